"""Draw the diagrams of the four objects of the architecture: images/object-*.svg.

python docs/diagrams.py
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).parent / "images"
STYLE = """
.ground { fill: #ffffff } .frame { fill: #f5f6f8; stroke: #9ea8b4 } .plain { fill: #ffffff; stroke: #59626e }
.network { fill: #fbece3; stroke: #b9501b } .learnt { fill: #e6f0f8; stroke: #2a6a9e }
rect { stroke-width: 1.4 } text { fill: #1c2127; text-anchor: middle }
.title { font-weight: 600 } .small { font-size: 12.5px; fill: #4a525c }
.flow { stroke: #59626e; stroke-width: 1.8; fill: none; marker-end: url(#tip) }
"""
TIP = """<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"
orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="#59626e"/></marker></defs>"""


def box(x: int, y: int, width: int, height: int, kind: str, title: str, *lines: str) -> str:
    """A rectangle with a title in bold and lines below it, all centred; a frame has its title at the top."""
    first = y + 20 if kind == "frame" else y + height // 2 + 5 - 9 * len(lines)
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>' + "".join(
        label(x + width // 2, first + 18 * row, text, "small" if row else "title")
        for row, text in enumerate((title, *lines))
    )


def label(x: int, y: int, text: str, kind: str = "small") -> str:
    """Text centred at x."""
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def arrow(path: str) -> str:
    """An arrow along a path."""
    return f'<path class="flow" d="{path}"/>'


def save(name: str, height: int, said: str, *parts: str) -> None:
    """Write one diagram; `said` describes it to readers who cannot see it."""
    drawn = "\n".join(parts)
    (OUT / f"object-{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="system-ui, sans-serif" '
        f'font-size="14" role="img" aria-label="{escape(said)}">\n<style>{STYLE}</style>\n{TIP}\n'
        f'<rect class="ground" width="720" height="{height}" rx="6" stroke="none"/>\n{drawn}\n</svg>\n',
        encoding="utf-8",
    )


def main() -> None:
    """Draw all four."""
    save(
        "detector",
        170,
        "A Detector has parameters; fit makes its fitted state, which answers questions",
        box(12, 50, 140, 76, "plain", "parameters", "backbone, method,", "preset, options"),
        arrow("M152 88H208"),
        box(210, 50, 120, 76, "plain", "Detector", "as the user", "gave them"),
        arrow("M330 88H416"),
        label(372, 80, "fit(images)"),
        box(418, 50, 134, 76, "learnt", "FittedDetector", "detector.fitted,", "immutable"),
        arrow("M552 88H596"),
        label(656, 56, "score"),
        label(656, 76, "p_value, predict"),
        label(656, 96, "explain, results"),
        label(656, 116, "score_map, plot"),
        arrow("M485 126V148H270V128"),
        label(378, 163, "assigning a parameter discards it"),
        label(485, 36, "a failed fit leaves it as it was"),
    )
    save(
        "fitted",
        246,
        "A FittedDetector turns images into features, a score, a p-value, and a map",
        box(80, 34, 560, 200, "frame", "FittedDetector"),
        box(90, 70, 160, 64, "network", "method", "backbone,", "preprocessing"),
        box(318, 70, 112, 64, "learnt", "scorer", "what is usual"),
        box(496, 70, 128, 64, "learnt", "reference", "calibration scores"),
        box(318, 160, 112, 60, "learnt", "maps", "what is usual"),
        arrow("M48 102H88"),
        label(34, 92, "images"),
        arrow("M250 102H316"),
        label(283, 93, "features"),
        arrow("M430 102H494"),
        label(462, 93, "score"),
        arrow("M624 102H668"),
        label(682, 92, "p-value"),
        arrow("M173 134V190H316"),
        label(244, 182, "values per pixel"),
        arrow("M430 190H668"),
        label(684, 180, "map,"),
        label(684, 212, "regions"),
        label(360, 20, "fit builds it, save writes it, load_detector reads it"),
    )
    save(
        "stream",
        160,
        "chunks groups images into Chunks, stream scores them, and every interface reads the ScoredChunks",
        box(12, 50, 104, 76, "plain", "images", "files, arrays,", "streams"),
        arrow("M116 88H178"),
        label(146, 80, "chunks"),
        box(180, 50, 140, 76, "plain", "Chunk", "images of one size,", "and errors"),
        arrow("M320 88H418"),
        label(367, 80, "stream(fitted)"),
        box(420, 50, 128, 76, "learnt", "ScoredChunk", "a Result for each", "image, and maps"),
        arrow("M548 88H584"),
        *(
            label(650, 42 + 20 * row, text)
            for row, text in enumerate(
                (
                    "Detector, sklearn",
                    "gepc score, map",
                    "gepc watch",
                    "gepc scene",
                    "gepc serve",
                    "cluster, benchmarks",
                )
            )
        ),
    )
    save(
        "decision",
        206,
        "A DecisionRule turns p-values and calibration scores into alarms and a statement about them",
        box(12, 44, 136, 50, "plain", "p-values", "of new images"),
        box(12, 120, 136, 50, "learnt", "reference", "calibration scores"),
        arrow("M148 69H184L214 92"),
        arrow("M148 145H184L214 122"),
        box(216, 12, 286, 184, "frame", "DecisionRule"),
        box(230, 42, 258, 44, "plain", "alpha", "a rate for each normal image"),
        box(230, 92, 258, 44, "plain", "alpha, confidence", "a rate that this detector keeps"),
        box(230, 142, 258, 44, "plain", "fdr", "the share of false among all alarms"),
        arrow("M502 104H560"),
        box(562, 66, 146, 76, "plain", "alarms", "and the statement", "that holds for them"),
    )


if __name__ == "__main__":
    main()

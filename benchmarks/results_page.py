r"""The tables of docs/results.md and of its sub-pages, from the results of a benchmark with all methods.

    gepc bench small32 --data data --out results \
        --methods all,msma:knn,diffpath:paper,diffpath:v2_light,scoped:paper,scoped:unsigned
    python benchmarks/results_page.py results
    python benchmarks/results_page.py --tables suites/ranks.json energy/energy.json

The first writes into docs/results: `measured.md` and `published.md`, which docs/results.md includes, the pages
`methods.md` and `ablations.md`, every table as a CSV file, and the figure of AUROC against cost. The second writes the
tables of other benchmarks into docs/results/tables, for pages to include, and as CSV files, and the figure beside them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc.core.palette import LIGHT
from gepc.core.tables import Cell, markdown_table, show, write_rows
from gepc.detector.plots import drawing, save
from gepc.lab.bench.detector_tables import PUBLISHED_NOTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = "all,msma:knn,diffpath:paper,diffpath:v2_light,scoped:paper,scoped:unsigned"
SHOWN = 9
"""Rows of the first table: more are on the page of every method."""
OURS = ("gepc+ full", "gepc+ fast", "gepc+ single", "GEPC")
ABOUT = ("method", "preset", "calibration", "train / test images", "average", "std over seeds", "worst", "worst pair")
ABLATIONS = ("kept", "sweep", "transforms", "calibration", "features", "timesteps", "false_alarms", "runtime")
METHODS_OPENING = (
    "This page shows the AUROC, the cost and the settings of every method on the paper's nine pairs.",
    "[Results](../results.md) discusses the tables.",
)
ABLATIONS_OPENING = (
    "This page shows how the choices of GEPC change its results: timesteps, transforms, calibration and features. It",
    "also shows the rate of false alarms and the runtime. [Results](../results.md) discusses the main table.",
)

Row = dict[str, Cell]


def pairs_of(rows: Sequence[Row]) -> list[str]:
    """The headings of the pairs: those with a colon."""
    return [heading for heading in rows[0] if ":" in heading]


def narrow_table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table whose numbers have no zero before the point and whose pairs may be broken at the colon."""
    short = [[show(cell).removeprefix("0") if isinstance(cell, float) else show(cell) for cell in row] for row in rows]
    return markdown_table([heading.replace(":", ": ") for heading in header], short)


def auroc_rows(rows: Sequence[Row], pairs: Sequence[str]) -> str:
    """Method, passes, average AUROC and that of every pair; without the zero before the point, to be narrow."""
    cells = [[show(row[name]).removesuffix("+0J") for name in ("method", "F+J", "average", *pairs)] for row in rows]
    short = [
        [method.replace("[", " ["), passes, *(cell.removeprefix("0") for cell in numbers)]
        for method, passes, *numbers in cells
    ]
    return markdown_table(("method", "passes", "average", *(pair.replace(":", ": ") for pair in pairs)), short)


def first_rows(rows: Sequence[Row]) -> list[Row]:
    """GEPC and gepc+, then the others with the highest averages; at most `SHOWN` in all, the highest average first."""
    ours = [row for row in rows if row["method"] in OURS]
    others = sorted((row for row in rows if row not in ours), key=_average, reverse=True)
    return sorted([*ours, *others[: SHOWN - len(ours)]], key=_average, reverse=True)


def _average(row: Row) -> float:
    return float(row["average"] or 0.0)


def section(table: dict[str, Any], command: str) -> str:
    """A table with its heading, a permanent anchor, its command, and its note without the one on published values."""
    rows = table["rows"]
    shown = narrow_table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    lines = [f"({table['name'].replace('_', '-')})=", f"## {table['title']}", "", shown, ""]
    note = table["note"].replace(PUBLISHED_NOTE, "").strip()
    if note:
        lines += [note, ""]
    download = f"{{download}}`CSV <csv/{table['name']}.csv>`"
    return "\n".join([*lines, f"`{command}`, {download}", ""])


def sentences(note: str) -> list[str]:
    """The sentences of a note as the items of a list; an example belongs to the sentence before it."""
    parts = note.replace(". For example", ".\n  For example").split(". ")
    return [f"- {part.removesuffix('.')}." for part in parts]


def methods_page(main: dict[str, Any], backbone: str, command: str) -> str:
    """Every method: AUROC and cost, and its settings."""
    rows = [row for row in main["rows"] if row["source"] == "measured"]
    about = [[show(row[name]) for name in ABOUT] for row in rows]
    lines = [
        "# Every method",
        "",
        *METHODS_OPENING,
        "",
        f"The backbone is `{backbone}`, a small network that was trained on a CPU.",
        "",
        *sentences(main["note"]),
        "",
        f"`{command}`",
        "",
        "(every-method)=",
        "## AUROC",
        "",
    ]
    lines += [auroc_rows(rows, pairs_of(rows)), "", "(settings)=", "## Settings and spread", ""]
    lines += [markdown_table(ABOUT, about)]
    return "\n".join(lines)


def ablations_page(tables: dict[str, dict[str, Any]], backbone: str, command: str) -> str:
    """The tables of the ablations; the opening says once where published values come from."""
    source = f"Measured values were obtained with the backbone `{backbone}`, a small network that was trained on a CPU."
    opening = ["# Ablations of GEPC", "", *ABLATIONS_OPENING, "", source, PUBLISHED_NOTE, ""]
    return "\n".join([*opening, *(section(tables[name], command) for name in ABLATIONS)])


def write_page_tables(files: Sequence[Path], out: Path) -> None:
    """Every table of these JSON files as `tables/NAME.md`, numbers without the zero before the point, and as CSV."""
    for folder in (out / "tables", out / "csv"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        figure = path.with_suffix(".png")
        if figure.exists():
            shutil.copy(figure, out / figure.name)
        for table in json.loads(path.read_text())["tables"]:
            header, rows = tuple(table["rows"][0]), [tuple(row.values()) for row in table["rows"]]
            text = "\n".join([narrow_table(header, rows), "", table["note"], ""])
            (out / "tables" / f"{table['name']}.md").write_text(text)
            write_rows(out / "csv" / f"{table['name']}.csv", header, rows)


def write_pages(results: Path, out: Path) -> None:
    """The results page and its sub-pages, from a folder of `gepc bench`."""
    found = json.loads((results / "results.json").read_text())
    tables = {table["name"]: table for table in found["tables"]}
    protocol = found["about"]["command"].split()[2]
    command = f"gepc bench {protocol} --data DATA --out results"
    with_methods = f"{command} --methods {METHODS}"
    rows = tables["main"]["rows"]
    measured = [row for row in rows if row["source"] == "measured"]
    published = [row for row in rows if row["source"] != "measured"]
    (out / "csv").mkdir(parents=True, exist_ok=True)
    texts = {
        "measured.md": auroc_rows(first_rows(measured), pairs_of(rows)),
        "methods.md": methods_page(tables["main"], found["about"]["backbone"], with_methods),
        "ablations.md": ablations_page(tables, found["about"]["backbone"], command),
    }
    if published:
        texts["published.md"] = auroc_rows(published, pairs_of(rows))
    for name, text in texts.items():
        (out / name).write_text(text.rstrip() + "\n")
    for path in (results / "tables").glob("*.csv"):
        shutil.copy(path, out / "csv" / path.name)
    save(auroc_over_cost(measured), out / "cost", ("png",))


def auroc_over_cost(rows: Sequence[Row]) -> Figure:
    """Average AUROC of every method beside its F+J per image on a log axis, the cheapest above; GEPC is highlighted."""
    ordered = sorted(rows, key=lambda row: (-_passes(row), _average(row)))
    colours = [LIGHT["outside" if row["method"] == "GEPC" else "inside"] for row in ordered]
    places = range(len(ordered))
    with drawing(0.7 + 0.17 * len(ordered)) as figure:
        quality, cost = figure.subplots(1, 2, sharey=True)
        quality.scatter([_average(row) for row in ordered], places, s=16, c=colours)
        quality.axvline(0.5, color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (1, 2)))
        quality.set_yticks(places, [show(row["method"]) for row in ordered], fontsize=7)
        quality.set(xlabel="average AUROC")
        cost.scatter([_passes(row) for row in ordered], places, s=16, c=colours)
        cost.set_xscale("symlog", linthresh=1.0)
        cost.xaxis.set_major_formatter("{x:g}")
        cost.set(xlabel="F+J per image")
        for axes in (quality, cost):
            axes.grid(axis="y", color=LIGHT["rule"], linewidth=0.6)
            axes.set_axisbelow(True)
    return figure


def _passes(row: Row) -> int:
    """F + J of a cell such as `14F+0J`."""
    return sum(int(part[:-1]) for part in str(row["F+J"]).split("+"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="folder of gepc bench")
    parser.add_argument("--tables", type=Path, nargs="*", default=[], help="JSON files of other benchmarks")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    if options.results is not None:
        write_pages(options.results, options.out)
    write_page_tables(options.tables, options.out)


if __name__ == "__main__":
    main()

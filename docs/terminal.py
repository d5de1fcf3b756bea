"""The animated terminal of the README: real commands, run by this script, with their real output.

    python docs/terminal.py

writes images/terminal.svg. The photographs are those of `gepc demo`, smaller; nothing is downloaded. A minute on two
cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path

from PIL import Image

from gepc.lab.report.beach import THINGS, Lost, beach

OUT = Path(__file__).parent / "images" / "terminal.svg"
COMMANDS = (
    "gepc fit normal --out det --preset inspect",
    "gepc score det new --out scores.csv",
    "cut -d, -f1-4 scores.csv",
)
WIDTH, LINE, LEFT, TOP = 880, 20, 20, 50  # pixels
COLUMNS = 102
TYPING, PAUSE = 1.4, 1.1  # seconds for a command, and after its output


def photographs(folder: Path) -> None:
    """57 photographs of a beach, and five new ones: on the last three something was lost."""
    for name, seeds in {"normal": range(57), "new": range(100, 105)}.items():
        (folder / name).mkdir()
        for number, seed in enumerate(seeds, start=1):
            lost = [Lost(THINGS[number - 3], 64, 96)] if name == "new" and number >= 3 else []
            Image.fromarray(beach(seed, 128, 192, lost)).save(folder / name / f"beach-{number}.png")


def outputs(folder: Path) -> list[tuple[str, list[str]]]:
    """Every command with the lines that it prints, folded to the width."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": str(COLUMNS), "PYTHONWARNINGS": "ignore"}
    shown = []
    for command in COMMANDS:
        print("$", command)
        done = subprocess.run(  # noqa: S602 - the commands above, as a user types them
            command, shell=True, cwd=folder, env=environment, check=True, text=True, capture_output=True
        )
        text = (done.stderr + done.stdout).replace(f"{folder}{os.sep}", "").rstrip()
        lines = [part for line in text.splitlines() for part in textwrap.wrap(line, COLUMNS)]
        print(*lines, sep="\n")
        shown.append((command, lines))
    return shown


def animated(steps: list[tuple[str, list[str]]]) -> str:
    """An SVG in which the commands appear one after the other, each followed by its output; it repeats.

    The first command is always visible, so that the picture is never empty.
    """
    rows: list[tuple[float, str, str]] = []
    now = 0.0
    for command, lines in steps:
        rows.append((now, "command", f"$ {command}"))
        now += TYPING
        rows += [(now, "output", line) for line in lines]
        now += PAUSE + 0.1 * len(lines)
    length = now + 4.0
    height = TOP + LINE * len(rows) + 10
    styles, texts = [], []
    for number, (begin, kind, line) in enumerate(rows):
        if begin > 0.0:
            share = 100.0 * begin / length
            styles.append(
                f"@keyframes r{number}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}"
                f".r{number}{{animation:r{number} {length:.1f}s infinite}}"
            )
        y = TOP + LINE * number
        texts.append(f'<text class="{kind} r{number}" x="{LEFT}" y="{y}" xml:space="preserve">{escape(line)}</text>')
    dots = "".join(f'<circle cx="{22 + 20 * n}" cy="20" r="6" fill="#6b7280"/>' for n in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-label="A terminal in which gepc fits a detector on photographs and scores new ones">\n'
        "<style>text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#d1d5db}"
        f".command{{fill:#f0935a;font-weight:bold}}@media(prefers-reduced-motion:reduce){{text{{animation:none!important}}}}"
        f"{''.join(styles)}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#16191f"/>{dots}\n' + "\n".join(texts) + "\n</svg>\n"
    )


def main() -> None:
    """Run the commands in a temporary folder and write the picture."""
    with tempfile.TemporaryDirectory() as place:
        photographs(Path(place))
        OUT.write_text(animated(outputs(Path(place))), encoding="utf-8")


if __name__ == "__main__":
    main()

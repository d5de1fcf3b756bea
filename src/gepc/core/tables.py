"""Tables of results: one structure, written as Markdown, CSV, JSON and LaTeX."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gepc.core.files import replacing, write_json, write_text

Cell = str | float | int | None
_FORMULA = ("=", "+", "-", "@", "'", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # the last four are full-width
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_ESCAPED = re.compile(r"\\(?:\\|u([0-9a-f]{4}))")


@dataclass(frozen=True)
class ResultTable:
    """A table with a name for files, a title, and a note on what the reader must know. None is shown as a dash."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"table {self.name}: a row has {len(row)} cells under {len(self.header)} headings")

    def shown(self) -> list[list[str]]:
        """The rows as text."""
        return [[show(cell) for cell in row] for row in self.rows]

    def numbers(self, heading: str) -> list[float]:
        """A column; every cell of it must be a number."""
        column = self.header.index(heading)
        cells: list[Any] = [row[column] for row in self.rows]
        return [float(cell) for cell in cells]

    def markdown(self) -> str:
        """A GitHub table with its title and note."""
        lines = [f"### {self.title}", "", markdown_table(self.header, self.shown())]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])

    def csv(self) -> str:
        """Full precision, empty for None."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([["" if cell is None else cell for cell in row] for row in self.rows])
        return text.getvalue()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, full precision."""
        rows = [dict(zip(self.header, row, strict=True)) for row in self.rows]
        return {"name": self.name, "title": self.title, "note": self.note, "rows": rows}

    def latex(self) -> str:
        """A booktabs table."""
        head, *body = ("    " + " & ".join(map(_tex, row)) + r" \\" for row in (self.header, *self.shown()))
        lines = [
            r"\begin{table}[t]",
            r"  \centering",
            rf"  \caption{{{_tex(self.title)}. {_tex(self.note)}}}",
            rf"  \begin{{tabular}}{{l{'c' * (len(self.header) - 1)}}}",
            *(r"    \toprule", head, r"    \midrule", *body, r"    \bottomrule"),
            r"  \end{tabular}",
            r"\end{table}",
        ]
        return "\n".join([*lines, ""])


def interval_text(low: float, high: float) -> str:
    """An interval as tables show it: `0.123 to 0.456`."""
    return f"{low:.3f} to {high:.3f}"


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file row by row."""
    with replacing(path) as draft, open(draft, "w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def escape_cell(text: str) -> str:
    """A file name or message as a CSV cell: one line of valid UTF-8 that a spreadsheet does not take for a formula.

    Text that begins like a formula or with `'`, or holds control characters or bytes that are not UTF-8, is preceded by
    `'`; in it, those characters are written as four hexadecimal digits after a backslash and `u`, and backslashes are
    doubled. Any other text stays as it is. `unescape_cell` gives the text back.
    """
    if not _UNSAFE.search(text) and not text.startswith(_FORMULA):
        return text
    return "'" + _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\\", "\\\\"))


def unescape_cell(cell: str) -> str:
    """The text that `escape_cell` made the cell of."""
    if not cell.startswith("'"):
        return cell
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else "\\", cell[1:])


def show(cell: Cell) -> str:
    """A number with three decimals, or its power of ten where they would all be 0; a dash for nothing."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0e}" if 0.0 < abs(cell) < 5e-4 else f"{cell:.3f}"
    return str(cell)


def write_tables(folder: Path, name: str, tables: Sequence[ResultTable], about: dict[str, Any]) -> str:
    """`name.json`, by which commands recognise the folder, and `name.md`; gives back the Markdown."""
    text = "\n".join(table.markdown() for table in tables)
    write_json(folder / f"{name}.json", {"about": about, "tables": [table.as_dict() for table in tables]})
    write_text(folder / f"{name}.md", text)
    return text


def write_each(folder: Path, tables: Sequence[ResultTable]) -> None:
    """A CSV and a LaTeX file for each table."""
    for table in tables:
        write_text(folder / f"{table.name}.csv", table.csv())
        write_text(folder / f"{table.name}.tex", table.latex())


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], aligned: bool = False) -> str:
    """Text cells as a GitHub table; `aligned` pads the columns on the left, so that the source is readable too."""
    table = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    if not aligned:
        rule = ["---"] * len(header)
        return "\n".join("| " + " | ".join(row) + " |" for row in (table[0], rule, *table[1:]))
    widths = [max(3, *map(len, column)) for column in zip(*table, strict=True)]
    padded = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in table]
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]])


_TEX = {letter: f"\\{letter}" for letter in "&%_#${}"}
_TEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
_TEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}  # other glyphs in the default encoding


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)

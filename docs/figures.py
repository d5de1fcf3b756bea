"""Check the figures of the pages against the stored result tables, and list them.

    python docs/figures.py [--check]

reads figures.yaml and writes the list of figures.md. With --check nothing is written: a figure that a page states
otherwise than its table, or a list that is out of date, is an error.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
BEGIN, END = "<!-- figures begin -->", "<!-- figures end -->"


def cell(table: str, row: dict[str, str], column: str, digits: int) -> str:
    """A number of a stored table, as the pages write it: without a zero before the point."""
    with open(DOCS / "results" / "csv" / f"{table}.csv", newline="", encoding="utf-8") as handle:
        rows = [line for line in csv.DictReader(handle) if all(line[key] == value for key, value in row.items())]
    if len(rows) != 1:
        raise SystemExit(f"{table}.csv has {len(rows)} rows with {row}")
    return f"{float(rows[0][column]):.{digits}f}".removeprefix("0")


def values(entry: dict[str, Any]) -> dict[str, str]:
    """The values of an entry by their names."""
    return {name: given if isinstance(given, str) else cell(*given) for name, given in entry["values"].items()}


def problems(entries: list[dict[str, Any]]) -> list[str]:
    """One line for every text that a page should contain and does not."""
    found = []
    for entry in entries:
        for page, texts in entry["pages"].items():
            content = " ".join((DOCS.parent / page).read_text(encoding="utf-8").split())
            wanted = [text.format(**values(entry)) for text in texts]
            found += [f"{page} does not say {text!r} ({entry['claim']})" for text in wanted if text not in content]
    return found


def listed(entries: list[dict[str, Any]]) -> str:
    """The list as Markdown: each claim with its figures, its pages, its commit and its commands."""
    parts = []
    for entry in entries:
        named = {name.replace("_", " "): value for name, value in values(entry).items()}
        figures = ", ".join(f"{name} **{value}**" for name, value in named.items())
        pages = ", ".join(f"`{page}`" for page in entry["pages"])
        where = f"Stated in {pages}; stored at commit `{entry['commit']}`.{entry.get('note', '')}"
        commands = "\n".join(f"$ {command}" for command in entry["commands"])
        parts.append(f"### {entry['claim']}\n\n{figures}\n\n{where}\n\n```console\n{commands}\n```")
    return "\n\n".join(parts)


def main() -> int:
    """0 if every figure agrees with its table, and with --check if the list is up to date."""
    entries = yaml.safe_load((DOCS / "figures.yaml").read_text(encoding="utf-8"))
    page = DOCS / "figures.md"
    before = page.read_text(encoding="utf-8")
    head, _, rest = before.partition(BEGIN)
    after = f"{head}{BEGIN}\n\n{listed(entries)}\n\n{END}{rest.partition(END)[2]}"
    wrong = problems(entries)
    if "--check" not in sys.argv:
        page.write_text(after, encoding="utf-8")
    elif after != before:
        wrong.append("figures.md is out of date; run python docs/figures.py")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())

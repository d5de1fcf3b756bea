"""A table of results says the same in Markdown, CSV, JSON and LaTeX."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from gepc.core.tables import (
    ResultTable,
    escape_cell,
    interval_text,
    markdown_table,
    show,
    unescape_cell,
    write_each,
    write_tables,
)

TABLE = ResultTable(
    "main", "AUROC in %", ("pair", "n", "auroc"), (("a|b_c", 3, 0.98765), ("x\\y", 0, None)), "10 % & more"
)


def test_numbers_for_readers() -> None:
    """Three decimals; a power of ten where all of them would be 0; a dash for nothing; whole numbers as they are."""
    shown = {0.5: "0.500", 0.0: "0.000", 5e-4: "0.001", 4.9e-4: "5e-04", -1e-5: "-1e-05", -2.0: "-2.000"}
    assert {value: show(value) for value in shown} == shown
    assert [show(cell) for cell in (None, 7, "text")] == ["-", "7", "text"]


def test_markdown() -> None:
    lines = ["### AUROC in %", "", "| pair | n | auroc |", "| --- | --- | --- |", "| a\\|b_c | 3 | 0.988 |"]
    assert TABLE.markdown().splitlines() == [*lines, "| x\\y | 0 | - |", "", "10 % & more"]
    bare = ResultTable("bare", "No note", ("a",), ())
    assert bare.markdown().splitlines() == ["### No note", "", "| a |", "| --- |"]


def test_aligned_markdown_has_columns_of_one_width() -> None:
    text = markdown_table(("a", "longer"), [("1000", "2"), ("3", "4")], aligned=True)
    assert text.splitlines() == ["|    a | longer |", "|-----:|-------:|", "| 1000 |      2 |", "|    3 |      4 |"]
    assert markdown_table(("a",), [("1",)], aligned=True).splitlines()[1] == "|----:|"


def test_csv_and_json_keep_every_digit() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows == [["pair", "n", "auroc"], ["a|b_c", "3", "0.98765"], ["x\\y", "0", ""]]
    assert TABLE.as_dict()["rows"][0] == {"pair": "a|b_c", "n": 3, "auroc": 0.98765}
    assert TABLE.numbers("n") == [3.0, 0.0]


def test_latex_escapes_what_is_special() -> None:
    text = TABLE.latex()
    assert r"\caption{AUROC in \%. 10 \% \& more}" in text
    assert r"\begin{tabular}{lcc}" in text
    assert r"a\textbar{}b\_c & 3 & 0.988 \\" in text
    assert r"x\textbackslash{}y & 0 & - \\" in text


def test_files(tmp_path: Path) -> None:
    assert write_tables(tmp_path, "all", [TABLE, TABLE], {"seed": 1}) == (tmp_path / "all.md").read_text()
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["about"] == {"seed": 1}
    assert [table["name"] for table in found["tables"]] == ["main", "main"]
    write_each(tmp_path, [TABLE])
    assert (tmp_path / "main.csv").read_text() == TABLE.csv()
    assert (tmp_path / "main.tex").read_text() == TABLE.latex()


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 1 cells under 2 headings"):
        ResultTable("t", "T", ("a", "b"), (("1",),))


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("a/b.png", "a/b.png"),
        ("=cmd|x", "'=cmd|x"),
        ("'quoted", "''quoted"),
        ("two\nlines", "'two\\u000alines"),
        ("a\\b", "a\\b"),
        ("-\\n", "'-\\\\n"),
        ("\udcff.png", "'\\udcff.png"),
    ],
)
def test_a_cell_is_no_formula_and_its_text_comes_back(text: str, cell: str) -> None:
    assert escape_cell(text) == cell
    assert unescape_cell(cell) == text


def test_an_interval_has_three_decimals() -> None:
    assert interval_text(0.12345, 0.5) == "0.123 to 0.500"

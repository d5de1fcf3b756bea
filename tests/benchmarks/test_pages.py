"""Tables of benchmarks for the documentation."""

from __future__ import annotations

from pathlib import Path

from results_page import write_page_tables

from gepc.core.tables import ResultTable, write_tables


def test_tables_of_other_benchmarks_become_parts_of_pages(tmp_path: Path) -> None:
    rows = (("a:b", 0.5, 3, None), ("c", 1.0, 12, -0.25))
    table = ResultTable("small", "A small table", ("pair", "AUROC", "n", "gap"), rows, "What it is.")
    write_tables(tmp_path, "small", [table], {})
    write_page_tables([tmp_path / "small.json"], tmp_path / "docs")
    lines = (tmp_path / "docs" / "tables" / "small.md").read_text().splitlines()
    assert lines[2:4] == ["| a:b | .500 | 3 | - |", "| c | 1.000 | 12 | -0.250 |"]
    assert lines[-1] == "What it is."
    assert (tmp_path / "docs" / "csv" / "small.csv").read_text().splitlines()[1] == "a:b,0.5,3,"

"""Tables of benchmarks for the documentation."""

from __future__ import annotations

from pathlib import Path

from results_page import ABLATIONS, ablations_page, auroc_over_cost, write_page_tables

from gepc.core.tables import ResultTable, write_tables
from gepc.lab.bench.detector_tables import PUBLISHED_NOTE


def test_tables_of_other_benchmarks_become_parts_of_pages(tmp_path: Path) -> None:
    rows = (("a:b", 0.5, 3, None), ("c", 1.0, 12, -0.25))
    table = ResultTable("small", "A small table", ("pair", "AUROC", "n", "gap"), rows, "What it is.")
    write_tables(tmp_path, "small", [table], {})
    write_page_tables([tmp_path / "small.json"], tmp_path / "docs")
    lines = (tmp_path / "docs" / "tables" / "small.md").read_text().splitlines()
    assert lines[2:4] == ["| a:b | .500 | 3 | - |", "| c | 1.000 | 12 | -0.250 |"]
    assert lines[-1] == "What it is."
    assert (tmp_path / "docs" / "csv" / "small.csv").read_text().splitlines()[1] == "a:b,0.5,3,"


def test_the_page_of_ablations_says_once_where_published_values_come_from() -> None:
    tables = {name: {"name": name, "title": name, "rows": [{"K": 1}], "note": PUBLISHED_NOTE} for name in ABLATIONS}
    tables["features"]["note"] = f"Fusion is the mean. {PUBLISHED_NOTE}"
    page = ablations_page(tables, "a-network", "gepc bench")
    assert page.count(PUBLISHED_NOTE) == 1
    assert "\n\nFusion is the mean.\n\n" in page
    assert "`a-network`" in page
    assert "\n\n\n" not in page


def test_the_figure_of_costs_has_a_row_for_every_method() -> None:
    rows = [("GEPC", "14F+0J", 0.85), ("msma", "10F+0J", 0.79), ("scoped", "2F+2J", 0.61), ("cfs", "1F+0J", 0.89)]
    quality, cost = auroc_over_cost([dict(zip(("method", "F+J", "average"), row, strict=True)) for row in rows]).axes
    names = [text.get_text() for text in quality.get_yticklabels()]
    (averages, _), (passes, _) = (axes.collections[0].get_offsets().T for axes in (quality, cost))
    assert names == ["GEPC", "msma", "scoped", "cfs"]
    assert averages.tolist() == [0.85, 0.79, 0.61, 0.89]
    assert passes.tolist() == [14, 10, 4, 1]

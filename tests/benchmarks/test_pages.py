"""Tables of benchmarks for the documentation, and how far the choice of `gepc choose` is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import choose as choose_benchmark
import numpy as np
import pytest
import yaml
from choose import LABELS, averages, candidates
from results_page import write_page_tables
from toys import as_uint8, pictures, toy_network

from gepc.core.tables import ResultTable, write_tables
from gepc.lab.bench.choose import DEFAULT


def test_tables_of_other_benchmarks_become_parts_of_pages(tmp_path: Path) -> None:
    rows = (("a:b", 0.5, 3, None), ("c", 1.0, 12, -0.25))
    table = ResultTable("small", "A small table", ("pair", "AUROC", "n", "gap"), rows, "What it is.")
    write_tables(tmp_path, "small", [table], {})
    write_page_tables([tmp_path / "small.json"], tmp_path / "docs")
    lines = (tmp_path / "docs" / "tables" / "small.md").read_text().splitlines()
    assert lines[2:4] == ["| a:b | .500 | 3 | - |", "| c | 1.000 | 12 | -0.250 |"]
    assert lines[-1] == "What it is."
    assert (tmp_path / "docs" / "csv" / "small.csv").read_text().splitlines()[1] == "a:b,0.5,3,"


def test_the_choice_is_compared_with_the_default_and_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suites, results = tmp_path / "suites", tmp_path / "results"
    (suites / "toy").mkdir(parents=True)
    np.savez(suites / "toy" / "a.npz", train_x=as_uint8(pictures(44)))
    (suites / "suites.yaml").write_text(yaml.safe_dump({"suites": {"toy": "toy.yaml"}}))
    (suites / "toy.yaml").write_text(yaml.safe_dump({"pairs": {"a": ["b", "c"]}, "backbone": "toy", "size": 8}))
    true = {name: 0.6 + 0.01 * place for place, name in enumerate(LABELS)}
    rows = [
        {"method": LABELS[name], "pair": pair, "AUROC": value + shift}
        for name, value in true.items()
        for pair, shift in (("a:b", -0.1), ("a:c", 0.1), ("b:c", 0.3))
    ]
    (results / "toy").mkdir(parents=True)
    (results / "toy" / "results.json").write_text(json.dumps({"tables": [{"name": "methods", "rows": rows}]}))

    loaded: list[Any] = []
    monkeypatch.setattr("gepc.load_backbone", lambda name: loaded.append(name) or toy_network())
    few = [candidate for candidate in candidates() if str(candidate) in ("gepc+:fast", "pixel_stats")]
    monkeypatch.setattr(choose_benchmark, "candidates", lambda: few)
    monkeypatch.setattr("sys.argv", ["choose.py", str(suites), str(results), "--out", str(tmp_path / "out")])
    for _ in range(2):  # the second run reads the stored choice
        choose_benchmark.main()
    assert loaded == ["toy"]
    ours, total = json.loads((tmp_path / "out" / "choose.json").read_text())["tables"][0]["rows"]
    assert ours["clear leader, else default"] in {str(candidate) for candidate in few}
    assert ours["its AUROC"] == pytest.approx(true[ours["clear leader, else default"]])
    assert ours["default"] == pytest.approx(true[str(DEFAULT)])
    assert (ours["oracle takes"], ours["oracle"]) == ("pixel_stats", pytest.approx(max(true.values())))
    assert total["default"] == pytest.approx(ours["default"])
    assert "1 ID sets" in capsys.readouterr().out


def test_every_compared_candidate_is_one_of_the_command() -> None:
    assert {str(candidate) for candidate in candidates()} == set(LABELS)
    assert averages({label: {"a:b": 0.5, "a:c": 0.7, "b:a": 0.1} for label in LABELS.values()}, "a") == pytest.approx(
        dict.fromkeys(LABELS, 0.6)
    )

"""Ranks over pairs: closed forms, critical differences published by Demsar (2006), and the diagram."""

import json

import numpy as np
import pytest
import ranks
from hypothesis import assume, given
from hypothesis import strategies as st
from ranks import Ranking, diagram, read_aurocs
from scipy.stats import chi2

from gepc.core.errors import InputError
from gepc.core.rates import holm, holm_adjusted


def ranking(aurocs, suites=("one",)):
    """Methods a, b, ... with rows of AUROCs, the pairs dealt to the suites in turn."""
    names = [chr(ord("a") + place) for place in range(len(aurocs))]
    found = {suite: {name: {} for name in names} for suite in suites}
    for name, row in zip(names, aurocs, strict=True):
        for pair, value in enumerate(row):
            found[suites[pair % len(suites)]][name][f"pair{pair}"] = value
    return Ranking.of(found)


def test_average_ranks_and_ties():
    found = ranking([[0.9, 0.8, 0.7], [0.8, 0.9, 0.7], [0.1, 0.1, 0.1]])
    assert found.methods == ("a", "b", "c")
    np.testing.assert_allclose(found.average_ranks, [1.5, 1.5, 3.0])


@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (10, 3.164)])
def test_critical_difference_has_the_published_quantiles(k, q):
    found = ranking(np.random.default_rng(k).random((k, 14)))
    assert found.critical_difference == pytest.approx(q * np.sqrt(k * (k + 1) / (6 * 14)), abs=1e-3)


def test_friedman_equals_its_formula():
    aurocs = np.random.default_rng(0).random((5, 20)) + np.arange(5)[:, None] / 20
    found = ranking(aurocs)
    k, pairs = 5, 20
    statistic = 12 * pairs / (k * (k + 1)) * (np.sum(found.average_ranks**2) - k * (k + 1) ** 2 / 4)
    assert found.p_value == pytest.approx(chi2.sf(statistic, k - 1))


def test_two_methods_have_the_sign_test():
    assert ranking([[0.9] * 5, [0.8] * 5]).p_value == pytest.approx(2 * 0.5**5)
    assert ranking([[0.9] * 5, [0.9] * 5]).p_value == 1.0


def test_table_gives_the_average_of_each_benchmark():
    table = ranking([[0.9, 0.5, 0.7, 0.5], [0.6, 0.6, 0.6, 0.6]], suites=("even", "odd")).table()
    first = ("method", "average rank", "p against the first", "average AUROC", "worst")
    assert table.header == (*first, "even (2)", "odd (2)")
    best = dict(zip(table.header, table.rows[0], strict=True))
    assert (best["method"], best["even (2)"], best["odd (2)"]) == ("a", pytest.approx(0.8), pytest.approx(0.5))
    assert "not independent" in table.note


def test_paired_test_counts_every_id_set_once():
    """Seven ID sets of three pairs: `a` is better on average in every set, so that p = 2/2^7, twice for two methods."""
    rng = np.random.default_rng(3)
    names = [f"{id_set}:{ood}" for id_set in "ABCDEFG" for ood in "xyz"]
    low = dict(zip(names, rng.uniform(0.5, 0.6, 21), strict=True))
    aurocs = {"a": dict.fromkeys(names, 0.9), "b": low, "c": {name: value - 0.1 for name, value in low.items()}}
    found = Ranking.of({"suite": aurocs})
    np.testing.assert_allclose(found.paired_p_values, [2 * 2 / 2**7] * 2)
    assert "7 ID sets" in found.table().note
    assert Ranking.of({"suite": {"a": low, "b": low}}).paired_p_values.tolist() == [1.0]


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), st.floats(0.001, 0.999))
def test_adjusted_p_values_reject_what_holm_rejects(p_values, alpha):
    adjusted = holm_adjusted(p_values)
    assume(np.all(np.abs(adjusted - alpha) > 1e-9))
    rejected = [False] * len(p_values)
    for step, row in enumerate(np.argsort(p_values, kind="stable")):  # Holm's own step-down rule
        if p_values[row] > alpha / (len(p_values) - step):
            break
        rejected[row] = True
    np.testing.assert_array_equal(adjusted <= alpha, rejected)
    np.testing.assert_array_equal(holm(p_values, alpha), rejected)


def test_methods_that_a_benchmark_lacks_are_left_out():
    full = {"a": {"p": 0.9}, "b": {"p": 0.8}, "c": {"p": 0.7}}
    assert Ranking.of({"x": full, "y": {"a": {"q": 0.4}, "c": {"q": 0.5}}}).methods == ("a", "c")
    with pytest.raises(InputError, match="two methods"):
        Ranking.of({"x": full, "y": {"d": {"q": 0.4}, "c": {"q": 0.5}}})


def test_aurocs_are_read_from_a_finished_benchmark(tmp_path):
    rows = [{"method": "GEPC", "pair": "A:B", "AUROC": 0.75}, {"method": "msma", "pair": "A:B", "AUROC": 0.5}]
    (tmp_path / "results.json").write_text(json.dumps({"tables": [{"name": "methods", "rows": rows}]}))
    assert read_aurocs(tmp_path) == {"GEPC": {"A:B": 0.75}, "msma": {"A:B": 0.5}}
    (tmp_path / "results.json").write_text(json.dumps({"tables": []}))
    with pytest.raises(InputError, match="no table of methods"):
        read_aurocs(tmp_path)


def test_bars_of_the_diagram_overlap_unless_methods_differ():
    found = ranking(np.random.default_rng(1).random((6, 12)))
    axes = diagram(found).axes[0]
    expected = [f"{name}  {rank:.1f}" for name, rank in zip(found.methods, found.average_ranks, strict=True)]
    assert [text.get_text() for text in axes.get_yticklabels()] == expected
    (bars,) = axes.collections
    ends = np.array([path.vertices[:, 0] for path in bars.get_paths()])
    np.testing.assert_allclose(ends.mean(1), found.average_ranks)
    np.testing.assert_allclose(np.ptp(ends, axis=1), found.critical_difference)


def test_the_script_ranks_every_folder_with_results(tmp_path, monkeypatch, capsys):
    for name, pair, better in (("one", "A:B", "msma"), ("two", "B:A", "GEPC")):
        rows = [
            {"method": method, "pair": pair, "AUROC": 0.5 + 0.4 * (method == better)} for method in ("GEPC", "msma")
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps({"tables": [{"name": "methods", "rows": rows}]}))
    monkeypatch.setattr("sys.argv", ["ranks.py", str(tmp_path)])
    ranks.main()
    assert "| method | average rank |" in capsys.readouterr().out
    (table,) = json.loads((tmp_path / "ranks.json").read_text())["tables"]
    found = {row["method"]: (row["average rank"], row["one (1)"], row["two (1)"]) for row in table["rows"]}
    assert found == {"GEPC": (1.5, 0.5, 0.9), "msma": (1.5, 0.9, 0.5)}
    assert (tmp_path / "ranks.svg").read_text().count("<svg") == 1
    monkeypatch.setattr("sys.argv", ["ranks.py", str(tmp_path / "one")])
    with pytest.raises(SystemExit):
        ranks.main()
    assert "no folder with a results.json" in capsys.readouterr().err

"""Which tiles are flagged: against definitions, by simulation under strong dependence, and the count needed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.conformal.decision import CONTROLS, DecisionRule, harmonic
from gepc.conformal.p_values import CalibrationScores, p_values
from gepc.core.errors import OptionError
from gepc.core.rates import holm

MANY = CalibrationScores.of(np.arange(9999.0), None)  # enough calibration images for any rate of these tests
ps = st.lists(st.integers(1, 40).map(lambda k: k / 40), min_size=1, max_size=30).map(np.array)


def flags_of(control, alpha, p):
    return DecisionRule(alpha, control=control).alarms(p, MANY)


def holm_by_hand(p, alpha):
    flags = np.zeros(len(p), dtype=bool)
    for k, index in enumerate(np.argsort(p, kind="stable")):
        if p[index] > alpha / (len(p) - k) * (1 + 1e-12):
            break
        flags[index] = True
    return flags


@given(ps, st.floats(0.01, 0.9))
def test_holm_is_its_definition_and_flags_what_the_union_bound_flags(p, alpha):
    assert np.array_equal(holm(p, alpha), holm_by_hand(p, alpha))
    assert holm(p, alpha)[p <= alpha / len(p)].all()


@given(ps, st.floats(0.01, 0.9))
def test_procedures_are_ordered_by_what_they_promise(p, alpha):
    flags = {name: flags_of(name, alpha, p) for name in CONTROLS}
    assert (flags["holm"] <= flags["bh"]).all()
    assert (flags["by"] <= flags["bh"]).all()
    assert (flags["bh"] <= flags["tile"]).all()


@given(st.integers(1, 60), st.integers(1, 300), st.sampled_from(CONTROLS), st.sampled_from([0.05, 0.1, 0.3]))
def test_the_fewest_flags_are_what_the_procedure_does_with_the_smallest_p_values(m, n, name, alpha):
    """k tiles at p = 1/(n+1), the others at 1: flagged from exactly `fewest_flags` on."""
    rule = DecisionRule(alpha, control=name)
    first = next(
        (k for k in range(1, m + 1) if rule.alarms(np.r_[np.full(k, 1 / (n + 1)), np.ones(m - k)], MANY).any()), m + 1
    )
    assert min(rule.fewest_flags(m, n), m + 1) == first
    assert (rule.shortfall(m, n) is None) == (first == 1)
    enough = rule.images_for_one(m)
    assert rule.fewest_flags(m, enough) == 1
    assert rule.fewest_flags(m, enough - 1) > 1 or enough == 0


def test_family_wise_errors_hold_though_all_tiles_are_copies_or_independent():
    rng, alpha, m, n = np.random.default_rng(0), 0.2, 4, 39
    for copies in (True, False):
        errors = 0
        for _ in range(2000):
            scores = np.full(m, rng.random()) if copies else rng.random(m)
            errors += flags_of("holm", alpha, p_values(scores, rng.random(n))).any()
        assert errors / 2000 <= alpha + 4 * np.sqrt(alpha * (1 - alpha) / 2000)


def test_the_harmonic_sum_and_its_expansion_agree():
    assert harmonic(4) == pytest.approx(25 / 12)
    assert harmonic(10**6) == pytest.approx((1.0 / np.arange(1, 10**6 + 1)).sum(), rel=1e-12)


def test_statements_name_their_assumptions_and_numbers():
    assert "positively dependent (PRDS)" in DecisionRule(0.1, control="bh").scene_statement(50, 99)
    assert "however the overlapping tiles depend" in DecisionRule(0.1, control="by").scene_statement(50, 99)
    any_flag = DecisionRule(0.1, control="holm").scene_statement(50, 99)
    assert "any false flag among the 50 tiles of this scene is at most 0.1" in any_flag
    assert "Of 50 such tiles, 5 are" in DecisionRule(0.1, control="tile").scene_statement(50, 99)
    for name in CONTROLS:
        assert "exchangeable with the 99 calibration images" in DecisionRule(0.1, control=name).scene_statement(50, 99)
    assert "at least 999 calibration images" in str(DecisionRule(0.05, control="holm").shortfall(50, 99))
    assert "only together with at least 9 others" in str(DecisionRule(0.05, control="bh").shortfall(50, 99))


def test_bad_rates_and_names_are_refused():
    with pytest.raises(OptionError, match="did you mean 'holm'"):
        DecisionRule(control="hol")
    with pytest.raises(OptionError, match="between 0 and 1"):
        DecisionRule(1.5, control="bh")
    with pytest.raises(OptionError, match="needs at least 99 calibration images"):
        DecisionRule(0.01, control="tile").check(CalibrationScores.of(np.arange(50.0), None))


def test_a_p_value_at_its_limit_is_flagged():
    """As p-values are computed, k/(n + 1): 1/20 and 1/40 at 0.05; with rounding, 1/10 at 1 - 0.9."""
    assert flags_of("tile", 0.05, np.array([1 / 20, 2 / 20])).tolist() == [True, False]
    assert flags_of("tile", 1 - 0.9, np.array([1 / 10])).tolist() == [True]
    assert holm([1 / 40, 1 / 20, 1.0], 0.1).tolist() == [True, True, False]
    assert holm([0.04, 0.01, 0.02], 0.05).tolist() == [True, True, True]
    assert holm([0.04, 0.01, 0.03], 0.05).tolist() == [False, True, False]
    assert holm([], 0.05).tolist() == []
    assert holm(np.array([1 / 40, 1 / 20]), 0.05).tolist() == [True, True]
    assert holm(np.array([1 / 10]), 1 - 0.9).tolist() == [True]


def test_a_rule_has_one_control():
    with pytest.raises(OptionError, match="not both"):
        DecisionRule(fdr=0.1, control="holm")
    with pytest.raises(OptionError, match="confidence can be used with alpha only"):
        DecisionRule(0.1, confidence=0.9, control="holm")


def test_a_tile_without_a_p_value_is_neither_flagged_nor_counted():
    """Three p-values at 0.1/3 and an empty one: Holm divides by 3, not by 4."""
    p = np.array([0.033, np.nan, 1.0, 1.0])
    assert flags_of("holm", 0.1, p).tolist() == [True, False, False, False]
    assert flags_of("by", 0.1, np.array([0.018, np.nan, 1.0, 1.0])).tolist() == [True, False, False, False]


@pytest.mark.parametrize("name", CONTROLS)
def test_a_single_tile_is_flagged_at_the_rate_itself_and_no_tile_gives_no_flag(name):
    """1 + 1/2 + ... + 1/m is 1 for one tile, so that even Benjamini-Yekutieli pays nothing."""
    assert flags_of(name, 0.05, np.array([0.05])).tolist() == [True]
    assert flags_of(name, 0.05, np.array([0.0501])).tolist() == [False]
    assert flags_of(name, 0.05, np.empty(0)).tolist() == []


@pytest.mark.parametrize(
    ("n", "words"), [(0, "nothing can be flagged"), (1, "with at least 9 others"), (18, "1 others")]
)
def test_a_shortfall_says_whether_all_tiles_together_could_be_flagged(n, words):
    """Ten tiles at 0.5: with k at p = 1/(n + 1) the limit is k/20, so that one image needs k = 10 and 18 need 2."""
    assert words in str(DecisionRule(0.5, control="bh").shortfall(10, n))
    assert DecisionRule(0.5, control="bh").shortfall(10, 19) is None


def test_only_a_rate_for_single_tiles_is_checked_before_scoring():
    """The other procedures may flag many tiles at once where one alone is out of reach."""
    for name in CONTROLS:
        if name != "tile":
            DecisionRule(0.01, control=name).check(CalibrationScores.of(np.arange(5.0), None))
    DecisionRule(0.01, control="tile").check(CalibrationScores.of(np.arange(99.0), None))

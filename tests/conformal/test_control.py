"""Which tiles are flagged: against definitions, by simulation under strong dependence, and the count needed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.conformal.decision import CONTROLS, Control, bonferroni, harmonic, holm
from gepc.conformal.p_values import p_values
from gepc.core.errors import OptionError

ps = st.lists(st.integers(1, 40).map(lambda k: k / 40), min_size=1, max_size=30).map(np.array)


def holm_by_hand(p, alpha):
    flags = np.zeros(len(p), dtype=bool)
    for k, index in enumerate(np.argsort(p, kind="stable")):
        if p[index] > alpha / (len(p) - k) * (1 + 1e-12):
            break
        flags[index] = True
    return flags


@given(ps, st.floats(0.01, 0.9))
def test_holm_is_its_definition_and_flags_what_bonferroni_flags(p, alpha):
    assert np.array_equal(holm(p, alpha), holm_by_hand(p, alpha))
    assert (holm(p, alpha) >= bonferroni(p, alpha)).all()


@given(ps, st.integers(1, 39).map(lambda k: k / 40))
def test_bonferroni_is_its_definition(p, alpha):
    """p <= alpha/m, in whole fortieths, so that equality counts; one tile alone is flagged at alpha itself."""
    fortieths = np.round(p * 40).astype(int)
    assert np.array_equal(bonferroni(p, alpha), fortieths * len(p) <= round(alpha * 40))
    assert bonferroni(np.array([alpha]), alpha).tolist() == [True]
    assert bonferroni(np.empty(0), alpha).tolist() == []


@given(ps, st.floats(0.01, 0.9))
def test_procedures_are_ordered_by_what_they_promise(p, alpha):
    flags = {name: Control(name, alpha).flags(p) for name in CONTROLS}
    assert (flags["bonferroni"] <= flags["holm"]).all()
    assert (flags["holm"] <= flags["bh"]).all()
    assert (flags["by"] <= flags["bh"]).all()
    assert (flags["bh"] <= flags["tile"]).all()


@given(st.integers(1, 60), st.integers(1, 300), st.sampled_from(CONTROLS), st.sampled_from([0.05, 0.1, 0.3]))
def test_the_fewest_flags_are_what_the_procedure_does_with_the_smallest_p_values(m, n, name, alpha):
    """k tiles at p = 1/(n+1), the others at 1: flagged from exactly `fewest_flags` on."""
    control = Control(name, alpha)
    first = next(
        (k for k in range(1, m + 1) if control.flags(np.r_[np.full(k, 1 / (n + 1)), np.ones(m - k)]).any()), m + 1
    )
    assert min(control.fewest_flags(m, n), m + 1) == first
    assert (control.shortfall(m, n) is None) == (first == 1)
    enough = control.images_for_one(m)
    assert control.fewest_flags(m, enough) == 1
    assert control.fewest_flags(m, enough - 1) > 1 or enough == 0


@pytest.mark.parametrize("name", ["holm", "bonferroni"])
def test_family_wise_errors_hold_though_all_tiles_are_copies_or_independent(name):
    rng, alpha, m, n = np.random.default_rng(0), 0.2, 4, 39
    for copies in (True, False):
        errors = 0
        for _ in range(2000):
            scores = np.full(m, rng.random()) if copies else rng.random(m)
            errors += Control(name, alpha).flags(p_values(scores, rng.random(n))).any()
        assert errors / 2000 <= alpha + 4 * np.sqrt(alpha * (1 - alpha) / 2000)


def test_the_harmonic_sum_and_its_expansion_agree():
    assert harmonic(4) == pytest.approx(25 / 12)
    assert harmonic(10**6) == pytest.approx((1.0 / np.arange(1, 10**6 + 1)).sum(), rel=1e-12)


def test_statements_name_their_assumptions_and_numbers():
    assert "positively dependent (PRDS)" in Control("bh", 0.1).statement(50, 99)
    assert "however the overlapping tiles depend" in Control("by", 0.1).statement(50, 99)
    assert "even one false flag among the 50 tiles of this scene is at most 0.1" in Control("holm", 0.1).statement(
        50, 99
    )
    assert "of 50 such tiles 5 are" in Control("tile", 0.1).statement(50, 99)
    for name in CONTROLS:
        assert "exchangeable with the 99 calibration images" in Control(name, 0.1).statement(50, 99)
    assert "at least 999 calibration images" in str(Control("holm", 0.05).shortfall(50, 99))
    assert "only together with at least 9 others" in str(Control("bh", 0.05).shortfall(50, 99))


def test_bad_rates_and_names_are_refused():
    with pytest.raises(OptionError, match="did you mean 'holm'"):
        Control("hol")
    with pytest.raises(OptionError, match="between 0 and 1"):
        Control("bh", 1.5)
    with pytest.raises(OptionError, match="needs at least 99 calibration images"):
        Control("tile", 0.01).check(50)


def test_a_p_value_at_its_limit_is_flagged():
    """As p-values are computed, k/(n + 1): 1/20 and 1/40 at 0.05; with rounding, 1/10 at 1 - 0.9."""
    assert Control("tile", 0.05).flags(np.array([1 / 20, 2 / 20])).tolist() == [True, False]
    assert Control("tile", 1 - 0.9).flags(np.array([1 / 10])).tolist() == [True]
    assert holm(np.array([1 / 40, 1 / 20, 1.0]), 0.1).tolist() == [True, True, False]
    assert holm(np.array([1 / 40, 1 / 20]), 0.05).tolist() == [True, True]
    assert holm(np.array([1 / 10]), 1 - 0.9).tolist() == [True]


def test_the_rate_is_a_twentieth_and_the_procedure_benjamini_hochbergs_unless_others_are_given():
    assert Control() == Control("bh", 0.05)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_single_tile_is_flagged_at_the_rate_itself_and_no_tile_gives_no_flag(name):
    """1 + 1/2 + ... + 1/m is 1 for one tile, so that even Benjamini-Yekutieli pays nothing."""
    assert Control(name, 0.05).flags(np.array([0.05])).tolist() == [True]
    assert Control(name, 0.05).flags(np.array([0.0501])).tolist() == [False]
    assert Control(name, 0.05).flags(np.empty(0)).tolist() == []


@pytest.mark.parametrize(
    ("n", "words"), [(0, "nothing can be flagged"), (1, "with at least 9 others"), (18, "1 others")]
)
def test_a_shortfall_says_whether_all_tiles_together_could_be_flagged(n, words):
    """Ten tiles at 0.5: with k at p = 1/(n + 1) the limit is k/20, so that one image needs k = 10 and 18 need 2."""
    assert words in str(Control("bh", 0.5).shortfall(10, n))
    assert Control("bh", 0.5).shortfall(10, 19) is None


def test_only_a_rate_for_single_tiles_is_checked_before_scoring():
    """The other procedures may flag many tiles at once where one alone is out of reach."""
    for name in CONTROLS:
        if name != "tile":
            Control(name, 0.01).check(5)
    Control("tile", 0.01).check(99)

"""p-values are valid for any finite sample, and what is promised of verdicts follows from exact distributions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom

from gepc.conformal.decision import DecisionRule
from gepc.conformal.p_values import (
    CalibrationScores,
    Guarantee,
    check_alpha,
    check_rates,
    images_needed,
    p_values,
    threshold,
)
from gepc.core.errors import InputError, OptionError

tied_scores = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=40).map(np.array)


def test_small_cases_exactly() -> None:
    """p = (1 + #{calibration >= s})/(n + 1), ties against the alarm."""
    calibration = np.array([3.0, 1.0, 2.0, 2.0])
    found = p_values(np.array([0.0, 1.0, 1.5, 2.0, 3.0, 4.0]), calibration)
    np.testing.assert_array_equal(found, np.array([5, 5, 4, 4, 2, 1]) / 5)
    assert p_values(np.array([7.0]), np.empty(0)).tolist() == [1.0]


@given(tied_scores, tied_scores)
def test_p_values_lie_in_their_range_and_fall_with_the_score(scores: np.ndarray, calibration: np.ndarray) -> None:
    found = p_values(np.sort(scores), calibration)
    assert (found >= 1 / (len(calibration) + 1)).all()
    assert (found <= 1).all()
    assert (np.diff(found) <= 0).all()


@given(tied_scores)
def test_exchangeable_p_values_are_super_uniform_exactly(scores: np.ndarray) -> None:
    """Every one of n + 1 scores compared with the n others: at most a share alpha has p <= alpha, for every alpha."""
    found = np.array([p_values(scores[i : i + 1], np.delete(scores, i))[0] for i in range(len(scores))])
    for alpha in np.arange(1, len(scores) + 1) / len(scores):
        assert (found <= alpha).sum() <= round(alpha * len(scores))


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("distribution", ["continuous", "tied"])
def test_false_alarms_are_held_on_average_over_calibration_sets(alpha: float, distribution: str) -> None:
    """4000 sets of 39 and one new score: alarms stay below the 0.999 quantile of Binomial(4000, alpha).

    Without ties alpha is reached exactly, so they stay above the 0.001 quantile as well.
    """
    rng = np.random.default_rng(0)
    runs, n = 4000, 39
    draws = rng.standard_normal((runs, n + 1)) if distribution == "continuous" else rng.poisson(2.0, (runs, n + 1))
    alarms = sum(p_values(row[:1], row[1:])[0] <= alpha for row in draws.astype(float))
    assert alarms <= binom(runs, alpha).ppf(0.999)
    if distribution == "continuous":
        assert alarms >= binom(runs, alpha).ppf(0.001)


@given(tied_scores, tied_scores, st.integers(1, 40), st.sampled_from([0.0, 0.4]))
def test_the_threshold_and_the_p_value_give_the_same_verdict(
    scores: np.ndarray, calibration: np.ndarray, rank: int, between: float
) -> None:
    """score > threshold exactly when p <= alpha, at every rank and between two of them."""
    n = len(calibration)
    alpha = (min(rank, n) + between) / (n + 1)
    p = CalibrationScores.of(calibration, None).p_values(scores, None, None)
    limit = DecisionRule(alpha, None).limits(CalibrationScores.of(calibration, None), None)
    np.testing.assert_array_equal(scores > threshold(calibration, alpha), p <= limit)


@pytest.mark.parametrize("alpha", [1 - 0.9, 0.3 - 0.2, 0.1 + 0.2 - 0.2])
def test_a_rate_is_not_missed_by_rounding(alpha: float) -> None:
    """Ten percent, however it was computed, alarms at p = 1/10."""
    calibration = np.arange(9.0)
    assert alpha != 0.1
    limit = DecisionRule(alpha, None).limits(CalibrationScores.of(calibration, None), None)
    assert p_values(np.array([100.0]), calibration)[0] <= limit
    assert threshold(calibration, alpha) == 8.0


@pytest.mark.parametrize(("alpha", "needed"), [(0.05, 19), (0.1, 9), (0.01, 99), (0.3, 3), (0.5, 1), (0.001, 999)])
def test_too_few_images_are_refused_with_the_number_needed(alpha: float, needed: int) -> None:
    """1/(n + 1) <= alpha can be had with the stated number and with no fewer."""
    assert images_needed(alpha) == needed
    check_alpha(alpha, needed)
    with pytest.raises(OptionError, match=f"needs at least {needed} calibration images, there are {needed - 1}"):
        check_alpha(alpha, needed - 1)
    with pytest.raises(OptionError, match=f"needs at least {needed}"):
        threshold(np.arange(needed - 1.0), alpha)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 5.0, float("nan")])
def test_an_impossible_rate_is_refused(alpha: float) -> None:
    with pytest.raises(OptionError, match="between 0 and 1"):
        check_alpha(alpha, 1000)


@pytest.mark.parametrize(("alpha", "n"), [(0.05, 199), (0.05, 200), (0.1, 57)])
def test_the_guarantee_is_the_beta_law_of_the_realised_rate(alpha: float, n: int) -> None:
    """The rate of a calibration set at hand is Beta(k, n + 1 - k), k = floor(alpha (n + 1)): quantiles and simulation.

    Scores are uniform, so that the rate of a set is 1 - threshold; its mean is k/(n + 1) <= alpha.
    """
    found = Guarantee.at(alpha, n)
    k = int(alpha * (n + 1) + 1e-9)
    np.testing.assert_allclose([found.low, found.high], beta(k, n + 1 - k).ppf([0.05, 0.95]))
    rng = np.random.default_rng(1)
    rates = np.array([1 - threshold(rng.random(n), alpha) for _ in range(2000)])
    inside = ((rates >= found.low) & (rates <= found.high)).sum()
    assert binom(2000, 0.9).ppf(0.0005) <= inside <= binom(2000, 0.9).ppf(0.9995)
    assert abs(rates.mean() - k / (n + 1)) < 4 * rates.std() / np.sqrt(2000)


def test_a_guarantee_says_what_it_promises() -> None:
    found = Guarantee.at(0.05, 199)
    assert vars(found) == {"alpha": 0.05, "n": 199, "low": found.low, "high": found.high, "trimmed": 0}
    assert str(found).startswith("at most 0.05 of in-distribution images raise an alarm, on average")
    with pytest.raises(OptionError, match="needs at least 19"):
        Guarantee.at(0.05, 18)


@pytest.mark.parametrize(
    ("scores", "message"),
    [([], "no calibration images"), ([1.0, np.nan], "NaN or infinite"), ([np.inf], "NaN or infinite")],
)
def test_a_reference_needs_finite_scores(scores: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CalibrationScores.of(np.array(scores), None)


@given(st.fractions(min_value="1/400", max_value="399/400", max_denominator=400))
def test_the_images_needed_are_the_first_with_a_small_enough_p_value(alpha: Fraction) -> None:
    """1/(n + 1) <= alpha, in exact arithmetic; the rate is the nearest floating-point number."""
    n = images_needed(float(alpha))
    assert Fraction(1, n + 1) <= alpha
    assert n == 0 or Fraction(1, n) > alpha


@given(st.integers(1, 10**6), st.sampled_from([0.0, 1e-15, 1e-13, 1e-11, 1e-10, 1e-9, 1e-6]))
def test_the_images_needed_are_those_that_pass_the_check(n: int, short: float) -> None:
    """Also for a rate that falls short of 1/(n + 1) by more than rounding, be it ever so little."""
    alpha = (1.0 - short) / (n + 1)
    needed = images_needed(alpha)
    assert needed == (n if short < 1e-12 else n + 1)
    check_alpha(alpha, needed)
    with pytest.raises(OptionError, match=f"needs at least {needed} calibration images, there are {needed - 1}"):
        check_alpha(alpha, needed - 1)


@pytest.mark.parametrize("value", ["0.5", None, True, False, 0, 1, 0.0, 1.0, float("nan"), [0.5], np.array([0.5])])
def test_what_is_no_rate_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(OptionError, match="width must be between 0 and 1, got "):
        check_rates(alpha=0.5, width=value)


def test_rates_may_be_numbers_of_numpy() -> None:
    check_rates(half=np.float32(0.5), small=np.float64(1e-9), large=1.0 - 1e-9)
    with pytest.raises(OptionError, match="needs at least 3 calibration images, there are 2"):
        check_alpha(np.float32(0.25), 2)


def test_a_score_that_is_missing_has_no_p_value() -> None:
    for uniform in (None, np.array([0.3, 0.3])):
        found = p_values(np.array([np.nan, 4.5]), np.arange(9.0), uniform)
        assert np.isnan(found[0])
        assert 0.0 < found[1] < 1.0

"""Metrics: OOD is positive, ties count half, FPR95 is the paper's, and the interval covers as often as it says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from gepc.core.errors import InputError
from gepc.lab.metrics import aupr, auroc, auroc_interval, detection, fpr_at_tpr, placements

few_values = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=30)


def labelled(inside: list[float], outside: list[float]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    return np.repeat([0.0, 1.0], [len(inside), len(outside)]), np.array([*inside, *outside])


@given(few_values, few_values)
def test_auroc_and_aupr_are_scikit_learns_with_ood_positive(inside: list[float], outside: list[float]) -> None:
    labels, scores = labelled(inside, outside)
    assert auroc(inside, outside) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert aupr(inside, outside) == pytest.approx(average_precision_score(labels, scores), abs=1e-12)


@given(few_values, few_values)
def test_fpr95_is_the_first_point_of_the_roc_that_finds_95_percent(inside: list[float], outside: list[float]) -> None:
    """With ties: the threshold is a score, and every image that reaches it is flagged."""
    fpr, tpr, _ = roc_curve(*labelled(inside, outside), drop_intermediate=False)
    assert fpr_at_tpr(inside, outside) == pytest.approx(fpr[np.argmax(tpr >= 0.95 - 1e-12)])


def test_fpr95_by_hand() -> None:
    """Of 20 OOD images 19 must be flagged: the threshold is the second lowest OOD score, 1."""
    outside = np.arange(20.0)
    assert fpr_at_tpr([0.5, 1.0, 1.5, -3.0], outside) == 0.5
    assert fpr_at_tpr([0.5, 1.0, 1.5, -3.0], outside, tpr=1.0) == 0.75
    assert fpr_at_tpr(outside + 100, outside) == 1.0


@given(few_values, few_values)
def test_the_two_classes_mirror_each_other(inside: list[float], outside: list[float]) -> None:
    assert auroc(inside, outside) + auroc(outside, inside) == pytest.approx(1)
    negated = auroc([-v for v in inside], [-v for v in outside])
    assert auroc(inside, outside) + negated == pytest.approx(1)


@given(few_values, few_values)
def test_placements_are_shares_of_the_other_class_with_ties_counting_half(
    inside: list[float], outside: list[float]
) -> None:
    pairs = np.subtract.outer(outside, inside)
    above = (pairs > 0) + 0.5 * (pairs == 0)
    under_ood, over_id = placements(np.array(inside), np.array(outside))
    np.testing.assert_allclose(under_ood, above.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(over_id, above.mean(axis=1), atol=1e-12)


def test_delong_variance_by_its_definition() -> None:
    """The interval's half width on the logit scale is z sqrt(V10/m + V01/n)/(A (1 - A)), V from all pairs with ties."""
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 8, 40).astype(float), rng.integers(2, 10, 25).astype(float)
    pairs = (outside[:, None] > inside) + 0.5 * (outside[:, None] == inside)
    value = pairs.mean()
    deviation = np.sqrt(pairs.mean(1).var(ddof=1) / 25 + pairs.mean(0).var(ddof=1) / 40)
    logit = np.log(value / (1 - value))
    half = norm.ppf(0.95) * deviation / (value * (1 - value))
    expected = 1 / (1 + np.exp(-(logit + np.array([-half, half]))))
    np.testing.assert_allclose(auroc_interval(inside, outside, confidence=0.9), expected, rtol=1e-10)


@pytest.mark.parametrize("shift", [0.0, 1.0, 2.0])
def test_the_interval_covers_the_true_auroc(shift: float) -> None:
    """Two unit normals `shift` apart: AUROC = Phi(shift/sqrt 2); 95 % intervals from 60 + 60 scores, 400 repetitions.

    The coverage is within 4 binomial standard deviations of 95 %, plus 1 % for the method's own approximation.
    """
    rng = np.random.default_rng(1)
    truth, repetitions = norm.cdf(shift / np.sqrt(2)), 400
    covered = 0
    for _ in range(repetitions):
        low, high = auroc_interval(rng.standard_normal(60), shift + rng.standard_normal(60))
        covered += low <= truth <= high
    tolerance = 4 * np.sqrt(0.95 * 0.05 / repetitions) + 0.01
    assert abs(covered / repetitions - 0.95) < tolerance


@pytest.mark.parametrize(("n", "m"), [(5, 9), (200, 100), (2, 2)])
def test_sets_that_do_not_overlap_still_have_an_interval(n: int, m: int) -> None:
    """The end is the AUROC at which min(n, m) independent pairs all come out right with probability 2.5 %."""
    inside, outside = np.linspace(0, 1, n), np.linspace(2, 3, m)
    low, high = auroc_interval(inside, outside)
    assert high == 1.0
    assert low ** min(n, m) == pytest.approx(0.025)
    assert auroc_interval(outside, inside) == (0.0, pytest.approx(1 - auroc_interval(inside, outside)[0]))


def test_one_score_of_a_kind_says_nothing() -> None:
    assert auroc_interval([1.0], [0.5, 2.0]) == auroc_interval([1.0, 0.0], [2.0]) == (0.0, 1.0)


def test_all_metrics_of_a_pair() -> None:
    inside, outside = np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.5, 4.0, 5.0])
    found = detection(inside, outside)
    assert (found.n_id, found.n_ood) == (4, 3)
    assert found.auroc == auroc(inside, outside) == pytest.approx(10 / 12)
    assert found.auroc_low < found.auroc < found.auroc_high
    assert found.aupr == aupr(inside, outside)
    assert found.fpr95 == fpr_at_tpr(inside, outside) == 0.5


@pytest.mark.parametrize(
    ("inside", "outside", "message"),
    [([], [1.0], "no ID scores"), ([1.0], [], "no OOD scores"), ([1.0], [np.nan, 1.0], "OOD scores are NaN: 1;")],
)
def test_scores_that_cannot_be_compared(inside: list[float], outside: list[float], message: str) -> None:
    for metric in (auroc, aupr, fpr_at_tpr, auroc_interval, detection):
        with pytest.raises(InputError, match=message):
            metric(inside, outside)


def test_an_infinite_score_is_the_largest() -> None:
    found = detection([0.0, 1.0, 2.0], [1.5, np.inf, np.inf])
    assert found.auroc == pytest.approx(8 / 9)
    assert np.isfinite([found.aupr, found.fpr95, found.auroc_low, found.auroc_high]).all()


def test_the_rate_and_the_confidence_are_95_percent_unless_others_are_given() -> None:
    rng = np.random.default_rng(5)
    inside, outside = rng.normal(size=200), rng.normal(1.0, size=100)
    assert fpr_at_tpr(inside, outside) == fpr_at_tpr(inside, outside, 0.95) > fpr_at_tpr(inside, outside, 0.9)
    assert auroc_interval(inside, outside) == auroc_interval(inside, outside, 0.95)


def test_two_scores_of_each_kind_are_enough_for_an_interval() -> None:
    low, high = auroc_interval([0.0, 2.0], [1.0, 3.0])
    assert 0.0 < low < 0.75 < high < 1.0


@pytest.mark.parametrize("count", [1, 3, 20, 21, 1000])
def test_perfect_scores_have_an_average_precision_of_one_and_no_more(count: int) -> None:
    """The sum over 20 or 21 scores is larger by rounding."""
    assert aupr(np.zeros(count), 1.0 + np.arange(count)) == 1.0


def test_the_interval_of_tied_scores_is_everything() -> None:
    assert auroc_interval([1, 1, 1], [1, 1, 1, 1]) == (0.0, 1.0)

"""Levels are chosen by the stability of their feature on in-distribution images, and weighted by it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.calibration import Aggregation, Scorer, create_calibrator
from gepc.calibration.calibrators import register
from gepc.calibration.scorer import coefficient_of_variation, select
from gepc.core.errors import InputError, OptionError
from gepc.core.parts import Part


def table(*cvs: float) -> np.ndarray:
    """Two images per level with mean 1 and exactly these CVs."""
    return np.stack([1 - np.asarray(cvs), 1 + np.asarray(cvs)])


def test_the_lowest_cv_stays_and_weighs_one_over_it() -> None:
    picked = select(table(0.4, 0.1, 0.8, 0.2), keep=2, weighting="inv_cv")
    assert picked.kept == (1, 3)
    np.testing.assert_allclose(picked.weights, [2 / 3, 1 / 3])
    np.testing.assert_allclose(picked.cv, [0.4, 0.1, 0.8, 0.2])


def test_uniform_weights_and_all_levels() -> None:
    base = table(0.4, 0.1, 0.8)
    assert select(base, None, "uniform").kept == (0, 1, 2)
    np.testing.assert_allclose(select(base, None, "uniform").weights, 1 / 3)
    np.testing.assert_allclose(select(base, 2, "uniform").weights, 1 / 2)
    np.testing.assert_allclose(select(base, None, "inv_cv").weights, np.array([2.5, 10, 1.25]) / 13.75)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.sampled_from(["inv_cv", "uniform"]),
    st.floats(1e-6, 1e6),
)
def test_selection_is_a_choice_of_the_most_stable_and_blind_to_units(
    seed: int, keep: int, weighting: str, unit: float
) -> None:
    """Ascending, distinct, weights sum to 1, no level left out is more stable, and a factor changes nothing."""
    base = np.exp(np.random.default_rng(seed).standard_normal((20, 5)))
    picked = select(base, keep, weighting)
    assert list(picked.kept) == sorted(set(picked.kept))
    assert len(picked.kept) == keep
    assert picked.weights.sum() == pytest.approx(1)
    left_out = sorted(set(range(5)) - set(picked.kept))
    assert not left_out or picked.cv[left_out].min() >= picked.cv[list(picked.kept)].max()
    scaled = select(unit * base, keep, weighting)
    assert scaled.kept == picked.kept
    np.testing.assert_allclose(scaled.weights, picked.weights, rtol=1e-9)


def test_negative_means_and_missing_entries() -> None:
    """CV = std/|mean|, over the images that were looked at."""
    values = np.array([[-1.0, 1.0], [-3.0, np.nan], [-2.0, 3.0]])
    np.testing.assert_allclose(coefficient_of_variation(values), [np.sqrt(2 / 3) / 2, 0.5])


@pytest.mark.parametrize("level", [0.0, 0.1])
def test_a_constant_level_is_an_error(level: float) -> None:
    """Also where its standard deviation is not 0 but a rounding error, which would look most stable of all."""
    base = np.tile(table(0.4, 0.1, 0.8), (30, 1))
    base[:, 1] = level
    with pytest.raises(InputError, match="constant over the in-distribution images at some level"):
        select(base, 2, "inv_cv")


@pytest.mark.parametrize("keep", [0, 4, -1])
def test_keep_must_be_possible(keep: int) -> None:
    with pytest.raises(OptionError, match="between 1 and the number of distinct levels, 3"):
        select(table(0.4, 0.1, 0.8), keep, "inv_cv")


def test_unknown_weights() -> None:
    with pytest.raises(OptionError, match="did you mean 'inv_cv'"):
        select(table(0.4, 0.1), 1, "inv-cv")


def test_a_scorer_works_on_columns_alone() -> None:
    rng = np.random.default_rng(0)
    train, test = rng.normal(size=(60, 4, 2)) + 5.0, rng.normal(size=(10, 4, 2)) + 5.0
    scorer = Scorer("zscore", keep=2).fit(train)
    kept = list(scorer.selection_.kept)
    assert scorer.selection_.kept == select(train[:, :, 0], 2, "inv_cv").kept
    expected = (
        create_calibrator("zscore").fit(train[:, kept]).score(test[:, kept], scorer.selection_.weights, Aggregation())
    )
    np.testing.assert_array_equal(scorer.score(test), expected)
    again = Scorer("zscore", keep=2).restore(scorer.selection_, scorer.state())
    np.testing.assert_array_equal(again.score(test), expected)


def test_levels_are_selected_by_the_feature_that_is_given() -> None:
    rng = np.random.default_rng(0)
    train = rng.normal(size=(60, 3, 1)) + 5.0
    stability = np.stack([rng.normal(1.0, spread, 60) for spread in (0.5, 0.01, 0.3)], axis=1)
    assert Scorer("zscore", keep=1).fit(train, stability).selection_.kept == (1,)


@pytest.mark.parametrize(
    ("calibration", "options"),
    [("mvn", {"aggregate": "max"}), ("knn", {"fuse": "mean"}), ("level_mahalanobis", {"fuse": "mean"})],
)
def test_an_option_that_the_calibrator_ignores_is_refused(calibration: str, options: dict[str, str]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=f"{name}=.* has no effect with calibration '{calibration}'"):
        Scorer(calibration, **options)
    Scorer("level_mahalanobis", aggregate="max")


def test_a_registered_name_is_not_replaced() -> None:
    with pytest.raises(OptionError, match="a calibrator named 'kde' exists already"):
        register("kde")(type("Other", (create_calibrator("kde").__class__,), {}))
    assert create_calibrator("kde").__class__.__name__ == "KDE"


def test_whether_scores_are_finite_is_asked_of_the_middle_of_the_range() -> None:
    scorer = Scorer("zscore").fit(np.random.default_rng(0).normal(size=(30, 2, 1)) + 5.0)
    assert scorer.gives_finite_scores()
    state = scorer.state()
    broken = {name: np.full_like(value, np.nan) for name, value in state.items() if not name.endswith("bounds")}
    assert not Scorer("zscore").restore(scorer.selection_, {**state, **broken}).gives_finite_scores()


def test_columns_are_calibrated_in_the_parts_that_are_given_or_those_of_the_table() -> None:
    columns = np.random.default_rng(0).normal(size=(40, 2, 3)) + 5.0
    parts = (Part.of("output", [0]), Part.of("structure", [1, 2]))
    table = SimpleNamespace(columns=columns, stability=columns[:, :, 0], parts=parts)
    assert Scorer("zscore").fit(table).calibrator_.parts == parts
    assert Scorer("zscore").fit(table, parts=parts[:1]).calibrator_.parts == parts[:1]
    assert Scorer("zscore").fit(columns).calibrator_.parts == ()

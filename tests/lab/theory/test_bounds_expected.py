"""The expected residual lies between its bounds; the printed lower bound does not hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import GROUPS, Bent, gaussian, gaussian_backbone, mixture_backbone

from gepc.lab.theory import (
    Affine,
    ResidualBounds,
    empirical_bounds,
    error_term_counter_example,
    expected_bounds,
    field_of,
)

SEEDS, NAMES = st.integers(0, 2**32 - 1), st.sampled_from(sorted(GROUPS))


def holds(bounds: ResidualBounds) -> bool:
    slack = 1e-9 * (bounds.upper + 1e-12)  # rounding, relative to the largest term
    return bounds.lower - slack <= bounds.residual <= bounds.upper + slack


@settings(max_examples=150)
@given(SEEDS, NAMES, st.floats(0.0, 3.0), st.booleans())
def test_the_bounds_hold_for_gaussians(seed: int, name: str, shift: float, is_a_score: bool) -> None:
    """In closed form, for the score of another Gaussian and for affine fields that are nobody's score."""
    rng = np.random.default_rng(seed)
    p = gaussian(rng)
    model = gaussian(rng).score if is_a_score else Affine(rng.standard_normal((4, 4)), shift * rng.standard_normal(4))
    assert holds(expected_bounds(model, p, GROUPS[name]))


@given(SEEDS, NAMES, st.integers(1, 20))
def test_the_bounds_hold_on_every_finite_sample(seed: int, name: str, count: int) -> None:
    """A bent field against a mixture's true score; one point is enough."""
    rng = np.random.default_rng(seed)
    truth = field_of(mixture_backbone(rng), 1)
    assert holds(empirical_bounds(Bent.random(rng), truth, 2 * rng.standard_normal((count, 4)), GROUPS[name]))


@given(SEEDS, NAMES)
def test_averages_over_points_with_the_laws_moments_are_the_closed_form(seed: int, name: str) -> None:
    """Every term is a mean square of an affine field: 2 D points with the law's moments give it exactly."""
    rng = np.random.default_rng(seed)
    p, model = gaussian(rng), gaussian(rng).score
    root = np.linalg.cholesky(p.cov) * 2.0
    points = p.mean + np.vstack([root.T, -root.T])
    found, expected = empirical_bounds(model, p.score, points, GROUPS[name]), expected_bounds(model, p, GROUPS[name])
    for term in vars(expected):
        assert getattr(found, term) == pytest.approx(getattr(expected, term), rel=1e-6, abs=1e-8), term


@given(SEEDS, NAMES)
def test_the_lower_bound_is_tight_for_an_equivariant_backbone(seed: int, name: str) -> None:
    """s_theta equivariant: Delta_g e = -Delta_g s_p, so Delta_E = B and both the residual and the bound are 0.

    Such a backbone sees nothing however far p is, and the bound does not promise otherwise.
    """
    rng = np.random.default_rng(seed)
    bounds = expected_bounds(Affine(-2.0 * np.eye(4), np.zeros(4)), gaussian(rng), GROUPS[name])
    assert bounds.breaking > 1e-6
    assert bounds.residual == pytest.approx(0.0, abs=1e-20)
    assert bounds.lower == pytest.approx(0.0, abs=1e-12 * bounds.breaking)


def test_without_error_the_residual_is_the_breaking() -> None:
    """e = 0: the lower bound is B itself, the upper one 2 B."""
    p = gaussian(np.random.default_rng(4))
    bounds = expected_bounds(p.score, p, GROUPS["sign"])
    assert bounds.residual == bounds.breaking == bounds.lower
    assert bounds.upper == 2 * bounds.breaking


@pytest.mark.parametrize("size", [1, 4, 12])
def test_the_printed_lower_bound_fails(size: int) -> None:
    bounds = error_term_counter_example(size)
    assert bounds.residual == bounds.breaking == bounds.lower == 0.0
    assert bounds.printed_lower == pytest.approx(size / 2)
    assert bounds.printed_lower > bounds.residual


def test_the_printed_lower_bound_fails_on_ordinary_backbones_too() -> None:
    """It is no corner case: among 50 pairs of random Gaussians, noised, many break it, and none breaks ours."""
    rng = np.random.default_rng(5)
    broken = 0
    for _ in range(50):
        model, truth = (field_of(gaussian_backbone(rng), 1) for _ in range(2))
        bounds = empirical_bounds(model, truth, rng.standard_normal((30, 4)), GROUPS["quarter turns"])
        assert holds(bounds)
        broken += bounds.printed_lower > bounds.residual * (1 + 1e-9)
    assert broken >= 10

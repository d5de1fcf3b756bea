"""A backbone away from its manifold: the upper bound, a lower bound that holds, and the printed one that does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import GROUPS, Bent, gaussian, mixture_backbone

from gepc.core.errors import InputError
from gepc.lab.theory import Affine, Array, Field, Subspace, cross_bounds, cross_counter_example, field_of

SEEDS, NAMES = st.integers(0, 2**32 - 1), st.sampled_from(sorted(GROUPS))
PLANE = np.eye(4)[:, :2]
INVARIANT = {
    "sign": Subspace.spanned_by(np.random.default_rng(0).standard_normal((4, 2))),
    "quarter turns": Subspace.spanned_by(PLANE),
    "cyclic shifts": Subspace.spanned_by(np.ones((4, 1)), origin=np.full(4, 0.5)),
}


def fields(rng: np.random.Generator) -> dict[str, Field]:
    return {"bent": Bent.random(rng), "mixture": field_of(mixture_backbone(rng), 1), "gaussian": gaussian(rng).score}


@given(SEEDS, NAMES, st.sampled_from(["bent", "mixture", "gaussian"]))
def test_the_residual_lies_between_its_bounds(seed: int, name: str, kind: str) -> None:
    """With the L, m and beta measured at the points themselves."""
    rng = np.random.default_rng(seed)
    x = 2 * rng.standard_normal((12, 4))
    bounds = cross_bounds(fields(rng)[kind], x, INVARIANT[name], GROUPS[name])
    slack = 1e-9 * (bounds.upper + 1e-12)
    assert (bounds.residual <= bounds.upper + slack).all()
    assert (bounds.lower - slack <= bounds.residual).all()


@given(SEEDS, NAMES, st.sampled_from(["bent", "mixture", "gaussian"]))
def test_growth_never_exceeds_the_lipschitz_constant(seed: int, name: str, kind: str) -> None:
    """m <= L: what the printed lower bound squares is never positive."""
    rng = np.random.default_rng(seed)
    bounds = cross_bounds(fields(rng)[kind], rng.standard_normal((5, 4)), INVARIANT[name], GROUPS[name])
    assert bounds.growth <= bounds.lipschitz * (1 + 1e-12)
    assert ((bounds.growth - bounds.lipschitz) * bounds.distance <= 1e-12).all()


@given(SEEDS, NAMES)
def test_the_measured_lipschitz_constant_is_below_the_true_one(seed: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    field, x = Bent.random(rng), rng.standard_normal((5, 4))
    measured = cross_bounds(field, x, INVARIANT[name], GROUPS[name])
    given = cross_bounds(field, x, INVARIANT[name], GROUPS[name], lipschitz=field.lipschitz)
    assert measured.lipschitz <= field.lipschitz
    assert given.lipschitz == field.lipschitz
    assert (measured.upper <= given.upper).all()


def test_an_affine_residual_grows_with_the_square_of_the_distance() -> None:
    """s = -A x with s = 0 on the manifold {0}: rho = 0, and the lower bound is attained."""
    A = np.diag([1.0, 3.0])
    turns = [np.linalg.matrix_power(np.array([[0.0, -1.0], [1.0, 0.0]]), k) for k in range(4)]
    x = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]])
    origin = Subspace(np.zeros(2), np.zeros((2, 0)))
    bounds = cross_bounds(Affine(-A, np.zeros(2)), x, origin, turns)
    np.testing.assert_allclose(bounds.distance, [1, 2, 5])
    np.testing.assert_allclose(bounds.residual, 0.5 * 2.0**2 * bounds.distance**2, rtol=1e-12)
    np.testing.assert_allclose(bounds.lower, bounds.residual, rtol=1e-12)
    assert bounds.lipschitz == pytest.approx(3.0)
    assert bounds.growth == pytest.approx(1.0)
    assert bounds.breaking_growth == pytest.approx(np.sqrt(2.0))


@given(st.lists(st.floats(0.1, 5.0), min_size=2, max_size=5), SEEDS)
def test_the_printed_lower_bound_fails(slopes: list[float], seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((6, len(slopes)))
    axes = np.eye(len(slopes))
    bounds = cross_counter_example(np.vstack([x, axes]), slopes)
    np.testing.assert_array_equal(bounds.residual, 0.0)
    assert bounds.growth == pytest.approx(min(slopes))
    assert bounds.lipschitz == max(slopes)
    assert bounds.breaking_growth == 0.0
    np.testing.assert_array_equal(bounds.lower, 0.0)
    expected = (max(slopes) - min(slopes)) ** 2 * bounds.distance**2
    np.testing.assert_allclose(bounds.printed_lower, expected, rtol=1e-9, atol=1e-12)
    if max(slopes) - min(slopes) > 0.01:
        assert (bounds.printed_lower > bounds.residual).all()


@given(SEEDS, NAMES)
def test_projection_is_nearest_and_commutes_with_the_group(seed: int, name: str) -> None:
    rng, manifold = np.random.default_rng(seed), INVARIANT[name]
    x = rng.standard_normal((5, 4))
    z = manifold.project(x)
    np.testing.assert_allclose(manifold.project(z), z, atol=1e-12)
    other: Array = z + rng.standard_normal((5, manifold.basis.shape[1])) @ manifold.basis.T
    assert (manifold.distance(x) <= np.linalg.norm(x - other, axis=1) + 1e-12).all()
    for P in GROUPS[name]:
        np.testing.assert_allclose(manifold.project(x @ P.T), z @ P.T, atol=1e-12)


def test_what_cannot_be_measured_is_refused() -> None:
    line = Subspace.spanned_by(np.eye(4)[:, :1])
    with pytest.raises(InputError, match="does not map this manifold to itself"):
        cross_bounds(lambda x: -x, np.ones((1, 4)), line, GROUPS["cyclic shifts"])
    with pytest.raises(InputError, match="off the manifold"):
        cross_bounds(lambda x: -x, np.eye(4)[:1], line, GROUPS["sign"])
    with pytest.raises(InputError, match="independent"):
        Subspace.spanned_by(np.ones((4, 2)))

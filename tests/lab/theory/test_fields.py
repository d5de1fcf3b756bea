"""Fields, matrices of group elements, and the link between invariant laws and equivariant scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import ABAR, GROUPS, SHAPE, covariance, gaussian, gaussian_backbone, mixture_backbone

from gepc.backbones.base import Backbone
from gepc.core.errors import InputError
from gepc.lab.theory import (
    Gaussian,
    anisotropy_residual,
    components_of,
    equivariance_breaking,
    field_of,
    matrices_of,
    mean_shift_residual,
    residuals,
)
from gepc.methods.groups import Group

SEEDS = st.integers(0, 2**32 - 1)


def test_the_field_of_a_gaussian_backbone_is_the_score_of_the_noised_gaussian() -> None:
    rng = np.random.default_rng(0)
    backbone = gaussian_backbone(rng)
    x = rng.standard_normal((6, 4))
    ((share, law),) = components_of(backbone)
    assert share == 1.0
    for t, abar in enumerate(ABAR):
        np.testing.assert_allclose(field_of(backbone, t)(x), law.noised(abar).score(x), rtol=1e-9)


def test_a_backbone_of_any_size_has_no_vectors() -> None:
    backbone = Backbone.from_callable(lambda x, t: x, alphas_cumprod=ABAR, channels=1, image_size=None)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="image_size"):
        field_of(backbone, 0)


@pytest.mark.parametrize("name", ["paper", "d4", "sign"])
def test_matrices_do_what_the_actions_do(name: str) -> None:
    shape = (2, 3, 3)
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((5, *shape)))
    for action, P in zip(Group.of(name), matrices_of(name, shape), strict=True):
        np.testing.assert_allclose(P @ P.T, np.eye(18), atol=1e-15)
        np.testing.assert_allclose(x.flatten(1).numpy() @ P.T, action.apply(x).flatten(1).numpy(), atol=1e-15)


def test_an_energy_is_the_mean_square_under_the_law() -> None:
    """tr(A Sigma A^T) + |A mu + c|^2, against 2 D points that have mean mu and covariance Sigma."""
    rng = np.random.default_rng(2)
    law, field = gaussian(rng), gaussian(rng).score
    root = np.linalg.cholesky(law.cov) * np.sqrt(4)
    points = law.mean + np.vstack([root.T, -root.T])  # mean and covariance of the law, exactly
    np.testing.assert_allclose(np.square(field(points)).sum(1).mean(), field.energy(law), rtol=1e-12)


@given(SEEDS, st.floats(0.05, 5.0))
def test_a_mean_shift_is_what_the_sign_group_sees(seed: int, variance: float) -> None:
    """R is 2 |mu|^2 / sigma^4 at every x, not only on average."""
    rng = np.random.default_rng(seed)
    law = Gaussian(rng.standard_normal(4), variance * np.eye(4))
    expected = mean_shift_residual(law.mean, variance)
    found = residuals(law.score, 3 * rng.standard_normal((5, 4)), GROUPS["sign"]).mean(1)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    np.testing.assert_allclose(equivariance_breaking(law, GROUPS["sign"]), expected, rtol=1e-9)
    np.testing.assert_allclose(law.score.energy(law), 4 / variance, rtol=1e-9)  # the score's energy does not see mu


@given(st.floats(0.05, 5.0), st.floats(0.05, 5.0))
def test_anisotropy_is_what_quarter_turns_see(first: float, second: float) -> None:
    turns = [np.linalg.matrix_power(np.array([[0.0, -1.0], [1.0, 0.0]]), k) for k in range(4)]
    law = Gaussian(np.zeros(2), np.diag([first, second]))
    np.testing.assert_allclose(
        equivariance_breaking(law, turns), anisotropy_residual(first, second), rtol=1e-9, atol=1e-12
    )


@given(SEEDS, st.sampled_from(sorted(GROUPS)))
def test_breaking_is_zero_exactly_for_invariant_gaussians(seed: int, name: str) -> None:
    """Averaging mean and covariance over a closed group makes the law invariant; a shift undoes it."""
    rng, matrices = np.random.default_rng(seed), GROUPS[name]
    mean, cov = rng.standard_normal(4), covariance(rng)
    invariant = Gaussian(np.mean([P @ mean for P in matrices], 0), np.mean([P @ cov @ P.T for P in matrices], 0))
    assert equivariance_breaking(invariant, matrices) < 1e-18 * np.linalg.cond(cov) ** 4 + 1e-20
    x = rng.standard_normal((4, 4))
    for P in matrices:
        np.testing.assert_allclose(invariant.log_density(x @ P.T), invariant.log_density(x), rtol=1e-9)
    moved = Gaussian(invariant.mean + np.array([1.0, 0, 0, 0]), invariant.cov)
    assert equivariance_breaking(moved, matrices) > 1e-3


def test_breaking_of_a_mixture_is_an_average_of_residuals() -> None:
    """An even mixture of N(m, C) and N(-m, C) has an odd score; with unequal shares it has not."""
    rng = np.random.default_rng(3)
    uneven = mixture_backbone(rng, 2)
    x = rng.standard_normal((8, 4))
    assert residuals(field_of(uneven, 1), x, GROUPS["sign"])[:, 1].min() > 1e-3
    law = components_of(uneven)[0][1]
    mean = law.mean.reshape(SHAPE)
    even = type(uneven)([1, 1], [mean, -mean], [law.cov, law.cov], SHAPE, ABAR)
    np.testing.assert_allclose(residuals(field_of(even, 1), x, GROUPS["sign"]), 0.0, atol=1e-20)

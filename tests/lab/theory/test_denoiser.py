"""Tweedie, the posterior covariance as a Jacobian, and the growth of the score along a line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import ABAR, SHAPE, Bent, gaussian_backbone, mixture_backbone

from gepc.backbones.base import Backbone
from gepc.core.errors import InputError
from gepc.lab.analytic import GaussianBackbone, MixtureBackbone
from gepc.lab.theory import (
    components_of,
    contraction,
    denoiser_jacobian,
    directional_growth,
    field_of,
    posterior,
    posterior_covariance,
    tweedie,
)

SEEDS, LEVELS = st.integers(0, 2**32 - 1), st.integers(0, len(ABAR) - 1)
KINDS = {"gaussian": gaussian_backbone, "mixture": mixture_backbone}
KIND = st.sampled_from(sorted(KINDS))


def case(seed: int, kind: str, count: int = 4) -> tuple[GaussianBackbone | MixtureBackbone, np.ndarray]:
    rng = np.random.default_rng(seed)
    return KINDS[kind](rng), rng.standard_normal((count, 4))


@given(SEEDS, LEVELS, KIND)
def test_tweedie_is_bayes_rule(seed: int, t: int, kind: str) -> None:
    """From the score on one side, from the posterior's own formula on the other."""
    backbone, x = case(seed, kind)
    found = tweedie(field_of(backbone, t), x, ABAR[t])
    np.testing.assert_allclose(found, posterior(backbone, x, t).mean, rtol=1e-7, atol=1e-8)


@given(SEEDS, LEVELS, KIND)
def test_the_predicted_noise_is_the_expected_noise(seed: int, t: int, kind: str) -> None:
    """eps(x_t) = E[noise | x_t] = (x_t - sqrt(abar) E[x_0 | x_t]) / sigma_t."""
    backbone, x = case(seed, kind)
    eps = backbone.eps(torch.from_numpy(x).reshape(-1, *SHAPE), t).flatten(1).numpy()
    expected = (x - np.sqrt(ABAR[t]) * posterior(backbone, x, t).mean) / np.sqrt(1 - ABAR[t])
    np.testing.assert_allclose(eps, expected, rtol=1e-7, atol=1e-7)


@settings(max_examples=20)
@given(SEEDS, LEVELS, KIND)
def test_the_jacobian_of_the_denoiser_is_the_posterior_covariance(seed: int, t: int, kind: str) -> None:
    """(sigma^2/sqrt(abar)) dm/dx, differentiated, against Bayes' rule; symmetric, no negative eigenvalue."""
    backbone, x = case(seed, kind, 2)
    found = posterior_covariance(backbone, x, t)
    np.testing.assert_allclose(found, posterior(backbone, x, t).cov, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found, found.transpose(0, 2, 1), atol=1e-9)
    assert np.linalg.eigvalsh(found).min() > -1e-9
    assert backbone.jvp_count == 2 * 4


@settings(max_examples=20)
@given(SEEDS, LEVELS, KIND)
def test_the_covariance_is_the_hessian_of_the_log_density(seed: int, t: int, kind: str) -> None:
    """C = sigma~^2 I + sigma~^4 H~ in y = x/sqrt(abar); H~ = abar ds/dx, by central differences of the score."""
    backbone, x = case(seed, kind, 1)
    noise, step = (1 - ABAR[t]) / ABAR[t], 1e-5
    field = field_of(backbone, t)
    hessian = (field(x + step * np.eye(4)) - field(x - step * np.eye(4))) / (2 * step)
    expected = noise * np.eye(4) + noise**2 * ABAR[t] * hessian
    np.testing.assert_allclose(posterior(backbone, x, t).cov[0], expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=20)
@given(SEEDS, LEVELS)
def test_a_bound_on_the_covariance_is_a_lipschitz_constant_of_the_denoiser(seed: int, t: int) -> None:
    """Of one Gaussian, whose covariance is one for all y: |m(y) - m(y')| <= rho |y - y'|, rho = |C| / sigma~^2."""
    backbone, x = case(seed, "gaussian", 8)
    rho = np.linalg.norm(posterior(backbone, x[:1], t).cov[0], 2) * ABAR[t] / (1 - ABAR[t])
    m = tweedie(field_of(backbone, t), x, ABAR[t])
    gaps = np.linalg.norm(m[:4] - m[4:], axis=1) / (np.linalg.norm(x[:4] - x[4:], axis=1) / np.sqrt(ABAR[t]))
    assert (gaps <= rho * (1 + 1e-9)).all()
    assert rho < 1  # a Gaussian's denoiser always contracts


@given(SEEDS, LEVELS, KIND)
def test_growth_is_contraction_over_the_noise(seed: int, t: int, kind: str) -> None:
    """-<s(x) - s(z), u>/d = kappa/sigma_t^2, and kappa <= 1."""
    backbone, points = case(seed, kind, 8)
    field, x, z = field_of(backbone, t), points[:4], points[4:]
    kappa = contraction(field, x, z, ABAR[t])
    np.testing.assert_allclose(directional_growth(field, x, z), kappa / (1 - ABAR[t]), rtol=1e-7, atol=1e-7)
    assert (kappa <= 1 + 1e-9).all()


@given(SEEDS, LEVELS)
def test_growth_of_a_gaussian_is_its_precision_along_the_line(seed: int, t: int) -> None:
    """m = n^T Sigma_t^-1 n > 0, wherever the two points lie."""
    backbone, points = case(seed, "gaussian", 8)
    ((_, law),) = components_of(backbone)
    n = points[:4] - points[4:]
    n /= np.linalg.norm(n, axis=1, keepdims=True)
    expected = np.einsum("ni,ij,nj->n", n, np.linalg.inv(law.noised(ABAR[t]).cov), n)
    np.testing.assert_allclose(directional_growth(field_of(backbone, t), points[:4], points[4:]), expected, rtol=1e-7)


def test_between_two_modes_the_score_does_not_pull_back() -> None:
    """The directional condition is an assumption: halfway between modes the denoiser drives points apart, kappa < 0."""
    mean = np.full(SHAPE, 1.0)
    backbone = MixtureBackbone([1, 1], [mean, -mean], [0.01, 0.01], SHAPE, ABAR)
    near, far = np.full((1, 4), 0.05), np.full((1, 4), 5.0)
    field = field_of(backbone, 1)
    assert contraction(field, near, -near, ABAR[1]) < 0 < contraction(field, far, near, ABAR[1])
    assert directional_growth(field, near, -near) < 0


@given(SEEDS, st.floats(0.001, 0.1))
def test_growth_survives_a_bounded_error(seed: int, delta: float) -> None:
    """|s_theta - s| <= delta: growth loses at most 2 delta/d; from d = 4 sigma^2 delta/kappa on half is left."""
    backbone, points = case(seed, "gaussian", 8)
    rng, t = np.random.default_rng(seed), 1
    exact, bend = field_of(backbone, t), Bent.random(rng)
    size = np.linalg.norm(bend.W, 2) * 2.0  # |W tanh| <= |W| sqrt(D), D = 4

    def learned(x: np.ndarray) -> np.ndarray:
        return exact(x) + delta / size * bend(x)

    z, step = points[4:], points[:4] - points[4:]
    kappa = contraction(exact, z + step, z, ABAR[t])
    distance = np.linalg.norm(step, axis=1)
    slack = 2 * delta / distance
    assert (directional_growth(learned, z + step, z) >= kappa / (1 - ABAR[t]) - slack - 1e-12).all()
    far = step / distance[:, None] * (4 * (1 - ABAR[t]) * delta / kappa)[:, None]  # kappa is the same along a line
    assert (directional_growth(learned, z + far, z) >= 0.5 * kappa / (1 - ABAR[t]) * (1 - 1e-6)).all()


def test_a_backbone_of_any_size_has_no_jacobian() -> None:
    backbone = Backbone.from_callable(lambda x, t: x, alphas_cumprod=ABAR, channels=1, image_size=None)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="image_size"):
        denoiser_jacobian(backbone, np.zeros((1, 4)), 0)

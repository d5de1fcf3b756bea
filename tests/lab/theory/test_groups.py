"""What the bounds become for compact groups, approximately orthogonal operators and noised laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from laws import GROUPS, Bent, D, covariance, gaussian, mixture_backbone
from scipy.stats import ortho_group

from gepc.lab import theory
from gepc.lab.theory import Affine, Array, Gaussian
from gepc.methods.groups import find_action


def rotation(angle: float) -> Array:
    return np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


def kl(p: Gaussian, q: Gaussian) -> float:
    inverse, gap = np.linalg.inv(q.cov), q.mean - p.mean
    logs = np.linalg.slogdet(q.cov)[1] - np.linalg.slogdet(p.cov)[1]
    return float(0.5 * (np.trace(inverse @ p.cov) + gap @ inverse @ gap - len(gap) + logs))


def moved(p: Gaussian, P: Array) -> Gaussian:
    """The law of P^-1 x, whose density is p(P x)."""
    return Gaussian(P.T @ p.mean, P.T @ p.cov @ P)


def test_a_sample_of_the_haar_measure_is_unbiased_with_variance_over_n() -> None:
    """N(0, diag(v1, v2)) under SO(2): R = 4 b^2 |x|^2 sin^2 a, mean 2 b^2 |x|^2, variance 2 b^4 |x|^4."""
    p, x = Gaussian(np.zeros(2), np.diag([0.5, 2.0])), np.array([[0.7, -0.4]])
    b, square = (1 / 2.0 - 1 / 0.5) / 2, float(np.square(x).sum())
    rng = np.random.default_rng(0)
    for count in (1, 4, 16):
        angles = rng.uniform(0, 2 * np.pi, (4000, count))
        every = theory.residuals(p.score, x, [rotation(a) for a in angles.ravel()])[0].reshape(angles.shape)
        np.testing.assert_allclose(every, 4 * b**2 * square * np.sin(angles) ** 2, atol=1e-12)
        means = every.mean(1)
        standard_error = np.sqrt(2 * b**4 * square**2 / count / 4000)
        assert means.mean() == pytest.approx(2 * b**2 * square, abs=4 * standard_error)
        assert means.var() == pytest.approx(2 * b**4 * square**2 / count, rel=0.15)


def test_equally_spaced_rotations_integrate_low_harmonics_exactly() -> None:
    """The residual of a Gaussian has harmonics up to 2 in the angle: three rotations are as good as all."""
    p = Gaussian(np.zeros(2), np.diag([0.5, 2.0]))
    haar = theory.anisotropy_residual(0.5, 2.0)
    for count in (3, 4, 7):
        angles = 2 * np.pi * np.arange(count) / count
        assert theory.equivariance_breaking(p, [rotation(a) for a in angles]) == pytest.approx(haar, rel=1e-12)
    assert theory.equivariance_breaking(p, [rotation(0), rotation(np.pi)]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_the_expected_bounds_hold_for_any_sample_of_the_orthogonal_group(seed: int) -> None:
    """The proof uses a mean over g alone, so the bounds hold for the sampled elements as they are."""
    rng = np.random.default_rng(seed)
    matrices = list(ortho_group(D, seed=rng).rvs(5))
    bounds = theory.empirical_bounds(Bent.random(rng), gaussian(rng).score, rng.standard_normal((30, D)), matrices)
    assert bounds.lower - 1e-9 <= bounds.residual <= bounds.upper + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_approximately_orthogonal_operators(seed: int) -> None:
    """With Q for P^-1: r = Q s(Px) - Q P s(x) is 0 for an equivariant field, and |r| / |s(Px) - P s(x)| is in |Q|."""
    rng = np.random.default_rng(seed)
    P = ortho_group(D, seed=rng).rvs() + 0.1 * rng.standard_normal((D, D))
    Q = np.linalg.inv(P) + 0.1 * rng.standard_normal((D, D))
    s, x = Bent.random(rng), rng.standard_normal((50, D))
    gap = s(x @ P.T) - s(x) @ P.T
    corrected = s(x @ P.T) @ Q.T - s(x) @ P.T @ Q.T
    sizes = np.linalg.svd(Q, compute_uv=False)
    ratio = np.linalg.norm(corrected, axis=1) / np.linalg.norm(gap, axis=1)
    assert sizes[-1] - 1e-9 <= ratio.min()
    assert ratio.max() <= sizes[0] + 1e-9
    plain = s(x @ P.T) @ Q.T - s(x)
    lost = s(x) @ (Q @ P - np.eye(D)).T
    np.testing.assert_allclose(plain, corrected + lost, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_an_invariant_law_has_an_equivariant_score_only_under_orthogonal_maps(seed: int) -> None:
    """p(Px)|det P| = p(x) gives s(Px) - P s(x) = P^-T (I - P^T P) s(x): a scaling is no symmetry of a score."""
    rng = np.random.default_rng(seed)
    root = np.linalg.cholesky(covariance(rng))
    P = root @ ortho_group(D, seed=rng).rvs() @ np.linalg.inv(root)  # keeps the covariance root root^T
    score = Gaussian(np.zeros(D), root @ root.T).score
    x = rng.standard_normal((20, D))
    gap = score(x @ P.T) - score(x) @ P.T
    np.testing.assert_allclose(gap, score(x) @ (np.eye(D) - P.T @ P).T @ np.linalg.inv(P), atol=1e-8)
    assert np.abs(gap).max() > 0.01


def test_a_bicubic_scaling_is_far_from_orthogonal_on_noise() -> None:
    """Why the residual under a scaling stays calibrated against ID images alone: its singular values spread."""
    basis = torch.eye(64, dtype=torch.float64).reshape(64, 1, 8, 8)
    P = find_action("scale(1.25)").apply(basis).reshape(64, 64).numpy().T
    assert np.linalg.svd(P, compute_uv=False)[-1] < 0.5
    R = find_action("rotate(25)").apply(basis).reshape(64, 64).numpy().T
    np.testing.assert_allclose(R @ R.T, np.eye(64), atol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_noise_never_makes_a_law_less_invariant(seed: int) -> None:
    """KL(q_t, P q_t) decreases with the noise, and an invariant q_0 gives an invariant q_t."""
    rng = np.random.default_rng(seed)
    p = gaussian(rng)
    for matrices in GROUPS.values():
        for P in matrices:
            divergences = [kl(p.noised(abar), moved(p, P).noised(abar)) for abar in (0.999, 0.9, 0.5, 0.1)]
            assert (np.diff(divergences) <= 1e-12).all()
        mean_cov = np.mean([P @ p.cov @ P.T for P in matrices], axis=0)
        invariant = Gaussian(np.mean([P @ p.mean for P in matrices], axis=0), mean_cov)
        for abar in (0.99, 0.3):
            assert theory.equivariance_breaking(invariant.noised(abar), matrices) == pytest.approx(0.0, abs=1e-18)


@pytest.mark.parametrize("seed", range(5))
def test_equivariance_breaking_is_the_loss_of_divergence(seed: int) -> None:
    """De Bruijn: d/dv KL(p * N(0, v), P p * N(0, v)) = -B/2, so B is small on average over noise levels."""
    rng = np.random.default_rng(seed)
    p, P, v, step = gaussian(rng), GROUPS["cyclic shifts"][1], 0.7, 1e-4

    def at(variance: float) -> tuple[Gaussian, Gaussian]:
        one, other = p, moved(p, P)
        return tuple(Gaussian(law.mean, law.cov + variance * np.eye(D)) for law in (one, other))  # type: ignore[return-value]

    slope = (kl(*at(v + step)) - kl(*at(v - step))) / (2 * step)
    assert slope == pytest.approx(-0.5 * at(v)[0].score.residual(P).energy(at(v)[0]), rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_contraction_is_a_mean_of_posterior_variances(seed: int) -> None:
    """kappa = 1 - mean over the segment of n'C n / sigma~^2, so n'C n <= (1 - k) sigma~^2 on it implies kappa >= k."""
    rng = np.random.default_rng(seed)
    backbone, t = mixture_backbone(rng), 1
    abar = float(backbone.alphas_cumprod[t])
    x, z = rng.standard_normal((2, 1, D))
    n = (x - z)[0] / np.linalg.norm(x - z)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    points = z + (x - z) * (nodes[:, None] + 1) / 2
    covs = theory.posterior(backbone, points, t).cov
    ratios = np.einsum("i,nij,j->n", n, covs, n) / ((1 - abar) / abar)
    kappa = theory.contraction(theory.field_of(backbone, t), x, z, abar)[0]
    assert kappa == pytest.approx(1 - (weights * ratios).sum() / 2, abs=1e-6)
    assert kappa >= 1 - ratios.max() - 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_the_guaranteed_separation_follows_from_the_corrected_bounds(seed: int) -> None:
    """sqrt(E_p R) >= beta sqrt(E_p d^2) - sqrt(E_p rho^2), and E_q R <= 2 E_q rho^2 + 8 L^2 E_q d^2; beta <= 2 L."""
    rng = np.random.default_rng(seed)
    origin = theory.Subspace(np.zeros(2), np.zeros((2, 0)))
    turns = [rotation(np.pi / 2 * k) for k in range(4)]
    score = Affine(-np.diag([1.0, 3.0]), np.array([0.05, 0.0]))
    far, near = 10 * rng.standard_normal((200, 2)), 0.01 * rng.standard_normal((200, 2))
    outside, inside = (theory.cross_bounds(score, x, origin, turns, lipschitz=3.0) for x in (far, near))
    assert outside.breaking_growth <= 2 * outside.lipschitz
    d, rho = np.sqrt(np.mean(outside.distance**2)), np.sqrt(outside.residual_at_projection.mean())
    least = outside.breaking_growth * d - rho
    most = 2 * inside.residual_at_projection.mean() + 8 * inside.lipschitz**2 * np.mean(inside.distance**2)
    assert np.sqrt(outside.residual.mean()) >= least > np.sqrt(most)
    assert inside.residual.mean() <= most < outside.residual.mean()

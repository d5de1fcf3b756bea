"""The extractor against the paper's mathematics, on backbones with exact scores; `tests/theory` has the statements.

For x_0 ~ N(mu, Sigma) the noisy image is x_t ~ N(mu_t, Sigma_t), mu_t = sqrt(abar) mu, Sigma_t = abar Sigma +
(1 - abar) I: the paper's statements about p are checked on p_t. Residuals come from the library's own table, where
with mean pooling |r_g|^2 = D s_g b.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import multivariate_normal

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import InputError
from gepc.lab import theory
from gepc.lab.analytic import GaussianBackbone, MixtureBackbone
from gepc.methods.base import Batch
from gepc.methods.gepc import GepcExtractor
from gepc.methods.groups import Action, Group

Array = npt.NDArray[np.float64]
T = 200  # abar = 0.899 on the cosine schedule: signal and noise both matter


def residuals(backbone: Backbone, group: Group | str, x0: Array, noise: Array) -> tuple[Array, Array]:
    """|r_g|^2 per image and element (identity first), and |s|^2 per image, at timestep T."""
    method = GepcExtractor(levels=Levels.index(T), features=("s", "b"), pool="mean", group=Group.of(group))
    keys = [bytes([index % 256]) for index in range(len(x0))]
    table = method.extract(backbone, Batch(x0, keys, fixed_noise={(T, 0): noise}), (T,))
    energy = table["b"][:, 0] * x0[0].size
    return table["s"][:, 0] * energy[:, None], energy


def noised(backbone: Backbone, x0: Array, noise: Array) -> Array:
    abar = backbone.alphas_cumprod[T]
    return np.sqrt(abar) * x0 + np.sqrt(1 - abar) * noise


def score_at(backbone: Backbone, x: Array) -> Array:
    return backbone.score(torch.from_numpy(x), T).numpy()


def draw(rng: np.random.Generator, mu: Array, cov: Array, count: int, shape: tuple[int, int, int]) -> Array:
    return rng.multivariate_normal(mu.ravel(), cov, size=count).reshape(count, *shape)


def random_covariance(rng: np.random.Generator, size: int) -> Array:
    factor = rng.standard_normal((size, size))
    return factor @ factor.T / size + 0.05 * np.eye(size)


# --- Gaussian sanity checks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 5, 7)])
def test_a_mean_shift_shows_in_the_residual_and_not_in_the_score_norm(shape: tuple[int, int, int]) -> None:
    """E_g R = 2 |mu_t|^2/sigma_t^4 for every x under {Id, -Id}; E|s|^2 = d/sigma_t^2, whatever mu."""
    rng = np.random.default_rng(0)
    count, d, variance = 400, int(np.prod(shape)), 0.3
    noise, deviation = rng.standard_normal((2, count, *shape))
    norms = []
    for mu in (np.zeros(shape), rng.uniform(-1, 1, shape)):
        backbone = GaussianBackbone(mu, variance, shape)
        abar = backbone.alphas_cumprod[T]
        variance_t = abar * variance + 1 - abar
        found, energy = residuals(backbone, "sign", mu + np.sqrt(variance) * deviation, noise)
        np.testing.assert_allclose(found.mean(1), 2 * abar * (mu**2).sum() / variance_t**2, rtol=1e-9, atol=1e-12)
        norms.append(energy)
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-9)
    standard_error = np.sqrt(2 * d / count) / variance_t  # |s|^2 variance_t is chi-square with d degrees of freedom
    assert abs(norms[0].mean() - d / variance_t) < 4 * standard_error


def column_rotation(quarters: int) -> Action:
    """The paper's R^k, ((0, -1), (1, 0))^k, on every pair of neighbouring columns: on 1x2 images it is R^k itself."""

    def turn(x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times % 4):
            x = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
        return x

    return Action(f"R{quarters}", lambda x: turn(x, quarters), lambda x: turn(x, -quarters))


def test_anisotropy_shows_under_quarter_turns() -> None:
    """d = 2, C4: R(x, g) = (s2^-2 - s1^-2)^2 |x|^2 for R and R^3, 0 for R^2; on average (1/2)(...)^2 (s1^2 + s2^2)."""
    variances = np.array([0.2, 1.5])
    backbone = GaussianBackbone(0.0, variances.reshape(1, 1, 2), (1, 1, 2))
    abar = backbone.alphas_cumprod[T]
    first, second = abar * variances + 1 - abar
    rng = np.random.default_rng(1)
    count = 4000
    x0 = np.sqrt(variances) * rng.standard_normal((count, 1, 1, 2))
    noise = rng.standard_normal((count, 1, 1, 2))
    found, _ = residuals(backbone, Group.of([column_rotation(k) for k in (1, 2, 3)]), x0, noise)

    square = (noised(backbone, x0, noise) ** 2).sum((1, 2, 3))
    gap = (1 / second - 1 / first) ** 2
    np.testing.assert_allclose(found[:, 1], gap * square, rtol=1e-9)
    np.testing.assert_allclose(found[:, 3], gap * square, rtol=1e-9)
    np.testing.assert_allclose(found[:, 2], 0.0, atol=1e-12)
    standard_error = 0.5 * gap * np.sqrt(2 * (first**2 + second**2) / count)
    assert abs(found.mean() - 0.5 * gap * (first + second)) < 4 * standard_error


# --- Tweedie ---------------------------------------------------------------------------------------------------------

SHAPE = (1, 2, 2)


@dataclass(frozen=True)
class Mixture:
    """A mixture of Gaussians on 2x2 images with its noised density by scipy."""

    weights: Array
    mus: Array
    covs: Array

    @classmethod
    def random(cls, seed: int, components: int) -> Mixture:
        rng = np.random.default_rng(seed)
        weights = rng.dirichlet(np.full(components, 3.0))
        covs = np.stack([0.3 * random_covariance(rng, 4) for _ in range(components)])
        return cls(weights, rng.uniform(-1, 1, (components, 4)), covs)

    def backbone(self) -> Backbone:
        mus = [mu.reshape(SHAPE) for mu in self.mus]
        if len(mus) == 1:
            return GaussianBackbone(mus[0], self.covs[0], SHAPE)
        return MixtureBackbone(self.weights.tolist(), mus, list(self.covs), SHAPE)

    def log_density(self, x: Array, abar: float) -> Array:
        """log p_t at x (N, 4)."""
        parts = [
            weight * multivariate_normal(np.sqrt(abar) * mu, abar * cov + (1 - abar) * np.eye(4)).pdf(x)
            for weight, mu, cov in zip(self.weights, self.mus, self.covs, strict=True)
        ]
        return np.log(np.sum(parts, axis=0))

    def sample(self, rng: np.random.Generator, count: int) -> Array:
        which = rng.choice(len(self.weights), size=count, p=self.weights)
        roots = np.linalg.cholesky(self.covs)
        return self.mus[which] + np.einsum("nij,nj->ni", roots[which], rng.standard_normal((count, 4)))


MIXTURES = [Mixture.random(3, 1), Mixture.random(4, 3)]


@pytest.mark.parametrize("mixture", MIXTURES, ids=["gaussian", "mixture"])
def test_the_score_is_the_gradient_of_the_noised_log_density(mixture: Mixture) -> None:
    """s(x, t) = grad log p_t(x), against central differences of scipy's density."""
    backbone = mixture.backbone()
    x = np.random.default_rng(5).standard_normal((20, 4))
    step = 1e-5
    gradient = np.stack(
        [
            (mixture.log_density(x + step * axis, a) - mixture.log_density(x - step * axis, a)) / (2 * step)
            for a in [backbone.alphas_cumprod[T]]
            for axis in np.eye(4)
        ],
        axis=1,
    )
    found = score_at(backbone, x.reshape(-1, *SHAPE)).reshape(-1, 4)
    np.testing.assert_allclose(found, gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mixture", MIXTURES, ids=["gaussian", "mixture"])
def test_tweedie_gives_the_posterior_mean(mixture: Mixture) -> None:
    """(x_t + sigma_t^2 s)/sqrt(abar) = E[x_0 | x_t], against a self-normalised Monte-Carlo mean over x_0."""
    backbone = mixture.backbone()
    abar = backbone.alphas_cumprod[T]
    rng = np.random.default_rng(6)
    prior = mixture.sample(rng, 200_000)
    for x_t in noised(backbone, prior[:4], rng.standard_normal((4, 4))):
        tweedie = (x_t + (1 - abar) * score_at(backbone, x_t.reshape(1, *SHAPE)).ravel()) / np.sqrt(abar)
        likelihood = np.exp(-0.5 * ((x_t - np.sqrt(abar) * prior) ** 2).sum(1) / (1 - abar))
        share = (likelihood / likelihood.sum())[:, None]
        estimate = (share * prior).sum(0)
        standard_error = np.sqrt((share**2 * (prior - estimate) ** 2).sum(0))
        assert standard_error.max() < 0.02
        assert (np.abs(tweedie - estimate) < 4.5 * standard_error).all()


def test_tweedie_of_a_gaussian_in_closed_form() -> None:
    """E[x_0 | x_t] = mu + sqrt(abar) Sigma Sigma_t^-1 (x_t - sqrt(abar) mu)."""
    (gaussian,) = MIXTURES[:1]
    backbone = gaussian.backbone()
    abar = backbone.alphas_cumprod[T]
    mu, cov = gaussian.mus[0], gaussian.covs[0]
    x_t = np.random.default_rng(7).standard_normal((10, 4))
    gain = np.sqrt(abar) * cov @ np.linalg.inv(abar * cov + (1 - abar) * np.eye(4))
    tweedie = (x_t + (1 - abar) * score_at(backbone, x_t.reshape(-1, *SHAPE)).reshape(-1, 4)) / np.sqrt(abar)
    np.testing.assert_allclose(tweedie, mu + (x_t - np.sqrt(abar) * mu) @ gain.T, rtol=1e-10)


# --- invariance and equivariance -------------------------------------------------------------------------------------


def orbit_mixture(group: Group, shares: list[float]) -> MixtureBackbone:
    """Components N(P_g m, P_g C P_g^T), g in G, on 3x3 images: invariant under a group if the shares are equal."""
    rng = np.random.default_rng(8)
    basis = torch.eye(9, dtype=torch.float64).reshape(9, 1, 3, 3)
    mean, cov = rng.uniform(-1, 1, 9), random_covariance(rng, 9)
    matrices = [action.apply(basis).reshape(9, 9).numpy().T for action in group]
    mus = [(matrix @ mean).reshape(1, 3, 3) for matrix in matrices]
    return MixtureBackbone(shares, mus, [matrix @ cov @ matrix.T for matrix in matrices], (1, 3, 3))


def torus_covariance(size: int) -> Array:
    """2^-(distance along rows + along columns) on a torus: unchanged by shifts, flips and quarter turns."""
    line = np.arange(size)
    step = np.minimum((line[:, None] - line) % size, (line - line[:, None]) % size)
    return np.kron(0.5**step, 0.5**step)


INVARIANT = {
    "stationary Gaussian, the paper's set": (GaussianBackbone(0.3, torus_covariance(4), (1, 4, 4)), "paper"),
    "orbit of a Gaussian, d4": (orbit_mixture(Group.of("d4"), [1.0] * 8), "d4"),
    "even mixture, sign": (MixtureBackbone([1, 1], [0.4, -0.4], [0.1, 0.1], (1, 3, 3)), "sign"),
}
NOT_INVARIANT = {
    "Gaussian with a tilted mean": (
        GaussianBackbone(np.linspace(-0.5, 0.5, 16).reshape(1, 4, 4), torus_covariance(4), (1, 4, 4)),
        "paper",
    ),
    "unequal orbit, d4": (orbit_mixture(Group.of("d4"), [1.0] * 7 + [3.0]), "d4"),
    "uneven mixture, sign": (MixtureBackbone([1, 3], [0.4, -0.4], [0.1, 0.1], (1, 3, 3)), "sign"),
}


def density_gap(backbone: Backbone, group: Group, x: Array) -> float:
    """The largest |log p_t(P_g x) - log p_t(x)|."""
    abar = torch.full((len(x), 1, 1, 1), backbone.alphas_cumprod[T], dtype=torch.float64)
    parts = backbone.components
    shares = getattr(backbone, "shares", np.ones(1))

    def log_density(y: torch.Tensor) -> torch.Tensor:
        logs = [part.log_density(y, abar) + np.log(share) for part, share in zip(parts, shares, strict=True)]
        return torch.stack(logs).logsumexp(0)

    points = torch.from_numpy(x)
    return max(float((log_density(g.apply(points)) - log_density(points)).abs().max()) for g in group)


@pytest.mark.parametrize("case", [*INVARIANT, *NOT_INVARIANT])
def test_a_density_is_invariant_exactly_when_its_score_is_equivariant(case: str) -> None:
    """Both the residual and the change of log p_t are 0 to 1e-10, or neither is small."""
    backbone, name = {**INVARIANT, **NOT_INVARIANT}[case]
    group = Group.of(name)
    x0, noise = 0.5 * np.random.default_rng(9).standard_normal((2, 30, *backbone.shape))
    found, energy = residuals(backbone, group, x0, noise)
    relative = found.mean(1) / energy
    gap = density_gap(backbone, group, noised(backbone, x0, noise))
    if case in INVARIANT:
        assert relative.max() < 1e-10
        assert gap < 1e-10
    else:
        assert relative.max() > 1e-3
        assert gap > 1e-3


# --- the extractor and gepc.lab.theory ------------------------------------------------------------------------------


def test_the_expected_residual_in_closed_form_is_what_the_extractor_measures() -> None:
    """E R of one Gaussian's score under another Gaussian, against the table's mean over draws (4 standard errors)."""
    rng = np.random.default_rng(10)
    shape, count = (1, 2, 2), 4000
    mu, cov, model_mu, model_cov = (
        rng.uniform(-0.5, 0.5, 4),
        random_covariance(rng, 4),
        rng.uniform(-0.5, 0.5, 4),
        random_covariance(rng, 4),
    )
    backbone = GaussianBackbone(model_mu.reshape(shape), model_cov, shape)
    abar = float(backbone.alphas_cumprod[T])
    found, _ = residuals(backbone, "c4", draw(rng, mu, cov, count, shape), rng.standard_normal((count, *shape)))

    model, test = (theory.Gaussian(m, c).noised(abar) for m, c in ((model_mu, model_cov), (mu, cov)))
    case = theory.expected_bounds(model.score, test, theory.matrices_of("c4", shape))
    per_image = found.mean(1)
    assert abs(per_image.mean() - case.residual) < 4 * per_image.std() / np.sqrt(count)
    assert case.lower <= case.residual <= case.upper


def test_the_extractor_sees_nothing_where_the_printed_lower_bound_promises_something() -> None:
    """p = N(0, I), a backbone of N(0, 2 I), {Id, -Id}: an odd score, so R = 0; the printed bound is d/2."""
    rng = np.random.default_rng(11)
    backbone = GaussianBackbone(0.0, 2.0, (1, 2, 2), np.linspace(0.99, 0.01, 1000))
    found, _ = residuals(backbone, "sign", *rng.standard_normal((2, 50, 1, 2, 2)))
    np.testing.assert_array_equal(found, 0.0)
    assert theory.error_term_counter_example(4).printed_lower == pytest.approx(2.0)


# --- what analytic backbones accept ----------------------------------------------------------------------------------


def test_every_way_to_give_a_covariance_is_the_same_gaussian() -> None:
    """A scalar, one variance per pixel, and the full matrix, where they coincide."""
    shape = (1, 3, 2)
    x = torch.from_numpy(np.random.default_rng(13).standard_normal((5, *shape)))
    answers = [GaussianBackbone(0.1, cov, shape).eps(x, T) for cov in (0.4, np.full(shape, 0.4), 0.4 * np.eye(6))]
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=1e-12, atol=1e-12)


def test_a_mixture_of_one_is_its_gaussian() -> None:
    shape, rng = (1, 2, 2), np.random.default_rng(14)
    mu, cov = rng.standard_normal(shape), random_covariance(rng, 4)
    x = torch.from_numpy(rng.standard_normal((5, *shape)))
    single = GaussianBackbone(mu, cov, shape).eps(x, T)
    torch.testing.assert_close(MixtureBackbone([2.0], [mu], [cov], shape).eps(x, T), single, rtol=1e-12, atol=1e-12)
    halves = MixtureBackbone([1.0, 1.0], [mu, mu], [cov, cov], shape).eps(x, T)
    torch.testing.assert_close(halves, single, rtol=1e-12, atol=1e-12)


def test_a_fitted_gaussian_has_the_images_mean_and_nearly_their_covariance() -> None:
    rng = np.random.default_rng(15)
    cov = random_covariance(rng, 4)
    images = draw(rng, np.full(4, 0.2), cov, 5000, (1, 2, 2))
    fitted = GaussianBackbone.fitted(images)
    np.testing.assert_allclose(fitted.components[0].mu.numpy(), images.mean(0))
    (law,) = fitted.components
    vectors = law.vectors.numpy()
    np.testing.assert_allclose(vectors @ np.diag(law.values.numpy()) @ vectors.T, cov, atol=0.1)


@pytest.mark.parametrize(
    ("cov", "reason"),
    [
        (-1.0, "semi-definite"),
        (np.array([[1.0, 2.0], [2.0, 1.0]]), "semi-definite"),
        (np.array([[1.0, 0.5], [0.0, 1.0]]), "symmetric"),
    ],
)
def test_an_impossible_covariance_is_refused(cov: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        GaussianBackbone(0.0, cov, (1, 1, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0]])
def test_impossible_mixture_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(InputError, match="weights"):
        MixtureBackbone(weights, [0.0, 1.0], [1.0, 1.0], (1, 2, 2))

"""Vector fields, Gaussians and group elements on images laid out as vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from gepc.backbones.analytic import Component, GaussianBackbone, MixtureBackbone
from gepc.backbones.base import Backbone
from gepc.core.errors import InputError
from gepc.features.groups import Group

Array: TypeAlias = npt.NDArray[np.float64]
Field: TypeAlias = Callable[[Array], Array]


@dataclass(frozen=True)
class Affine:
    """The field f(x) = A x + c. Scores of Gaussians are affine, which gives closed forms for expectations."""

    A: Array
    c: Array

    def __call__(self, x: Array) -> Array:
        """f at the rows of x (N, D)."""
        return x @ self.A.T + self.c

    def __sub__(self, other: Affine) -> Affine:
        return Affine(self.A - other.A, self.c - other.c)

    def after(self, P: Array) -> Affine:
        """x -> f(P x)."""
        return Affine(self.A @ P, self.c)

    def residual(self, P: Array) -> Affine:
        """Delta_g f: x -> P^-1 f(P x) - f(x), with P^-1 = P^T."""
        return Affine(P.T @ self.A @ P, P.T @ self.c) - self

    def energy(self, p: Gaussian) -> float:
        """E_p |f(x)|^2 = tr(A Sigma A^T) + |A mu + c|^2."""
        return float(np.einsum("ij,jk,ik->", self.A, p.cov, self.A) + np.square(self.A @ p.mean + self.c).sum())


@dataclass(frozen=True)
class Gaussian:
    """N(mean, cov) on vectors."""

    mean: Array
    cov: Array

    @property
    def score(self) -> Affine:
        """grad log p(x) = -Sigma^-1 (x - mu)."""
        precision: Array = np.linalg.inv(self.cov).astype(np.float64)
        return Affine(-precision, precision @ self.mean)

    def noised(self, abar: float) -> Gaussian:
        """The law of x_t = sqrt(abar) x_0 + sqrt(1 - abar) noise: N(sqrt(abar) mu, abar Sigma + (1 - abar) I)."""
        return Gaussian(np.sqrt(abar) * self.mean, abar * self.cov + (1.0 - abar) * np.eye(len(self.mean)))

    def log_density(self, x: Array) -> Array:
        """log p at the rows of x."""
        from scipy.stats import multivariate_normal

        return np.asarray(multivariate_normal(self.mean, self.cov).logpdf(x), dtype=np.float64).reshape(len(x))


def components_of(backbone: GaussianBackbone | MixtureBackbone) -> list[tuple[float, Gaussian]]:
    """The law of x_0 for which an analytic backbone is exact: (share, Gaussian) of each component."""
    if isinstance(backbone, GaussianBackbone):
        return [(1.0, _gaussian(backbone.component))]
    return [(float(w), _gaussian(part)) for w, part in zip(backbone.shares, backbone.components, strict=True)]


def _gaussian(part: Component) -> Gaussian:
    values = part.values.numpy()
    vectors = np.eye(len(values)) if part.vectors is None else part.vectors.numpy()
    return Gaussian(part.mu.numpy().ravel(), (vectors * values) @ vectors.T)


def image_shape(backbone: Backbone) -> tuple[int, int, int]:
    """(C, H, W) of a backbone with a fixed image size."""
    if backbone.image_size is None:
        raise InputError("this backbone takes images of any size; set its `image_size` to treat images as vectors")
    return (backbone.channels, *backbone.image_size)


def field_of(backbone: Backbone, t: int) -> Field:
    """s(., t) of any backbone with a fixed image size, on vectors."""
    import torch

    shape = image_shape(backbone)

    def score(x: Array) -> Array:
        images = torch.from_numpy(np.ascontiguousarray(x)).reshape(-1, *shape).to(backbone.dtype)
        return np.asarray(backbone.score(images, t).detach().double().flatten(1).numpy(), dtype=np.float64)

    return score


def matrices_of(group: Group | str, shape: tuple[int, int, int]) -> list[Array]:
    """P_g of every element, identity first, as (D, D) matrices on images of this shape."""
    import torch

    size = int(np.prod(shape))
    basis = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    actions = Group.of(group).for_size(*shape[1:])
    return [np.asarray(action.apply(basis).reshape(size, size).numpy().T) for action in actions]


def residuals(field: Field, x: Array, matrices: Sequence[Array]) -> Array:
    """R(x, g) = |P_g^-1 f(P_g x) - f(x)|^2, (N, |G|). Means over G include the identity, whose residual is 0."""
    here = field(x)
    return np.stack([np.square(field(x @ P.T) @ P - here).sum(1) for P in matrices], axis=1)


@dataclass(frozen=True)
class Posterior:
    """E[x_0 | x_t] (N, D) and Cov(x_0 | x_t) (N, D, D)."""

    mean: Array
    cov: Array


def posterior(backbone: GaussianBackbone | MixtureBackbone, x: Array, t: int) -> Posterior:
    """The posterior of x_0 given x_t = x by Bayes' rule, without the score.

    For one Gaussian, with the gain K = sqrt(abar) Sigma Sigma_t^-1: mean mu + K (x - sqrt(abar) mu), covariance
    Sigma - sqrt(abar) K Sigma. For a mixture the parts are weighted by their posterior shares, and the spread of their
    means adds to the covariance.
    """
    abar = float(backbone.alphas_cumprod[t])
    logs, means, covs = [], [], []
    for share, prior in components_of(backbone):
        marginal = prior.noised(abar)
        gain = np.sqrt(abar) * np.linalg.solve(marginal.cov, prior.cov).T
        logs.append(np.log(share) + marginal.log_density(x))
        means.append(prior.mean + (x - marginal.mean) @ gain.T)
        covs.append(prior.cov - np.sqrt(abar) * gain @ prior.cov)
    weights = softmax(np.stack(logs), axis=0)
    mean = np.einsum("kn,kni->ni", weights, np.stack(means))
    spread = np.stack(means) - mean
    cov = np.einsum("kn,kij->nij", weights, np.stack(covs)) + np.einsum("kn,kni,knj->nij", weights, spread, spread)
    return Posterior(mean, cov)


def tweedie(score: Field, x: Array, abar: float) -> Array:
    """m(x_t) = (x_t + sigma_t^2 s(x_t)) / sqrt(abar): the posterior mean, from the score alone."""
    return np.asarray((x + (1.0 - abar) * score(x)) / np.sqrt(abar), dtype=np.float64)


def denoiser_jacobian(backbone: Backbone, x: Array, t: int) -> Array:
    """dm/dx_t = (I + sigma_t^2 ds/dx_t) / sqrt(abar) at every row, (N, D, D), by D Jacobian-vector products each."""
    import torch

    shape = image_shape(backbone)
    abar = float(backbone.alphas_cumprod[t])
    size = x.shape[1]
    basis = torch.eye(size, dtype=backbone.dtype).reshape(size, *shape)
    answers = []
    for row in x:
        point = torch.from_numpy(row).to(backbone.dtype).reshape(1, *shape).expand(size, *shape).contiguous()
        _, columns = backbone.jvp(point, t, basis)
        eps_jacobian = columns.detach().double().flatten(1).numpy().T
        answers.append((np.eye(size) - np.sqrt(1.0 - abar) * eps_jacobian) / np.sqrt(abar))
    return np.stack(answers)


def posterior_covariance(backbone: Backbone, x: Array, t: int) -> Array:
    """Cov(x_0 | x_t) = (sigma_t^2 / sqrt(abar)) dm/dx_t; in the paper's coordinates C(y) = sigma~^2 dm/dy."""
    abar = float(backbone.alphas_cumprod[t])
    return np.asarray((1.0 - abar) / np.sqrt(abar) * denoiser_jacobian(backbone, x, t), dtype=np.float64)


def contraction(score: Field, x: Array, z: Array, abar: float) -> Array:
    """kappa(x, z) = 1 - <m(x) - m(z), y_x - y_z> / |y_x - y_z|^2, y = x_t / sqrt(abar), one for each pair of rows.

    Positive where the denoiser moves the two points closer along the line through them. At most 1, since the Jacobian
    of m is a covariance; negative where it moves them apart, for example between two modes of a mixture.
    """
    gap = x - z
    pull = np.einsum("ni,ni->n", tweedie(score, x, abar) - tweedie(score, z, abar), gap)
    return np.asarray(1.0 - np.sqrt(abar) * pull / np.square(gap).sum(1), dtype=np.float64)


def directional_growth(score: Field, x: Array, z: Array) -> Array:
    """m(x, z) = -<s(x) - s(z), x - z> / |x - z|^2: how fast the score pulls back along the line from z to x.

    Tweedie makes it kappa(x, z) / sigma_t^2, an equality; the appendix states it as an inequality.
    """
    gap = x - z
    return np.asarray(-np.einsum("ni,ni->n", score(x) - score(z), gap) / np.square(gap).sum(1), dtype=np.float64)

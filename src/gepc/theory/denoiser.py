"""The Bayes denoiser m(x_t) = E[x_0 | x_t] and its relation to the score (appendix on score identities)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

from gepc.backbones.analytic import GaussianBackbone, MixtureBackbone
from gepc.backbones.base import Backbone
from gepc.theory.fields import Array, Field, components_of, image_shape


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
    """Cov(x_0 | x_t) = (sigma_t^2 / sqrt(abar)) dm/dx_t.

    In the paper's coordinates y = x_t/sqrt(abar), with noise sigma_t/sqrt(abar), this is C(y) = sigma~^2 dm/dy.
    """
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

"""Backbones with exact scores: Gaussians and mixtures of Gaussians, noised by any schedule. In float64.

If x_0 ~ N(mu, Sigma), then x_t ~ N(sqrt(abar) mu, Sigma_t) with Sigma_t = abar Sigma + (1 - abar) I, and the optimal
noise prediction is eps(x, t) = sqrt(1 - abar) Sigma_t^-1 (x - sqrt(abar) mu).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import cosine_alphas_cumprod
from gepc.core.errors import InputError


class MixtureBackbone(Backbone):
    """The exact noise prediction for a mixture of Gaussians: the posterior mean of the components' predictions.

    Parameters
    ----------
    weights : the share of each component; positive, scaled to sum to 1.
    mus : the mean of each component, broadcastable to `shape`.
    covs : the covariance of each component: one variance for all pixels, a variance per pixel (broadcastable to
        `shape`), or the full (D, D) matrix, D = C H W, over pixels in C order.
    shape : (C, H, W) of the images.
    alphas_cumprod : the noise schedule; None is the cosine schedule with 1000 timesteps.

    See Also
    --------
    GaussianBackbone : has one component, and can be fitted to images.

    Examples
    --------
    >>> from gepc.lab.analytic import MixtureBackbone
    >>> modes = MixtureBackbone([0.5, 0.5], [0.8, -0.8], [0.01, 0.01], (1, 8, 8))
    >>> modes.n_steps
    1000
    """

    family = "mixture"

    def __init__(
        self,
        weights: Sequence[float],
        mus: Sequence[npt.ArrayLike],
        covs: Sequence[npt.ArrayLike],
        shape: tuple[int, int, int],
        alphas_cumprod: npt.ArrayLike | None = None,
    ) -> None:
        abar = cosine_alphas_cumprod(1000) if alphas_cumprod is None else alphas_cumprod
        super().__init__(abar, shape[0], (shape[1], shape[2]))
        if not (len(weights) == len(mus) == len(covs) > 0):
            raise InputError("a mixture needs as many weights as means and covariances, and at least one")
        shares = np.asarray(weights, dtype=np.float64)
        if (shares <= 0).any():
            raise InputError(f"mixture weights must be positive, got {list(weights)}")
        self.dtype = torch.float64
        self.shape = shape
        self.shares = shares / shares.sum()
        self.components = [Component(mu, cov, shape) for mu, cov in zip(mus, covs, strict=True)]

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        abar = self.per_image(self.alphas_cumprod, x, t)
        scores = torch.stack([component.score(x, abar) for component in self.components])
        parts = zip(self.components, self.shares, strict=True)
        logs = [component.log_density(x, abar) + float(np.log(share)) for component, share in parts]
        posterior = torch.softmax(torch.stack(logs), dim=0)
        mean = (posterior.reshape(*posterior.shape, *([1] * (x.ndim - 1))) * scores).sum(0)
        return -(1.0 - abar).sqrt() * mean


class GaussianBackbone(MixtureBackbone):
    """The exact noise prediction for images drawn from N(mu, cov).

    Parameters
    ----------
    mu, cov : the mean and the covariance, in one of the forms of `MixtureBackbone`.
    shape : (C, H, W) of the images.
    alphas_cumprod : the noise schedule; None is the cosine schedule with 1000 timesteps.

    Examples
    --------
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> GaussianBackbone(0.0, 0.1, (1, 8, 8)).image_size
    (8, 8)
    """

    family = "gaussian"

    def __init__(
        self,
        mu: npt.ArrayLike,
        cov: npt.ArrayLike,
        shape: tuple[int, int, int],
        alphas_cumprod: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__([1.0], [mu], [cov], shape, alphas_cumprod)

    @classmethod
    def fitted(cls, images: npt.ArrayLike, alphas_cumprod: npt.ArrayLike | None = None) -> GaussianBackbone:
        """Fit the mean and the covariance, with Ledoit-Wolf shrinkage.

        Parameters
        ----------
        images : array (N, C, H, W)
            Images in [-1, 1].
        alphas_cumprod : array (T,), optional
            The noise schedule.

        Returns
        -------
        GaussianBackbone

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> GaussianBackbone.fitted(images).channels
        1
        """
        from sklearn.covariance import ledoit_wolf

        data = np.asarray(images, dtype=np.float64)
        cov, _ = ledoit_wolf(data.reshape(len(data), -1))
        return cls(data.mean(axis=0), cov, (data.shape[1], data.shape[2], data.shape[3]), alphas_cumprod)


class Component:
    """One Gaussian, diagonalised once, so that every noise level costs two products with its eigenvectors."""

    def __init__(self, mu: npt.ArrayLike, cov: npt.ArrayLike, shape: tuple[int, int, int]) -> None:
        size = int(np.prod(shape))
        matrix = np.asarray(cov, dtype=np.float64)
        if matrix.shape == (size, size) and size > 1:
            if not np.allclose(matrix, matrix.T):
                raise InputError("a covariance matrix must be symmetric")
            values, vectors = np.linalg.eigh(matrix)
            self.vectors: torch.Tensor | None = torch.from_numpy(vectors)
        else:
            values, self.vectors = np.broadcast_to(matrix, shape).reshape(-1).copy(), None
        if values.min() < -1e-10 * max(1.0, values.max()):
            raise InputError("a covariance must be positive semi-definite")
        self.values = torch.from_numpy(np.maximum(values, 0.0))
        self.mu = torch.from_numpy(np.broadcast_to(np.asarray(mu, dtype=np.float64), shape).copy())

    def _white(self, x: torch.Tensor, abar: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x - sqrt(abar) mu in the eigenbasis (N, D), and the eigenvalues of Sigma_t (N, D)."""
        centred = (x - abar.sqrt() * self.mu).flatten(1)
        if self.vectors is not None:
            centred = centred @ self.vectors
        share = abar.reshape(-1, 1)
        return centred, share * self.values + (1.0 - share)

    def score(self, x: torch.Tensor, abar: torch.Tensor) -> torch.Tensor:
        """-Sigma_t^-1 (x - sqrt(abar) mu)."""
        centred, variances = self._white(x, abar)
        answer = -centred / variances
        if self.vectors is not None:
            answer = answer @ self.vectors.T
        return answer.reshape(x.shape)

    def log_density(self, x: torch.Tensor, abar: torch.Tensor) -> torch.Tensor:
        """log N(x; sqrt(abar) mu, Sigma_t), (N,)."""
        centred, variances = self._white(x, abar)
        return -0.5 * ((centred.square() / variances) + variances.log() + float(np.log(2.0 * np.pi))).sum(1)

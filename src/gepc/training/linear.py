"""The best linear noise predictor, a baseline for networks: it knows the mean and covariance of the images only.

For Gaussian images x_0 ~ N(mu, Sigma) it is the best of all predictors,

    eps_hat = sigma Sigma_t^-1 (x_t - sqrt(abar) mu),    Sigma_t = abar Sigma + sigma^2 I,    sigma^2 = 1 - abar,

and its mean squared error is the mean of abar lambda / (abar lambda + sigma^2) over the eigenvalues lambda of Sigma.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gepc.images.sources import Image

FULL_DIMENSIONS = 4096
IMAGES_PER_DIMENSION = 2
CHUNK = 1024

Array = npt.NDArray[Any]
Predictor = Callable[[Image], Array]


class LinearPredictor(Protocol):
    """A linear predictor fitted to images; `kind` describes the covariance in words."""

    kind: str

    def at(self, abar: float) -> Predictor:
        """eps_hat(x_t) at one noise level, for batches (N, C, H, W)."""
        ...


def fit_linear(images: Image) -> LinearPredictor:
    """Fit the full covariance if it can be inverted and there are enough images for it, else a stationary one."""
    dimensions = int(np.prod(images.shape[1:]))
    if dimensions <= FULL_DIMENSIONS and len(images) >= IMAGES_PER_DIMENSION * dimensions:
        return FullCovariance(images)
    return StationaryCovariance(images)


class FullCovariance:
    """Sigma is the sample covariance of whole images; each level costs one Cholesky factorisation."""

    def __init__(self, images: Image) -> None:
        import torch

        self.kind = f"full covariance of {len(images)} training images"
        self._mean = images.mean(axis=0, dtype=np.float64)
        self._covariance = torch.zeros(self._mean.size, self._mean.size, dtype=torch.float64)
        for chunk in _chunks(images):
            centred = torch.from_numpy((chunk - self._mean).reshape(len(chunk), -1))
            self._covariance += centred.T @ centred
        self._covariance /= len(images)

    def at(self, abar: float) -> Predictor:
        """eps_hat(x_t) at one noise level."""
        import torch

        noisy_covariance = abar * self._covariance
        noisy_covariance.diagonal().add_(1.0 - abar)
        factor = torch.linalg.cholesky(noisy_covariance)

        def predict(noisy: Image) -> Array:
            centred = torch.from_numpy((noisy - np.sqrt(abar) * self._mean).reshape(len(noisy), -1))
            answer: Array = np.sqrt(1.0 - abar) * torch.cholesky_solve(centred.T, factor).T.numpy()
            return answer.reshape(noisy.shape)

        return predict


class StationaryCovariance:
    """Sigma is that of a periodic stationary field: one C x C cross-spectrum per spatial frequency."""

    def __init__(self, images: Image) -> None:
        self.kind = f"stationary covariance of {len(images)} training images"
        self._mean = images.mean(axis=0, dtype=np.float64)
        self._spectrum = np.zeros(1, dtype=np.complex128)
        for chunk in _chunks(images):
            waves = np.fft.rfft2(chunk - self._mean, norm="ortho")
            self._spectrum = self._spectrum + np.einsum("nchw,ndhw->hwcd", waves, waves.conj()) / len(images)

    def at(self, abar: float) -> Predictor:
        """eps_hat(x_t) at one noise level."""
        identity = np.eye(len(self._mean))
        inverse = np.linalg.inv(abar * self._spectrum + (1.0 - abar) * identity)

        def predict(noisy: Image) -> Array:
            waves = np.fft.rfft2(noisy - np.sqrt(abar) * self._mean, norm="ortho")
            waves = np.sqrt(1.0 - abar) * np.einsum("hwcd,ndhw->nchw", inverse, waves)
            return np.asarray(np.fft.irfft2(waves, s=noisy.shape[-2:], norm="ortho"))

        return predict


def _chunks(images: Image) -> Iterator[Image]:
    for start in range(0, len(images), CHUNK):
        yield images[start : start + CHUNK]

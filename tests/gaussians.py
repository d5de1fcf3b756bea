"""The analytic test bed: N(mu, s^2 I) on 3x4x4 images, cosine-4000, float64, where every method has a closed form."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import gepc
from gepc.backbones.schedule import cosine_alphas_cumprod, rho_of
from gepc.calibration import create_calibrator
from gepc.images.noise import image_key
from gepc.lab.analytic import GaussianBackbone
from gepc.lab.metrics import auroc
from gepc.methods.base import Batch, Extractor, Table, find_method

Array = npt.NDArray[np.float64]

SHAPE = (3, 4, 4)
D, MU, S = 48, 0.2, 0.5
ABAR = cosine_alphas_cumprod(4000)
RHO = rho_of(ABAR)
V = ABAR * S**2 + 1.0 - ABAR


def gaussian(abar: npt.ArrayLike = ABAR) -> GaussianBackbone:
    return GaussianBackbone(MU, S**2, SHAPE, abar)


def sample(count: int, spread: float = S, seed: int = 0, mean: float = MU) -> npt.NDArray[np.float32]:
    """Images from N(mean, spread^2 I), not clipped."""
    draws = np.random.default_rng(seed).standard_normal((count, *SHAPE))
    return (mean + spread * draws).astype(np.float32)


def as_given(count: int, spread: float = S, seed: int = 0) -> npt.NDArray[np.float32]:
    """The same clipped to [-1, 1], as a user would give them: (N, H, W, C)."""
    return np.clip(sample(count, spread, seed), -1, 1).transpose(0, 2, 3, 1)


def batch_of(images: npt.NDArray[np.float32], seed: int = 0) -> Batch:
    return Batch(images, [image_key(image) for image in images], seed, rows=len(images))


def method(name: str, **options: Any) -> Extractor:
    return find_method(name)(**options)


def run(
    extractor: Extractor,
    images: npt.NDArray[np.float32],
    backbone: gepc.Backbone | None = None,
    timesteps: Sequence[int] | None = None,
    seed: int = 0,
) -> Table:
    backbone = gaussian() if backbone is None else backbone
    steps = extractor.timesteps(backbone) if timesteps is None else timesteps
    return extractor.extract(backbone, batch_of(images, seed), steps)


def distance2(images: npt.NDArray[np.float32], scale: float = 1.0) -> Array:
    """A = |scale x - mu|^2."""
    return ((scale * images.astype(np.float64) - MU) ** 2).reshape(len(images), -1).sum(1)


def passes(extractor: Extractor, backbone: gepc.Backbone, count: int = 2) -> tuple[float, float]:
    """Counted F and J per image, which must be what `cost` says."""
    backbone.reset_counts()
    run(extractor, sample(count), backbone)
    cost = extractor.cost(backbone, SHAPE[1:])
    assert (backbone.forward_count, backbone.jvp_count) == (count * cost.forward, count * cost.jvp)
    return cost.forward, cost.jvp


@functools.lru_cache(maxsize=2)
def _columns(extractor: Extractor, count: int) -> list[Array]:
    """Of images to fit on, of others like them, wider and narrower ones."""
    spreads = enumerate((S, S, 2 * S, S / 2))
    return [extractor.columns(run(extractor, sample(count, spread, seed))) for seed, spread in spreads]


def aurocs(extractor: Extractor, calibration: str, count: int = 300) -> tuple[float, float]:
    """AUROC against Gaussians twice as wide and half as wide."""
    train, inside, wide, narrow = _columns(extractor, count)
    calibrator = create_calibrator(calibration).fit(train)
    levels = train.shape[1]
    aggregation = gepc.calibration.Aggregation("sum", extractor.aggregate)
    weights = np.full(levels, 1 / levels)
    scores = [calibrator.score(columns, weights, aggregation) for columns in (inside, wide, narrow)]
    return auroc(scores[0], scores[1]), auroc(scores[0], scores[2])

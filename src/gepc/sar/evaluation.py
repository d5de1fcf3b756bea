"""Localisation metrics of maps against boxes, and confidence intervals for patches that share images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError
from gepc.features.pooling import box_filter
from gepc.sar.annotations import Mask
from gepc.scoring.metrics import auroc

Array = npt.NDArray[np.float64]
Interval = tuple[float, float]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Localisation:
    """How well maps point at boxes, one value per patch.

    Attributes
    ----------
    auroc : P(a pixel inside a box has a larger map value than one outside), ties counting half; chance is 0.5.
    hit : pointing game: 1 if the map's maximum lies inside a box; ties are averaged.
    energy : fraction of the map's sum inside boxes.
    area : fraction of the pixels inside boxes, the chance level of `hit` and `energy`.
    """

    auroc: Array
    hit: Array
    energy: Array
    area: Array


def localise(maps: npt.ArrayLike, masks: npt.ArrayLike) -> Localisation:
    """Compare non-negative maps (N, H, W) with box masks (N, H, W)."""
    fields, inside = np.asarray(maps, dtype=np.float64), np.asarray(masks, dtype=bool)
    if fields.shape != inside.shape or fields.ndim != 3:
        raise InputError(f"maps {fields.shape} and masks {inside.shape} must both be (N, H, W)")
    rows = [_localise(field, mask) for field, mask in zip(fields, inside, strict=True)]
    return Localisation(*(np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)))


def _localise(field: Array, mask: Mask) -> tuple[float, float, float, float]:
    if not mask.any() or mask.all():
        raise InputError("a patch without a box, or covered by one, cannot be used to measure localisation")
    if not np.isfinite(field).all() or (field < 0).any():
        raise InputError("a map must be finite and not negative")
    total = field.sum()
    energy = float(field[mask].sum() / total) if total > 0 else float(mask.mean())
    return auroc(field[~mask], field[mask]), float(mask[field == field.max()].mean()), energy, float(mask.mean())


def smoothed(maps: npt.ArrayLike, window: int) -> npt.NDArray[np.float32]:
    """Apply the box filter of local pooling to maps (N, H, W): what the score is pooled from."""
    import torch

    fields = torch.from_numpy(np.ascontiguousarray(maps, dtype=np.float32))
    return np.asarray(box_filter(fields, window).numpy())


def resample(groups: Sequence[str], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Positions of a bootstrap sample of whole groups: as many groups as there are, drawn with replacement.

    Patches of one image share sea state, sensor and often a ship, so intervals for independent patches would be too
    narrow.
    """
    names, membership = np.unique(np.asarray(groups), return_inverse=True)
    members = [np.flatnonzero(membership == position) for position in range(len(names))]
    return np.concatenate([members[pick] for pick in rng.integers(0, len(names), len(names))])


def bootstrap_intervals(
    measure: Callable[..., npt.ArrayLike], samples: Sequence[Array], groups: Sequence[Sequence[str]], draws: int
) -> list[Interval]:
    """95 % percentile bootstrap intervals of several metrics.

    Parameters
    ----------
    measure : function of the samples that returns the metrics, for instance of ID scores and OOD scores.
    samples : the samples, which are resampled independently of each other.
    groups : for each sample, the source image of every value.
    draws : number of bootstrap samples.
    """
    rng = np.random.default_rng(0)
    pairs = list(zip(samples, groups, strict=True))
    found = [measure(*(values[resample(names, rng)] for values, names in pairs)) for _ in range(draws)]
    low, high = np.quantile(np.array(found, dtype=np.float64), [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2], axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]

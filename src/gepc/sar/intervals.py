"""Intervals for patches that share images: whole images are drawn again, not single patches.

Patches of one image have sea state, sensor and often a ship in common, so that an interval for independent patches
would be too narrow. The percentile interval here draws images with replacement, ID and OOD images each by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Interval = tuple[float, float]


def redraw(groups: Sequence[str], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Positions of a sample of the same number of groups, drawn with replacement; each brings all its members."""
    names, membership = np.unique(np.asarray(groups), return_inverse=True)
    members = [np.flatnonzero(membership == position) for position in range(len(names))]
    return np.concatenate([members[pick] for pick in rng.integers(0, len(names), len(names))])


def two_sample_interval(
    measure: Callable[[Array, Array], Array],
    inside: Array,
    outside: Array,
    groups: tuple[Sequence[str], Sequence[str]],
    draws: int = 300,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[Interval]:
    """An interval for each of the numbers that `measure(ID scores, OOD scores)` gives."""
    rng = np.random.default_rng(seed)
    found = np.array([measure(inside[redraw(groups[0], rng)], outside[redraw(groups[1], rng)]) for _ in range(draws)])
    return _percentiles(found, confidence)


def mean_interval(
    values: Array, groups: Sequence[str], draws: int = 1000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """An interval for a mean over patches."""
    rng = np.random.default_rng(seed)
    found = np.array([[values[redraw(groups, rng)].mean()] for _ in range(draws)])
    return _percentiles(found, confidence)[0]


def _percentiles(found: Array, confidence: float) -> list[Interval]:
    low, high = np.quantile(found, [0.5 - confidence / 2, 0.5 + confidence / 2], axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]

"""From one number per (level, feature) to one per image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.core.errors import check_choice

Array = npt.NDArray[np.float64]

FUSIONS = ("sum", "mean")
AGGREGATIONS = ("wmean", "mean", "max", "min", "trimmed")
TRIM = 0.25


@dataclass(frozen=True)
class Aggregation:
    """How per-column scores, all higher = more OOD, become one: first over features, then over levels.

    Over levels: `wmean` with the selection's weights, `mean`, `max` (the most alarming level), `min`, or `trimmed`,
    the mean without the lowest and highest quarter. Levels that an image was not evaluated at (NaN) are left out.
    """

    over_features: str = "sum"
    over_levels: str = "wmean"

    def __post_init__(self) -> None:
        check_choice("fuse", self.over_features, FUSIONS)
        check_choice("aggregate", self.over_levels, AGGREGATIONS)

    def __call__(self, values: Array, weights: Array) -> Array:
        """(N, levels, features) and (levels,) -> (N,)."""
        per_level = values.sum(axis=2) if self.over_features == "sum" else values.mean(axis=2)
        if self.over_levels == "max":
            return np.asarray(np.nanmax(per_level, axis=1))
        if self.over_levels == "min":
            return np.asarray(np.nanmin(per_level, axis=1))
        seen = ~np.isnan(per_level)
        if self.over_levels == "trimmed":
            seen = _without_extremes(per_level)
        share = seen * (weights if self.over_levels == "wmean" else 1.0)
        return np.asarray((np.where(seen, per_level, 0.0) * share).sum(axis=1) / share.sum(axis=1))


def _without_extremes(values: Array) -> npt.NDArray[np.bool_]:
    """Mask of what the trimmed mean keeps in each row; NaN sorts last and is never kept."""
    order = np.argsort(np.argsort(values, axis=1, kind="stable"), axis=1)
    count = (~np.isnan(values)).sum(axis=1, keepdims=True)
    cut = np.floor(TRIM * count)
    return np.asarray((order >= cut) & (order < count - cut))

"""Does the map point at the ships? Measured against boxes, patch by patch, always beside what chance would give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError
from gepc.features.pooling import box_filter
from gepc.sar.annotations import Mask
from gepc.scoring.metrics import auroc

Field = npt.NDArray[np.floating[npt.NBitBase]]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Localisation:
    """One value per patch.

    auroc : P(a pixel inside a box has the larger map value than one outside), ties half; chance is 0.5.
    hit : 1 where the map's largest pixel lies inside a box, the pointing game; ties are shared out.
    energy : share of the map's sum that lies inside boxes.
    area : share of the pixels inside boxes: what `hit` and `energy` are by chance.
    """

    auroc: Array
    hit: Array
    energy: Array
    area: Array


def localise(maps: npt.ArrayLike, masks: npt.ArrayLike) -> Localisation:
    """Measures of maps (N, H, W), which are not negative, against box masks (N, H, W)."""
    fields, inside = np.asarray(maps, dtype=np.float64), np.asarray(masks, dtype=bool)
    if fields.shape != inside.shape or fields.ndim != 3:
        raise InputError(f"maps {fields.shape} and masks {inside.shape} must both be (N, H, W)")
    rows = [_one(field, mask) for field, mask in zip(fields, inside, strict=True)]
    return Localisation(*(np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)))


def _one(field: Array, mask: Mask) -> tuple[float, float, float, float]:
    if not mask.any() or mask.all():
        raise InputError("a patch has no box, or is all box: there is nothing to locate in it")
    if not np.isfinite(field).all() or (field < 0).any():
        raise InputError("a map must be finite and not negative")
    total = field.sum()
    energy = float(field[mask].sum() / total) if total > 0 else float(mask.mean())
    return auroc(field[~mask], field[mask]), float(mask[field == field.max()].mean()), energy, float(mask.mean())


def smoothed(maps: npt.ArrayLike, window: int) -> npt.NDArray[np.float32]:
    """Maps (N, H, W) under the box filter of local pooling: what the score is pooled from."""
    import torch

    fields = torch.from_numpy(np.ascontiguousarray(maps, dtype=np.float32))
    return np.asarray(box_filter(fields, window).numpy())

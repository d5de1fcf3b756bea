"""Which noise levels to keep and how much each counts, from in-distribution features alone (the paper, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, OptionError, check_choice

WEIGHTINGS = ("inv_cv", "uniform")


@dataclass(frozen=True)
class Selection:
    """Positions of the kept levels, ascending, their weights (summing to 1), and CV(t) of every candidate."""

    kept: tuple[int, ...]
    weights: npt.NDArray[np.float64]
    cv: npt.NDArray[np.float64]


def coefficient_of_variation(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """CV(t) = std/|mean| over images (axis 0), NaN entries left out."""
    mean, std = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(std / np.abs(mean))


def select(base: npt.NDArray[np.float64], keep: int | None, weighting: str) -> Selection:
    """Keep the `keep` levels whose base feature (N, levels) is most stable; None keeps all.

    Weights are proportional to 1/CV(t), or uniform, normalised over the kept levels.
    """
    check_choice("weights", weighting, WEIGHTINGS)
    count = base.shape[1]
    if keep is not None and not 1 <= keep <= count:
        raise OptionError(f"keep must be between 1 and the number of distinct levels, {count}; got {keep}")
    cv = coefficient_of_variation(base)
    if keep is None and weighting == "uniform":
        return Selection(tuple(range(count)), np.full(count, 1.0 / count), cv)
    if not (np.isfinite(cv) & (cv > 1e-12)).all():  # a constant leaves a rounding error of some 1e-16
        raise InputError(
            "the feature that chooses levels is constant over the in-distribution images at some level: "
            "the images are all alike, or the backbone is exactly equivariant under this group; "
            "choose other images or other elements"
        )
    kept = tuple(sorted(int(position) for position in np.argsort(cv, kind="stable")[:keep]))
    raw = 1.0 / cv[list(kept)] if weighting == "inv_cv" else np.ones(len(kept))
    return Selection(kept, raw / raw.sum(), cv)

"""From feature columns to one score per image: select levels, calibrate, aggregate. Fitted on in-distribution images.

Selection is the paper's algorithm 1: keep the K levels at which the base feature has the lowest coefficient of
variation over in-distribution images, CV(t) = std/|mean|, weighted by 1/CV(t).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gepc.calibration.calibrators import Aggregation, Array, Calibrator, State, create_calibrator, under
from gepc.core.errors import InputError, OptionError, check_choice
from gepc.core.parts import Part

WEIGHTINGS = ("inv_cv", "uniform")


@dataclass(eq=False)
class Scorer:
    """The part of a detector that uses numbers alone: `Scorer(...).fit(table).score(table)`.

    A table is a `FeatureTable`, or an array of columns (N, levels, features).

    Parameters
    ----------
    calibration : name of the calibrator, with options after a colon: `kde`, `knn:k=1`.
    keep : how many levels to keep; None keeps all.
    weights : weights of the kept levels: `inv_cv` (proportional to 1/CV) or `uniform`.
    aggregate : how levels are combined; see `Aggregation`.
    fuse : how features are combined; see `Aggregation`.

    Attributes
    ----------
    selection_ : the kept levels, their weights, and the coefficient of variation of every candidate.
    calibrator_ : the fitted calibrator of all kept levels.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc import Scorer
    >>> table = np.random.default_rng(0).normal(1.0, 0.1, (50, 3, 1))
    >>> scorer = Scorer(keep=2).fit(table)
    >>> scorer.score(table[:4]).shape
    (4,)
    """

    calibration: str = "kde"
    keep: int | None = None
    weights: str = "inv_cv"
    aggregate: str = "wmean"
    fuse: str = "sum"
    selection_: Selection = field(init=False, repr=False)
    calibrator_: Calibrator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("weights", self.weights, WEIGHTINGS)
        self._aggregation = Aggregation(self.fuse, self.aggregate)
        self._aggregation.check_used_by(create_calibrator(self.calibration))

    def fit(self, table: Any, stability: Array | None = None, parts: Iterable[Part] | None = None) -> Scorer:
        """Select levels and fit the calibrator on in-distribution features.

        Parameters
        ----------
        table : the features of in-distribution images at every candidate level.
        stability : the feature (N, levels) whose coefficient of variation selects levels; by default that of the
            table's method, or the first column of an array.
        parts : the columns that are calibrated together; by default those of the table's method.

        Returns
        -------
        Scorer

        Examples
        --------
        >>> import numpy as np
        >>> from gepc import Scorer
        >>> table = np.random.default_rng(0).normal(1.0, 0.1, (50, 3, 1))
        >>> len(Scorer(keep=2).fit(table).selection_.kept)
        2
        """
        columns = _columns(table)
        stability = getattr(table, "stability", columns[:, :, 0]) if stability is None else stability
        parts = getattr(table, "parts", ()) if parts is None else parts
        self.selection_ = select(stability, self.keep, self.weights)
        kept = columns[:, list(self.selection_.kept)]
        self.calibrator_ = create_calibrator(self.calibration).fit(kept, parts)
        return self

    def keep_all(self, levels: int) -> Scorer:
        """Keep that many levels with equal weights, before there are features to fit on; returns self."""
        self.selection_ = Selection(tuple(range(levels)), np.full(levels, 1.0 / levels), np.full(levels, np.nan))
        return self

    def score(self, table: Any) -> Array:
        """Score images from their features at every candidate level.

        Parameters
        ----------
        table : FeatureTable or array (N, levels, features)
            The features.

        Returns
        -------
        One score for each image, an array (N,). Higher = more out of distribution.

        Examples
        --------
        >>> import numpy as np
        >>> from gepc import Scorer
        >>> scorer = Scorer().fit(np.random.default_rng(0).normal(1.0, 0.1, (50, 3, 1)))
        >>> usual, unusual = scorer.score(np.array([[[1.0]] * 3, [[2.0]] * 3]))
        >>> bool(unusual > usual)
        True
        """
        return self.score_kept(_columns(table)[:, list(self.selection_.kept)])

    def score_kept(self, columns: Array) -> Array:
        """The same from columns at the kept levels alone."""
        return self.calibrator_.score(columns, self.selection_.weights, self._aggregation)

    def explain_kept(self, columns: Array) -> tuple[Array, dict[str, Array]]:
        """The scores from columns at the kept levels, and the tail probability of each part by name, (N,)."""
        return self.calibrator_.explained(columns, self.selection_.weights, self._aggregation)

    def gives_finite_scores(self) -> bool:
        """Whether features in the middle of the in-distribution range get a finite score."""
        with np.errstate(all="ignore"):
            scores = self.score_kept(self.calibrator_.bounds_.mean(axis=0, keepdims=True))
        return scores.shape == (1,) and bool(np.isfinite(scores).all())

    def state(self) -> State:
        """The fitted arrays by name."""
        return {f"calibrator/{name}": value for name, value in self.calibrator_.state().items()}

    def restore(self, selection: Selection, state: State, parts: Iterable[Part] = ()) -> Scorer:
        """Take a selection, a `state` and the parts of the columns back; returns self."""
        self.selection_ = selection
        calibrator = create_calibrator(self.calibration)
        calibrator.parts = tuple(parts)
        self.calibrator_ = calibrator.restore(under("calibrator", state))
        return self


def _columns(table: Any) -> Array:
    return np.asarray(getattr(table, "columns", table), dtype=np.float64)


@dataclass(frozen=True)
class Selection:
    """Positions of the kept levels, ascending, their weights (summing to 1), and CV(t) of every candidate."""

    kept: tuple[int, ...]
    weights: Array
    cv: Array


def coefficient_of_variation(values: Array) -> Array:
    """CV(t) = std/|mean| over images (axis 0), NaN entries left out."""
    mean, std = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(std / np.abs(mean))


def select(base: Array, keep: int | None, weighting: str) -> Selection:
    """The `keep` levels whose base feature (N, levels) is most stable, None for all, with weights that sum to 1."""
    check_choice("weights", weighting, WEIGHTINGS)
    count = base.shape[1]
    if keep is not None and not 1 <= keep <= count:
        raise OptionError(f"keep must be between 1 and the number of distinct levels, {count}; got {keep}")
    cv = coefficient_of_variation(base)
    if keep is None and weighting == "uniform":
        return Selection(tuple(range(count)), np.full(count, 1.0 / count), cv)
    if not (np.isfinite(cv) & (cv > 1e-12)).all():  # a constant leaves a rounding error of some 1e-16
        constant = "the feature that chooses levels is constant over the in-distribution images at some level"
        reason = "the images are all alike, or the backbone is exactly equivariant under this group"
        raise InputError(f"{constant}: {reason}; choose other images or other elements")
    kept = tuple(sorted(int(position) for position in np.argsort(cv, kind="stable")[:keep]))
    raw = 1.0 / cv[list(kept)] if weighting == "inv_cv" else np.ones(len(kept))
    return Selection(kept, raw / raw.sum(), cv)

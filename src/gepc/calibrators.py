"""From features to one score, knowing in-distribution features alone. Higher means more out of distribution.

A column calibrator looks at each (level, feature) by itself and gives minus its log-score there; the results are
aggregated over features, then over levels. A vector calibrator looks at all of them together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from gepc.errors import InputError, OptionError, check_choice, nearest

Array = npt.NDArray[np.float64]
State = dict[str, Array]

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


class Calibrator(ABC):
    """Fitted on ID columns (N, levels, features); scores others. `state` is what a saved detector keeps."""

    name: ClassVar[str]

    @abstractmethod
    def fit(self, columns: Array) -> Calibrator:
        """Learn from in-distribution columns; returns self."""

    @abstractmethod
    def score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        """(N, levels, features) -> (N,), higher = more OOD."""

    @abstractmethod
    def state(self) -> State:
        """The fitted numbers by name."""

    @abstractmethod
    def restore(self, state: State) -> Calibrator:
        """Take a `state` back; returns self."""


C_ = TypeVar("C_", bound=type[Calibrator])
_CALIBRATORS: dict[str, type[Calibrator]] = {}


def register(name: str) -> Callable[[C_], C_]:
    """Class decorator: make a calibrator known by name."""

    def add(cls: C_) -> C_:
        cls.name = name
        _CALIBRATORS[name] = cls
        return cls

    return add


def list_calibrators() -> list[str]:
    """Names of the calibrators."""
    return sorted(_CALIBRATORS)


def create_calibrator(name: str) -> Calibrator:
    """An unfitted calibrator of that name."""
    if name not in _CALIBRATORS:
        raise OptionError(f"unknown calibration {name!r}; {nearest(name, _CALIBRATORS)}")
    return _CALIBRATORS[name]()


class ColumnCalibrator(Calibrator):
    """One model per (level, feature)."""

    @abstractmethod
    def surprise(self, columns: Array) -> Array:
        """Minus the ID log-score of every entry, (N, levels, features)."""

    def score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        """Aggregate the surprise of each entry."""
        return aggregation(self.surprise(columns), weights)


@register("raw")
class Raw(ColumnCalibrator):
    """No model: the features themselves, which are OOD-high by construction but not always in fact."""

    def fit(self, columns: Array) -> Raw:
        """Nothing to learn."""
        return self

    def surprise(self, columns: Array) -> Array:
        """The values as they are."""
        return columns

    def state(self) -> State:
        """Nothing."""
        return {}

    def restore(self, state: State) -> Raw:
        """Nothing."""
        return self


@register("zscore")
class ZScore(ColumnCalibrator):
    """A Gaussian per column up to its constant: z^2/2 with z = (f - mean)/std. Two-sided."""

    mean_: Array
    std_: Array

    def fit(self, columns: Array) -> ZScore:
        """Mean and standard deviation of every column."""
        _check_varies(columns)
        self.mean_, self.std_ = np.nanmean(columns, axis=0), np.nanstd(columns, axis=0)
        return self

    def surprise(self, columns: Array) -> Array:
        """z^2/2."""
        return np.asarray(0.5 * ((columns - self.mean_) / self.std_) ** 2)

    def state(self) -> State:
        """Mean and standard deviation."""
        return {"mean": self.mean_, "std": self.std_}

    def restore(self, state: State) -> ZScore:
        """Mean and standard deviation."""
        self.mean_, self.std_ = state["mean"], state["std"]
        return self


@register("kde")
class KDE(ColumnCalibrator):
    """A Gaussian kernel density per column, -log p(f), in log space so that far points do not tie. Two-sided.

    Bandwidth by Silverman's rule with a robust spread: h = 0.9 min(std, IQR/1.34) n^(-1/5).
    """

    samples_: Array
    bandwidth_: Array

    def fit(self, columns: Array) -> KDE:
        """Keep the samples; one bandwidth per column."""
        _check_varies(columns)
        self.samples_ = columns
        self.bandwidth_ = silverman(columns)
        return self

    def surprise(self, columns: Array) -> Array:
        """-log (1/n) sum_i N(f; f_i, h^2), column by column."""
        out = np.empty_like(columns)
        for level, feature in np.ndindex(columns.shape[1:]):
            samples = self.samples_[:, level, feature]
            out[:, level, feature] = -log_density(
                columns[:, level, feature], samples[~np.isnan(samples)], float(self.bandwidth_[level, feature])
            )
        return out

    def state(self) -> State:
        """Samples and bandwidths."""
        return {"samples": self.samples_, "bandwidth": self.bandwidth_}

    def restore(self, state: State) -> KDE:
        """Samples and bandwidths."""
        self.samples_, self.bandwidth_ = state["samples"], state["bandwidth"]
        return self


def silverman(columns: Array) -> Array:
    """h = 0.9 min(std, IQR/1.34) n^(-1/5) per column, floored at 1e-6 std where the quartiles coincide."""
    std = np.nanstd(columns, axis=0)
    low, high = np.nanquantile(columns, (0.25, 0.75), axis=0)
    robust = (high - low) / 1.34
    spread = np.where(robust > 0, np.minimum(std, robust), std)
    count = (~np.isnan(columns)).sum(axis=0)
    return np.asarray(np.maximum(0.9 * spread * count**-0.2, 1e-6 * (std + 1e-12)))


def log_density(values: Array, samples: Array, bandwidth: float, chunk: int = 256) -> Array:
    """log p of a 1-D Gaussian kernel density at `values`, by log-sum-exp, in chunks of bounded memory."""
    from scipy.special import logsumexp

    constant = np.log(len(samples) * bandwidth * np.sqrt(2.0 * np.pi))
    out = np.empty(len(values))
    for start in range(0, len(values), chunk):
        part = slice(start, start + chunk)
        z = (values[part, None] - samples[None, :]) / bandwidth
        out[part] = logsumexp(-0.5 * z**2, axis=1) - constant
    return out


class VectorCalibrator(Calibrator):
    """One model of the whole (level, feature) vector; weights and aggregations do not apply to it."""

    @abstractmethod
    def distance(self, vectors: Array) -> Array:
        """(N, D) -> (N,), higher = more OOD."""

    def score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        """The model's distance of the flattened columns."""
        return self.distance(_flatten(columns))


@register("mvn")
class MVN(VectorCalibrator):
    """One Gaussian over all columns: half the squared Mahalanobis distance, d^2/2.

    The covariance gets a ridge of 1e-6 times its mean variance, so that collinear columns do not break it.
    """

    mean_: Array
    factor_: Array

    def fit(self, columns: Array) -> MVN:
        """Mean, and the Cholesky factor of the covariance."""
        _check_varies(columns)
        vectors = _flatten(columns)
        if len(vectors) <= vectors.shape[1]:
            raise InputError(
                f"mvn calibration of {vectors.shape[1]} columns needs more than {vectors.shape[1]} ID images, "
                f"got {len(vectors)}; give more images or use kde"
            )
        self.mean_ = vectors.mean(axis=0)
        scale = vectors.std(axis=0)
        correlation = np.atleast_2d(np.cov(vectors / scale, rowvar=False, bias=True))
        ridge = 1e-6 * np.eye(len(scale))
        self.factor_ = np.linalg.cholesky(correlation + ridge) * scale[:, None]
        return self

    def distance(self, vectors: Array) -> Array:
        """d^2/2."""
        from scipy.linalg import solve_triangular

        white = solve_triangular(self.factor_, (vectors - self.mean_).T, lower=True)
        return np.asarray(0.5 * (white**2).sum(axis=0))

    def state(self) -> State:
        """Mean and Cholesky factor."""
        return {"mean": self.mean_, "factor": self.factor_}

    def restore(self, state: State) -> MVN:
        """Mean and Cholesky factor."""
        self.mean_, self.factor_ = state["mean"], state["factor"]
        return self


def _flatten(columns: Array) -> Array:
    vectors = columns.reshape(len(columns), -1)
    if np.isnan(vectors).any():
        raise OptionError(
            "a vector calibration needs every level for every image; use kde or zscore with level_samples"
        )
    return vectors


def _check_varies(columns: Array) -> None:
    spread = np.nanstd(columns, axis=0)
    if not np.isfinite(spread).all():
        raise InputError("a feature of the in-distribution images is not finite; check the backbone and the images")
    scale = np.nanmean(np.abs(columns), axis=0)
    if (spread <= 1e-12 * scale).any() or (spread == 0).any():
        raise InputError(
            "a feature is constant over the in-distribution images, so there is nothing to calibrate: "
            "the images are all alike, or the backbone is exactly equivariant under this group"
        )

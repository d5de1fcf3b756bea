"""Calibrators that look at each (level, feature) by itself."""

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from scipy.special import logsumexp

from gepc.calibration.calibrators import Aggregation, Array, Calibrator, check_varies, register
from gepc.core.errors import OptionError

KERNELS = 1 << 20  # evaluated together, whatever the number of samples


class ColumnCalibrator(Calibrator):
    """One model per (level, feature)."""

    @abstractmethod
    def surprise(self, columns: Array) -> Array:
        """How unusual every entry is for ID images, (N, levels, features)."""

    def per_level(self, columns: Array) -> Array:
        return np.asarray(self.surprise(columns).sum(axis=2))

    def _score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        return aggregation(self.surprise(columns), weights)


@register("raw")
class Raw(ColumnCalibrator):
    """No model: the features themselves. Most are higher out of distribution by construction, not always in fact."""

    def _fit(self, columns: Array) -> None:
        pass

    def surprise(self, columns: Array) -> Array:
        return columns


@register("z")
class Z(ColumnCalibrator):
    """Signed z = (f - mean)/std. One-sided: only a larger feature is more OOD."""

    fitted: ClassVar[tuple[str, ...]] = ("mean", "std")

    def _fit(self, columns: Array) -> None:
        check_varies(columns)
        self.mean_, self.std_ = np.nanmean(columns, axis=0), np.nanstd(columns, axis=0)

    def surprise(self, columns: Array) -> Array:
        return np.asarray((columns - self.mean_) / self.std_)


@register("abs_z")
class AbsZ(Z):
    """|z|. Two-sided."""

    def surprise(self, columns: Array) -> Array:
        return np.abs(super().surprise(columns))


@register("zscore")
class ZScore(Z):
    """A Gaussian per column up to its constant: z^2/2. Two-sided."""

    def surprise(self, columns: Array) -> Array:
        return np.asarray(0.5 * super().surprise(columns) ** 2)


@register("softplus")
class Softplus(Z):
    """log(1 + e^z), a smooth max(z, 0): one-sided, and a small feature does not make up for a large one."""

    def surprise(self, columns: Array) -> Array:
        with np.errstate(invalid="ignore"):  # NaN where an image was not evaluated
            return np.asarray(np.logaddexp(0.0, super().surprise(columns)))


@register("tail")
class Tail(ColumnCalibrator):
    """-log P(F >= f). One-sided: for features that an anomaly can only raise, such as the largest energy of any place.

        P(F >= f) = (1 + #{f_i >= f})/(n + 1)       up to the 0.8 quantile u of the ID images, at least 0.2
                    0.2 exp(-(f - u)/m)             above it, m the mean excess of the f_i over u

    With `fuse="max"` the score is -log of the smallest of these probabilities, so that a feature with a heavy tail does
    not hide another one.
    """

    fitted: ClassVar[tuple[str, ...]] = ("samples",)

    def _fit(self, columns: Array) -> None:
        check_varies(columns)
        self.samples_ = columns.copy()

    def surprise(self, columns: Array) -> Array:
        out = np.empty_like(columns)
        for level, feature in np.ndindex(columns.shape[1:]):
            samples = self.samples_[:, level, feature]
            out[:, level, feature] = -log_tail(columns[:, level, feature], np.sort(samples[~np.isnan(samples)]))
        return out


def log_tail(values: Array, samples: Array, share: float = 0.2) -> Array:
    """log P(F >= f) from ascending samples, exponential beyond the quantile that leaves `share` of them above it."""
    limit = np.quantile(samples, 1.0 - share)
    above = samples[samples > limit]
    excess = float(above.mean() - limit) if len(above) else float(samples.std())
    counted = (1.0 + len(samples) - np.searchsorted(samples, values)) / (1.0 + len(samples))
    beyond = np.log(share) - (values - limit) / excess
    known = np.where(values > limit, beyond, np.log(np.maximum(counted, share)))
    return np.where(np.isnan(values), np.nan, known)


@register("kde", "kde1d")
class KDE(ColumnCalibrator):
    """A Gaussian kernel density per column, -log p(f), in log space so that far points do not tie. Two-sided.

    Options
    -------
    bandwidth : h in the feature's own units; by default Silverman's rule with a robust spread, see `silverman`.
    standardise : density of (f - mean)/std rather than of f, so that columns of different units can be compared
        (a constant per column: it matters to `max`, not to means).
    """

    fitted: ClassVar[tuple[str, ...]] = ("samples", "bandwidth")

    def __init__(self, bandwidth: float | None = None, standardise: bool = False) -> None:
        if bandwidth is not None and not bandwidth > 0.0:
            raise OptionError(f"kde: bandwidth must be positive, got {bandwidth}")
        self.bandwidth, self.standardise = bandwidth, standardise

    def _fit(self, columns: Array) -> None:
        check_varies(columns)
        self.samples_ = columns.copy()
        fixed = self.bandwidth
        self.bandwidth_ = silverman(columns) if fixed is None else np.full(columns.shape[1:], fixed)

    def surprise(self, columns: Array) -> Array:
        """-log (1/n) sum_i N(f; f_i, h^2), column by column."""
        out = np.empty_like(columns)
        for level, feature in np.ndindex(columns.shape[1:]):
            samples = self.samples_[:, level, feature]
            out[:, level, feature] = -log_density(
                columns[:, level, feature], samples[~np.isnan(samples)], float(self.bandwidth_[level, feature])
            )
        return out - np.log(np.nanstd(self.samples_, axis=0)) if self.standardise else out


def silverman(columns: Array) -> Array:
    """h = 0.9 min(std, IQR/1.34) n^(-1/5) per column, floored at 1e-6 std where the quartiles coincide."""
    std = np.nanstd(columns, axis=0)
    low, high = np.nanquantile(columns, (0.25, 0.75), axis=0)
    robust = (high - low) / 1.34
    spread = np.where(robust > 0, np.minimum(std, robust), std)
    count = (~np.isnan(columns)).sum(axis=0)
    return np.asarray(np.maximum(0.9 * spread * count**-0.2, 1e-6 * (std + 1e-12)))


def log_density(values: Array, samples: Array, bandwidth: float, kernels: int = KERNELS) -> Array:
    """log p of a 1-D Gaussian kernel density at `values`, by log-sum-exp, in chunks of about that many kernels."""
    chunk = max(1, kernels // len(samples))
    constant = np.log(len(samples) * bandwidth * np.sqrt(2.0 * np.pi))
    out = np.empty(len(values))
    for start in range(0, len(values), chunk):
        part = slice(start, start + chunk)
        z = (values[part, None] - samples[None, :]) / bandwidth
        out[part] = logsumexp(-0.5 * z**2, axis=1) - constant
    return out

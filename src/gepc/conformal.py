"""From scores to p-values and verdicts with a finite-sample guarantee."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.errors import InputError, OptionError

Array = npt.NDArray[np.float64]


def p_values(scores: Array, calibration: Array) -> Array:
    """p = (1 + #{calibration >= s})/(n + 1), ties counted against the alarm.

    If the calibration scores and s are exchangeable, P(p <= alpha) <= alpha for every alpha, whatever the score
    (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005, prop. 2.4). The calibration images must
    not have chosen levels or fitted densities.
    """
    ordered = np.sort(calibration)
    at_least = len(ordered) - np.searchsorted(ordered, scores, side="left")
    return np.asarray((1.0 + at_least) / (len(ordered) + 1.0))


def threshold(calibration: Array, alpha: float) -> float:
    """The score above which p <= alpha: the alarm is `score > threshold`.

    p <= alpha means at most m = floor(alpha (n + 1)) - 1 calibration scores reach s, so the threshold is the
    (m + 1)-th largest of them.
    """
    needed = math.floor(alpha * (len(calibration) + 1) * (1 + 1e-12)) - 1
    return float(np.sort(calibration)[::-1][needed])


def images_needed(alpha: float) -> int:
    """The fewest calibration images with which p <= alpha can happen: 1/(n + 1) <= alpha."""
    return math.ceil(1.0 / alpha - 1e-9) - 1


def check_alpha(alpha: float, n_calibration: int) -> None:
    """Refuse a false-alarm rate that cannot be held with so few calibration images, or only by never alarming."""
    if not 0.0 < alpha < 1.0:
        raise OptionError(f"alpha is a false-alarm rate between 0 and 1, got {alpha}")
    if alpha * (n_calibration + 1) * (1 + 1e-12) < 1.0:
        raise OptionError(
            f"alpha={alpha:g} needs at least {images_needed(alpha)} calibration images, there are {n_calibration}; "
            f"the smallest possible alpha is {1 / (n_calibration + 1):.3g}"
        )


@dataclass(frozen=True)
class Guarantee:
    """What may be promised at `alpha` with `n` calibration images.

    On average over calibration sets the false-alarm rate is at most alpha. For the calibration set at hand it is a
    number that follows Beta(k, n + 1 - k), k = floor(alpha (n + 1)) (Vovk, Conditional validity of inductive
    conformal predictors, 2012); `low` and `high` are its 5 % and 95 % quantiles.
    """

    alpha: float
    n: int
    low: float
    high: float

    @classmethod
    def at(cls, alpha: float, n: int) -> Guarantee:
        """The guarantee at `alpha` with `n` calibration images."""
        from scipy.stats import beta

        check_alpha(alpha, n)
        k = math.floor(alpha * (n + 1) * (1 + 1e-12))
        low, high = beta(k, n + 1 - k).ppf([0.05, 0.95])
        return cls(alpha, n, float(low), float(high))

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"at most {self.alpha:.3g} of in-distribution images raise an alarm, on average over calibration sets; "
            f"with these {self.n} calibration images the rate lies between {self.low:.3g} and {self.high:.3g} "
            "with probability 0.9"
        )


def check_calibration_scores(scores: Array) -> None:
    """Calibration scores must be finite and there must be some."""
    if len(scores) == 0:
        raise InputError("there are no calibration images; give more images or calibration_images=")
    if not np.isfinite(scores).all():
        raise InputError("a calibration score is not finite; check the calibration images")

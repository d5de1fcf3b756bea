"""From scores to p-values and verdicts with a finite-sample guarantee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from scipy.stats import beta

from gepc.core.errors import InputError, OptionError, TooFewImagesError, nearest
from gepc.core.rates import SLACK, left_out
from gepc.images.sources import FileImages, Images

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.str_]
Rows = npt.NDArray[np.int64]
UNGROUPED = ""


def p_values(scores: Array, calibration: Array, uniform: Array | None = None) -> Array:
    """p = (1 + #{calibration >= s})/(n + 1), ties counted against the alarm.

    If the calibration scores and s are exchangeable, P(p <= alpha) <= alpha for every alpha, whatever the score
    (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005, prop. 2.4). The calibration images must
    not have chosen levels or fitted densities. With `uniform`, numbers drawn from [0, 1] for each score, ties are
    broken at random, p = (#{calibration > s} + U (1 + #{calibration = s}))/(n + 1), and p is exactly uniform.

    Parameters
    ----------
    scores : float array (N,)
        Scores of new images, higher = more out of distribution; the p-value of NaN is NaN.
    calibration : float array (n,)
        Scores of the calibration images.
    uniform : float array (N,), optional
        Numbers drawn uniformly from [0, 1].

    Returns
    -------
    float array (N,)

    See Also
    --------
    threshold : the score above which p <= alpha.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.conformal.p_values import p_values
    >>> p_values(np.array([0.5, 8.5, 20.0]), np.arange(9.0)).tolist()
    [0.9, 0.1, 0.1]
    """
    ordered = np.sort(calibration)
    at_least = len(ordered) - np.searchsorted(ordered, scores, side="left")
    found = (1.0 + at_least) / (len(ordered) + 1.0)
    if uniform is not None:
        above = len(ordered) - np.searchsorted(ordered, scores, side="right")
        found = (above + uniform * (1.0 + at_least - above)) / (len(ordered) + 1.0)
    return np.where(np.isnan(scores), np.nan, found)


def threshold(calibration: Array, alpha: float) -> float:
    """The score above which p <= alpha: the alarm is `score > threshold`.

    p <= alpha means at most m = floor(alpha (n + 1)) - 1 calibration scores reach s, so the threshold is the
    (m + 1)-th largest of them.

    Parameters
    ----------
    calibration : float array (n,)
        Scores of the calibration images.
    alpha : float
        The false-alarm rate, at least 1/(n + 1).

    Returns
    -------
    float

    See Also
    --------
    p_values, images_needed

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.conformal.p_values import threshold
    >>> threshold(np.arange(99.0), 0.05)
    94.0
    """
    check_alpha(alpha, len(calibration))
    needed = math.floor(alpha * (len(calibration) + 1) * SLACK) - 1
    return float(np.sort(calibration)[::-1][needed])


def images_needed(alpha: float) -> int:
    """The fewest calibration images with which p <= alpha can happen: 1/(n + 1) <= alpha.

    Parameters
    ----------
    alpha : float
        The false-alarm rate.

    Returns
    -------
    int

    See Also
    --------
    images_for_width : how many images bring the realised rate near `alpha`.

    Examples
    --------
    >>> from gepc.conformal.p_values import images_needed
    >>> images_needed(0.01)
    99
    """
    return math.ceil(1 / (Fraction(float(alpha)) * Fraction(SLACK))) - 1


def check_rates(**rates: object) -> None:
    """Raise `OptionError` unless each rate is a number strictly between 0 and 1."""
    for name, value in rates.items():
        if not (isinstance(value, (int, float, np.integer, np.floating)) and 0.0 < float(value) < 1.0):
            raise OptionError(f"{name} must be between 0 and 1, got {value!r}")


def check_alpha(alpha: float, n_calibration: int) -> None:
    """Refuse a false-alarm rate that cannot be held with so few calibration images, or only by never alarming."""
    check_rates(alpha=alpha)
    if alpha * (n_calibration + 1) * SLACK < 1.0:
        raise _too_few(f"alpha={alpha:g}", images_needed(alpha), n_calibration, 1 / (n_calibration + 1))


def _too_few(asked: str, needed: int, n: int, smallest: float) -> TooFewImagesError:
    message = f"{asked} needs at least {needed} calibration images, there are {n}"
    return TooFewImagesError(f"{message}; the smallest possible alpha is {smallest:.3g}", needed, smallest)


@dataclass(frozen=True)
class Guarantee:
    """What is guaranteed at `alpha` with `n` calibration images.

    On average over calibration sets the false-alarm rate is at most alpha. For the calibration set at hand it is a
    number that follows Beta(k, n + 1 - k), k = floor(alpha (n + 1)) (Vovk, Conditional validity of inductive
    conformal predictors, 2012); `low` and `high` are its 5 % and 95 % quantiles.

    If the k = `trimmed` largest calibration scores were left out, this holds where they were the outliers. If fewer of
    them were, the rate is at most alpha + k/(n + 1), on average; see `CalibrationScores.trim`.

    Parameters
    ----------
    alpha : float
        The false-alarm rate.
    n : int
        How many calibration images there are.
    low : float
        The 5 % quantile of the rate of a calibration set.
    high : float
        The 95 % quantile of this rate.
    trimmed : int
        How many of the largest calibration scores were left out.

    See Also
    --------
    gepc.Detector.guarantee : the guarantee of a fitted detector.

    Examples
    --------
    >>> from gepc.conformal.p_values import Guarantee
    >>> found = Guarantee.at(0.05, 99)
    >>> round(found.low, 3), round(found.high, 3)
    (0.02, 0.09)
    """

    alpha: float
    n: int
    low: float
    high: float
    trimmed: int = 0

    @classmethod
    def at(cls, alpha: float, n: int, trimmed: int = 0) -> Guarantee:
        """Compute the guarantee at `alpha` with `n` calibration images, after `trimmed` others were left out.

        Parameters
        ----------
        alpha, n, trimmed : as in the class.

        Returns
        -------
        Guarantee

        Raises
        ------
        TooFewImagesError
            If `alpha` is below 1/(n + 1).

        Examples
        --------
        >>> from gepc.conformal.p_values import Guarantee
        >>> found = Guarantee.at(0.05, 999)
        >>> round(found.low, 3), round(found.high, 3)
        (0.039, 0.062)
        """
        check_alpha(alpha, n)
        return cls(alpha, n, *realised_range(alpha, n), trimmed)

    @staticmethod
    def condition(trimmed: int) -> str:
        """The condition of every promise after that many calibration images were left out; empty for none."""
        return f" if the {trimmed} calibration images that were left out are outliers" if trimmed else ""

    def __str__(self) -> str:
        promise = f"at most {self.alpha:.3g} of in-distribution images raise an alarm{self.condition(self.trimmed)}"
        if self.trimmed:
            worst = min(self.alpha + self.trimmed / (self.n + 1), 1.0)
            return f"{promise}, and at most {worst:.3g} if fewer of them are, on average over calibration sets"
        return (
            f"{promise}, on average over calibration sets; with these {self.n} calibration images the rate lies "
            f"between {self.low:.3g} and {self.high:.3g} with probability 0.9"
        )


def pac_rank(n: int, alpha: float, confidence: float) -> int:
    """The largest k such that alarms at p <= k/(n + 1) have a rate of at most alpha with probability `confidence`.

    The rate of the calibration set at hand follows Beta(k, n + 1 - k) for continuous scores and is smaller with ties,
    so k is the largest with P(Beta(k, n + 1 - k) <= alpha) >= confidence (Vovk 2012, proposition 2a).
    """
    check_rates(alpha=alpha, confidence=confidence)
    ranks = np.arange(n) + 1
    safe = beta.cdf(alpha, ranks, n + 1 - ranks) >= confidence
    if n == 0 or not safe[0]:
        needed = math.ceil(math.log1p(-confidence) / math.log1p(-alpha))
        smallest = -math.expm1(math.log1p(-confidence) / n) if n else 1.0
        raise _too_few(f"alpha={alpha:g} with confidence {confidence:g}", needed, n, smallest)
    return int(ranks[safe][-1])


def p_limit(n: int, alpha: float, confidence: float | None = None) -> float:
    """The largest p-value that raises an alarm with n calibration images: alpha, or that of `pac_rank`."""
    if confidence is not None:
        return pac_rank(n, alpha, confidence) / (n + 1)
    check_alpha(alpha, n)
    return alpha * SLACK


def images_for_width(alpha: float, width: float, probability: float = 0.9) -> int:
    """The fewest calibration images that bring the realised rate into a central range of that width around alpha.

    At least two. The range widens a little where the rank floor(alpha (n + 1)) grows, so every number is looked at.

    Parameters
    ----------
    alpha : float
        The false-alarm rate.
    width : float
        The width of the range, between 0 and 1.
    probability : float
        The probability that the realised rate lies in the range, over calibration sets.

    Returns
    -------
    int

    See Also
    --------
    images_needed : the fewest images with which an alarm is possible at all.

    Examples
    --------
    >>> from gepc.conformal.p_values import images_for_width
    >>> images_for_width(0.05, width=0.02)
    1270
    """
    check_rates(alpha=alpha, width=width)
    start = max(2, images_needed(alpha))
    while True:
        numbers = np.arange(start, 2 * start)
        low, high = _ranges(alpha, numbers, probability)
        narrow = np.flatnonzero(high - low <= width)
        if len(narrow):
            return int(numbers[narrow[0]])
        start *= 2


def realised_range(alpha: float, n: int, probability: float = 0.9) -> tuple[float, float]:
    """Central range of the false-alarm rate over calibration sets of n images: Beta(k, n + 1 - k) quantiles."""
    low, high = _ranges(alpha, np.array([n]), probability)
    return float(low[0]), float(high[0])


def _ranges(alpha: float, n: Rows, probability: float) -> tuple[Array, Array]:
    """`realised_range` of several numbers of images."""
    k, tail = np.floor(alpha * (n + 1) * SLACK), 0.5 * (1.0 - probability)
    low, high = beta(k, n + 1 - k).ppf([[tail], [1.0 - tail]])
    return low, high


@dataclass(frozen=True)
class CalibrationScores:
    """The calibration scores that p-values compare with, sorted, by group; without groups all are in one."""

    by_group: dict[str, Array]
    removed: dict[str, Array] = field(default_factory=dict)  # the largest scores, which `trim` has left out

    @classmethod
    def of(cls, scores: Array, labels: Labels | None) -> CalibrationScores:
        """Scores of calibration images, with a label each for group-conditional (Mondrian) p-values."""
        if len(scores) == 0:
            advice = "give more images, or separate `calibration_images`"
            raise InputError(f"there are no calibration images; {advice}", options=("calibration_images",))
        if not np.isfinite(scores).all():
            raise InputError("a calibration score is NaN or infinite; check the calibration images and the backbone")
        if labels is None:
            return cls({UNGROUPED: np.sort(scores)})
        return cls({str(label): np.sort(scores[labels == label]) for label in np.unique(labels)})

    def trim(self, contamination: float) -> CalibrationScores:
        """Leave out the k = floor(contamination n) largest of the n scores of each group.

        If at most k of the n calibration images are outliers, and the others are exchangeable with a new image, then

            P(p <= alpha) <= alpha + k/(n - k + 1),

        since trimming removes at most k scores of images that are no outliers. If the k removed images are all the
        outliers, P(p <= alpha) <= alpha. See the guide on false alarms for the proof.
        """
        kept, removed = {}, {}
        for label, scores in self.by_group.items():
            stop = len(scores) - left_out(contamination, len(scores))
            kept[label], removed[label] = scores[:stop], scores[stop:]
        return CalibrationScores(kept, removed)

    @property
    def trimmed(self) -> int:
        """How many scores were left out in the group that lost the most."""
        return max((len(scores) for scores in self.removed.values()), default=0)

    @property
    def grouped(self) -> bool:
        """Whether images need a group."""
        return set(self.by_group) != {UNGROUPED}

    @property
    def scores(self) -> Array:
        """All scores, sorted."""
        return np.sort(np.concatenate(list(self.by_group.values())))

    @property
    def smallest(self) -> int:
        """How many images the smallest group has."""
        return min(len(scores) for scores in self.by_group.values())

    def check(self, labels: Labels | None) -> None:
        """Refuse labels that this reference cannot serve."""
        if self.grouped and labels is None:
            known = ", ".join(self.by_group)
            raise OptionError(f"this detector was fitted with groups ({known}); give `groups`", options=("groups",))
        if not self.grouped and labels is not None:
            raise OptionError("this detector was fitted without groups; give none", options=("groups",))
        for label in () if labels is None else np.unique(labels):
            if str(label) not in self.by_group:
                hint = nearest(label, self.by_group)
                raise OptionError(f"there is no calibration image of group {str(label)!r}; {hint}")

    def p_values(self, scores: Array, labels: Labels | None = None, uniform: Array | None = None) -> Array:
        """Each score against its own group."""
        self.check(labels)
        if labels is None:
            return p_values(scores, self.by_group[UNGROUPED], uniform)
        out = np.empty(len(scores))
        for label in np.unique(labels):
            own = labels == label
            out[own] = p_values(scores[own], self.by_group[str(label)], None if uniform is None else uniform[own])
        return out


def group_labels(groups: Sequence[str] | str | None, images: Images, indices: Rows | None = None) -> Labels | None:
    """Labels of the images at `indices`: as given for every image of the collection, or the name of their folder."""
    if groups is None:
        return None
    if isinstance(groups, str):
        if groups != "folder":
            raise OptionError(f"groups must be a list with a label for every image, or 'folder'; got {groups!r}")
        if not isinstance(images, FileImages):
            raise OptionError("`groups` can be 'folder' only for images from files", options=("groups",))
        labels = [path.absolute().parent.name for path in images.paths]
    else:
        labels = [str(label) for label in groups]
    if len(labels) != len(images):
        raise OptionError(f"groups has {len(labels)} labels for {len(images)} images; give one label per image")
    found = np.asarray(labels, dtype=np.str_)
    return found if indices is None else found[indices]

"""Decisions: which p-values raise an alarm, and what is guaranteed of the alarms. No other module compares p-values.

A p-value by itself is valid: P(p <= a) <= a for an image that is exchangeable with the calibration images. Images that
share a calibration set, and overlapping tiles of a scene, depend on each other; each procedure states what it needs.
"""

import math
import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from scipy.special import digamma
from scipy.stats import false_discovery_control

from gepc.conformal.p_values import Array, CalibrationScores, Guarantee, Labels, check_rates, images_needed, p_limit
from gepc.core.errors import OptionError, check_choice
from gepc.core.rates import SLACK, holm

Flags = npt.NDArray[np.bool_]
PROCEDURES = ("bh", "storey")
CONTROLS = ("bh", "by", "holm", "tile")


@dataclass(frozen=True)
class DecisionRule:
    """How p-values become alarms, of images or of the tiles of a scene.

    Parameters
    ----------
    alpha : level of the error rate that `control` names. By default it is the false-alarm rate: an in-distribution
        image raises an alarm with at most this probability, on average over calibration sets.
    confidence : if given, the false-alarm rate holds for the calibration set at hand with this probability.
    fdr : if given, control the false-discovery rate over all images at this level instead of using `alpha`.
    procedure : `bh` (Benjamini-Hochberg) or `storey`, with `fdr`.
    control : the error rate that `alpha` bounds. `tile`, the default, judges every image or tile by itself by
        p <= alpha, and nothing is guaranteed for all of them together. `bh` (Benjamini-Hochberg) bounds the expected
        share of false flags under positive dependence. `by` (Benjamini-Yekutieli) bounds it under any dependence, as
        BH at alpha/(1 + 1/2 + ... + 1/m). `holm` bounds the probability of any false flag, under any dependence.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc import DecisionRule
    >>> from gepc.conformal.p_values import CalibrationScores
    >>> reference = CalibrationScores.of(np.arange(99.0), None)
    >>> DecisionRule(0.1, control="holm").alarms([0.01, 0.06, 0.9], reference).tolist()
    [True, False, False]
    """

    alpha: float = 0.05
    confidence: float | None = None
    fdr: float | None = None
    procedure: str = "bh"
    control: str = "tile"

    def __post_init__(self) -> None:
        check_choice("control", self.control, CONTROLS)
        check_choice("procedure", self.procedure, PROCEDURES)
        if self.fdr is not None:
            check_rates(fdr=self.fdr)
        else:
            check_rates(alpha=self.alpha)
            if self.procedure != PROCEDURES[0]:
                raise OptionError(f"procedure={self.procedure!r} has no effect without fdr; give fdr, or leave it out")
        if self.confidence is not None and self._method != "tile":
            raise OptionError("confidence can be used with alpha only; leave it out, or leave out fdr and control")
        if self.fdr is not None and self.control != "tile":
            raise OptionError("give either fdr (with a procedure) or alpha (with a control), not both")

    @property
    def _method(self) -> str:
        """The procedure by name; `tile` compares every p-value by itself."""
        return self.control if self.fdr is None else self.procedure

    def limits(self, reference: CalibrationScores, labels: Labels | None = None) -> Array:
        """Compute the largest p-value that raises an alarm. Only a rule that judges every image by itself has one.

        Parameters
        ----------
        reference : CalibrationScores
            The calibration scores of the detector.
        labels : sequence of str, optional
            The group of each image, for a detector with groups.

        Returns
        -------
        One limit for all images, or an array (N,) with groups.

        Raises
        ------
        TooFewImagesError
            If the calibration images are too few for the rate.

        Examples
        --------
        >>> import numpy as np
        >>> from gepc import DecisionRule
        >>> from gepc.conformal.p_values import CalibrationScores
        >>> round(float(DecisionRule(0.05).limits(CalibrationScores.of(np.arange(99.0), None))), 6)
        0.05
        """
        reference.check(labels)
        limit = partial(p_limit, alpha=self.alpha, confidence=self.confidence)
        if labels is None:
            return np.asarray(limit(reference.smallest))
        limit(reference.smallest)  # the error names the group that needs the largest alpha
        by_group = {label: limit(len(scores)) for label, scores in reference.by_group.items()}
        return np.array([by_group[str(label)] for label in labels])

    def check(self, reference: CalibrationScores, labels: Labels | None = None) -> None:
        """Check, before any work, that there are enough calibration images for the rate.

        Parameters
        ----------
        reference, labels : as in `limits`.

        Raises
        ------
        TooFewImagesError
            If there are too few.

        Examples
        --------
        >>> from gepc import DecisionRule
        >>> from gepc.conformal.p_values import CalibrationScores
        >>> DecisionRule(0.05).check(CalibrationScores.of(range(10), None))
        Traceback (most recent call last):
            ...
        gepc.core.errors.TooFewImagesError: alpha=0.05 needs at least 19 calibration images, there are 10; ...
        """
        reference.check(labels)
        if self._method == "tile":
            self.limits(reference, labels)

    def alarms(self, p_values: npt.ArrayLike, reference: CalibrationScores, labels: Labels | None = None) -> Flags:
        """Decide which p-values raise an alarm.

        Parameters
        ----------
        p_values : array (N,)
            The p-values. An image that could not be scored has NaN and does not raise an alarm.
        reference : CalibrationScores
            The calibration scores of the detector.
        labels : sequence of str, optional
            The group of each image, for a detector with groups.

        Returns
        -------
        bool array (N,)

        Raises
        ------
        TooFewImagesError
            If the calibration images are too few for the rate.

        Examples
        --------
        >>> import numpy as np
        >>> from gepc import DecisionRule
        >>> from gepc.conformal.p_values import CalibrationScores
        >>> reference = CalibrationScores.of(np.arange(99.0), None)
        >>> DecisionRule(0.05).alarms([0.01, 0.06, np.nan], reference).tolist()
        [True, False, False]
        """
        p = np.asarray(p_values, dtype=np.float64)
        if self._method == "tile":
            return np.asarray(p <= self.limits(reference, labels))
        flags, scored = np.zeros(len(p), dtype=bool), ~np.isnan(p)
        procedures = {"bh": benjamini_hochberg, "by": benjamini_hochberg, "storey": storey, "holm": holm}
        flags[scored] = procedures[self._method](p[scored], self._rate(max(1, int(scored.sum()))))
        return flags

    def decide(self, reference: CalibrationScores, labels: Labels | None, p_values: Array, scores: Array) -> Flags:
        """`alarms` with a warning where images repeat and the procedure needs independent ones."""
        known = scores[~np.isnan(scores)]
        repeated = len(known) - len(np.unique(known))
        if self._method == "storey" and repeated:
            warnings.warn(
                f"{repeated} of {len(known)} images have the same score as another one, as copies do; Storey's "
                "procedure needs independent images, and its false-discovery rate can be twice the target; leave "
                "copies out, or use the procedure 'bh'",
                stacklevel=3,
            )
        return self.alarms(p_values, reference, labels)

    def _rate(self, m: int) -> float:
        """The rate that the procedure is run at on `m` p-values."""
        rate = self.alpha if self.fdr is None else self.fdr
        return rate / harmonic(m) if self.control == "by" else rate

    # --- how many calibration images a scene needs ---------------------------------------------------------------

    def images_for_one(self, m: int) -> int:
        """The fewest calibration images with which a single tile of `m` can be flagged: 1/(n + 1) <= its limit."""
        return images_needed(self._rate(m) / (1 if self._method == "tile" else m))

    def fewest_flags(self, m: int, n: int) -> int:
        """How many of `m` tiles must have the smallest p-value, 1/(n + 1), for any flag; more than m: never."""
        if n >= self.images_for_one(m):
            return 1
        if self._method in ("tile", "holm"):
            return m + 1
        return math.ceil(m / (self._rate(m) * (n + 1)) / SLACK)

    def shortfall(self, m: int, n: int) -> str | None:
        """A warning where `n` calibration images are too few for `m` tiles, with the number that is needed."""
        fewest = self.fewest_flags(m, n)
        if fewest == 1:
            return None
        few = f"with {n} calibration images no p-value is below {1 / (n + 1):.3g}"
        needed = f"a single flag among {m} tiles needs at least {self.images_for_one(m):,} calibration images"
        needed += f" ({self.control} at {self.alpha:g})"
        if fewest > m:
            return f"nothing can be flagged: {few}; {needed}, or fewer tiles"
        return f"{few}, so a tile can be flagged only together with at least {fewest - 1} others; {needed}"

    # --- what is guaranteed, in words ----------------------------------------------------------------------------

    def statement(self, reference: CalibrationScores) -> str:
        """State in words what the rule guarantees for images.

        Parameters
        ----------
        reference : CalibrationScores
            The calibration scores of the detector.

        Returns
        -------
        str

        Raises
        ------
        TooFewImagesError
            If the calibration images are too few for the rate.

        Examples
        --------
        >>> from gepc import DecisionRule
        >>> from gepc.conformal.p_values import CalibrationScores
        >>> DecisionRule(fdr=0.1).statement(CalibrationScores.of(range(99), None))
        'on average at most 0.1 of the flagged images are false alarms (bh)'
        """
        condition = Guarantee.condition(reference.trimmed)
        if self.fdr is not None:
            rate = f"at most {self.fdr:g} of the flagged images are false alarms ({self.procedure})"
            return f"on average {rate}{condition}"
        if self.confidence is not None:
            rate = f"at most {self.alpha:g} of in-distribution images raise an alarm"
            each = "for each group, " if reference.grouped else ""
            return f"{each}with probability {self.confidence:g} over calibration sets, {rate}{condition}"
        return str(Guarantee.at(self.alpha, reference.smallest, reference.trimmed))

    def scene_statement(self, m: int, n: int, trimmed: int = 0) -> str:
        """The guarantee for a scene of `m` tiles with `n` calibration images, and its assumptions.

        `trimmed` is how many other calibration images were left out as outliers.
        """
        return (
            f"{self._promise(m)} The guarantee assumes that every in-distribution tile is exchangeable with the {n} "
            "calibration images: same sensor, size and processing, and images that neither fitting nor the network has "
            f"seen. It holds on average over calibration sets{Guarantee.condition(trimmed)}, and approximately for "
            "tiles with replaced no-data pixels."
        )

    def _promise(self, m: int) -> str:
        if self.control == "tile":
            return (
                f"Each in-distribution tile is flagged with probability at most {self.alpha:g}. Of {m} such tiles, "
                f"{self.alpha * m:.3g} are expected to be flagged. No rate is guaranteed for the scene as a whole."
            )
        if self.control == "holm":
            return (
                f"The probability of any false flag among the {m} tiles of this scene is at most {self.alpha:g} "
                f"({self.control}), however the overlapping tiles depend on each other. The same bound holds for any "
                "region without an out-of-distribution tile."
            )
        if self.control == "bh":
            return (
                f"On average at most {self.alpha:g} of the flagged tiles are false (Benjamini-Hochberg over {m} "
                "tiles), if the p-values are positively dependent (PRDS). This holds for separate images and is an "
                "assumption for overlapping tiles; control 'by' does not need it. It is a rate of tiles, not regions."
            )
        return (
            f"On average at most {self.alpha:g} of the flagged tiles are false (Benjamini-Yekutieli over {m} tiles), "
            "however the overlapping tiles depend on each other. It is a rate of tiles, not of regions."
        )


def benjamini_hochberg(p_values: npt.ArrayLike, fdr: float) -> Flags:
    """Flag the k smallest p-values, where k is the largest number with p_(k) <= fdr k / m.

    The expected share of false flags among the flags is at most fdr m_0/m. Conformal p-values that share one
    calibration set are positively dependent in the way this needs (Benjamini and Yekutieli 2001; Bates, Candes, Lei,
    Romano and Sesia, Testing for outliers with conformal p-values, Annals of Statistics 2023, theorem 2).

    Parameters
    ----------
    p_values : float array (m,)
        The p-values of all images.
    fdr : float
        The false-discovery rate.

    Returns
    -------
    bool array (m,)

    See Also
    --------
    storey : has more power where many images are out of distribution, and needs independent images.

    Examples
    --------
    >>> from gepc.conformal.decision import benjamini_hochberg
    >>> benjamini_hochberg([0.01, 0.04, 0.2, 0.9], fdr=0.1).tolist()
    [True, True, False, False]
    """
    p = _check(p_values, fdr)
    return np.asarray(false_discovery_control(p) <= fdr * SLACK) if len(p) else np.zeros(0, dtype=bool)


def storey(p_values: npt.ArrayLike, fdr: float, cutoff: float = 0.5) -> Flags:
    """Run Benjamini-Hochberg at fdr / pi_0, where pi_0 = (1 + #{p > cutoff})/(m (1 - cutoff)) estimates the ID share.

    It flags more images than Benjamini-Hochberg when many are out of distribution (Storey, Taylor and Siegmund 2004;
    for conformal p-values Bates et al. 2023, theorem 3, with this estimate of pi_0). The guarantee needs scores that
    are independent given the calibration set. With correlated or repeated images the rate can be twice the target (0.14
    to 0.22 measured at a target of 0.1), where Benjamini-Hochberg holds it.

    Parameters
    ----------
    p_values : float array (m,)
        The p-values of all images.
    fdr : float
        The false-discovery rate.
    cutoff : float
        Images with a larger p-value are counted as in-distribution in the estimate.

    Returns
    -------
    bool array (m,)

    See Also
    --------
    benjamini_hochberg

    Examples
    --------
    >>> from gepc.conformal.decision import storey
    >>> storey([0.01, 0.04, 0.2, 0.9], fdr=0.1).tolist()
    [True, True, False, False]
    """
    p = _check(p_values, fdr)
    check_rates(cutoff=cutoff)
    share = (1.0 + float((p > cutoff).sum())) / (max(1, len(p)) * (1.0 - cutoff))
    # flags beyond p = cutoff would count the same images as evidence for and against
    return benjamini_hochberg(p, min(fdr / share, 1.0 - 1e-12)) & (p <= cutoff)


def _check(p_values: npt.ArrayLike, fdr: float) -> Array:
    check_rates(fdr=fdr)
    p = np.asarray(p_values, dtype=np.float64).ravel()
    if not ((p >= 0.0) & (p <= 1.0)).all():
        raise OptionError("p-values must be numbers between 0 and 1; leave out NaN, which marks images without a score")
    return p


def harmonic(m: int) -> float:
    """1 + 1/2 + ... + 1/m, the price of Benjamini-Yekutieli."""
    return float(digamma(m + 1) + np.euler_gamma)

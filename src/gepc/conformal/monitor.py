"""Drift of a stream of images: a conformal test martingale over its scores.

If the stream is exchangeable with the calibration images, the online p-values

    p_n = (#{i < n: s_i > s_n} + U_n (1 + #{i < n: s_i = s_n})) / n,   i over calibration and stream, U_n uniform,

are independent and uniform (Vovk, Gammerman and Shafer 2005, theorem 8.2). The simple jumper bets on them not being: it
splits its capital over f_e(p) = 1 + e (p - 1/2), e in {-1, 0, 1}, and moves a share J of it back to equal parts before
each step (Vovk et al., Retrain or not retrain, COPA 2021). The capital is a martingale that starts at 1, so by Ville's
inequality it ever reaches 1/delta with probability at most delta: that is the false-alarm bound of `drifted`.
"""

import bisect
import secrets
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.conformal.decision import DecisionRule
from gepc.conformal.p_values import UNGROUPED, CalibrationScores, Guarantee, check_rates
from gepc.core.errors import InputError, check_least
from gepc.images.noise import generator

BETS = np.array([-1.0, 0.0, 1.0])


@dataclass(frozen=True)
class Verdict:
    """What a monitor says after one more image.

    Attributes
    ----------
    seen : how many images there were.
    p_value : the p-value of the image.
    alarm : whether the image raises an alarm.
    alarm_rate : the share of alarms among the last images, as many as `window` says.
    log10_capital : the evidence for a drift, as the logarithm of a betting capital that starts at 1.
    drifted : whether the capital has ever reached 1/`delta`.

    Examples
    --------
    >>> import gepc
    >>> gepc.Monitor(range(99)).update(140.0).seen
    1
    """

    seen: int
    p_value: float
    alarm: bool
    alarm_rate: float
    log10_capital: float
    drifted: bool


@dataclass
class AdaptiveRate:
    """The rate of alarms in a stream whose normal state drifts slowly (adaptive conformal inference).

    Fixed calibration images lose their meaning when cameras age and seasons change. The p-values p_t stay as they are,
    and the rate a_t that they are compared with is corrected after every image,

        alarm_t = 1{p_t <= a_t},   a_1 = alpha,   a_{t+1} = a_t + gamma (alpha - alarm_t)

    (Gibbs and Candes, Adaptive conformal inference under distribution shift, NeurIPS 2021). Since a_t never leaves
    [-gamma, 1 + gamma], the corrections cancel over time, whatever the stream does:

        |mean of alarm_1, ..., alarm_T - alpha| <= (max(alpha, 1 - alpha) + gamma) / (gamma T).

    This is a statement about all images of the stream. If a part of them is truly anomalous, their alarms count, too,
    so `alpha` should be above the share of anomalies that is expected. A sudden and lasting change raises alarms at
    first and becomes the new normal state later; `gepc.Monitor` reports such a change as a drift.

    Parameters
    ----------
    alpha : float
        The long-run share of images that raise an alarm.
    gamma : float
        The step of a correction. The rate follows a drift within about 1/gamma images.

    Attributes
    ----------
    rate : float
        a_t, the largest p-value of the next image that raises an alarm.
    seen : int
        How many images there were.
    alarms : int
        How many of them raised an alarm.

    See Also
    --------
    gepc.Monitor : watches a stream, with a fixed rate or with this one.

    Examples
    --------
    >>> from gepc.conformal.monitor import AdaptiveRate
    >>> adaptive = AdaptiveRate(alpha=0.1, gamma=0.02)
    >>> [adaptive.update(p) for p in (0.5, 0.05, 0.101)]
    [False, True, False]
    >>> round(adaptive.rate, 3)
    0.086
    """

    alpha: float = 0.05
    gamma: float = 0.005
    rate: float = field(init=False)
    seen: int = field(default=0, init=False)
    alarms: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_rates(alpha=self.alpha, gamma=self.gamma)
        self.rate = self.alpha

    def update(self, p_value: float) -> bool:
        """Take the p-value of the next image, and correct the rate.

        Parameters
        ----------
        p_value : float
            The p-value of the next image of the stream.

        Returns
        -------
        bool
            Whether this image raises an alarm.

        Examples
        --------
        >>> from gepc.conformal.monitor import AdaptiveRate
        >>> AdaptiveRate(alpha=0.1).update(0.05)
        True
        """
        alarm = p_value <= self.rate
        self.rate += self.gamma * (self.alpha - alarm)
        self.seen += 1
        self.alarms += alarm
        return alarm

    @property
    def bound(self) -> float:
        """The largest possible difference between the share of alarms so far and `alpha`, for any stream."""
        return (max(self.alpha, 1.0 - self.alpha) + self.gamma) / (self.gamma * max(1, self.seen))


class Monitor:
    """Watches a stream of scores for single alarms and for a drift of the stream.

    Parameters
    ----------
    calibration : a fitted detector, or its calibration scores.
    alpha : false-alarm rate of the decision on a single image.
    delta : the largest probability that `drifted` is ever true on a stream that has not drifted.
    window : how many of the last images the rolling alarm rate covers.
    jump : J, the share of the capital that is redistributed before each step.
    seed : seed of the random order of equal scores. None draws a new one for every stream, as the bound of `delta`
        needs where scores are equal; give a number to repeat the verdicts of a stream.
    group : for a detector fitted with groups, the group that the stream belongs to.
    adapt : if given, the step by which the rate of alarms follows a stream that drifts slowly, see
        `AdaptiveRate`: in the long run a share `alpha` of the images raises an alarm.

    See Also
    --------
    gepc.DecisionRule : decisions on images that are not a stream.

    Examples
    --------
    >>> import gepc
    >>> monitor = gepc.Monitor(range(99), alpha=0.05)
    >>> [monitor.update(score).alarm for score in (12.5, 140.0)]
    [False, True]
    >>> monitor.drifted
    False
    """

    def __init__(
        self,
        calibration: Any,
        alpha: float = 0.05,
        delta: float = 0.01,
        window: int = 200,
        jump: float = 0.01,
        seed: int | None = None,
        group: str | None = None,
        adapt: float | None = None,
    ) -> None:
        check_rates(delta=delta, jump=jump)
        if adapt is not None:
            check_rates(adapt=adapt)
        check_least(1, window=window)
        self.calibration = _scores_of(calibration, group)
        self.alpha, self.delta, self.window, self.jump, self.adapt = alpha, delta, window, jump, adapt
        self._given_seed = seed
        self._reference = CalibrationScores({UNGROUPED: self.calibration})
        self._rule = DecisionRule(alpha)
        self._rule.check(self._reference)
        self.reset()

    def reset(self) -> None:
        """Forget the stream: capital 1, no image seen.

        Examples
        --------
        >>> import gepc
        >>> monitor = gepc.Monitor(range(99), alpha=0.05)
        >>> verdict = monitor.update(140.0)
        >>> monitor.reset()
        >>> monitor.scores
        []
        """
        self.seed = secrets.randbits(63) if self._given_seed is None else self._given_seed
        self.scores: list[float] = []
        self.log_capital = 0.0
        self.drifted_at: int | None = None
        self._shares = np.full(len(BETS), 1.0 / len(BETS))
        self._past = self.calibration.tolist()
        self._recent: deque[bool] = deque(maxlen=self.window)
        self.adaptive = None if self.adapt is None else AdaptiveRate(self.alpha, self.adapt)

    def update(self, score: float, key: str = "") -> Verdict:
        """Take one more score of the stream, in order.

        Parameters
        ----------
        score : float
            The score of the image.
        key : str
            Tells the image from others with the same pixels, such as the time of its file. With a fixed `seed`, equal
            images in several streams are then ordered independently.

        Returns
        -------
        Verdict

        Examples
        --------
        >>> import gepc
        >>> verdict = gepc.Monitor(range(99), alpha=0.05).update(140.0)
        >>> verdict.p_value, verdict.alarm
        (0.01, True)
        """
        score = float(score)
        if not np.isfinite(score):
            position = len(self.scores) + 1
            raise InputError(f"score {position} of the stream is {score}; leave out images that could not be scored")
        self._bet(self._online_p_value(score, key))
        self.scores.append(score)
        if self.drifted_at is None and self.log_capital >= -np.log(self.delta):
            self.drifted_at = len(self.scores)
        p = float(self._reference.p_values(np.array([score]))[0])
        alarm = bool(self._rule.alarms(p, self._reference)) if self.adaptive is None else self.adaptive.update(p)
        self._recent.append(alarm)
        log10_capital = self.log_capital / float(np.log(10.0))
        return Verdict(len(self.scores), p, alarm, float(np.mean(self._recent)), log10_capital, self.drifted)

    def update_all(self, scores: Iterable[float]) -> list[Verdict]:
        """Take several scores of the stream, in order.

        Parameters
        ----------
        scores : floats
            The scores of the next images.

        Returns
        -------
        list of Verdict

        Examples
        --------
        >>> import gepc
        >>> [verdict.seen for verdict in gepc.Monitor(range(99)).update_all([12.5, 140.0])]
        [1, 2]
        """
        return [self.update(score) for score in scores]

    def _online_p_value(self, score: float, key: str = "") -> float:
        above = len(self._past) - bisect.bisect_right(self._past, score)
        equal = len(self._past) - above - bisect.bisect_left(self._past, score)
        uniform = generator(self.seed, key.encode(), "drift", len(self.scores)).random()
        bisect.insort(self._past, score)
        return float((above + uniform * (equal + 1)) / len(self._past))

    def _bet(self, p: float) -> None:
        shares = (1.0 - self.jump) * self._shares + self.jump / len(BETS)
        shares = shares * (1.0 + BETS * (p - 0.5))
        growth = float(shares.sum())
        self.log_capital += float(np.log(growth))
        self._shares = shares / growth

    @property
    def drifted(self) -> bool:
        """Whether the capital has reached 1/delta; on an unmoved stream this ever happens with probability <= delta."""
        return self.drifted_at is not None


def _scores_of(calibration: Any, group: str | None) -> npt.NDArray[np.float64]:
    """The calibration scores of a detector, of one of its groups, or as given; sorted."""
    reference = getattr(getattr(calibration, "fitted", calibration), "reference", None)
    if isinstance(reference, CalibrationScores):
        reference.check(None if group is None else np.array([group]))
        label = UNGROUPED if group is None else group
        condition = Guarantee.condition(len(reference.removed.get(label, ())))
        if condition:
            warnings.warn(f"the rates of alarms and of false drift hold only{condition}", stacklevel=3)
        calibration = reference.by_group[label]
    scores = np.sort(np.asarray(calibration, dtype=np.float64).ravel())
    if len(scores) == 0 or not np.isfinite(scores).all():
        raise InputError("a monitor needs finite calibration scores; give a fitted detector")
    return scores

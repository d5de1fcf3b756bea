"""Alarms in a stream whose normal state drifts slowly: a rate that follows the stream (adaptive conformal inference).

Fixed calibration images lose their meaning when cameras age and seasons change. The p-values p_t stay as they are, and
the rate a_t that they are compared with is corrected after every image,

    alarm_t = 1{p_t <= a_t},   a_1 = alpha,   a_{t+1} = a_t + gamma (alpha - alarm_t)

(Gibbs and Candes, Adaptive conformal inference under distribution shift, NeurIPS 2021). Since a_t never leaves
[-gamma, 1 + gamma], the corrections cancel over time, whatever the stream does:

    |mean of alarm_1, ..., alarm_T - alpha| <= (max(alpha, 1 - alpha) + gamma) / (gamma T).

This is a statement about all images of the stream. If a part of them is truly anomalous, their alarms count, too, so
`alpha` should be above the share of anomalies that is expected. A sudden and lasting change raises alarms at first and
becomes the new normal state later; `gepc.Monitor` reports such a change as a drift.
"""

from dataclasses import dataclass, field

from gepc.conformal.p_values import check_rates


@dataclass
class AdaptiveRate:
    """The rate of alarms that follows a stream.

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
    seen, alarms : int
        How many images there were, and how many of them raised an alarm.

    See Also
    --------
    gepc.Monitor : watches a stream, with a fixed rate or with this one.

    Examples
    --------
    >>> from gepc.conformal.adaptive import AdaptiveRate
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
        """Take the p-value of the next image; whether it raises an alarm."""
        alarm = p_value <= self.rate
        self.rate += self.gamma * (self.alpha - alarm)
        self.seen += 1
        self.alarms += alarm
        return alarm

    @property
    def bound(self) -> float:
        """The largest possible difference between the share of alarms so far and `alpha`."""
        return (max(self.alpha, 1.0 - self.alpha) + self.gamma) / (self.gamma * max(1, self.seen))

"""Error rates: the tolerance with which p-values are compared with them, and Holm's procedure for several tests."""

import numpy as np
import numpy.typing as npt

SLACK = 1.0 + 1e-12  # rates are compared up to rounding, so that 1 - 0.9 is a tenth


def left_out(contamination: float, count: int) -> int:
    """How many of `count` calibration images are left out for that share of outliers."""
    return int(contamination * count * SLACK)


def holm(p_values: npt.ArrayLike, alpha: float) -> npt.NDArray[np.bool_]:
    """Reject the smallest p-values while p_(k) <= alpha/(m + 1 - k) (Holm 1979).

    The probability that any true hypothesis is rejected is at most `alpha`, however the p-values depend on each other.

    Parameters
    ----------
    p_values : float array (m,)
        One p-value for each hypothesis.
    alpha : float
        The family-wise error rate.

    Returns
    -------
    bool array (m,)
        True where a hypothesis is rejected.

    Examples
    --------
    >>> from gepc.core.rates import holm
    >>> holm([0.01, 0.2, 0.03], 0.05).tolist()
    [True, False, False]
    """
    return holm_adjusted(p_values) <= alpha * SLACK


def holm_adjusted(p_values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The smallest family-wise rate at which Holm's procedure rejects each hypothesis.

    It is max_{j <= k} min(1, (m + 1 - j) p_(j)) for the k-th smallest of m p-values.

    Parameters
    ----------
    p_values : float array (m,)
        One p-value for each hypothesis.

    Returns
    -------
    float array (m,)

    Examples
    --------
    >>> from gepc.core.rates import holm_adjusted
    >>> holm_adjusted([0.01, 0.2, 0.03]).tolist()
    [0.03, 0.2, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, (len(p) - np.arange(len(p))) * p[order]))
    return adjusted

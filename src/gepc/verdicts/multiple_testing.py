"""Many verdicts at once: which images of a batch to flag so that few of the flags are false."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gepc.core.errors import OptionError, check_choice

Array = npt.NDArray[np.float64]
PROCEDURES = ("bh", "storey")


def benjamini_hochberg(p_values: npt.ArrayLike, fdr: float) -> npt.NDArray[np.bool_]:
    """Flag the k smallest p-values, k the largest with p_(k) <= fdr k / m.

    The expected share of false flags among the flags is at most fdr m_0/m. Conformal p-values that share one
    calibration set are positively dependent in the way this needs (Benjamini and Yekutieli 2001; Bates, Candes, Lei,
    Romano and Sesia, Testing for outliers with conformal p-values, Annals of Statistics 2023, theorem 2).
    """
    p = _check(p_values, fdr)
    m = len(p)
    order = np.argsort(p, kind="stable")
    below = p[order] <= fdr * np.arange(1, m + 1) / m * (1 + 1e-12)
    flags = np.zeros(m, dtype=bool)
    if below.any():
        flags[order[: int(np.flatnonzero(below)[-1]) + 1]] = True
    return flags


def storey(p_values: npt.ArrayLike, fdr: float, cutoff: float = 0.5) -> npt.NDArray[np.bool_]:
    """Benjamini-Hochberg at fdr / pi_0, where pi_0 = (1 + #{p > cutoff})/(m (1 - cutoff)) estimates the ID share.

    More flags than Benjamini-Hochberg when many images are out of distribution (Storey, Taylor and Siegmund 2004; for
    conformal p-values Bates et al. 2023, theorem 3, with this estimate of pi_0).
    """
    p = _check(p_values, fdr)
    if not 0.0 < cutoff < 1.0:
        raise OptionError(f"cutoff must be between 0 and 1, got {cutoff}")
    if len(p) == 0:
        return np.zeros(0, dtype=bool)
    share = (1.0 + float((p > cutoff).sum())) / (len(p) * (1.0 - cutoff))
    # flags beyond p = cutoff would count the same images as evidence for and against
    return benjamini_hochberg(p, min(fdr / share, 1.0 - 1e-12)) & (p <= cutoff)


def discoveries(p_values: npt.ArrayLike, fdr: float, procedure: str = "bh") -> npt.NDArray[np.bool_]:
    """Flags by the named procedure: `bh` or `storey`."""
    check_choice("procedure", procedure, PROCEDURES)
    return benjamini_hochberg(p_values, fdr) if procedure == "bh" else storey(p_values, fdr)


def _check(p_values: npt.ArrayLike, fdr: float) -> Array:
    p = np.asarray(p_values, dtype=np.float64).ravel()
    if not 0.0 < fdr < 1.0:
        raise OptionError(f"fdr is a share of false flags between 0 and 1, got {fdr}")
    if len(p) and not ((p >= 0.0) & (p <= 1.0)).all():
        raise OptionError("p-values must lie in [0, 1]")
    return p

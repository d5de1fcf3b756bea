"""Detection metrics with one meaning: OOD is the positive class, higher scores mean more OOD."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError

Array = npt.NDArray[np.float64]


def _check(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike) -> tuple[Array, Array]:
    pair = (np.asarray(id_scores, dtype=np.float64).ravel(), np.asarray(ood_scores, dtype=np.float64).ravel())
    for name, scores in zip(("ID", "OOD"), pair, strict=True):
        if len(scores) == 0:
            raise InputError(f"there are no {name} scores")
        if np.isnan(scores).any():
            raise InputError(f"{int(np.isnan(scores).sum())} {name} scores are NaN")
    return np.nan_to_num(pair[0]), np.nan_to_num(pair[1])  # infinite ones rank as the largest numbers there are


def auroc(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike) -> float:
    """P(OOD score > ID score) + P(equal)/2, by average ranks."""
    from scipy.stats import rankdata

    inside, outside = _check(id_scores, ood_scores)
    ranks = rankdata(np.concatenate([inside, outside]))
    n, m = len(inside), len(outside)
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))


def aupr(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike) -> float:
    """Average precision with OOD as the positive class; depends on the share of OOD images."""
    from sklearn.metrics import average_precision_score

    inside, outside = _check(id_scores, ood_scores)
    labels = np.concatenate([np.zeros(len(inside)), np.ones(len(outside))])
    return min(1.0, float(average_precision_score(labels, np.concatenate([inside, outside]))))


def fpr_at_tpr(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike, tpr: float = 0.95) -> float:
    """Share of ID images flagged at the highest threshold that flags at least `tpr` of the OOD images (FPR95)."""
    inside, outside = _check(id_scores, ood_scores)
    needed = int(np.ceil(tpr * len(outside) - 1e-9))
    limit = np.sort(outside)[::-1][needed - 1]
    return float((inside >= limit).mean())


def auroc_interval(
    id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike, confidence: float = 0.95
) -> tuple[float, float]:
    """Confidence interval of the AUROC by DeLong's variance, on the logit scale so that it stays inside (0, 1).

    The variance is 0 for sets that do not overlap. The interval is then the exact binomial one of min(n, m) independent
    pairs, which is conservative. With a single score of either kind it is (0, 1).
    """
    from scipy.stats import norm, rankdata

    inside, outside = _check(id_scores, ood_scores)
    n, m = len(inside), len(outside)
    value = auroc(inside, outside)
    if n < 2 or m < 2:
        return (0.0, 1.0)
    if value in (0.0, 1.0):
        away = 1.0 - (0.5 - confidence / 2) ** (1.0 / min(n, m))
        return (max(0.0, value - away), min(1.0, value + away))
    ranks = rankdata(np.concatenate([inside, outside]))
    over_id = (ranks[n:] - rankdata(outside)) / n
    under_ood = 1.0 - (ranks[:n] - rankdata(inside)) / m
    deviation = np.sqrt(over_id.var(ddof=1) / m + under_ood.var(ddof=1) / n)
    half = norm.ppf(0.5 + confidence / 2) * deviation / (value * (1 - value))
    logit = np.log(value / (1 - value))
    low, high = 1.0 / (1.0 + np.exp(-(logit + np.array([-half, half]))))
    return (float(low), float(high))


@dataclass(frozen=True)
class Detection:
    """How well scores separate two sets."""

    auroc: float
    auroc_low: float
    auroc_high: float
    aupr: float
    fpr95: float
    n_id: int
    n_ood: int


def detection(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike) -> Detection:
    """All metrics of one pair of sets."""
    inside, outside = _check(id_scores, ood_scores)
    low, high = auroc_interval(inside, outside)
    return Detection(
        auroc(inside, outside),
        low,
        high,
        aupr(inside, outside),
        fpr_at_tpr(inside, outside),
        len(inside),
        len(outside),
    )

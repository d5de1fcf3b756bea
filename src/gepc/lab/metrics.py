"""Detection metrics with one meaning: OOD is the positive class, higher scores mean more OOD."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.integrate import trapezoid
from scipy.ndimage import label
from scipy.stats import norm, rankdata

from gepc.core.errors import InputError

Array = npt.NDArray[np.float64]
Interval = tuple[float, float]
PRO_LIMIT = 0.3


def _check(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike) -> tuple[Array, Array]:
    pair = (np.asarray(id_scores, dtype=np.float64).ravel(), np.asarray(ood_scores, dtype=np.float64).ravel())
    for name, scores in zip(("ID", "OOD"), pair, strict=True):
        if len(scores) == 0:
            raise InputError(f"there are no {name} scores; give at least one")
        if np.isnan(scores).any():
            raise InputError(f"{name} scores are NaN: {np.isnan(scores).sum()}; leave out images without a score")
    return np.nan_to_num(pair[0]), np.nan_to_num(pair[1])  # infinite ones rank as the largest numbers there are


def auroc(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike) -> float:
    """Compute the AUROC: P(OOD score > ID score) + P(equal)/2, by average ranks.

    Parameters
    ----------
    id_scores, ood_scores : arrays (N,) and (M,)
        The scores of in-distribution and of out-of-distribution images.

    Returns
    -------
    float

    See Also
    --------
    detection : all metrics at once.

    Examples
    --------
    >>> from gepc.lab.metrics import auroc
    >>> auroc([0.1, 0.2, 0.3, 0.4], [0.35, 0.9])
    0.875
    """
    inside, outside = _check(id_scores, ood_scores)
    ranks = rankdata(np.concatenate([inside, outside]))
    n, m = len(inside), len(outside)
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))


def placements(inside: Array, outside: Array) -> tuple[Array, Array]:
    """For each ID image the share of OOD images above it, and for each OOD image the share of ID images below it."""
    n, m = len(inside), len(outside)
    ranks = rankdata(np.concatenate([inside, outside]))
    return 1.0 - (ranks[:n] - rankdata(inside)) / m, (ranks[n:] - rankdata(outside)) / n


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


def auroc_interval(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike, confidence: float = 0.95) -> Interval:
    """Confidence interval of the AUROC by DeLong's variance, on the logit scale so that it stays inside (0, 1).

    The variance is 0 for sets that do not overlap. The interval is then the exact binomial one of min(n, m) independent
    pairs, which is conservative. With a single score of either kind it is (0, 1).
    """
    inside, outside = _check(id_scores, ood_scores)
    n, m = len(inside), len(outside)
    value = auroc(inside, outside)
    if n < 2 or m < 2:
        return (0.0, 1.0)
    if value in (0.0, 1.0):
        away = 1.0 - (0.5 - confidence / 2) ** (1.0 / min(n, m))
        return (max(0.0, value - away), min(1.0, value + away))
    under_ood, over_id = placements(inside, outside)
    deviation = np.sqrt(over_id.var(ddof=1) / m + under_ood.var(ddof=1) / n)
    if deviation == 0.0:  # all scores are tied
        return (0.0, 1.0)
    half = norm.ppf(0.5 + confidence / 2) * deviation / (value * (1 - value))
    logit = np.log(value / (1 - value))
    low, high = 1.0 / (1.0 + np.exp(-(logit + np.array([-half, half]))))
    return (float(low), float(high))


@dataclass(frozen=True)
class Detection:
    """How well scores separate two sets.

    Attributes
    ----------
    auroc : the area under the ROC curve.
    auroc_low, auroc_high : the ends of its 95 % interval, by DeLong's method.
    aupr : the average precision, with out-of-distribution images as the positive class.
    fpr95 : the share of in-distribution images above the score that 95 % of the other images reach.
    n_id, n_ood : the numbers of images.

    Examples
    --------
    >>> from gepc.lab.metrics import detection
    >>> detection([0.1, 0.2, 0.3, 0.4], [0.35, 0.9]).n_ood
    2
    """

    auroc: float
    auroc_low: float
    auroc_high: float
    aupr: float
    fpr95: float
    n_id: int
    n_ood: int


def detection(id_scores: npt.ArrayLike, ood_scores: npt.ArrayLike) -> Detection:
    """Compute all metrics of one pair of sets.

    Parameters
    ----------
    id_scores, ood_scores : arrays (N,) and (M,)
        The scores of in-distribution and of out-of-distribution images.

    Returns
    -------
    Detection
        AUROC with its 95 % interval, AUPR, FPR95 and the numbers of images.

    Examples
    --------
    >>> from gepc.lab.metrics import detection
    >>> detection([0.1, 0.2, 0.3, 0.4], [0.35, 0.9]).fpr95
    0.25
    """
    pair = _check(id_scores, ood_scores)
    interval = auroc_interval(*pair)
    return Detection(auroc(*pair), *interval, aupr(*pair), fpr_at_tpr(*pair), len(pair[0]), len(pair[1]))


@dataclass(frozen=True)
class Localisation:
    """How well maps point at annotated regions."""

    auroc: Array  # for each image, P(a pixel inside has a larger map value than one outside), ties counting half
    hit: Array  # pointing game: for each image 1 if the map's maximum lies inside a region; ties are averaged
    # per-region overlap: mean share of a region above a threshold, averaged over the thresholds at which up to 30 % of
    # the pixels outside of all images are above it. 0.15 is chance, 1 is perfect.
    pro: float


def localisation(maps: Iterable[npt.NDArray[Any]], masks: Iterable[npt.NDArray[np.bool_]]) -> Localisation:
    """Compare maps (H, W), one for each image, with masks (H, W) that are true inside the annotated regions."""
    fields, inside = [np.asarray(one, dtype=np.float64) for one in maps], [np.asarray(one, bool) for one in masks]
    if [one.shape for one in fields] != [one.shape for one in inside] or any(one.ndim != 2 for one in fields):
        raise InputError("maps and masks must both be (H, W), as many of one as of the other")
    if not all(mask.any() and not mask.all() for mask in inside):
        raise InputError("an image without a region, or covered by one, cannot be used to measure localisation")
    if not all(np.isfinite(field).all() for field in fields):
        raise InputError("a map must be finite")
    pairs = list(zip(fields, inside, strict=True))
    return Localisation(
        np.array([auroc(field[~mask], field[mask]) for field, mask in pairs]),
        np.array([float(mask[field == field.max()].mean()) for field, mask in pairs]),
        region_overlap(fields, inside),
    )


def region_overlap(
    maps: Iterable[npt.NDArray[Any]], masks: Iterable[npt.NDArray[np.bool_]], limit: float = PRO_LIMIT
) -> float:
    """The per-region overlap of `Localisation.pro`, up to a share `limit` of the pixels outside.

    Regions are connected parts of the masks (8 neighbours); an image without one counts for the pixels outside.
    """
    pairs = list(zip(maps, masks, strict=True))
    outside = np.concatenate([field[~mask] for field, mask in pairs])
    shares, ordered = np.linspace(0.0, limit, 301), np.sort(outside)
    thresholds = np.quantile(ordered, 1.0 - shares)
    more, least = (1.0 - np.searchsorted(ordered, thresholds, side) / len(ordered) for side in ("right", "left"))
    ties = np.clip((shares - more) / np.maximum(least - more, 1e-300), 0.0, 1.0)  # the share of them that is above
    overlaps = []
    for field, mask in pairs:
        parts, count = label(mask, np.ones((3, 3)))
        for part in range(1, count + 1):
            values = np.sort(field[parts == part])
            above, at = (len(values) - np.searchsorted(values, thresholds, side) for side in ("right", "left"))
            overlaps.append((above + ties * (at - above)) / len(values))
    return min(1.0, float(trapezoid(np.mean(overlaps, axis=0), dx=1.0 / 300)))


def bootstrap_intervals(
    measure: Callable[..., npt.ArrayLike], samples: Sequence[Array], groups: Sequence[Sequence[str]], draws: int = 300
) -> list[Interval]:
    """95 % percentile bootstrap intervals of metrics of samples that come in groups, such as patches of images.

    Whole groups are drawn with replacement, as many as there are: intervals for independent values would be too narrow.
    `measure` returns the metrics of the samples, which are resampled independently of each other, such as ID and OOD
    scores; `groups` has for each sample the group of every value, and `draws` is the number of bootstrap samples.
    """
    rng = np.random.default_rng(0)
    members = [[np.flatnonzero(np.asarray(names) == name) for name in np.unique(names)] for names in groups]

    def resampled(values: Array, sets: list[npt.NDArray[np.int64]]) -> Array:
        return np.asarray(values[np.concatenate([sets[pick] for pick in rng.integers(0, len(sets), len(sets))])])

    found = [measure(*map(resampled, samples, members)) for _ in range(draws)]
    low, high = np.quantile(np.array(found, dtype=np.float64), [0.025, 0.975], axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]

"""Whether one detector is better than another on the same images: differences of AUROC with their significance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.bench.baselines import BaselineBench
from gepc.bench.collect import Keys
from gepc.bench.evaluate import Bench, Scores, ScoresOf
from gepc.core.tables import Cell, ResultTable
from gepc.scoring.metrics import auroc

Array = npt.NDArray[np.float64]
LEAST = float(np.finfo(np.float64).tiny)  # a p-value too small for a float is shown as this one, not as impossible
Pair = tuple[str, str]
Run = Mapping[str, Scores]


@dataclass(frozen=True)
class Contender:
    """A detector whose scores can be had on some of its images alone, fitted on those of ID-train."""

    label: str
    keys: Keys
    on_images: Callable[[Keys], ScoresOf]


def contenders(bench: Bench, baselines: Sequence[BaselineBench]) -> list[Contender]:
    """GEPC as the protocol has it, then every compared method."""

    def gepc(some: Keys) -> ScoresOf:
        smaller = bench.on_images(some)
        return lambda name, seed: smaller.scores(name, smaller.main, seed)

    return [Contender("GEPC", bench.collection.keys, gepc), *(_contender(one) for one in baselines)]


def _contender(found: BaselineBench) -> Contender:
    return Contender(found.baseline.label, found.collection.keys, lambda some: found.on_images(some).scores)


def paired_table(bench: Bench, baselines: Sequence[BaselineBench]) -> ResultTable:
    """The method with the highest average against each of the others, on the images that both have seen."""
    everyone = contenders(bench, baselines)
    average = {one.label: _average(_runs(bench, one, one.keys)) for one in everyone}
    leader, *others = sorted(everyone, key=lambda one: average[one.label], reverse=True)
    header = ("method", "train / test images", "average", leader.label, "is ahead by", "p", "pairs not behind")
    note = (
        "Both are fitted and tested on the same images. p: one-sided test of the average over all pairs and seeds, by "
        "DeLong's variance over the images; it says nothing of other data sets or backbones."
    )
    rows = tuple(_paired_row(bench, leader, other) for other in others)
    return ResultTable("paired", f"{leader.label} against every other method", header, rows, note)


def _paired_row(bench: Bench, leader: Contender, other: Contender) -> tuple[Cell, ...]:
    common = {place: min(leader.keys[place], other.keys[place], key=len) for place in leader.keys}
    first, second = _runs(bench, leader, common), _runs(bench, other, common)
    train, test = (max(len(keys) for place, keys in common.items() if place[1] == split) for split in ("train", "test"))
    not_behind = [mine >= theirs for mine, theirs in zip(_means(first), _means(second), strict=True)]
    averages, lead = (_average(second), _average(first)), advantage(first, second)
    return (other.label, f"{train} / {test}", *averages, *lead, f"{sum(not_behind)} of {len(not_behind)}")


def _runs(bench: Bench, one: Contender, keys: Keys) -> list[Run]:
    """For each seed: ID set -> scores."""
    scores = one.on_images(keys)
    return [{name: scores(name, seed) for name in bench.protocol.pairs} for seed in bench.protocol.seeds]


def _means(runs: Sequence[Run]) -> list[float]:
    """AUROC of every pair, averaged over seeds."""
    return [float(value) for value in np.mean([list(aurocs(run).values()) for run in runs], axis=0)]


def _average(runs: Sequence[Run]) -> float:
    return float(np.mean(_means(runs)))


def aurocs(run: Run) -> dict[Pair, float]:
    """AUROC of every pair."""
    return {
        (name, other): auroc(scores.inside, outside)
        for name, scores in run.items()
        for other, outside in scores.outside.items()
    }


def advantage(first: Sequence[Run], second: Sequence[Run]) -> tuple[float, float | None]:
    """By how much the first detector's average AUROC exceeds the second's, and the one-sided p-value.

    The average over pairs and seeds is a U-statistic in the images of each set. DeLong's variance adds up, over the
    sets, the variance of what each image contributes to the difference, in whichever pairs it takes part. None where
    no image contributes anything, as between a detector and itself.
    """
    from scipy.stats import norm

    mine, theirs = _contributions(first), _contributions(second)
    lead = _average(first) - _average(second)
    variance = sum(float((mine[name] - theirs[name]).var(ddof=1)) / len(mine[name]) for name in mine)
    if variance <= 0.0:
        return lead, None
    return lead, max(float(norm.sf(lead / np.sqrt(variance))), LEAST)


def _contributions(runs: Sequence[Run]) -> dict[str, Array]:
    """Test set -> what each of its images adds to the average AUROC, by its placements among the other sets."""
    pairs = sum(len(scores.outside) for scores in runs[0].values())
    found: dict[str, Array] = {}
    for run in runs:
        for name, scores in run.items():
            for other, outside in scores.outside.items():
                below, above = placements(scores.inside, outside)
                for place, share in ((name, below), (other, above)):
                    found[place] = found.get(place, np.zeros(len(share))) + share / (pairs * len(runs))
    return found


def placements(inside: Array, outside: Array) -> tuple[Array, Array]:
    """For each ID image the share of OOD images above it, and for each OOD image the share of ID images below it."""
    from scipy.stats import rankdata

    n, m = len(inside), len(outside)
    ranks = rankdata(np.concatenate([inside, outside]))
    return 1.0 - (ranks[:n] - rankdata(inside)) / m, (ranks[n:] - rankdata(outside)) / n

"""Sequential scoring: evaluate one level at a time and stop once the decision at a given alpha is clear.

Stage k uses the first k levels with a calibrator of its own, S_k. The first level is the one whose score alone ranks
the fitted images most like S_K of all levels (Spearman correlation). With the fitted images' median m_k and (1 - alpha)
quantile q_k,

    T_k = (S_k - m_k) / (q_k - m_k),

is 0 for a typical in-distribution image and 1 at the alarm threshold, at every stage. An image stops where T_k <= low_k
or T_k >= high_k, else at the last stage K; its score is T where it stopped. The limits stop as many images as possible
while, on the fitted images, at most a share `TOLERANCE` of the alarms of stage K is decided differently.

Once fitted, the rule is a fixed function of the image, and calibration images are scored by the same rule. The
false-alarm guarantee is therefore unaffected at every alpha.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, OptionError
from gepc.scoring.calibrators import Aggregation, Calibrator, create_calibrator, under

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Look = Callable[[Rows, int], Array]
"""(images, level position) -> their columns at that level, (rows, 1, features)."""

TOLERANCE = 0.1


@dataclass(frozen=True)
class Stage:
    """What is known after looking at one level more: the calibrator of all levels so far, and where to stop."""

    calibrator: Calibrator
    median: float
    limit: float
    low: float
    high: float

    def standardise(self, scores: Array) -> Array:
        """T = (S - m)/(q - m)."""
        return (scores - self.median) / (self.limit - self.median)


@dataclass(frozen=True)
class Sequential:
    """The stages, the order in which they look at the levels (positions), and the weights of the levels."""

    stages: tuple[Stage, ...]
    order: tuple[int, ...]
    weights: Array
    aggregation: Aggregation

    @classmethod
    def fit(
        cls,
        columns: Array,
        weights: Array,
        calibrate: Callable[[Array], Calibrator],
        aggregation: Aggregation,
        alpha: float,
    ) -> Sequential:
        """Stages from the columns (N, levels, features) of in-distribution images alone.

        Parameters
        ----------
        columns : the features of the images at the kept levels.
        weights : the weights of the levels.
        calibrate : returns a calibrator fitted on columns of some of the levels.
        aggregation : how scores are combined.
        alpha : the false-alarm rate to stop for.
        """

        def fitted(seen: list[int]) -> tuple[Calibrator, Array]:
            calibrator = calibrate(columns[:, seen])
            return calibrator, calibrator.score(columns[:, seen], weights[seen], aggregation)

        positions = range(columns.shape[1])
        alone = [fitted([position]) for position in positions]
        order = by_agreement([scores for _, scores in alone], fitted(list(positions))[1])
        later = (fitted(list(order[: position + 1])) for position in positions[1:])
        calibrators, scores = zip(alone[order[0]], *later, strict=True)
        medians = [float(np.median(score)) for score in scores]
        limits = [_limit(score, alpha) for score in scores]
        standard = [
            (score - median) / (limit - median) for score, median, limit in zip(scores, medians, limits, strict=True)
        ]
        borders = [_borders(score, standard[-1] > 1.0) for score in standard[:-1]] + [(np.inf, -np.inf)]
        stages = zip(calibrators, medians, limits, borders, strict=True)
        return cls(tuple(Stage(c, m, q, low, high) for c, m, q, (low, high) in stages), order, weights, aggregation)

    def score(self, count: int, look: Look) -> tuple[Array, npt.NDArray[np.int64]]:
        """T of `count` images, and how many levels each was looked at."""
        scores, levels = np.full(count, np.nan), np.zeros(count, dtype=np.int64)
        going = np.arange(count)
        found: Array | None = None
        for position, (stage, level) in enumerate(zip(self.stages, self.order, strict=True)):
            if len(going) == 0:
                break
            new = look(going, level)
            found = new if found is None else np.concatenate([found, new], axis=1)
            weights = self.weights[list(self.order[: position + 1])]
            value = stage.standardise(stage.calibrator.score(found, weights, self.aggregation))
            scores[going], levels[going] = value, position + 1
            undecided = ~((value <= stage.low) | (value >= stage.high))
            going, found = going[undecided], found[undecided]
        return scores, levels

    def score_columns(self, columns: Array) -> tuple[Array, npt.NDArray[np.int64]]:
        """The same of columns (N, levels, features) that are there already."""
        return self.score(len(columns), lambda rows, position: columns[rows][:, [position]])

    def scores_by_stage(self, columns: Array) -> list[Array]:
        """The scores of every stage, whether the decision was clear before or not."""
        found = []
        for position, stage in enumerate(self.stages):
            levels = list(self.order[: position + 1])
            scores = stage.calibrator.score(columns[:, levels], self.weights[levels], self.aggregation)
            found.append(stage.standardise(scores))
        return found

    def state(self) -> dict[str, Array]:
        """The fitted numbers by name."""
        borders = np.array([[stage.median, stage.limit, stage.low, stage.high] for stage in self.stages])
        arrays = {"order": np.asarray(self.order, dtype=np.float64), "borders": borders}
        for position, stage in enumerate(self.stages):
            arrays.update({f"{position}/{name}": value for name, value in stage.calibrator.state().items()})
        return arrays

    @classmethod
    def restore(cls, state: dict[str, Array], weights: Array, calibration: str, aggregation: Aggregation) -> Sequential:
        """Take a `state` back."""
        borders, count = state["borders"], len(weights)
        if borders.shape != (count, 4) or sorted(state["order"].tolist()) != list(range(count)):
            raise InputError(f"sequential: there must be four numbers and a position for each of {count} levels")
        if not np.isfinite(borders[:, :2]).all() or (borders[:, 0] >= borders[:, 1]).any():
            raise InputError("sequential: each median must be below its limit")
        stages = []
        for position, borders in enumerate(state["borders"]):
            calibrator = create_calibrator(calibration).restore(under(position, state))
            stages.append(Stage(calibrator, *(float(value) for value in borders)))
        return cls(tuple(stages), tuple(int(position) for position in state["order"]), weights, aggregation)


def check_alpha(alpha: float | None) -> None:
    """Refuse what is not a false-alarm rate below one half, where the median lies."""
    if alpha is not None and not 0.0 < alpha < 0.5:
        raise OptionError(f"sequential is the false-alarm rate to stop for, between 0 and 0.5; got {alpha}")


def by_agreement(alone: Sequence[Array], together: Array) -> tuple[int, ...]:
    """The levels, that whose scores rank images most like all levels together first; equal ones as they come."""
    final = _ranks(together)
    agreement = np.array([_ranks(scores) @ final for scores in alone])
    return tuple(int(position) for position in np.argsort(-agreement.round(9), kind="stable"))


def _ranks(scores: Array) -> Array:
    """Ranks about 0 with unit length, so that a product of two is Spearman's correlation; 0 where all scores tie."""
    from scipy.stats import rankdata

    ranks = rankdata(scores) - (len(scores) + 1) / 2
    length = float(np.linalg.norm(ranks))
    return np.asarray(ranks / length if length > 0.0 else ranks, dtype=np.float64)


def _limit(scores: Array, alpha: float) -> float:
    """The (1 - alpha) quantile, strictly above the median even where scores tie."""
    median = float(np.median(scores))
    limit = float(np.quantile(scores, 1.0 - alpha))
    return limit if limit > median else median + max(abs(median), 1.0) * 1e-9


def _borders(early: Array, alarm: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """(low, high): below and above them at most `TOLERANCE` of the final alarms would have gone the other way."""
    allowed = int(TOLERANCE * alarm.sum())
    lost = np.sort(early[alarm])
    false = np.sort(early[~alarm])[::-1]
    first = lost[allowed] if len(lost) > allowed else np.nextafter(np.median(early), np.inf)
    low = _gap_below(early, min(first, np.nextafter(1.0, np.inf)))
    if len(false) <= allowed:
        return low, np.inf
    return low, -_gap_below(-early, -max(false[allowed], np.nextafter(1.0, -np.inf)))


def _gap_below(values: Array, bound: float) -> float:
    """The middle between the values below `bound` and the others: no value is so near that rounding could move it."""
    below, others = values[values < bound], values[values >= bound]
    if len(below) == 0:
        return -np.inf
    return float((below.max() + others.min()) / 2) if len(others) else float(bound)

"""A calibrator for features of several kinds: each part has a calibrator of its own, and their scores are added."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from gepc.calibration.calibrators import Aggregation, Array, Calibrator, State, create_calibrator, register, under
from gepc.core.errors import InputError, OptionError

FOLDS = 3
LEAST_DISTANCE = 0.01
WIDE = 32


@register("parts")
class Parts(Calibrator):
    """Parts of the columns, each calibrated by itself: the sum of their standardised scores.

    With S_p(t) the score of part p at level t, in logarithms if it is a distance, and m_p(t), s_p(t) its mean and
    standard deviation over ID images that it was not fitted on,

        score = aggregate_t sum_p (S_p(t) - m_p(t)) / s_p(t).

    The ID images are divided into three folds; each is scored by calibrators fitted on the other two, which gives m and
    s. The calibrators used later are fitted on all of them. Distances below a hundredth of the median count as that:
    equal images, whose distance is 0, would dominate s. Without named parts, all columns are one part.

    Options
    -------
    narrow : the calibrator of a part with fewer than 32 columns.
    wide : the calibrator of any other part.
    """

    fitted: ClassVar[tuple[str, ...]] = ("least", "mean", "std")

    def __init__(self, narrow: str = "level_knn", wide: str = "level_pca") -> None:
        self.narrow, self.wide = narrow, wide
        for name in (narrow, wide):
            if not create_calibrator(name).by_level:
                raise OptionError(f"parts: {name!r} looks at all levels together; choose a calibrator of single levels")

    def _fit(self, columns: Array) -> None:
        self.widths_ = list(self.parts.values()) or [columns.shape[2]]
        if sum(self.widths_) != columns.shape[2]:
            raise InputError(f"the parts have {sum(self.widths_)} columns in all, the features {columns.shape[2]}")
        # folds by content rather than by position: the order of the images does not matter
        fold = np.empty(len(columns), dtype=np.int64)
        fold[np.argsort(columns[:, 0, 0], kind="stable")] = np.arange(len(columns)) % FOLDS
        held_out = np.empty((*columns.shape[:2], len(self.widths_)))
        for number in range(FOLDS):
            mine = fold == number
            held_out[mine] = self._scores(self._models(columns[~mine]), columns[mine])
        self.models_ = self._models(columns)
        distances = [model.is_distance for model in self.models_]
        self.least_ = np.where(distances, LEAST_DISTANCE * np.nanmedian(held_out, axis=0), 0.0)
        held_out = self._logarithms(held_out)
        self.mean_, self.std_ = np.nanmean(held_out, axis=0), np.nanstd(held_out, axis=0)

    def _models(self, columns: Array) -> list[Calibrator]:
        return [self._new(part.shape[2]).fit(part) for part in self._split(columns)]

    def _new(self, width: int) -> Calibrator:
        return create_calibrator(self.narrow if width < WIDE else self.wide)

    def _split(self, columns: Array) -> list[Array]:
        return np.split(columns, np.cumsum(self.widths_)[:-1], axis=2)

    def _scores(self, models: Sequence[Calibrator], columns: Array) -> Array:
        """The score of each part, (N, levels, parts)."""
        scores = [model.per_level(part) for model, part in zip(models, self._split(columns), strict=True)]
        return np.stack(scores, axis=2)

    def _logarithms(self, scores: Array) -> Array:
        """S_p(t): logarithms of distances, which are the parts with a least value; other scores as they are."""
        is_distance = self.least_ > 0.0
        return np.where(is_distance, np.log(np.maximum(scores, np.where(is_distance, self.least_, 1e-300))), scores)

    def by_part(self, columns: Array) -> Array:
        """(S_p(t) - m_p(t))/s_p(t), (N, levels, parts): how unusual an image is in each part."""
        scores = self._logarithms(self._scores(self.models_, columns))
        return np.asarray((scores - self.mean_) / self.std_)

    def _score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        return aggregation(self.by_part(columns), weights)

    def state(self) -> State:
        arrays = {**super().state(), "widths": np.asarray(self.widths_, dtype=np.float64)}
        for place, model in enumerate(self.models_):
            arrays.update({f"{place}/{name}": value for name, value in model.state().items()})
        return arrays

    def restore(self, state: State) -> Calibrator:
        super().restore(state)
        self.widths_ = [int(width) for width in state["widths"]]
        self.models_ = [self._new(width).restore(under(place, state)) for place, width in enumerate(self.widths_)]
        return self

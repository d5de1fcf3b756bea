"""Several tests of an image at one false-alarm rate: a tail probability for each, and rules that combine them.

A test is a part of the columns with a calibrator of its own, whose score S_p is higher for unusual images. From ID
images that the calibrator was not fitted on follow the tail probability p_p = P(S_p >= s) and the combinations

    fisher     sum_p w_p (-log p_p)                 evidence adds up, and a usual part takes nothing away
    minimum    max_p (log w_p - log p_p)            the most unusual part decides
    cauchy     arsinh sum_p w_p cot(pi p_p)         after Liu & Xie, JASA 115, 2020; p_p at most 1/2
    positive   sum_p w_p max(0, z_p)^2              z_p the normal score of p_p

All of them are increasing in every S_p. The combination is fixed before the calibration scores are computed, so the
conformal p-value of the combined score is exactly valid, whatever the rule and however the parts depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from scipy.special import log_ndtr, logsumexp, ndtri_exp

from gepc.calibration.calibrators import Aggregation, Array, Calibrator, State, create_calibrator, register, under
from gepc.calibration.scorer import Scorer, Selection
from gepc.core.errors import InputError, OptionError, check_choice
from gepc.core.parts import Part

RULES = ("fisher", "minimum", "cauchy", "positive")
FOLDS = 3
LEAST_DISTANCE = 0.01
WIDE = 32
GRID = np.linspace(0.0, 1.0, 101)
TAIL = 0.2  # the share of ID scores in the tail, beyond which probabilities are extrapolated
LARGEST_SHAPE = 0.5
FAR = 30.0  # -log p from which cot(pi p) is 1/(pi p)


def combine_parts(evidence: Any, rule: str, weights: Array | None = None) -> Any:
    """Combine the parts, which are the last axis.

    Parameters
    ----------
    evidence : -log p_p of every part.
    rule : `fisher`, `minimum`, `cauchy` or `positive`; see `gepc.calibration.evidence` for the formulas.
    weights : w_p; all 1 by default.

    Returns
    -------
    The combination, without the last axis; higher is more unusual.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.calibration.evidence import combine_parts
    >>> both, first = -np.log([0.05, 0.05]), -np.log([0.05, 0.9])
    >>> bool(combine_parts(both, "fisher") > combine_parts(first, "fisher"))
    True
    >>> bool(combine_parts(both, "minimum") == combine_parts(first, "minimum"))
    True
    """
    check_choice("rule", rule, RULES)
    if rule == "minimum":
        return (evidence if weights is None else evidence + np.log(weights)).max(axis=-1)
    weights = np.ones(evidence.shape[-1]) if weights is None else weights
    if rule == "cauchy":
        return _cauchy(evidence, weights)
    if rule == "positive":
        evidence = np.maximum(-ndtri_exp(-np.maximum(evidence, 1e-300)), 0.0) ** 2
    return (weights * evidence).sum(axis=-1)


def _cauchy(evidence: Array, weights: Array) -> Array:
    """arsinh sum_p w_p cot(pi p_p), where cot(pi p) is 1/(pi p) for tiny p, in logarithms for the smallest."""
    near = 1.0 / np.tan(np.pi * np.exp(-np.clip(evidence, np.log(2.0), FAR)))
    with np.errstate(divide="ignore"):  # log 0 where p is a half or more
        logarithms = np.where(evidence > FAR, evidence - np.log(np.pi), np.log(np.maximum(near, 0.0)))
    total = logsumexp(logarithms, b=weights, axis=-1)
    return np.asarray(np.where(total > FAR, np.log(2.0) + total, np.arcsinh(np.exp(np.minimum(total, FAR)))))


class Tails:
    """P(S >= s) and P(S <= s) from ID scores (N, levels, parts): quantiles, and generalised Pareto tails.

    Beyond the 0.8 quantile u the excess has P(S - u >= y) = (1 + k y/a)^(-1/k), exp(-y/a) for k = 0. Scale a and shape
    k follow from the L-moments l1, l2 of the excesses, k = 2 - l1/l2 and a = l1 (1 - k) (Hosking & Wallis 1987). With k
    between 0 and 0.5, the probability falls strictly and never ends at 0, so that far outliers keep their order.
    """

    def __init__(self, quantiles: Array, tails: Array) -> None:
        self.quantiles, self.tails = quantiles, tails  # (101, levels, parts) and (side, scale and shape, levels, parts)

    @classmethod
    def of(cls, scores: Array) -> Tails:
        """Learn from scores; NaN entries are left out."""
        tails = np.empty((2, 2, *scores.shape[1:]))
        for level, part in np.ndindex(scores.shape[1:]):
            own = scores[:, level, part]
            for side, values in enumerate((own, -own)):
                tails[side, :, level, part] = _pareto(values[~np.isnan(values)])
        return cls(np.nanquantile(scores, GRID, axis=0), tails)

    def evidence(self, scores: Array, left: Array) -> Array:
        """-log p of every score; `left` (parts,) is the share of the rate that the left tail gets, 0 for right-sided.

        p = min(P(S >= s)/(1 - left), P(S <= s)/left), at most 1.
        """
        out = np.full(scores.shape, np.nan)
        for level, part in np.ndindex(scores.shape[1:]):
            values, quantiles = scores[:, level, part], self.quantiles[:, level, part]
            out[:, level, part] = _surprise(values, quantiles, *self.tails[0, :, level, part]) + np.log1p(-left[part])
            if left[part] > 0.0:
                low = _surprise(-values, -quantiles[::-1], *self.tails[1, :, level, part]) + np.log(left[part])
                out[:, level, part] = np.maximum(out[:, level, part], low)
        return np.asarray(np.maximum(out, 0.0))


def _pareto(values: Array) -> tuple[float, float]:
    """Scale and shape of the excesses over the 0.8 quantile."""
    limit = np.quantile(values, 1.0 - TAIL)
    excess = np.sort(values[values > limit] - limit)
    if len(excess) < 2 or excess[-1] <= 0.0:
        return max(float(values.std()), 1e-12), 0.0
    l1 = float(excess.mean())
    l2 = 2.0 * float((np.arange(len(excess)) / (len(excess) - 1) * excess).mean()) - l1
    shape = min(max(2.0 - l1 / max(l2, 1e-300), 0.0), LARGEST_SHAPE)
    return l1 * (1.0 - shape), shape


def _surprise(values: Array, quantiles: Array, scale: float, shape: float) -> Array:
    """-log P(S >= s): interpolated between quantiles, and a generalised Pareto tail beyond the 0.8 quantile."""
    limit = np.interp(1.0 - TAIL, GRID, quantiles)
    body = -np.log(np.maximum(1.0 - np.interp(values, quantiles, GRID), TAIL))
    excess = np.maximum(values - limit, 0.0) / scale
    beyond = np.log1p(shape * excess) / shape if shape > 1e-6 else excess
    return np.asarray(np.where(values > limit, beyond - np.log(TAIL), body))


@register("evidence")
class Evidence(Calibrator):
    """Parts of the columns, each calibrated by itself, whose tail probabilities are combined by a rule.

    With S_p(t) the score of part p at level t, in logarithms if it is a distance, and p_p(t) its tail probability,

        score = aggregate_t rule_p(p_p(t)).

    The ID images are divided into three folds; each is scored by calibrators fitted on the other two, which gives the
    tails. The calibrators used later are fitted on all of them. Distances below a hundredth of the median count as
    that: equal images, whose distance is 0, would dominate. Without named parts, all columns are one part.

    Options
    -------
    rule : how the parts are combined; see `gepc.calibration.evidence`.
    narrow : the calibrator of a part with fewer than 32 columns.
    wide : the calibrator of any other part.
    left : the share of the rate that the left tail of a wide part gets: 0 is right-sided, 0.5 two-sided.
    whole : the weight of a part that is not a view of another one.
    view : the weight of a part whose columns are also in another part; 0 leaves it out.

    See Also
    --------
    gepc.Detector.explain : the tail probability of each part of an image's score.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.calibration import Aggregation, Evidence
    >>> from gepc.core.parts import Part
    >>> columns = np.random.default_rng(0).standard_normal((90, 1, 4))
    >>> model = Evidence().fit(columns, [Part.of("colour", [0, 1]), Part.of("texture", [2, 3])])
    >>> scores, p_values = model.explained(np.array([[[0.0, 0.0, 6.0, 6.0]]]), np.ones(1), Aggregation())
    >>> min(p_values, key=p_values.get)
    'texture'
    """

    fitted: ClassVar[tuple[str, ...]] = ("least", "quantiles", "tails")
    uses_fuse: ClassVar[bool] = False

    def __init__(
        self,
        rule: str = "fisher",
        narrow: str = "level_mahalanobis",
        wide: str = "level_lof",
        left: float = 0.0,
        whole: float = 1.0,
        view: float = 0.25,
    ) -> None:
        check_choice("rule", rule, RULES)
        self.rule, self.narrow, self.wide = rule, narrow, wide
        self.left, self.whole, self.view = left, whole, view
        if not 0.0 <= left < 1.0 or min(whole, view) < 0.0:
            raise OptionError(f"{self.name}: left is a share below 1, and weights are at least 0: {left, whole, view}")
        for name in (narrow, wide):
            if not create_calibrator(name).by_level:
                raise OptionError(f"{self.name}: {name!r} looks at all levels together; choose one of single levels")

    @property
    def stored_parts(self) -> tuple[Part, ...]:
        return self.parts

    @property
    def used(self) -> list[Part]:
        """The parts with a positive weight; all columns are one part where none is named or has a weight."""
        used = [part for part in self.parts if self._of_kind(part) > 0.0]
        return used or [Part.of("all", range(self.bounds_.shape[2]))]

    def _of_kind(self, part: Part) -> float:
        return self.view if part.view else self.whole

    def weight_of(self, part: Part) -> float:
        """w_p of a part in `used`. The part of all columns counts fully, even if `whole` is 0."""
        return part.weight * (self._of_kind(part) or 1.0)

    def _fit(self, columns: Array) -> None:
        if max(int(part.columns.max()) for part in self.used) >= columns.shape[2]:
            raise InputError(f"the parts name more columns than the {columns.shape[2]} of the features")
        # folds by content rather than by position, also if the first column is constant: the order does not matter
        fold = np.empty(len(columns), dtype=np.int64)
        fold[np.lexsort((np.nansum(columns, axis=(1, 2)), columns[:, 0, 0]))] = np.arange(len(columns)) % FOLDS
        held_out = np.empty((*columns.shape[:2], len(self.used)))
        for number in range(FOLDS):
            mine = fold == number
            held_out[mine] = self._scores(self._models(columns[~mine]), columns[mine])
        self.models_ = self._models(columns)
        distances = [model.is_distance for model in self.models_]
        self.least_ = np.where(distances, LEAST_DISTANCE * np.nanmedian(held_out, axis=0), 0.0)
        self._learn(self._logarithms(held_out))

    def _learn(self, held_out: Array) -> None:
        tails = Tails.of(held_out)
        self.quantiles_, self.tails_ = tails.quantiles, tails.tails

    def _models(self, columns: Array) -> list[Calibrator]:
        return [self._new(part).fit(columns[:, :, part.columns]) for part in self.used]

    def _new(self, part: Part) -> Calibrator:
        if part.scoring is not None:
            return Whole(part)
        return create_calibrator(self.narrow if len(part.columns) < WIDE else self.wide)

    def _scores(self, models: Sequence[Calibrator], columns: Array) -> Array:
        """The score of each part, (N, levels, parts)."""
        pairs = zip(models, self.used, strict=True)
        return np.stack([model.per_level(columns[:, :, part.columns]) for model, part in pairs], axis=2)

    def _logarithms(self, scores: Array) -> Array:
        """S_p(t): logarithms of distances, which are the parts with a least value; other scores as they are."""
        is_distance = self.least_ > 0.0
        return np.where(is_distance, np.log(np.maximum(scores, np.where(is_distance, self.least_, 1e-300))), scores)

    def standing(self, columns: Array) -> Array:
        """What the score combines, (N, levels, parts): here -log p_p(t)."""
        wide = np.array([len(part.columns) >= WIDE and part.scoring is None for part in self.used])
        scores = self._logarithms(self._scores(self.models_, columns))
        return Tails(self.quantiles_, self.tails_).evidence(scores, np.where(wide, self.left, 0.0))

    def _surprise(self, standing: Array) -> Array:
        """-log p_p(t) of a `standing`."""
        return standing

    def _combined(self, standing: Array, weights: Array, aggregation: Aggregation) -> Array:
        """The score of a `standing`."""
        of_parts = np.array([self.weight_of(part) for part in self.used])
        return aggregation(combine_parts(standing, self.rule, of_parts)[:, :, None], weights)

    def _score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        return self._combined(self.standing(columns), weights, aggregation)

    def explained(self, columns: Array, weights: Array, aggregation: Aggregation) -> tuple[Array, dict[str, Array]]:
        """The scores, and the tail probability of each part: its geometric mean over the levels, by their weights."""
        standing = self.standing(self._checked(columns))
        surprise = self._surprise(standing)
        means = [Aggregation()(surprise[:, :, [position]], weights) for position in range(surprise.shape[2])]
        p_values = {part.name: np.exp(-mean) for part, mean in zip(self.used, means, strict=True)}
        return self._combined(standing, weights, aggregation), p_values

    def state(self) -> State:
        arrays = super().state()
        for position, model in enumerate(self.models_):
            arrays.update({f"{position}/{name}": value for name, value in model.state().items()})
        return arrays

    def restore(self, state: State) -> Calibrator:
        super().restore(state)
        self.models_ = [self._new(part).restore(under(position, state)) for position, part in enumerate(self.used)]
        return self


class Whole(Calibrator):
    """The scorer of a part that has one of its own: all levels of one method, one score per image."""

    name = "whole"

    def __init__(self, part: Part) -> None:
        self.part, self.scorer = part, Scorer(**(part.scoring or {}))

    def _shaped(self, columns: Array) -> Array:
        return columns.reshape(len(columns), self.part.levels, -1)

    def _fit(self, columns: Array) -> None:
        self.scorer.fit(self._shaped(columns), parts=self.part.parts)

    def per_level(self, columns: Array) -> Array:
        return self.scorer.score(self._shaped(columns))[:, None]

    def _score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        return self.per_level(columns)[:, 0]

    def state(self) -> State:
        selection = self.scorer.selection_
        kept = np.asarray(selection.kept, dtype=np.float64)
        arrays = {"kept": kept, "weights": selection.weights, "cv": selection.cv}
        return {**super().state(), **self.scorer.state(), **arrays}

    def restore(self, state: State) -> Calibrator:
        super().restore(state)
        kept = tuple(int(position) for position in state["kept"])
        self.scorer.restore(Selection(kept, state["weights"], state["cv"]), state, self.part.parts)
        return self


@register("parts")
class Parts(Evidence):
    """The combination of version 0.2: the sum of the standardised scores of all parts that are not views.

        score = aggregate_t sum_p (S_p(t) - m_p(t)) / s_p(t)

    with m_p(t), s_p(t) the mean and the standard deviation over held-out ID images. The options `narrow` and
    `wide` are those of `Evidence`.
    """

    fitted: ClassVar[tuple[str, ...]] = ("least", "mean", "std")
    uses_fuse: ClassVar[bool] = True

    def __init__(self, narrow: str = "level_knn", wide: str = "level_pca") -> None:
        super().__init__(narrow=narrow, wide=wide, view=0.0)

    def _learn(self, held_out: Array) -> None:
        self.mean_, self.std_ = np.nanmean(held_out, axis=0), np.nanstd(held_out, axis=0)

    def standing(self, columns: Array) -> Array:
        """What the score combines, (N, levels, parts): here (S_p(t) - m_p(t))/s_p(t)."""
        scores = self._logarithms(self._scores(self.models_, columns))
        return np.asarray((scores - self.mean_) / self.std_)

    def _surprise(self, standing: Array) -> Array:
        """-log p_p(t) of normal tails."""
        return np.asarray(-log_ndtr(-standing))

    def _combined(self, standing: Array, weights: Array, aggregation: Aggregation) -> Array:
        return aggregation(standing, weights)

    def state(self) -> State:
        return {**super().state(), "widths": np.array([len(part.columns) for part in self.used], dtype=np.float64)}

    def restore(self, state: State) -> Calibrator:
        """Version 0.2 stored the widths of the parts, which follow one another, and no names."""
        if not self.parts:
            ends = np.cumsum(state["widths"]).astype(np.int64)
            runs = zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)
            self.parts = tuple(Part.of(f"columns {first} to {end - 1}", range(first, end)) for first, end in runs)
        return super().restore(state)

"""What a calibrator is, how its numbers are aggregated, and the calibrators by name."""

from __future__ import annotations

import inspect
import typing
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import yaml

from gepc.core.errors import InputError, OptionError, check_choice, check_names
from gepc.core.options import coerce
from gepc.core.parts import Part

Array = npt.NDArray[np.float64]
State = dict[str, npt.NDArray[Any]]

BEYOND = 10.0
FUSIONS = ("sum", "mean", "max")
AGGREGATIONS = ("wmean", "mean", "max", "min", "trimmed")
TRIM = 0.25


@dataclass(frozen=True)
class Aggregation:
    """How scores per (level, feature) become one: first over features, then over levels.

    Levels at which an image was not evaluated (NaN) are left out.

    Parameters
    ----------
    over_features : `sum`, `mean` or `max`.
    over_levels : `wmean` with the weights of the selection, `mean`, `max`, `min`, or `trimmed`, the mean without the
        lowest and highest quarter.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.calibration import Aggregation
    >>> values = np.array([[[1.0, 2.0], [5.0, 5.0]]])  # one image, two levels, two features
    >>> Aggregation()(values, np.array([0.75, 0.25])).tolist()
    [4.75]
    >>> Aggregation("max", "min")(values, np.array([0.75, 0.25])).tolist()
    [2.0]
    """

    over_features: str = "sum"
    over_levels: str = "wmean"

    def __post_init__(self) -> None:
        check_choice("fuse", self.over_features, FUSIONS)
        check_choice("aggregate", self.over_levels, AGGREGATIONS)

    def check_used_by(self, calibrator: Calibrator) -> None:
        """Refuse a choice that the calibrator ignores because it models levels or features together."""
        default = Aggregation()
        name = calibrator.name
        if not calibrator.uses_fuse and self.over_features != default.over_features:
            raise OptionError(f"fuse={self.over_features!r} has no effect with calibration {name!r}; leave it out")
        if not calibrator.uses_aggregate and self.over_levels != default.over_levels:
            raise OptionError(f"aggregate={self.over_levels!r} has no effect with calibration {name!r}; leave it out")

    def __call__(self, values: Array, weights: Array) -> Array:
        """Aggregate scores.

        Parameters
        ----------
        values : float array (N, levels, features)
            The scores; NaN at levels that an image was not evaluated at.
        weights : float array (levels,)
            The weights of the levels.

        Returns
        -------
        float array (N,)
        """
        per_level = np.asarray(getattr(values, self.over_features)(axis=2))
        if self.over_levels in ("max", "min"):
            return np.asarray((np.nanmax if self.over_levels == "max" else np.nanmin)(per_level, axis=1))
        seen = _without_extremes(per_level) if self.over_levels == "trimmed" else ~np.isnan(per_level)
        share = seen * (weights if self.over_levels == "wmean" else 1.0)
        return np.asarray((np.where(seen, per_level, 0.0) * share).sum(axis=1) / share.sum(axis=1))


def _without_extremes(values: Array) -> npt.NDArray[np.bool_]:
    """Mask of what the trimmed mean keeps in each row; NaN sorts last and is never kept."""
    order = np.argsort(np.argsort(values, axis=1, kind="stable"), axis=1)
    count = (~np.isnan(values)).sum(axis=1, keepdims=True)
    cut = np.floor(TRIM * count)
    return np.asarray((order >= cut) & (order < count - cut))


class Calibrator(ABC):
    """Fitted on in-distribution columns (N, levels, features); scores others.

    NaN means that an image was not evaluated at a level. An infinite value means that the method failed: it is
    replaced by the largest in-distribution value plus `BEYOND` standard deviations (for minus infinity, by the
    smallest minus as many), with a warning. In in-distribution columns it is an error.

    A subclass gives `fitted`, `_fit` and `_score`, and `per_level` if it calibrates levels one by one; the arguments of
    its constructor are its options.
    """

    name: ClassVar[str]
    fitted: ClassVar[tuple[str, ...]] = ()  # names of the arrays that `_fit` sets, without the underscore at their end
    uses_fuse: ClassVar[bool] = True  # whether scores of single features are combined afterwards
    uses_aggregate: ClassVar[bool] = True  # whether scores of single levels are combined afterwards
    is_distance: ClassVar[bool] = False  # whether scores are positive, with a long tail
    bounds_: Array
    parts: tuple[Part, ...] = ()  # the columns that belong together

    def fit(self, columns: Array, parts: Iterable[Part] = ()) -> Calibrator:
        """Learn from in-distribution columns (N, levels, features), with their `parts`; returns self."""
        self.parts = tuple(parts)
        if np.isinf(columns).any():
            raise InputError("a feature of the in-distribution images is not finite; check the backbone and the images")
        beyond = BEYOND * np.nanstd(columns, axis=0)
        self.bounds_ = np.stack([np.nanmin(columns, axis=0) - beyond, np.nanmax(columns, axis=0) + beyond])
        self._fit(columns)
        return self

    def score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        """(N, levels, features) -> (N,), higher = more OOD."""
        return self._score(self._checked(columns), weights, aggregation)

    def explained(self, columns: Array, weights: Array, aggregation: Aggregation) -> tuple[Array, dict[str, Array]]:
        """The scores as in `score`, and the tail probability of each part by name, (N,).

        A calibrator without parts has no tail probabilities.
        """
        return self.score(columns, weights, aggregation), {}

    def per_level(self, columns: Array) -> Array:
        """The score of each level by itself, (N, levels)."""
        raise OptionError(f"the calibrator {self.name!r} looks at all levels together")

    @property
    def stored_parts(self) -> tuple[Part, ...]:
        """The parts that `restore` needs beside the arrays; none for most calibrators."""
        return ()

    @property
    def by_level(self) -> bool:
        """Whether the calibrator has a score for each level by itself."""
        return type(self).per_level is not Calibrator.per_level

    def state(self) -> State:
        """The fitted arrays by name."""
        return {name: np.asarray(getattr(self, f"{name}_")) for name in ("bounds", *self.fitted)}

    def restore(self, state: State) -> Calibrator:
        """Take a `state` back; returns self."""
        for name in ("bounds", *self.fitted):
            setattr(self, f"{name}_", state[name])
        return self

    def _checked(self, columns: Array) -> Array:
        """The columns, which must be as many as in fitting, with bounds instead of infinite values."""
        if columns.shape[2] != self.bounds_.shape[2]:
            given, fitted = columns.shape[2], self.bounds_.shape[2]
            raise InputError(f"the images have {given} feature columns, but the calibrator was fitted on {fitted}")
        broken = np.isinf(columns)
        if not broken.any():
            return columns
        message = f"{int(broken.sum())} features are infinite and count as beyond every in-distribution value"
        warnings.warn(message, UserWarning, stacklevel=4)
        low, high = self.bounds_
        return np.where(broken, np.where(columns > 0, high, low), columns)

    @abstractmethod
    def _fit(self, columns: Array) -> None:
        """Learn from finite columns."""

    @abstractmethod
    def _score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        """Score finite columns."""


def under(prefix: object, state: State) -> State:
    """The arrays stored as `prefix/name`, by name: the state of a part."""
    start = f"{prefix}/"
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}


C_ = TypeVar("C_", bound=type[Calibrator])
_CALIBRATORS: dict[str, type[Calibrator]] = {}


def register(*names: str) -> Callable[[C_], C_]:
    """Class decorator: make a calibrator known by name; further names are aliases."""

    def add(cls: C_) -> C_:
        taken = [name for name in names if name in _CALIBRATORS]
        if taken:
            raise OptionError(f"a calibrator named {taken[0]!r} exists already")
        cls.name = names[0]
        _CALIBRATORS.update(dict.fromkeys(names, cls))
        return cls

    return add


def list_calibrators() -> list[str]:
    """Names of the calibrators."""
    return sorted(_CALIBRATORS)


def create_calibrator(text: str) -> Calibrator:
    """An unfitted calibrator by name, with options after a colon: `kde`, `knn:k=1`, `kde:bandwidth=5`."""
    name, _, tail = text.partition(":")
    check_choice("calibration", name, _CALIBRATORS)
    return _CALIBRATORS[name](**_options(_CALIBRATORS[name], name, tail))


def _options(cls: type[Calibrator], name: str, text: str) -> dict[str, object]:
    """`key=value,key=value` as keyword arguments, each of the annotated type."""
    if not text:
        return {}
    given = dict(part.partition("=")[::2] for part in text.split(","))
    check_names(f"calibration {name!r}", given, list(inspect.signature(cls).parameters))
    hints = typing.get_type_hints(cls.__init__)
    return {key: coerce(hints[key], yaml.safe_load(value), f"{name}: {key}") for key, value in given.items()}


def check_varies(columns: Array) -> None:
    """Refuse a column that is the same for every ID image."""
    spread = np.nanstd(columns, axis=0)
    scale = np.nanmean(np.abs(columns), axis=0)
    if (spread <= 1e-12 * scale).any():
        reason = "the images are all alike, or the backbone is exactly equivariant under this group"
        raise InputError(f"a feature is constant over the in-distribution images: {reason}")

"""What a calibrator is, and the calibrators by name."""

from __future__ import annotations

import inspect
import typing
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, OptionError, check_names, nearest
from gepc.scoring.aggregation import Aggregation

if TYPE_CHECKING:
    from typing_extensions import Self

Array = npt.NDArray[np.float64]
State = dict[str, Array]

BEYOND = 10.0


class Calibrator(ABC):
    """Fitted on ID columns (N, levels, features); scores others. `state` is what a saved detector keeps.

    NaN in a column means that the image was not evaluated at that level. An infinite value means that the method broke
    down on the image: it counts as the worst ID value and `BEYOND` standard deviations more (below the least one for
    minus infinity), with a warning, and `replaced` counts how many there were. In ID columns it is an error.

    A subclass gives `_fit`, `_score`, `_state` and `_restore`; the arguments of its constructor are its options.
    """

    name: ClassVar[str]
    bounds_: Array
    replaced = 0

    def fit(self, columns: Array) -> Self:
        """Learn from in-distribution columns; returns self."""
        if np.isinf(columns).any():
            raise InputError("a feature of the in-distribution images is not finite; check the backbone and the images")
        beyond = BEYOND * np.nanstd(columns, axis=0)
        self.bounds_ = np.stack([np.nanmin(columns, axis=0) - beyond, np.nanmax(columns, axis=0) + beyond])
        self._fit(columns)
        return self

    def score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        """(N, levels, features) -> (N,), higher = more OOD."""
        return self._score(self._finite(columns), weights, aggregation)

    def state(self) -> State:
        """The fitted numbers by name."""
        return {"bounds": self.bounds_, **self._state()}

    def restore(self, state: State) -> Self:
        """Take a `state` back; returns self."""
        self.bounds_ = state["bounds"]
        self._restore(state)
        return self

    def _finite(self, columns: Array) -> Array:
        broken = np.isinf(columns)
        if not broken.any():
            return columns
        self.replaced += int(broken.sum())
        warnings.warn(
            f"{int(broken.sum())} features are infinite and count as beyond every in-distribution value",
            UserWarning,
            stacklevel=4,
        )
        low, high = self.bounds_
        return np.where(broken, np.where(columns > 0, high, low), columns)

    @abstractmethod
    def _fit(self, columns: Array) -> None:
        """Learn from finite columns."""

    @abstractmethod
    def _score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        """Score finite columns."""

    @abstractmethod
    def _state(self) -> State:
        """What `_fit` learned."""

    @abstractmethod
    def _restore(self, state: State) -> None:
        """Take it back."""


C_ = TypeVar("C_", bound=type[Calibrator])
_CALIBRATORS: dict[str, type[Calibrator]] = {}


def register(*names: str) -> Callable[[C_], C_]:
    """Class decorator: make a calibrator known by name; further names are aliases."""

    def add(cls: C_) -> C_:
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
    if name not in _CALIBRATORS:
        raise OptionError(f"unknown calibration {name!r}; {nearest(name, _CALIBRATORS)}")
    return _CALIBRATORS[name](**_options(_CALIBRATORS[name], name, tail))


def _options(cls: type[Calibrator], name: str, text: str) -> dict[str, object]:
    """`key=value,key=value` as keyword arguments, each of the annotated type."""
    if not text:
        return {}
    import yaml

    from gepc.core.options import coerce

    given = dict(part.partition("=")[::2] for part in text.split(","))
    check_names(f"calibration {name!r}", given, list(inspect.signature(cls).parameters))
    hints = typing.get_type_hints(cls.__init__)
    return {key: coerce(hints[key], yaml.safe_load(value), f"{name}: {key}") for key, value in given.items()}


def check_varies(columns: Array) -> None:
    """Refuse a column that is the same for every ID image."""
    spread = np.nanstd(columns, axis=0)
    scale = np.nanmean(np.abs(columns), axis=0)
    if (spread <= 1e-12 * scale).any() or (spread == 0).any():
        raise InputError(
            "a feature is constant over the in-distribution images, so there is nothing to calibrate: "
            "the images are all alike, or the backbone is exactly equivariant under this group"
        )

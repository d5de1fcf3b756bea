"""Parts of the columns of a feature table, each of which is one test of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

OUTPUT = "output"  # the part with all that the network answers, of which other parts are views


@dataclass(frozen=True)
class Part:
    """Columns that are calibrated together.

    Parameters
    ----------
    name : what the part looks at, in plain words.
    runs : (first, count) of every run of consecutive columns.
    view : whether the columns are also in another part, which looks at them together with others.
    levels : how many noise levels the columns hold, one after another, if `scoring` is given.
    scoring : options of `gepc.calibration.Scorer` for a part that has its own scorer; None leaves it to the calibrator.
    parts : the parts of these columns, for its own scorer.
    weight : the share of the false-alarm rate that the part gets, relative to others of its kind.

    Examples
    --------
    >>> from gepc.core.parts import Part
    >>> Part("colour", runs=((0, 3), (7, 1))).columns.tolist()
    [0, 1, 2, 7]

    See Also
    --------
    gepc.calibration.Evidence : combines the tail probabilities of all parts.
    """

    name: str
    runs: tuple[tuple[int, int], ...]
    view: bool = False
    levels: int = 1
    scoring: dict[str, Any] | None = None
    parts: tuple[Part, ...] = ()
    weight: float = 1.0

    @classmethod
    def of(cls, name: str, columns: Sequence[int], view: bool = False) -> Part:
        """A part of single columns, in ascending order.

        >>> Part.of("colour", [0, 1, 2, 7]).runs
        ((0, 3), (7, 1))
        """
        groups = np.split(np.asarray(columns), np.flatnonzero(np.diff(columns) != 1) + 1)
        return cls(name, tuple((int(group[0]), len(group)) for group in groups), view)

    @property
    def columns(self) -> npt.NDArray[np.int64]:
        """The positions of the columns."""
        return np.concatenate([np.arange(first, first + count) for first, count in self.runs])

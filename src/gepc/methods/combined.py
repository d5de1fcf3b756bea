"""Several methods as one: each is one test of an image, and their tail probabilities are combined.

The table has the features of every method, and the columns of a method are one part for `gepc.calibration.evidence`,
which scores it as the method by itself would be scored. The combination is named as future work in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from gepc.backbones.base import Backbone, shared_passes
from gepc.core.errors import OptionError, check_choice
from gepc.core.parts import Part
from gepc.methods.base import Batch, Columns, Derived, Extractor, Table, find_method, register


@dataclass(frozen=True)
class Member:
    """One of the methods, and the options of its scorer."""

    name: str  # `method` or `method:preset`
    extractor: Extractor
    scoring: dict[str, Any]

    @classmethod
    def of(cls, name: str) -> Member:
        """The method of that name, with the options of its preset if one is named after a colon."""
        method, _, preset_name = name.partition(":")
        kind = find_method(method)
        options: dict[str, Any] = {}
        scoring = {option: getattr(kind, option) for option in ("keep", "weights", "aggregate")}
        if preset_name:
            check_choice(f"preset of {method}", preset_name, kind.presets)
            preset = kind.presets[preset_name]
            if preset.preprocessing or "score_from" in preset.calibration:
                raise OptionError(f"{name} prepares images, or scores them, in a way of its own; it cannot be combined")
            options, scoring = dict(preset.method), {**scoring, **preset.calibration}
        extractor = kind(**options)
        if isinstance(extractor, Combined):
            raise OptionError("a combination cannot be part of another one; name its methods")
        return cls(name, extractor, {"calibration": extractor.calibration_name, **scoring})


@register("combined")
@dataclass(frozen=True)
class Combined(Derived):
    """Several methods as one detector: Fisher's combination of the tail probabilities of their scores.

    `create_detector(backbone, ["gepc", "scoped", "diffpath"])` builds it. All methods see the same noise, and a network
    pass that one of them has made for the same noisy image is not made again; the cost is then less than stated.

    Parameters
    ----------
    methods : names of methods, with a preset after a colon if wanted, such as `gepc:paper`.

    Raises
    ------
    OptionError
        If fewer than two methods are named, or if they need networks of different kinds.

    Examples
    --------
    >>> import gepc
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> detector = gepc.create_detector(GaussianBackbone(0.0, 0.1, (1, 8, 8)), ["gepc:paper", "msma"])
    >>> detector.extractor.methods
    ('gepc:paper', 'msma')
    """

    calibration: ClassVar[str] = "evidence"

    methods: tuple[str, ...] = ("gepc", "msma")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.methods)) < max(2, len(self.methods)):
            raise OptionError(f"name at least two different methods to combine, got {', '.join(self.methods)}")
        members = [member.extractor for member in self.members]
        needs = {member.needs for member in members} - {None}
        if len(needs) > 1:
            raise OptionError(f"methods that need {' and '.join(sorted(map(str, needs)))} cannot be combined")
        reasons = [member.pixels_only for member in members if member.pixels_only]
        object.__setattr__(self, "needs", next(iter(needs), None))
        object.__setattr__(self, "pixels_only", reasons[0] if reasons else None)

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """The methods, in order."""
        return tuple(map(Member.of, self.methods))

    def builds_on(self) -> tuple[Extractor, ...]:
        return tuple(member.extractor for member in self.members)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """The tables of all methods; a pass that two of them ask for is made once."""
        with shared_passes():
            return super().extract(backbone, batch, timesteps)

    def complete(self, tables: Sequence[Table], batch: Batch) -> Table:
        """`method/feature` -> (N, 1, levels, ...): the level axis of the table is that of the whole image."""
        named = zip(self.methods, tables, strict=True)
        return {f"{name}/{key}": values[:, None] for name, table in named for key, values in table.items()}

    def encoder_passes(self, backbone: Backbone, size: tuple[int, int]) -> int:
        return max(member.encoder_passes(backbone, size) for member in self.builds_on())

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(f"{member.name}/{name}" for member in self.members for name in member.extractor.column_names)

    @property
    def label(self) -> str:
        return " + ".join(self.methods)

    def columns(self, table: Table) -> Columns:
        """The columns of every method at all of its levels, one after another: (N, 1, columns)."""
        parts = [self._columns_of(member, table) for member in self.members]
        return np.concatenate([columns.reshape(len(columns), 1, -1) for columns in parts], axis=2)

    def parts(self, table: Table) -> tuple[Part, ...]:
        """One for each method, with its own scorer."""
        parts: list[Part] = []
        first = 0
        for member in self.members:
            levels, width = self._columns_of(member, table).shape[1:]
            own = member.extractor.parts(_of(member, table))
            parts.append(Part(member.name, ((first, levels * width),), False, levels, member.scoring, own))
            first += levels * width
        return tuple(parts)

    def _columns_of(self, member: Member, table: Table) -> Columns:
        return member.extractor.columns(_of(member, table))


def _of(member: Member, table: Table) -> Table:
    """The table of one of the methods."""
    start = f"{member.name}/"
    return {key.removeprefix(start): values[:, 0] for key, values in table.items() if key.startswith(start)}

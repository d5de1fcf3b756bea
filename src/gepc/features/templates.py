"""Base classes for most methods: features at each noise level (`PerLevel`), or of the whole image (`WholeImage`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError
from gepc.features.base import Batch, Cost, Extractor, Table

if TYPE_CHECKING:
    import torch

Features = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class PerLevel(Extractor):
    """The same features, and the same cost, at every level."""

    levels: Levels

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", Levels.of(self.levels))

    @abstractmethod
    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """name -> (N,) at timestep `t`."""

    @abstractmethod
    def level_cost(self, size: tuple[int, int]) -> Cost:
        """Network passes per image and level."""

    def timesteps(self, backbone: Backbone) -> tuple[int, ...]:
        """The levels on the backbone's schedule."""
        return self.levels.timesteps(backbone.alphas_cumprod)

    def cost(self, backbone: Backbone, size: tuple[int, int], levels: int | None = None) -> Cost:
        """The cost of one level, times the number of levels."""
        count, one = len(self.timesteps(backbone)) if levels is None else levels, self.level_cost(size)
        return Cost(count * one.forward, count * one.jvp)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """name -> (N, levels)."""
        rows = [self.at_level(backbone, batch, int(t)) for t in timesteps]
        return {name: np.stack([to_numpy(row[name]) for row in rows], axis=1) for name in rows[0]}


class WholeImage(Extractor):
    """Features that belong to no level: the level axis has one entry, for the whole image."""

    @property
    def by_level(self) -> bool:
        """False: there is one level for the whole image."""
        return False

    @abstractmethod
    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """name -> (N,) or (N, features)."""

    @abstractmethod
    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """Network passes per image."""

    def timesteps(self, backbone: Backbone) -> tuple[int, ...]:
        """One entry."""
        return (0,)

    def cost(self, backbone: Backbone, size: tuple[int, int], levels: int | None = None) -> Cost:
        """The cost of the image, whatever the number of levels."""
        return self.image_cost(backbone, size)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """name -> (N, 1) or (N, 1, features)."""
        return {name: to_numpy(values)[:, None] for name, values in self.of_images(backbone, batch).items()}


def to_numpy(values: torch.Tensor) -> npt.NDArray[np.float64]:
    """A tensor as a float64 array."""
    return np.asarray(values.detach().double().cpu().numpy())


def total(field: torch.Tensor) -> torch.Tensor:
    """Sum over channels and pixels in float64, where signed terms cancel without loss: (N, C, H, W) -> (N,)."""
    return field.double().flatten(1).sum(1)


def energy(field: torch.Tensor) -> torch.Tensor:
    """|field|^2 in float64."""
    return field.double().square().flatten(1).sum(1)


def check_least(least: int, **counts: int | None) -> None:
    """Raise `OptionError` naming the first count that is below `least`; None passes."""
    for name, value in counts.items():
        if value is not None and value < least:
            raise OptionError(f"{name} must be at least {least}, got {value}")

"""Density of states (DoS): a density over several summary statistics. Morningstar et al., AISTATS 2021.

The statistics that a diffusion model has at hand: the bound in bits per dimension, its shares in bands of noise levels
and the score norm at a few levels. The ID density over them is the calibrator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.features.base import Batch, Columns, Cost, DerivedExtractor, Table, register
from gepc.features.baselines.nll_vlb import NllVlb
from gepc.features.baselines.score_norm import ScoreNorm
from gepc.features.templates import check_least


@register("dos")
@dataclass(frozen=True)
class DensityOfStates(DerivedExtractor, NllVlb):
    """The bound's parameters, how many `bands` to split it into, and the `levels` of the score norms."""

    calibration: ClassVar[str] = "gmm"

    bands: int = 4
    levels: Levels = Levels.rho(0.05, 0.17, 0.52)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "levels", Levels.of(self.levels))
        check_least(1, bands=self.bands)

    @property
    def column_names(self) -> tuple[str, ...]:
        """The bound, its bands from low noise to high, the norms."""
        bands = [f"band{place}" for place in range(self.bands)]
        return ("bpd", *bands, *(f"norm{place}" for place in range(len(self.levels.values))))

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """The bound's, and one pass a level."""
        return Cost(forward=sum(part.cost(backbone, size).forward for part in self.builds_on()))

    def builds_on(self) -> tuple[NllVlb, ScoreNorm]:
        """The likelihood and the score norms."""
        return self.plain(), ScoreNorm(self.levels)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """`bpd` (N, 1), `bands` (N, 1, bands) and `norms` (N, 1, levels)."""
        tables = [part.extract(backbone, batch, part.timesteps(backbone)) for part in self.builds_on()]
        return self.complete(tables, batch)

    def complete(self, tables: Sequence[Table], batch: Batch) -> Table:
        """The bound, its terms but the last (which holds no pass) in bands from low noise to high, the norms."""
        bound, norms = tables
        bands = np.array_split(bound["terms"][:, :, :-1], self.bands, axis=2)
        return {
            "bpd": bound["bpd"],
            "bands": np.stack([band.sum(2) for band in bands], axis=2),
            "norms": norms["score_norm"][:, None],
        }

    def columns(self, table: Table) -> Columns:
        """(N, 1, 1 + bands + levels)."""
        return np.concatenate([table["bpd"][:, :, None], table["bands"], table["norms"]], axis=2)

"""Density of states (DoS): a density over several summary statistics. Morningstar et al., AISTATS 2021.

The statistics that a diffusion model has at hand: the bound in bits per dimension, its shares in bands of noise levels
and the score norm at a few levels. The ID density over them is the calibrator's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.extractors.base import Batch, Columns, Cost, Table, register
from gepc.extractors.nll_vlb import NllVlb
from gepc.extractors.score_norm import ScoreNorm
from gepc.extractors.shapes import check_least
from gepc.extractors.vlb import bits_per_dim

if TYPE_CHECKING:
    from gepc.extractors.shapes import Features


@register("dos")
@dataclass(frozen=True)
class DensityOfStates(NllVlb):
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
        return Cost(forward=super().image_cost(backbone, size).forward + len(self._norms.timesteps(backbone)))

    @property
    def _norms(self) -> ScoreNorm:
        return ScoreNorm(self.levels)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """`bpd`, `bands` (N, bands) and `norms` (N, levels)."""
        import torch

        terms = bits_per_dim(self.terms(backbone, batch), batch)
        bands = torch.tensor_split(terms[:, :-1], self.bands, dim=1)
        steps = self._norms.timesteps(backbone)
        norms = [self._norms.at_level(backbone, batch, t)["score_norm"] for t in steps]
        return {
            "bpd": terms.sum(1),
            "bands": torch.stack([band.sum(1) for band in bands], 1),
            "norms": torch.stack(norms, 1),
        }

    def columns(self, table: Table) -> Columns:
        """(N, 1, 1 + bands + levels)."""
        return np.concatenate([table["bpd"][:, :, None], table["bands"], table["norms"]], axis=2)

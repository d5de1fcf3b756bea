"""WAIC: expected likelihood with a penalty for its variance. Choi, Jang & Alemi, 2018.

    E[-log p] + Var[log p]/D, in nats of the whole image, and per dimension in the table

The paper takes both over an ensemble of models, and the variance as it is. One backbone has no ensemble: here they are
over independent noise draws of the bound, so the variance is the estimator's, not the model's, and is divided by the
image's D dimensions lest it drown the mean. A heuristic, and named one in tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gepc.backbones.base import Backbone
from gepc.extractors.base import Batch, Columns, Cost, Table, register
from gepc.extractors.nll_vlb import NllVlb
from gepc.extractors.shapes import check_least

if TYPE_CHECKING:
    from gepc.extractors.shapes import Features


@register("waic")
@dataclass(frozen=True)
class WAIC(NllVlb):
    """The bound's parameters, and how many `draws` stand in for the ensemble."""

    strata: int | None = 16
    draws: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(2, draws=self.draws)

    @property
    def label(self) -> str:
        """One backbone is no ensemble."""
        return f"{self.name}[heuristic]"

    @property
    def column_names(self) -> tuple[str, ...]:
        """One number."""
        return ("waic",)

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """The bound's, once a draw."""
        return Cost(forward=self.draws * super().image_cost(backbone, size).forward)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """`nll` (N, draws): -log p in nats per dimension."""
        import torch

        size = batch.images[0].size
        return {"nll": torch.stack([self.terms(backbone, batch, draw).sum(1) / size for draw in range(self.draws)], 1)}

    def columns(self, table: Table) -> Columns:
        """mean + var of the nats per dimension: 1/D of the formula above."""
        return np.asarray(table["nll"].mean(2) + table["nll"].var(2, ddof=1))[:, :, None]

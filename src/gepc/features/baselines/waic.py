"""WAIC: expected likelihood with a penalty for its variance. Choi, Jang & Alemi, 2018.

    E[-log p] + Var[log p]/D, in nats of the whole image, and per dimension in the table

The paper takes both over an ensemble of models, and the variance as it is; here it is divided by the image's D
dimensions lest it drown the mean. With `checkpoints` (other trainings or snapshots, as diffusers folders) both are
over the backbone and those, each model's bound averaged over the noise draws. One backbone alone has no ensemble: then
they are over the draws, so the variance is the estimator's, not the model's. A heuristic, and named one in tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gepc.backbones.base import Backbone
from gepc.features.base import Batch, Columns, Cost, Table, UsesOtherBackbones, register
from gepc.features.baselines.nll_vlb import NllVlb
from gepc.features.baselines.second_models import checkpoint, counted_with
from gepc.features.templates import check_least

if TYPE_CHECKING:
    import torch

    from gepc.features.templates import Features


@register("waic")
@dataclass(frozen=True)
class WAIC(UsesOtherBackbones, NllVlb):
    """The bound's parameters, the `checkpoints` beside the backbone, and the noise `draws` for each model.

    Without checkpoints the draws stand in for the ensemble.
    """

    strata: int | None = 16
    draws: int = 3
    checkpoints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (self.checkpoints,) if isinstance(self.checkpoints, str) else tuple(map(str, self.checkpoints))
        object.__setattr__(self, "checkpoints", given)
        check_least(1 if given else 2, draws=self.draws)

    @property
    def label(self) -> str:
        """With the number of models; one backbone is no ensemble."""
        return f"{self.name}[{1 + len(self.checkpoints)} models]" if self.checkpoints else f"{self.name}[heuristic]"

    @property
    def column_names(self) -> tuple[str, ...]:
        """One number."""
        return ("waic",)

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """The bound's, once a draw and model."""
        models = (backbone, *self.other_backbones())
        return Cost(forward=self.draws * sum(self.plain().image_cost(model, size).forward for model in models))

    def other_backbones(self) -> tuple[Backbone, ...]:
        """The further models."""
        return tuple(checkpoint(source) for source in self.checkpoints)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """`nll` (N, draws), or with checkpoints (N, models): -log p in nats per dimension."""
        import torch

        if not self.checkpoints:
            return {"nll": self._draws(backbone, batch)}
        found = [self._draws(backbone, batch).mean(1)]
        for source in self.checkpoints:
            with counted_with(backbone, source, batch) as model:
                found.append(self._draws(model, batch).mean(1).to(found[0].device))
        return {"nll": torch.stack(found, 1)}

    def _draws(self, backbone: Backbone, batch: Batch) -> torch.Tensor:
        import torch

        size = batch.images[0].size
        return torch.stack([self.terms(backbone, batch, draw).sum(1) / size for draw in range(self.draws)], 1)

    def columns(self, table: Table) -> Columns:
        """mean + var of the nats per dimension: 1/D of the formula above."""
        return np.asarray(table["nll"].mean(2) + table["nll"].var(2, ddof=1))[:, :, None]

"""Likelihood ratio (LR): what the image holds beyond its background. After Ren et al., NeurIPS 2019.

The paper subtracts the likelihood of a second model, trained on perturbed images. Where there is such a network, it is
the `background` (a diffusers folder, a checkpoint), and LR = bpd(x) - bpd_background(x), both by the variational bound
in 32 strata with the same noise. Without it, the one diffusion model holds both: its denoising loss
e_t = mean (noise - eps)^2 at low noise is about detail, at all levels about the whole image. Then

    LR = sum_{t in low} w_t e_t / sum_{t in low} w_t - sum_t w_t e_t / sum_t w_t

over levels even in log rho, `low` the given fraction of them from the least noise on, w_t growing with the level's
rank. Which sign is OOD depends on the ID set, so the density over ID values, two-sided, decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError
from gepc.features.base import Batch, Columns, Cost, Table, UsesOtherBackbones, register
from gepc.features.baselines.nll_vlb import NllVlb
from gepc.features.baselines.second_models import checkpoint, counted_with
from gepc.features.templates import WholeImage, energy

if TYPE_CHECKING:
    import torch

    from gepc.features.templates import Features


BOUND = NllVlb(strata=32)


@register("lr")
@dataclass(frozen=True)
class LikelihoodRatio(UsesOtherBackbones, WholeImage):
    """Losses at `levels`, of which the share `fraction` with the least noise is set against all.

    With a `background` network the two likelihoods are set against each other, and levels and fraction do not apply.
    """

    calibration: ClassVar[str] = "kde"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"levels": Levels.rho(*np.geomspace(0.02, 5.0, 100).tolist())},
        "light": {},
    }

    levels: Levels = Levels.rho(*np.geomspace(0.02, 5.0, 16).tolist())
    fraction: float = 0.5
    background: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", Levels.of(self.levels))
        if not 0.0 < self.fraction < 1.0:
            raise OptionError(f"fraction is a share of the levels between 0 and 1, got {self.fraction}")

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """One pass a level; with a background the bound's, once for each network."""
        if self.background is None:
            return Cost(forward=len(self._timesteps(backbone)))
        return Cost(forward=sum(BOUND.image_cost(one, size).forward for one in (backbone, *self.other_backbones())))

    @property
    def label(self) -> str:
        """Whether two networks are compared."""
        return self.name if self.background is None else f"{self.name}[2 models]"

    def other_backbones(self) -> tuple[Backbone, ...]:
        """The background's network."""
        return () if self.background is None else (checkpoint(self.background),)

    def _timesteps(self, backbone: Backbone) -> Sequence[int]:
        return self.levels.timesteps(backbone.alphas_cumprod)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """`loss` (N, levels), from the least noise on; with a background `bpd` (N, 2), the backbone's first."""
        import torch

        if self.background is not None:
            own = BOUND.of_images(backbone, batch)["bpd"]
            with counted_with(backbone, self.background, batch) as other:
                return {"bpd": torch.stack([own, BOUND.of_images(other, batch)["bpd"].to(own.device)], 1)}
        losses: list[torch.Tensor] = []
        for t in self._timesteps(backbone):
            x_t, field = batch.noised(backbone, t)
            losses.append(energy(field - backbone.eps(x_t, t)) / field[0].numel())
        return {"loss": torch.stack(losses, 1)}

    def columns(self, table: Table) -> Columns:
        """Loss at low noise less loss at all, or the backbone's bound less the background's."""
        if self.background is not None:
            return np.asarray(table["bpd"][:, :, :1] - table["bpd"][:, :, 1:])
        loss = table["loss"]
        weights = np.arange(1.0, loss.shape[2] + 1)
        low = max(1, round(self.fraction * len(weights)))
        part = loss[:, :, :low] @ weights[:low] / weights[:low].sum()
        return np.asarray(part - loss @ weights / weights.sum())[:, :, None]

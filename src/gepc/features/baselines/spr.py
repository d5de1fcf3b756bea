"""Score-based perturbation resilience (SPR). Shin, Lee, Lee, Lee & Yun, ICCV 2023, pp. 23372-23382.

    r = xhat0(x_t) - x_0 = rho (noise - eps)      map = box filter of mean over channels of r^2, mean over 3 draws

The denoising error at one tiny noise level (rho = 0.0633, their sigma at t = 1e-3 in units of [-1, 1]); the image's
score is the map's largest value. The authors train on normal images and fit nothing; on another backbone the density
over ID values is needed, so it is the default. The box is their 31 pixels of 256 in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels, rho_of
from gepc.core.errors import OptionError, check_choice
from gepc.features.base import Batch, Cost, HasMaps, Maps, Table, register
from gepc.features.templates import PerLevel, check_least

if TYPE_CHECKING:
    import torch

    from gepc.features.templates import Features


@register("spr")
@dataclass(frozen=True)
class SPR(HasMaps, PerLevel):
    """Denoising error around every pixel.

    Parameters
    ----------
    levels, draws : where to look, and noise draws to average over.
    window : odd side of the box filter; None is about an eighth of the image.
    pool : the map's `max`, or its `mean`.
    """

    calibration: ClassVar[str] = "kde"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"calibration": "raw"}, "light": {}}

    levels: Levels = Levels.rho(0.0633)
    draws: int = 3
    window: int | None = None
    pool: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(1, draws=self.draws)
        check_choice("pool", self.pool, ("max", "mean"))
        if self.window is not None and (self.window < 1 or self.window % 2 == 0):
            raise OptionError(f"window is an odd number of pixels, got {self.window}")

    def level_cost(self, size: tuple[int, int]) -> Cost:
        """One pass a draw."""
        return Cost(forward=self.draws)

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """The map's maximum or mean."""
        return {"spr": self._pooled(self._map(backbone, batch, t))}

    def maps(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> tuple[Table, Maps]:
        """The table, and the map of every level."""
        fields = [self._map(backbone, batch, int(t)) for t in timesteps]
        table = {"spr": np.stack([self._pooled(field).cpu().numpy() for field in fields], axis=1)}
        return table, np.stack([field.float().cpu().numpy() for field in fields], axis=1)

    def _pooled(self, field: torch.Tensor) -> torch.Tensor:
        pixels = field.double().flatten(1)
        return pixels.amax(1) if self.pool == "max" else pixels.mean(1)

    def _map(self, backbone: Backbone, batch: Batch, t: int) -> torch.Tensor:
        """(N, H, W)."""
        rho = float(rho_of(backbone.alphas_cumprod[t]))
        field = batch.clean(backbone).new_zeros((len(batch), *batch.size))
        for draw in range(self.draws):
            x_t, noise = batch.noised(backbone, t, draw)
            field += (rho * (noise - backbone.eps(x_t, t))).square().mean(1) / self.draws
        return _box(field, self.window or _eighth(min(batch.size)))


def _eighth(side: int) -> int:
    """The largest odd number up to an eighth of the side: 31 at 256, 3 at 32."""
    part = max(1, side // 8)
    return part - 1 + part % 2


def _box(field: torch.Tensor, window: int) -> torch.Tensor:
    """Mean over a window; at the border it shrinks."""
    import torch

    return torch.nn.functional.avg_pool2d(
        field[:, None], window, stride=1, padding=window // 2, count_include_pad=False
    )[:, 0]

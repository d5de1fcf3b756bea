"""From a field of energies (..., C, H, W) to one number per image: mean over channels, then over pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gepc.core.errors import OptionError, check_choice

if TYPE_CHECKING:
    import torch

KINDS = ("mean", "topk", "local")


@dataclass(frozen=True)
class Pooling:
    """How a field of energies becomes a number.

    `mean`: over all pixels. `topk`: over the k = max(1, floor(topk H W)) largest. `local`: the same after a box
    filter of `window` pixels a side, for targets of about that size; at the border the box shrinks.
    """

    kind: str = "topk"
    topk: float = 0.3
    window: int = 9

    def __post_init__(self) -> None:
        check_choice("pool", self.kind, KINDS)
        if not 0.0 < self.topk <= 1.0:
            raise OptionError(f"topk is a share of the pixels in (0, 1], got {self.topk}")
        if self.window < 1 or self.window % 2 == 0:
            raise OptionError(f"window is an odd number of pixels, got {self.window}")

    def __call__(self, energy: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) -> (N,)."""
        return self.pixels(energy.mean(1))

    def pixels(self, energy: torch.Tensor) -> torch.Tensor:
        """(N, H, W), channels averaged already -> (N,)."""
        import torch

        if self.kind == "mean":
            return energy.mean((1, 2))
        if self.kind == "local":
            energy = torch.nn.functional.avg_pool2d(
                energy[:, None], self.window, stride=1, padding=self.window // 2, count_include_pad=False
            )[:, 0]
        flat = energy.flatten(1)
        k = max(1, math.floor(self.topk * flat.shape[1]))
        return flat.topk(k, dim=1, sorted=False).values.mean(1)

"""Lift, map, detect (LMD): inpaint and compare. Liu, Zhou, Wang & Weinberger, ICML 2023.

A checkerboard hides half of the image, the model fills it in, and the whole is compared with the original; the next
repetition hides the other half. The score is the median distance over repetitions (the mean of two).

Filling in is ancestral sampling (DDIM with eta = 1) on timesteps even in index, from rho = 80 or the schedule's end
down; after every step the known half is replaced by a freshly noised copy of the image at that level, and by the image
itself at the end. The authors take 10 repetitions of 1000 steps, 10^4 passes, and LPIPS; `light` takes 8 of 13 and
the gradient similarity. Few steps leave seams that such a distance sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import InputError
from gepc.features.base import Batch, Cost, register
from gepc.features.baselines.samplers import denoise
from gepc.features.distances import check_distance, distance_of, unit
from gepc.features.templates import WholeImage, check_least

if TYPE_CHECKING:
    import torch

    from gepc.features.templates import Features

HIGHEST_RHO = 80.0


@register("lmd")
@dataclass(frozen=True)
class LMD(WholeImage):
    """Median distance between the image and its inpaintings.

    Parameters
    ----------
    repetitions, steps : inpaintings, and passes for each.
    blocks : blocks of the checkerboard along a side; must divide both sides.
    distance : a name of `gepc.features.distances`.
    clip : bring every estimate of x_0 into [-1, 1] on the way.
    """

    calibration: ClassVar[str] = "z"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"repetitions": 10, "steps": 1000, "distance": "lpips"},
        "light": {"repetitions": 8, "steps": 13},
    }

    repetitions: int = 8
    steps: int = 13
    blocks: int = 8
    distance: str = "msgms"
    clip: bool = True

    def __post_init__(self) -> None:
        check_least(1, repetitions=self.repetitions, steps=self.steps, blocks=self.blocks)
        check_distance(self.distance)

    @property
    def label(self) -> str:
        """With the distance."""
        return f"{self.name}[{self.distance}]"

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """Repetitions times steps; the distance `backbone` takes one more a repetition and one for the image."""
        extra = self.repetitions + 1 if self.distance == "backbone" else 0
        return Cost(forward=self.repetitions * self.steps + extra)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """The median as `lmd`."""
        import torch

        ruler = distance_of(self.distance, backbone)
        image, known = unit(batch.clean(backbone)), self._checkerboard(backbone, batch.size)
        found = []
        for repetition in range(self.repetitions):
            mask = known if repetition % 2 == 0 else 1.0 - known
            found.append(ruler(image, unit(self.inpaint(backbone, batch, mask, repetition))))
        return {"lmd": torch.stack(found, 1).quantile(0.5, dim=1)}

    def _checkerboard(self, backbone: Backbone, size: tuple[int, int]) -> torch.Tensor:
        """1 where the image is known, (H, W)."""
        import torch

        if size[0] % self.blocks or size[1] % self.blocks:
            raise InputError(f"{self.blocks} blocks do not divide images of {size[0]}x{size[1]}; choose other blocks")
        place = torch.arange(self.blocks)
        board = (place[:, None] + place[None, :]) % 2
        block = torch.ones(size[0] // self.blocks, size[1] // self.blocks)
        return torch.kron(board, block).to(device=backbone.device, dtype=backbone.dtype)

    def inpaint(self, backbone: Backbone, batch: Batch, known: torch.Tensor, repetition: int) -> torch.Tensor:
        """x_0 with the unknown pixels drawn from the model."""
        x0, abar = batch.clean(backbone), backbone.alphas_cumprod
        timesteps = self._grid(backbone)
        # three kinds of noise at a level: of the start, of the known pixels and of the ancestral step
        x = batch.noise(backbone, timesteps[0], 3 * repetition)
        for place, t in enumerate(timesteps):
            x = known * batch.noised(backbone, t, 3 * repetition + 1)[0] + (1.0 - known) * x
            estimate, eps = denoise(backbone, x, t, self.clip)
            if place + 1 == len(timesteps):
                break
            after = timesteps[place + 1]
            now, then = float(abar[t]), float(abar[after])
            spread = ((1.0 - then) / (1.0 - now) * (1.0 - now / then)) ** 0.5
            fresh = batch.noise(backbone, after, 3 * repetition + 2)
            x = then**0.5 * estimate + (1.0 - then - spread**2) ** 0.5 * eps + spread * fresh
        return known * x0 + (1.0 - known) * estimate

    def _grid(self, backbone: Backbone) -> list[int]:
        """Descending timesteps, one for each pass; repeated where the schedule is shorter."""
        (top,) = Levels.rho(HIGHEST_RHO).timesteps(backbone.alphas_cumprod)
        return [int(t) for t in np.round(np.linspace(top, 0, self.steps))]

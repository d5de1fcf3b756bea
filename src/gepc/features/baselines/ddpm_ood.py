"""DDPM-OOD: reconstruct from several amounts of noise. Graham et al., CVPR workshops 2023.

For every start level: noise x_0 once, run the sampler down to x_0 again, measure how far that is from the image by
each distance. The score is the mean over starts of the sum over distances of z-scores.

The sampler is PLMS (Adams-Bashforth, order 1 to 4) on evenly strided timesteps; the starts are given as the rho of the
authors' 10, 170, ..., 970 on their scaled-linear schedule of 1000 steps (every 16th of a grid of 100, from the second)
and matched to the grid, so that on their schedule an image costs 350 passes. Their code differs from the paper, and
ours follows the paper: it uses the MSE alone (`distances="mse"`); it leaves the sampler's history of one start to the
next, and ends at abar_0 (both with `compat`); it takes two passes for its very first step and stretches every image's
contrast to [0, 1], which are not offered. LPIPS is in the preset `paper` alone, and must lie on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels, rho_of
from gepc.core.errors import OptionError, check_choice
from gepc.features.base import Batch, Columns, Cost, Extractor, Table, register
from gepc.features.baselines.samplers import ddim_grid, reconstruct
from gepc.features.distances import check_distance, distance_of, unit
from gepc.features.templates import to_numpy

if TYPE_CHECKING:
    import torch


def original_rho(timesteps: Sequence[int]) -> tuple[float, ...]:
    """rho on the authors' schedule, scaled-linear from .0015 to .0195 in 1000 steps."""
    betas = np.linspace(0.0015**0.5, 0.0195**0.5, 1000) ** 2
    return tuple(rho_of(np.cumprod(1.0 - betas))[list(timesteps)].tolist())


STARTS = tuple(range(10, 1000, 160))


@register("ddpm_ood")
@dataclass(frozen=True)
class DDPMOOD(Extractor):
    """Reconstruction errors, (start, distance).

    Parameters
    ----------
    levels : where to start from.
    steps : timesteps of the sampler's grid over the whole schedule.
    distances : names of `gepc.features.distances`.
    order : 4 is PLMS, 1 DDIM.
    clip : bring every estimate of x_0 into [-1, 1] on the way; the authors' code does not.
    compat : keep the history of predictions from start to start, and end at abar_0, as the published code does.
    """

    calibration: ClassVar[str] = "z"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"levels": Levels.rho(*original_rho(STARTS)), "steps": 100, "distances": ("mse", "lpips")},
        "light": {},
    }

    levels: Levels = Levels.rho(*original_rho(STARTS[1:6:2]))
    steps: int = 20
    distances: tuple[str, ...] = ("mse", "msgms")
    order: int = 4
    clip: bool = False
    compat: bool = False

    def __post_init__(self) -> None:
        given = (self.distances,) if isinstance(self.distances, str) else tuple(self.distances)
        object.__setattr__(self, "distances", given)
        object.__setattr__(self, "levels", Levels.of(self.levels))
        if not given:
            raise OptionError("name at least one distance")
        for name in given:
            check_distance(name)
        check_choice("order", str(self.order), ("1", "2", "3", "4"))

    @property
    def by_level(self) -> bool:
        """False: the starts may share the sampler's history, and the image's own features."""
        return False

    @property
    def label(self) -> str:
        """With the distances."""
        return f"{self.name}[{'+'.join(self.distances)}]"

    @property
    def column_names(self) -> tuple[str, ...]:
        """One a distance."""
        return self.distances

    def timesteps(self, backbone: Backbone) -> tuple[int, ...]:
        """The starts, each at the nearest place in log rho of the sampler's grid."""
        grid = ddim_grid(backbone.n_steps, self.steps)
        log_rho = np.log(rho_of(backbone.alphas_cumprod))
        wanted = self.levels.timesteps(backbone.alphas_cumprod)
        return tuple(sorted({grid[int(np.argmin(np.abs(log_rho[list(grid)] - log_rho[t])))] for t in wanted}))

    def cost(self, backbone: Backbone, size: tuple[int, int], levels: int | None = None) -> Cost:
        """Every grid point from each start down; at most that where only some of the starts are kept.

        With `compat` a start's history is that of all starts before it, so none of them is spared.

        The distance `backbone` takes one pass for the image and one a reconstruction besides.
        """
        grid = np.asarray(ddim_grid(backbone.n_steps, self.steps))
        starts = self.timesteps(backbone)
        if levels is not None and not self.compat:
            starts = starts[-levels:]
        extra = 1 + len(starts) if "backbone" in self.distances else 0
        return Cost(forward=sum(int((grid <= start).sum()) for start in starts) + extra)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """distance -> (N, starts)."""
        grid = ddim_grid(backbone.n_steps, self.steps)
        rulers = {name: distance_of(name, backbone) for name in self.distances}
        image = unit(batch.clean(backbone))
        history: list[torch.Tensor] = []
        found: dict[str, list[torch.Tensor]] = {name: [] for name in rulers}
        starts = self.timesteps(backbone) if self.compat else tuple(timesteps)
        for start in starts:
            x_t, _ = batch.noised(backbone, int(start))
            below = [t for t in grid if t <= start]
            again = unit(
                reconstruct(backbone, x_t, below, self.order, self.clip, history if self.compat else None, self.compat)
            )
            for name, ruler in rulers.items():
                found[name].append(ruler(image, again))
        asked = [starts.index(start) for start in timesteps]
        return {name: np.stack([to_numpy(values[place]) for place in asked], axis=1) for name, values in found.items()}

    def columns(self, table: Table) -> Columns:
        """(N, starts, distances)."""
        return np.stack([table[name] for name in self.distances], axis=2)

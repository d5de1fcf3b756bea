"""Methods that follow a sampler's path, to noise or back to an image: UFCOD, DDPM-OOD, LMD.

The samplers work in the coordinates y = x_t/sqrt(abar), rho = sqrt(1/abar - 1), where dy = eps drho.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import FloatArray, Levels, rho_of
from gepc.core.errors import InputError, OptionError, check_choice
from gepc.core.options import at_least
from gepc.lab.baselines.distances import distance_of
from gepc.methods.base import Batch, Cost, Derived, Extractor, Features, Table, WholeImage, register, to_numpy
from gepc.methods.diffpath import PathMoments, ddim_grid, denoise, unit
from gepc.methods.presets import Preset, Presets

HIGHEST_RHO = 80.0
STARTS = tuple(range(10, 1000, 160))  # of DDPM-OOD

# Adams-Bashforth weights of the newest prediction, the one before, ...; the order grows while the history does
ADAMS_BASHFORTH = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))


def even_in(axis: FloatArray, count: int) -> list[int]:
    """`count` + 1 ascending indices from the first to the last of a monotone `axis`, as even in value as possible."""
    last = len(axis) - 1
    if count > last:
        raise OptionError(f"{count} steps do not fit between timesteps 0 and {last} of this schedule")
    values = np.abs(axis - axis[0])
    wanted = np.linspace(values[0], values[last], count + 1)
    edges = [int(np.argmin(np.abs(values - value))) for value in wanted]
    edges[0], edges[-1] = 0, last
    for place in range(1, count + 1):
        edges[place] = max(edges[place], edges[place - 1] + 1)
    for place in range(count - 1, -1, -1):
        edges[place] = min(edges[place], edges[place + 1] - 1)
    return edges


def reconstruct(backbone: Backbone, x: Tensor, timesteps: Sequence[int], order: int = 4, clip: bool = False) -> Tensor:
    """x_0 from x_t = x at the last of the ascending `timesteps`, down through all of them to rho = 0.

    Order 1 is DDIM. Higher orders mix the latest predictions by Adams-Bashforth weights as PLMS does, starting from
    order 1, so every step costs one pass.
    """
    rho = np.concatenate([[0.0], rho_of(backbone.alphas_cumprod[list(timesteps)])])
    y: Tensor = x / float(np.sqrt(backbone.alphas_cumprod[timesteps[-1]]))
    seen: list[Tensor] = []
    for place in range(len(timesteps), 0, -1):
        t = timesteps[place - 1]
        _, eps = denoise(backbone, y * float(backbone.alphas_cumprod[t]) ** 0.5, t, clip)
        seen = [eps, *seen][:order]
        slope = sum(weight * one for weight, one in zip(ADAMS_BASHFORTH[len(seen) - 1], seen, strict=True))
        y = y + float(rho[place - 1] - rho[place]) * slope
    return y


@register("ufcod")
@dataclass(frozen=True)
class UFCOD(Derived):
    """UFCOD: energy of the path from an image to noise and of its changes, by a soft minimum over ID images.

        (sum eps^2, sum d^2) along DDIM inversion as in DiffPath, standardised
        score = -log mean_i exp(-|z - z_i|),   z_i: 100 ID images

    arXiv 2605.03410. The text leaves open how the two sums are scaled and the temperature of the soft minimum; here
    they are standardised on the ID images and the temperature is 1. It shares the passes of DiffPath.

    Parameters
    ----------
    steps : number of steps of the inversion.
    clip : clip the estimate of x_0, as in DiffPath.
    """

    calibration: ClassVar[str] = "soft_minimum"
    column_names = ("eps2", "d2")
    presets: ClassVar[Presets] = {"paper": Preset(), "light": Preset()}

    steps: int = at_least(2, 10)
    clip: bool = True

    def builds_on(self) -> tuple[PathMoments]:
        return (PathMoments(self.steps, self.clip),)


def original_rho(timesteps: Sequence[int]) -> tuple[float, ...]:
    """rho on the schedule of DDPM-OOD's authors, scaled-linear from .0015 to .0195 in 1000 steps."""
    betas = np.linspace(0.0015**0.5, 0.0195**0.5, 1000) ** 2
    return tuple(rho_of(np.cumprod(1.0 - betas))[list(timesteps)].tolist())


@register("ddpm_ood")
@dataclass(frozen=True)
class DDPMOOD(Extractor):
    """DDPM-OOD: reconstruct from several amounts of noise. Graham et al., CVPR workshops 2023.

    For every start level: noise x_0 once, run the sampler (PLMS on evenly strided timesteps) back to x_0, and measure
    each distance to the image. The score is the mean over starts of the sum over distances of z-scores.

    The starts are the rho of the authors' 10, 170, ..., 970 on their schedule of 1000 steps, matched to the grid; on
    their schedule an image costs 350 passes. Their code differs from the paper, which this follows: it uses the MSE
    alone (`distances="mse"`), carries the sampler's history from one start to the next, ends at abar_0, and stretches
    every image's contrast. LPIPS is in the preset `paper` only; its weights must be on disk.

    Parameters
    ----------
    levels : noise levels to start from.
    steps : timesteps of the sampler's grid over the whole schedule.
    distances : names of `gepc.lab.baselines.distances`.
    order : 4 is PLMS, 1 DDIM.
    clip : clip every estimate of x_0 to [-1, 1] on the way; the authors' code does not.
    """

    calibration: ClassVar[str] = "z"
    pixels_only: ClassVar[str | None] = "it compares pictures with their reconstructions"
    presets: ClassVar[Presets] = {
        "paper": Preset({"levels": Levels.rho(*original_rho(STARTS)), "steps": 100, "distances": ("mse", "lpips")}),
        "light": Preset(),
    }

    levels: Levels = Levels.rho(*original_rho(STARTS[1:6:2]))
    steps: int = 20
    distances: tuple[str, ...] = ("mse", "msgms")
    order: int = 4
    clip: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.distances:
            raise OptionError("`distances` is empty; name at least one distance")
        for name in self.distances:
            distance_of(name)
        check_choice("order", str(self.order), ("1", "2", "3", "4"))

    @property
    def label(self) -> str:
        return f"{self.name}[{'+'.join(self.distances)}]"

    @property
    def column_names(self) -> tuple[str, ...]:
        return self.distances

    def timesteps(self, backbone: Backbone) -> tuple[int, ...]:
        """The starts, each at the nearest point in log rho of the sampler's grid."""
        grid = ddim_grid(backbone.n_steps, self.steps)
        log_rho = np.log(rho_of(backbone.alphas_cumprod))
        wanted = self.levels.timesteps(backbone.alphas_cumprod)
        return tuple(sorted({grid[int(np.argmin(np.abs(log_rho[list(grid)] - log_rho[t])))] for t in wanted}))

    def cost(self, backbone: Backbone, size: tuple[int, int], levels: int | None = None) -> Cost:
        """Every grid point from each start down; an upper bound for some levels."""
        grid = np.asarray(ddim_grid(backbone.n_steps, self.steps))
        starts = self.timesteps(backbone)[-(levels or 0) :]
        return Cost(forward=sum(int((grid <= start).sum()) for start in starts))

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        grid = ddim_grid(backbone.n_steps, self.steps)
        distances = {name: distance_of(name, backbone.device) for name in self.distances}
        image = unit(batch.clean(backbone))
        gaps: dict[str, list[Tensor]] = {name: [] for name in distances}
        for start in timesteps:
            x_t, _ = batch.noised(backbone, int(start))
            again = unit(reconstruct(backbone, x_t, [t for t in grid if t <= start], self.order, self.clip))
            for name, distance in distances.items():
                gaps[name].append(distance(image, again))
        return {name: np.stack([to_numpy(value) for value in values], axis=1) for name, values in gaps.items()}


@register("lmd")
@dataclass(frozen=True)
class LMD(WholeImage):
    """Lift, map, detect: inpaint and compare. Liu, Zhou, Wang & Weinberger, ICML 2023.

    A checkerboard hides half of the image, the model fills it in, and the result is compared with the original; the
    next repetition hides the other half. The score is the median distance over repetitions (the mean of two).

    Filling in is ancestral sampling (DDIM with eta = 1) on timesteps even in index, from rho = 80 or the schedule's end
    down; after every step the known half is replaced by a freshly noised copy of the image at that level, and by the
    image itself at the end. The authors take 10 repetitions of 1000 steps and LPIPS.

    Parameters
    ----------
    repetitions : number of inpaintings.
    steps : passes per inpainting.
    blocks : blocks of the checkerboard along a side; must divide both sides.
    distance : a name of `gepc.lab.baselines.distances`.
    clip : clip every estimate of x_0 to [-1, 1] on the way.
    """

    calibration: ClassVar[str] = "z"
    pixels_only: ClassVar[str | None] = "it compares pictures with their reconstructions"
    presets: ClassVar[Presets] = {
        "paper": Preset({"repetitions": 10, "steps": 1000, "distance": "lpips"}),
        "light": Preset({"repetitions": 8, "steps": 13}),
    }

    repetitions: int = at_least(1, 8)
    steps: int = at_least(1, 13)
    blocks: int = at_least(1, 8)
    distance: str = "msgms"
    clip: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        distance_of(self.distance)

    @property
    def label(self) -> str:
        return f"{self.name}[{self.distance}]"

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        self._checkerboard(backbone, size)  # an error if the blocks do not fit
        return Cost(forward=self.repetitions * self.steps)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        distance = distance_of(self.distance, backbone.device)
        image, known = unit(batch.clean(backbone)), self._checkerboard(backbone, batch.size)
        found = []
        for repetition in range(self.repetitions):
            mask = known if repetition % 2 == 0 else 1.0 - known
            found.append(distance(image, unit(self.inpaint(backbone, batch, mask, repetition))))
        return {"lmd": torch.stack(found, 1).quantile(0.5, dim=1)}

    def _checkerboard(self, backbone: Backbone, size: tuple[int, int]) -> Tensor:
        """1 where the image is known, (H, W)."""
        if size[0] % self.blocks or size[1] % self.blocks:
            raise InputError(f"{self.blocks} blocks do not divide images of {size[0]}x{size[1]}; choose other blocks")
        place = torch.arange(self.blocks)
        board = (place[:, None] + place[None, :]) % 2
        block = torch.ones(size[0] // self.blocks, size[1] // self.blocks)
        return torch.kron(board, block).to(device=backbone.device, dtype=backbone.dtype)

    def inpaint(self, backbone: Backbone, batch: Batch, known: Tensor, repetition: int) -> Tensor:
        """x_0 with the unknown pixels drawn from the model."""
        x0, abar = batch.clean(backbone), backbone.alphas_cumprod
        (top,) = Levels.rho(HIGHEST_RHO).timesteps(abar)
        timesteps = [int(t) for t in np.round(np.linspace(top, 0, self.steps))]  # repeated if the schedule is shorter
        # three kinds of noise at a level: of the start, of the known pixels and of the ancestral step
        x = batch.noise(backbone, timesteps[0], 3 * repetition)
        for t, after in zip(timesteps, [*timesteps[1:], None], strict=True):
            x = known * batch.noised(backbone, t, 3 * repetition + 1)[0] + (1.0 - known) * x
            estimate, eps = denoise(backbone, x, t, self.clip)
            if after is None:
                break
            now, then = float(abar[t]), float(abar[after])
            spread = ((1.0 - then) / (1.0 - now) * (1.0 - now / then)) ** 0.5
            fresh = batch.noise(backbone, after, 3 * repetition + 2)
            x = then**0.5 * estimate + (1.0 - then - spread**2) ** 0.5 * eps + spread * fresh
        return known * x0 + (1.0 - known) * estimate

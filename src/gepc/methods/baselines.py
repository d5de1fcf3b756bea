"""The baselines that users choose most: pixel statistics, channel statistics, multiscale norms, denoising errors.

`gepc.methods.diffpath` has the fifth. All other published methods are in `gepc.lab.baselines`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels, rho_of
from gepc.core.options import at_least, one_of
from gepc.methods.base import Batch, Cost, Features, HasMaps, MapParts, PerLevel, Table, WholeImage, register, to_numpy
from gepc.methods.pooling import box_filter, channel_statistics, check_window, energy, odd_eighth
from gepc.methods.presets import Preset, Presets


@register("pixel_stats")
@dataclass(frozen=True)
class PixelStatistics(WholeImage):
    """Pixel statistics: mean and standard deviation of every channel, a reference that does not use a network."""

    calibration: ClassVar[str] = "mahalanobis"
    needs: ClassVar[str | None] = None

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        return Cost()

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """`pixel_stats` (N, 2 C), all means first."""
        return {"pixel_stats": channel_statistics({"pixels": batch.clean(backbone)})}


@register("cfs")
@dataclass(frozen=True)
class CFS(PerLevel):
    """Channel statistics of one encoder and one decoder block at one noise level, as a mean of squared z-scores.

        mean over channels of ((h - mean)/std)^2,   h: mean and standard deviation of a channel over pixels

    arXiv 2605.11014. The text leaves the blocks open; here one lies a quarter of the way into the network, the other a
    quarter before its end.

    Parameters
    ----------
    levels : noise levels; a log-SNR of 5 by default.
    layers : names of the two blocks; None chooses them among those of `gepc.backbones.activations.find_layers`.
    """

    calibration: ClassVar[str] = "zscore"
    presets: ClassVar[Presets] = {"paper": Preset(), "light": Preset()}

    levels: Levels = Levels.rho(0.0821)
    layers: tuple[str, ...] | None = None

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """`cfs` (N, 2 C)."""
        x_t, _ = batch.noised(backbone, t)
        _, maps = backbone.eps_and_activations(x_t, t, self.layers)
        if self.layers is None:
            names = list(maps)  # in the order of execution
            quarter = len(names) // 4
            maps = {name: maps[name] for name in (names[quarter], names[-1 - quarter])}
        return {"cfs": channel_statistics(maps)}


@register("msma")
@dataclass(frozen=True)
class MSMA(PerLevel):
    """Multiscale score matching analysis. Mahmood, Oliva & Styner, ICLR 2021.

        f_i = sigma_i |s(x, sigma_i)|     i = 1 ... 10, sigma geometric from 2 to 0.02 in units of [-1, 1]

    No noise is added to the image; on a variance-preserving schedule f_i = |eps(sqrt(abar) x, t)|. The authors choose
    2, 4, ..., 20 components of a mixture by 10-fold cross-validation (preset `paper`), or take the fifth neighbour
    (`knn`, here on standardised features), and report .959 and .991 for CIFAR-10 against SVHN.

    Parameters
    ----------
    levels : noise levels.
    noised : evaluate the noised image x_t instead.
    """

    calibration: ClassVar[str] = "gmm"
    presets: ClassVar[Presets] = {
        "paper": Preset(calibration={"calibration": "gmm:choose=cv"}),
        "light": Preset(),
        "knn": Preset(calibration={"calibration": "knn:k=5"}),
    }

    levels: Levels = Levels.rho(*np.geomspace(2.0, 0.02, 10).tolist())
    noised: bool = False

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        x = batch.noised(backbone, t)[0] if self.noised else batch.scaled(backbone, t)
        return {"msma": energy(backbone.eps(x, t)).sqrt()}


@register("spr")
@dataclass(frozen=True)
class SPR(HasMaps, PerLevel):
    """Score-based perturbation resilience. Shin, Lee, Lee, Lee & Yun, ICCV 2023, pp. 23372-23382.

        r = xhat0(x_t) - x_0 = rho (noise - eps)      map = box filter of mean over channels of r^2, mean over 3 draws

    The denoising error at one tiny noise level (rho = 0.0633, their sigma at t = 1e-3 in units of [-1, 1]); the score
    is the map's largest value. The authors train on normal images and fit nothing; on another backbone the density over
    ID values is needed, so it is the default. The box is their 31 pixels of 256 in proportion.

    Parameters
    ----------
    levels : noise levels.
    draws : noise draws to average over.
    window : odd side of the box filter; None is about an eighth of the image.
    pool : the map's `max`, or its `mean`.
    """

    presets: ClassVar[Presets] = {"paper": Preset(calibration={"calibration": "raw"}), "light": Preset()}

    levels: Levels = Levels.rho(0.0633)
    draws: int = at_least(1, 3)
    window: int | None = None
    pool: str = one_of("max", "mean")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self.window)

    def level_cost(self, size: tuple[int, int]) -> Cost:
        return Cost(forward=self.draws)

    def field(self, backbone: Backbone, batch: Batch, t: int) -> Tensor:
        """The map at one level, (N, H, W)."""
        rho = float(rho_of(backbone.alphas_cumprod[t]))
        squares = []
        for draw in range(self.draws):
            x_t, drawn = batch.noised(backbone, t, draw)
            squares.append((rho * (drawn - backbone.eps(x_t, t))).square().mean(1) / self.draws)
        return box_filter(torch.stack(squares).sum(0), self.window or odd_eighth(min(batch.size)))

    def pooled(self, field: Tensor) -> Tensor:
        """(N, H, W) -> (N,)."""
        return field.double().amax((1, 2)) if self.pool == "max" else field.double().mean((1, 2))

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        return {"spr": self.pooled(self.field(backbone, batch, t))}

    def map_parts(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> tuple[Table, MapParts]:
        fields = [self.field(backbone, batch, int(t)) for t in timesteps]
        pooled = to_numpy(torch.stack([self.pooled(field) for field in fields], dim=1))
        return {"spr": pooled}, {"residual": torch.stack(fields, dim=1).float().cpu().numpy()}

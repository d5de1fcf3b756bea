"""Methods that read simple statistics: of the pixels, which cost no pass, and of two inner layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.methods.base import Batch, Cost, Features, PerLevel, WholeImage, register
from gepc.methods.residuals import channel_statistics


@register("pixel_stats")
@dataclass(frozen=True)
class PixelStatistics(WholeImage):
    """Pixel statistics: mean and standard deviation of every channel. Without a network, the floor of every table."""

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
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}, "light": {}}

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

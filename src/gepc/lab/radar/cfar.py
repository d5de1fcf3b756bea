"""Detectors that radar operators use, without a network: CA-CFAR, OS-CFAR and RX.

Each tests every pixel against a model of its surroundings. The map is -log Pfa, where Pfa is the probability that
clutter of that model is at least as bright: thresholding the map at -log 1e-3 gives a false alarm on one pixel in a
thousand. The score is the map pooled at the size of a target. OS-CFAR and RX are also features of `gepc+`, which its
preset `radar` uses.

The cell under test has the intensity I; the clutter is taken from a ring around it, between a guard window, which keeps
the target out, and a training window. Speckle of L looks is gamma distributed with shape L.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.ndimage import rank_filter, uniform_filter
from scipy.special import betainc, betaln, chdtrc, gammainc, gammaincc, gammaincinv, gammaln

from gepc.backbones.base import Backbone
from gepc.core.errors import check_least
from gepc.core.options import one_of, positive
from gepc.images.preprocessing import from_log_magnitude
from gepc.methods.base import Batch, Cost, Features, HasMaps, MapParts, Table, WholeImage, register, to_numpy
from gepc.methods.features import feature, unchanged
from gepc.methods.passes import LevelAnswers
from gepc.methods.pooling import Pooling, check_window, position_distance, ring_sides

Array = npt.NDArray[np.float64]

SMALLEST = 1e-300
DARKEST = (0.5 / 255.0) ** 2  # half a step of 8-bit amplitude: pixels of 0 have no logarithm
RATIOS = np.geomspace(1e-4, 1e6, 400)


@dataclass(frozen=True)
class PixelTest(HasMaps, WholeImage):
    """A method whose map is -log Pfa for every pixel, pooled as in `gepc.methods.pooling.Pooling`."""

    calibration: ClassVar[str] = "z"
    pixels_only: ClassVar[str | None] = "it tests the intensity of pixels"
    needs: ClassVar[str | None] = None

    topk: float = 0.003
    window: int = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        Pooling("local", self.topk, self.window)

    @abstractmethod
    def log_pfa(self, images: torch.Tensor) -> torch.Tensor:
        """log Pfa of every pixel, (N, C, H, W) -> (N, H, W)."""

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        return Cost()

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        return {self.name: self.pooled(-self.log_pfa(batch.clean(backbone)))}

    def pooled(self, field: torch.Tensor) -> torch.Tensor:
        """log of the pooled -log Pfa, (N, H, W) -> (N,)."""
        return Pooling("local", self.topk, self.window).pixels(field).clamp_min(SMALLEST).log()

    def map_parts(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> tuple[Table, MapParts]:
        field = -self.log_pfa(batch.clean(backbone))
        table = {self.name: to_numpy(self.pooled(field))[:, None]}
        return table, {"target": field[:, None].float().cpu().numpy()}


@dataclass(frozen=True)
class CFAR(PixelTest):
    """A constant false-alarm rate test of the ratio T of a pixel's intensity to the clutter level of a ring.

    Parameters
    ----------
    topk : share of the pixels that the score averages over, after a box filter.
    window : side of that box filter in pixels.
    guard : side of the guard window in pixels; larger than a target.
    ring : side of the training window in pixels. Both shrink in images smaller than the training window.
    looks : number of looks L of the speckle.
    scale : what the pixels mean: `amplitude`, `intensity`, or `log` for images read with `magnitude="log"`.
    """

    guard: int = 41
    ring: int = 61
    looks: float = positive(1.0)
    scale: str = one_of("amplitude", "intensity", "log")

    def __post_init__(self) -> None:
        super().__post_init__()
        for side in (self.guard, self.ring):
            check_window(side)
        check_least(self.guard + 2, ring=self.ring)

    def intensity(self, images: torch.Tensor) -> Array:
        """(N, C, H, W) in [-1, 1] -> (N, H, W), averaged over channels."""
        unit = 0.5 * (images.double().cpu().numpy() + 1.0)
        if self.scale == "intensity":
            return np.asarray(unit.mean(1))
        amplitude = from_log_magnitude(unit) if self.scale == "log" else unit
        return np.asarray((amplitude**2).mean(1))

    def log_pfa(self, images: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.stack([self.log_pfa_of(one) for one in self.intensity(images)]))

    @abstractmethod
    def log_pfa_of(self, intensity: Array) -> Array:
        """log Pfa of the pixels of one image (H, W)."""

    def ring_mean(self, intensity: Array) -> tuple[Array, Array]:
        """Mean of the ring around every pixel, and its number of pixels; at the border both windows shrink."""
        guard, ring = ring_sides(self.guard, self.ring, intensity.shape)

        def ring_sum(field: Array) -> Array:
            inner, outer = (side**2 * uniform_filter(field, side, mode="constant") for side in (guard, ring))
            return np.asarray(outer - inner)

        count = np.rint(ring_sum(np.ones_like(intensity)))
        return np.maximum(ring_sum(intensity) / count, DARKEST), count


@register("ca_cfar")
@dataclass(frozen=True)
class CellAveragingCFAR(CFAR):
    """Cell-averaging CFAR: T is the intensity divided by the mean of the N pixels of the ring.

        Pfa(T) = P(F > T), F with (2 L, 2 N L) degrees of freedom; (1 + T/N)^-N for one look

    so that the threshold of one look is N (Pfa^(-1/N) - 1). Finn and Johnson, RCA Review 29 (1968).
    """

    def log_pfa_of(self, intensity: Array) -> Array:
        """The tail of the F distribution as an incomplete beta function."""
        mean, count = self.ring_mean(intensity)
        tail = betainc(count * self.looks, self.looks, count / (count + intensity / mean))
        return np.asarray(np.log(np.maximum(tail, SMALLEST)))


@register("os_cfar")
@dataclass(frozen=True)
class OrderStatisticCFAR(CFAR):
    """Order-statistic CFAR: T is the intensity divided by the k-th smallest of N pixels of the ring, k = 3 N/4.

        Pfa(T) = prod_{i < k} (N - i)/(N - i + T) for one look, otherwise by numerical integration

    Other targets in the ring do not raise the level. Every sixth line and column of the ring is used, which leaves
    N = 72 pixels of independent speckle. Rohling, IEEE TAES 19 (1983).
    """

    STEP: ClassVar[int] = 6

    def footprint(self, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """The pixels of the ring that are used."""
        guard, ring = ring_sides(self.guard, self.ring, shape)
        offsets = np.abs(np.arange(ring) - ring // 2)
        outside = np.maximum.outer(offsets, offsets) > guard // 2
        used = offsets % min(self.STEP, max(1, ring // 8)) == 0
        return np.asarray(outside & np.logical_and.outer(used, used))

    def log_pfa_of(self, intensity: Array) -> Array:
        footprint = self.footprint(intensity.shape)
        count = int(footprint.sum())
        rank = max(1, round(0.75 * count))
        level = rank_filter(intensity, rank - 1, footprint=footprint, mode="reflect")
        ratio = intensity / np.maximum(level, DARKEST)
        table = os_log_pfa(count, rank, self.looks)
        return np.asarray(np.interp(np.log(np.maximum(ratio, RATIOS[0])), np.log(RATIOS), table))


@register("rx")
@dataclass(frozen=True)
class RX(PixelTest):
    """Reed-Xiaoli detector: the Mahalanobis distance of a pixel's neighbourhood to those of the whole image.

        d^2 = (v - mean)^T cov^-1 (v - mean),    Pfa = P(chi^2 > d^2) with as many degrees of freedom as v has entries

    v are the values of all channels in a square around the pixel. Reed and Yu, IEEE TASSP 38 (1990).

    Parameters
    ----------
    topk : share of the pixels that the score averages over, after a box filter.
    window : side of that box filter in pixels.
    side : side of the neighbourhood in pixels; 1 is the pixel alone.
    """

    side: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self.side)

    def log_pfa(self, images: torch.Tensor) -> torch.Tensor:
        pad = self.side // 2
        padded = torch.nn.functional.pad(images.double(), (pad,) * 4, mode="reflect" if pad else "constant")
        vectors = torch.nn.functional.unfold(padded, self.side)
        neighbourhoods = vectors.reshape(len(images), -1, *images.shape[2:])
        squared = position_distance(neighbourhoods).cpu().numpy()
        return torch.from_numpy(np.log(np.maximum(chdtrc(vectors.shape[1], squared), SMALLEST)))


@feature("os_cfar", transform=unchanged, looks_at="brightness of a target")
def order_statistic_feature(level: LevelAnswers) -> torch.Tensor:
    """log pool(-log Pfa) of order-statistic CFAR at the size of a target, for log-magnitudes; without a network."""
    test = OrderStatisticCFAR(level.pooling.topk, level.pooling.window, scale="log")
    return test.pooled(-test.log_pfa(level.images))


# a fifth of the weight of the others: in real clutter RX finds little at the rates that targets are looked for
@feature("pixel_rx", transform=unchanged, looks_at="unusual pixels", weight=0.2)
def neighbourhood_feature(level: LevelAnswers) -> torch.Tensor:
    """log pool(-log Pfa) of RX at the size of a target, which compares 3x3 pixels with those of the whole image."""
    test = RX(level.pooling.topk, level.pooling.window)
    return test.pooled(-test.log_pfa(level.images))


@lru_cache(maxsize=64)
def os_log_pfa(count: int, rank: int, looks: float) -> Array:
    """log Pfa at every ratio of `RATIOS` for the `rank`-th smallest of `count` pixels of gamma(L) clutter."""
    ends = gammaincinv(looks, np.array([1e-9, 1.0 - 1e-12]))
    x = np.geomspace(ends[0], ends[1], 2000)  # the order statistic; P(gamma(L) > T x) is integrated in log x
    below, above = np.log(gammainc(looks, x)), np.log(gammaincc(looks, x))
    density = looks * np.log(x) - x - gammaln(looks)  # of log x
    density += (rank - 1) * below + (count - rank) * above - betaln(rank, count - rank + 1)
    weights = np.exp(density) * np.log(x[1] / x[0])
    tail = gammaincc(looks, RATIOS[:, None] * x) @ weights
    return np.asarray(np.log(np.clip(tail, SMALLEST, 1.0)))

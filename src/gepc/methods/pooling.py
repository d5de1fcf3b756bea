"""Pooling: fields, and the activations of inner layers, to numbers; maps: one field per level to one per image."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, interpolate

from gepc.core.errors import InputError, OptionError, check_choice
from gepc.images.formats import size_text

Map = npt.NDArray[np.float32]
QUANTILE = 0.99
KINDS = ("mean", "topk", "local")
GRID, VECTOR_CHANNELS = 64, 256  # the largest side of the grid of activations, and number of channels on it


def total(field: torch.Tensor) -> torch.Tensor:
    """Sum over channels and pixels in float64, where signed terms cancel without loss: (N, C, H, W) -> (N,)."""
    return field.double().flatten(1).sum(1)


def energy(field: torch.Tensor) -> torch.Tensor:
    """|field|^2 in float64."""
    return total(field.double().square())


@dataclass(frozen=True)
class Pooling:
    """How a field of energies becomes a number."""

    # `mean` over all pixels; `topk` over the k = max(1, floor(topk H W)) largest; `local` is `topk` after a box filter,
    # for targets of about that size
    kind: str = "topk"
    topk: float = 0.3  # the share of the pixels that `topk` and `local` average over
    window: int = 9  # odd side of the box filter of `local`, in pixels; at the border the box shrinks

    def __post_init__(self) -> None:
        check_choice("pool", self.kind, KINDS)
        if not 0.0 < self.topk <= 1.0:
            raise OptionError(f"topk is a share of the pixels in (0, 1], got {self.topk}")
        check_window(self.window)

    def __call__(self, energy: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) -> (N,)."""
        return self.pixels(energy.mean(1))

    def pixels(self, energy: torch.Tensor) -> torch.Tensor:
        """(N, H, W), channels averaged already -> (N,)."""
        if self.kind == "mean":
            return energy.mean((1, 2))
        flat = (box_filter(energy, self.window) if self.kind == "local" else energy).flatten(1)
        k = max(1, math.floor(self.topk * flat.shape[1]))
        return flat.topk(k, dim=1, sorted=False).values.mean(1)


def box_filter(fields: torch.Tensor, window: int) -> torch.Tensor:
    """The mean over a window of each pixel, (N, H, W) -> (N, H, W); at the border the window shrinks."""
    pad = window // 2
    return avg_pool2d(fields[:, None], window, stride=1, padding=pad, count_include_pad=False)[:, 0]


def position_distance(fields: torch.Tensor) -> torch.Tensor:
    """Squared Mahalanobis distance of the vector at every position from those at all positions of the same image.

        d^2(p) = (v_p - m)^T S^-1 (v_p - m),    (N, C, H, W) -> (N, H, W)

    The mean m and the covariance S are those of each image. The correlations in S are shrunk by C/(C + H W), and every
    variance is raised by a millionth, so that few positions and collinear channels do not break it.
    """
    channels, positions = fields.shape[1], fields.shape[2] * fields.shape[3]
    centred = fields.flatten(2) - fields.mean((2, 3))[:, :, None]
    covariance = (centred @ centred.mT).double() / positions
    variances = torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))
    shrunk = torch.lerp(covariance, variances, channels / (channels + positions)) + 1e-6 * variances
    identity = torch.eye(channels, dtype=torch.float64, device=fields.device)
    factor = torch.linalg.cholesky(shrunk + 1e-30 * identity)
    whitening = torch.linalg.solve_triangular(factor, identity, upper=False).to(fields.dtype)
    squared: torch.Tensor = (whitening @ centred).square().sum(1)
    return squared.reshape(len(fields), *fields.shape[2:])


def channel_statistics(maps: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean and standard deviation over pixels of every channel of the recorded layers, (N, 2 C): all means first."""
    fields = [field.float() for field in maps.values()]
    means = [field.mean((2, 3), keepdim=True) for field in fields]
    # torch.var_mean takes nine times as long on channels-last fields
    deviations = [(field - mean).square_().mean((2, 3)).sqrt() for field, mean in zip(fields, means, strict=True)]
    return torch.cat([mean.flatten(1) for mean in means] + deviations, 1)


def activation_distance(maps: Mapping[str, torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
    """RX in the inner layers: how unusual the activations at a position are among those of the image, (N, H, W).

    d^2/C of the vectors of all C channels (`position_distance`) on a grid of at most 64 cells along a side. It compares
    an image with itself, so that another sensor is not foreign as a whole.
    """
    grid = _common_grid(size)
    vectors = torch.cat([adaptive_avg_pool2d(layer.float(), grid) for layer in maps.values()], 1)
    distance = position_distance(vectors) / vectors.shape[1]
    return interpolate(distance[:, None], size, mode="bilinear")[:, 0]


def position_vectors(maps: Mapping[str, torch.Tensor], size: tuple[int, int], most: int = GRID) -> torch.Tensor:
    """The activations at each position of a common grid, (N, C, h, w), with at most `most` positions along a side.

    At most 256 channels are taken, evenly spaced over all layers: neighbouring channels say much the same.
    """
    grid = _common_grid(size, most)
    channels = sum(layer.shape[1] for layer in maps.values())
    every = torch.linspace(0, channels - 1, min(channels, VECTOR_CHANNELS)).round().long()
    vectors, first = [], 0
    for layer in maps.values():
        taken = every[(every >= first) & (every < first + layer.shape[1])] - first
        first += layer.shape[1]
        part = layer[:, taken.to(layer.device)].float()
        larger = part.shape[2] > grid[0] or part.shape[3] > grid[1]
        vectors.append(adaptive_avg_pool2d(part, grid) if larger else interpolate(part, grid, mode="bilinear"))
    return torch.cat(vectors, 1)


def _common_grid(size: tuple[int, int], most: int = GRID) -> tuple[int, int]:
    """Cells of a grid over an image of `size`, at most `most` along a side."""
    step = -(-max(size) // most)
    return -(-size[0] // step), -(-size[1] // step)


def log_contrast(fields: torch.Tensor, window: int) -> torch.Tensor:
    """How much brighter a window is than its surroundings, in their standard deviations: (N, H, W) -> (N, H, W).

    The mean over `window` minus the mean of the ring around it, between 5 and 7 windows, divided by the ring's standard
    deviation. On log-magnitudes this is the log-t detector (Goldstein, IEEE TAES 9, 1973) for windows: neither the gain
    of a scene nor the spread of its clutter changes it. The ring shrinks in images smaller than it.
    """
    guard, ring = ring_sides(5 * window, 7 * window, fields.shape[1:])

    def box_sum(values: torch.Tensor, side: int) -> torch.Tensor:
        # one axis after the other, which is much faster for large windows
        lines = avg_pool2d(values[:, None], (side, 1), 1, (side // 2, 0))
        return avg_pool2d(lines, (1, side), 1, (0, side // 2))[:, 0] * side**2

    def ring_sum(values: torch.Tensor) -> torch.Tensor:
        return box_sum(values, ring) - box_sum(values, guard)

    centred = fields - fields.mean((1, 2), keepdim=True)  # float32 squares
    count = ring_sum(torch.ones_like(fields[:1])).round()
    mean = ring_sum(centred) / count
    variance = ring_sum(centred.square()) / count - mean.square()
    least = 1e-6 * centred.square().mean((1, 2), keepdim=True) + 1e-30  # of each image by itself
    spread = torch.maximum(variance, least).sqrt()
    return (box_filter(centred, window) - mean) / spread


def ring_sides(guard: int, ring: int, shape: Sequence[int]) -> tuple[int, int]:
    """Sides of a guard and a training window; in images smaller than the latter, those that fit."""
    fitting = min(ring, 2 * (min(shape) // 2) - 1)
    if fitting < 3:
        small = f"an image of {size_text(tuple(shape))} is too small to compare a target with its surroundings"
        raise InputError(f"{small}: both sides must be at least 4 pixels")
    return (guard, ring) if fitting == ring else (2 * (fitting // 4) + 1, fitting)


def odd_eighth(side: int) -> int:
    """The largest odd number up to an eighth of the side, at least 1: 31 at 256, 3 at 32."""
    part = max(1, side // 8)
    return part - 1 + part % 2


def check_window(window: int | None) -> None:
    """Require an odd number of pixels, or None for a default that depends on the image."""
    if window is not None and (window < 1 or window % 2 == 0):
        raise OptionError(f"window is an odd number of pixels, got {window}")


def v_global(maps: Iterable[Map]) -> float:
    """Median over in-distribution maps (H, W) of their 0.99 quantile: the common scale of maps before calibration."""
    return float(np.median([np.quantile(field, QUANTILE) for field in maps]))


def combine(levels: Map, weights: npt.NDArray[np.float64]) -> Map:
    """sum_t w_t m_t for (N, levels, H, W), over the levels at which an image was evaluated; the others are NaN."""
    seen = ~np.isnan(levels[:, :, 0, 0])
    share = seen * weights
    share /= share.sum(axis=1, keepdims=True)
    fields = np.where(seen[:, :, None, None], levels, 0.0)
    return np.asarray(np.einsum("nlhw,nl->nhw", fields, share), dtype=np.float32)

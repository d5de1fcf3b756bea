"""What the activations of inner layers say: statistics of their channels, and how unusual a position is."""

from collections.abc import Mapping

import torch
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from gepc.methods.pooling import position_distance

GRID, VECTOR_CHANNELS = 64, 256  # the largest side of the grid of activations, and number of channels on it


def channel_statistics(maps: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean and standard deviation over pixels of every channel of the recorded layers, (N, 2 C): all means first."""
    fields = [field.float() for field in maps.values()]
    means = [field.mean((2, 3), keepdim=True) for field in fields]
    # torch.var_mean takes nine times as long on channels-last fields
    deviations = [(field - mean).square().mean((2, 3)).sqrt() for field, mean in zip(fields, means, strict=True)]
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


def position_vectors(maps: Mapping[str, torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
    """The activations at each position of a common grid, (N, C, h, w), with at most 64 positions along a side.

    At most 256 channels are taken, evenly spaced over all layers: neighbouring channels say much the same.
    """
    grid = _common_grid(size)
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


def _common_grid(size: tuple[int, int]) -> tuple[int, int]:
    """Cells of a grid over an image of `size`, at most `GRID` along a side."""
    step = -(-max(size) // GRID)
    return -(-size[0] // step), -(-size[1] // step)

"""Rules that exclude patches from an evaluation, from their pixels alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gepc.images.formats import Pixels
from gepc.sar.annotations import Mask

BLACK = 0.01  # of white
EDGE_SHARE, BLACK_SHARE = 0.95, 0.5
BLOCK, LAND_TIMES, LAND_SHARE = 16, 3.0, 0.25
SAME_BITS = 4
_BITS = np.array([value.bit_count() for value in range(256)], dtype=np.uint8)


def has_no_data(magnitude: Pixels) -> bool:
    """Whether some pixel is NaN or infinite."""
    return not bool(np.isfinite(magnitude).all())


def has_black_border(magnitude: Pixels, white: float) -> bool:
    """Whether 95 % of an edge line or half of the patch is black, that is, at most 1 % of white.

    Single black pixels are speckle and do not count.
    """
    black = magnitude <= BLACK * white
    edges = (black[0], black[-1], black[:, 0], black[:, -1])
    return bool(max(edge.mean() for edge in edges) >= EDGE_SHARE or black.mean() >= BLACK_SHARE)


def sea_level(magnitude: Pixels) -> float:
    """Brightness of the sea in a scene: the 0.1 quantile of its 16x16 block means, black blocks excluded."""
    means = block_means(magnitude).ravel()
    lit = means[means > 0]
    return float(np.quantile(lit, 0.1)) if len(lit) else 0.0


def is_land(magnitude: Pixels, ships: Mask, sea: float) -> bool:
    """Whether over a quarter of the 16x16 blocks without a ship are brighter than three times the sea level.

    A rule of thumb for coasts: rough sea of uneven brightness may be taken for land, dark flat land for sea.
    """
    free = block_means(ships) == 0
    bright = block_means(magnitude) > LAND_TIMES * sea
    return bool(free.any() and bright[free].mean() > LAND_SHARE)


def block_means(field: Pixels, block: int = BLOCK) -> npt.NDArray[np.float64]:
    """Means over whole blocks; incomplete blocks at the right and the bottom are ignored."""
    side = min(block, *field.shape)
    rows, columns = field.shape[0] // side, field.shape[1] // side
    whole = field[: rows * side, : columns * side].astype(np.float64)
    return np.asarray(whole.reshape(rows, side, columns, side).mean((1, 3)))


def difference_hash(magnitude: Pixels) -> int:
    """64 bits: the patch is averaged to 8 x 9 cells, and each bit says whether a cell exceeds its left neighbour."""
    edges = [
        np.linspace(0, length, count + 1).astype(int) for length, count in zip(magnitude.shape, (8, 9), strict=True)
    ]
    sums = np.add.reduceat(np.add.reduceat(magnitude.astype(np.float64), edges[0][:-1], 0), edges[1][:-1], 1)
    cells = sums / np.outer(np.diff(edges[0]), np.diff(edges[1]))
    bits = (cells[:, 1:] > cells[:, :-1]).ravel()
    return int("".join("1" if bit else "0" for bit in bits), 2)


class NearDuplicates:
    """Finds near-duplicates: patches whose difference hashes differ in at most 4 of 64 bits.

    Patches of independent speckle differ in 32 bits on average, with a standard deviation of 4.
    """

    def __init__(self) -> None:
        self._hashes = np.empty(1024, dtype=np.uint64)
        self._count = 0

    def is_new(self, magnitude: Pixels) -> bool:
        """Whether the patch differs from all new patches so far; if it does, it is added to them."""
        found = np.uint64(difference_hash(magnitude))
        differing = (self._hashes[: self._count] ^ found).view(np.uint8).reshape(-1, 8)
        if (_BITS[differing].sum(axis=1) <= SAME_BITS).any():
            return False
        if self._count == len(self._hashes):
            self._hashes = np.concatenate([self._hashes, np.empty_like(self._hashes)])
        self._hashes[self._count] = found
        self._count += 1
        return True

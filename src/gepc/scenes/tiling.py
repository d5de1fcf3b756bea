"""A scene as overlapping tiles, each an image for the detector, and one map from the maps of the tiles.

    M(y, x) = sum_i w(y - y_i, x - x_i) m_i(y - y_i, x - x_i) / sum_i w(y - y_i, x - x_i)

over the tiles i that hold the pixel, with w(u, v) = w_h(u) w_w(v) and w_n(u) = sin^2(pi (u + 1/2)/n). The weight is
almost zero at the border of a tile, so the map has no steps where tiles begin, and a constant map stays constant.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.ndimage import distance_transform_edt

from gepc.core.errors import InputError, OptionError
from gepc.images.formats import Pixels
from gepc.images.preprocessing import window_starts
from gepc.images.sources import Images, Record
from gepc.methods.pooling import Map
from gepc.scenes.reading import Valid

Size = tuple[int, int]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Tile:
    """A tile: its row and column in the grid, and the line and column of its upper left pixel in the scene."""

    row: int
    column: int
    top: int
    left: int

    def __str__(self) -> str:
        return f"the tile at line {self.top}, column {self.left}"


@dataclass(frozen=True)
class Grid:
    """Tiles of (height, width) pixels that cover every pixel of a scene of height x width."""

    height: int
    width: int
    tile: Size
    tops: tuple[int, ...]  # first lines of the rows of tiles
    lefts: tuple[int, ...]  # first columns of the columns of tiles

    @classmethod
    def over(cls, height: int, width: int, tile: Size, stride: Size, name: str = "the scene") -> Grid:
        """Tiles that are `stride` pixels apart, and one more at each far edge where needed; errors call it `name`."""
        if min(tile) < 1 or min(stride) < 1:
            raise OptionError(f"tile and stride must be at least 1 pixel, got {tile} and {stride}")
        if stride[0] > tile[0] or stride[1] > tile[1]:
            raise OptionError(f"a stride of {_text(stride)} leaves gaps between tiles of {_text(tile)}; reduce it")
        if height < tile[0] or width < tile[1]:
            raise InputError(f"{name} has {height}x{width} pixels, less than one tile of {_text(tile)}; reduce tile")
        tops, lefts = window_starts(height, tile[0], stride[0]), window_starts(width, tile[1], stride[1])
        return cls(height, width, tile, tuple(tops), tuple(lefts))

    def __len__(self) -> int:
        return len(self.tops) * len(self.lefts)

    def tiles(self, rows: Sequence[int]) -> list[Tile]:
        """The tiles of some rows, row by row."""
        return [Tile(row, column, self.tops[row], left) for row in rows for column, left in enumerate(self.lefts)]

    def holding(self, line: int, column: int) -> tuple[slice, slice]:
        """The rows and the columns of the tiles that hold a pixel."""
        rows, columns = (
            slice(bisect_right(starts, pixel - side), bisect_right(starts, pixel))
            for starts, pixel, side in ((self.tops, line, self.tile[0]), (self.lefts, column, self.tile[1]))
        )
        return rows, columns

    def lines_done_after(self, row: int) -> int:
        """Number of lines, from the top of a row on, that later rows do not touch."""
        return self.tops[row + 1] - self.tops[row] if row + 1 < len(self.tops) else self.tile[0]


def fill(pixels: Pixels, valid: Valid) -> Pixels:
    """Replace each missing pixel by the nearest pixel of the tile that is not missing."""
    if valid.all():
        return pixels
    nearest = distance_transform_edt(~valid, return_distances=False, return_indices=True)
    return np.asarray(pixels[tuple(nearest)])


class TileImages(Images):
    """Tiles as images for the detector; a tile that is left out or cannot be read is a record with an error.

    `cut` returns the pixels of a tile and where they are valid. Tiles with a larger share of missing pixels than
    `max_missing` are left out. `valid` and `left_out` are known once a tile has been read.
    """

    def __init__(self, tiles: list[Tile], cut: Callable[[Tile], tuple[Pixels, Valid]], max_missing: float) -> None:
        self.items, self._cut, self._max_missing = tiles, cut, max_missing
        self.valid: dict[int, Valid] = {}
        self.left_out: set[int] = set()

    def missing(self, index: int) -> float:
        """The share of missing pixels of a tile that has been read; NaN if it cannot be read."""
        return 1.0 - float(self.valid[index].mean()) if index in self.valid else np.nan

    def __getitem__(self, index: int) -> Record:
        tile = self.items[index]
        try:
            pixels, self.valid[index] = self._cut(tile)
        except InputError as error:
            return Record(str(tile), error=str(error))
        missing = self.missing(index)
        if missing > self._max_missing or missing == 1.0:
            self.left_out.add(index)
            return Record(str(tile), error=f"left out: {missing:.0%} no-data")
        return Record(str(tile), np.ascontiguousarray(fill(pixels, self.valid[index])))


def _text(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def weights(n: int) -> Array:
    """w_n(u) = sin^2(pi (u + 1/2)/n) for u = 0 ... n - 1: positive and symmetric; at stride n/2 they sum to 1."""
    return np.asarray(np.sin(np.pi * (np.arange(n) + 0.5) / n) ** 2)


class Stitcher:
    """The sums of the map's formula for the lines of one row of tiles.

    Finished lines are returned and the others move up. Sums are float64 and the map is float32, so that a float32
    constant is reproduced exactly.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._weight = np.outer(weights(grid.tile[0]), weights(grid.tile[1]))
        self.total = np.zeros((grid.tile[0], grid.width))
        self.share = np.zeros((grid.tile[0], grid.width))
        self._begun = 0  # lines that earlier rows have added to

    def add(self, left: int, field: Map, valid: Valid) -> None:
        """Add the map of a tile of the current row, where its pixels are valid."""
        part = slice(left, left + self._grid.tile[1])
        weight = np.where(valid, self._weight, 0.0)
        self.total[:, part] += weight * field
        self.share[:, part] += weight

    def advance(self, lines: int) -> Map:
        """Return the first `lines` lines, NaN where no tile was added, and move the others up."""
        seen = self.share[:lines] > 0.0
        out = np.full((lines, self._grid.width), np.nan, dtype=np.float32)
        out[seen] = (self.total[:lines][seen] / self.share[:lines][seen]).astype(np.float32)
        for sums in (self.total, self.share):
            sums[: len(sums) - lines] = sums[lines:]
            sums[len(sums) - lines :] = 0.0
        self._begun = len(self.total) - lines
        return out

    def state(self) -> dict[str, Array]:
        """The sums of the unfinished lines, for resuming after `advance`."""
        return {"total": self.total[: self._begun], "share": self.share[: self._begun]}

    def restore(self, state: dict[str, Array]) -> None:
        """Continue from a saved state."""
        self._begun = len(state["total"])
        self.total[: self._begun], self.share[: self._begun] = state["total"], state["share"]

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
            raise OptionError(f"a stride of {_text(stride)} leaves gaps between tiles of {_text(tile)} pixels")
        if height < tile[0] or width < tile[1]:
            raise InputError(f"{name} has {height}x{width} pixels, less than one tile of {_text(tile)}")
        tops, lefts = window_starts(height, tile[0], stride[0]), window_starts(width, tile[1], stride[1])
        return cls(height, width, tile, tuple(tops), tuple(lefts))

    def __len__(self) -> int:
        return len(self.tops) * len(self.lefts)

    def tiles(self, rows: Sequence[int], columns: Sequence[int]) -> list[Tile]:
        """The tiles of some rows and columns, row by row."""
        return [Tile(row, column, self.tops[row], self.lefts[column]) for row in rows for column in columns]

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

    def blocks(self, first_row: int, tiles: int, pixels: int) -> list[range]:
        """Rows from `first_row` on, grouped until a group has `tiles` tiles, or as many as span at most `pixels`."""
        lines = max(self.tile[0], pixels // self.width)
        return _grouped(
            range(first_row, len(self.tops)),
            lambda first, row: (
                (row - first) * len(self.lefts) < tiles and self.tops[row] + self.tile[0] - self.tops[first] <= lines
            ),
        )

    def segments(self, pixels: int) -> list[range]:
        """Columns, grouped as long as one row of the tiles of a group spans at most `pixels`."""
        wide = max(self.tile[1], pixels // self.tile[0])
        return _grouped(
            range(len(self.lefts)), lambda first, column: self.lefts[column] + self.tile[1] - self.lefts[first] <= wide
        )


def _grouped(indices: range, joins: Callable[[int, int], bool]) -> list[range]:
    """Cut `indices`; an index stays in the group that began at `first` while `joins(first, index)`."""
    found: list[range] = []
    for index in indices:
        if found and joins(found[-1].start, index):
            found[-1] = range(found[-1].start, index + 1)
        else:
            found.append(range(index, index + 1))
    return found


def fill(pixels: Pixels, valid: Valid) -> Pixels:
    """Replace each missing pixel by the nearest pixel of the tile that is not missing."""
    if valid.all():
        return pixels
    nearest = distance_transform_edt(~valid, return_distances=False, return_indices=True)
    return np.asarray(pixels[tuple(nearest)])


class TileImages(Images):
    """Tiles as images for the detector; a tile that is left out or cannot be read is a record with an error.

    `cut` returns the pixels of a tile and where they are valid; tiles with a larger share of missing pixels than
    `max_missing` are left out. `missing` and `left_out` are known once a tile has been read.
    """

    def __init__(self, tiles: list[Tile], cut: Callable[[Tile], tuple[Pixels, Valid]], max_missing: float) -> None:
        self.items, self._cut, self._max_missing = tiles, cut, max_missing
        self.missing = np.full(len(tiles), np.nan)
        self.left_out = np.zeros(len(tiles), dtype=bool)

    def __getitem__(self, index: int) -> Record:
        tile = self.items[index]
        try:
            pixels, valid = self._cut(tile)
        except InputError as error:
            return Record(str(tile), error=str(error))
        missing = self.missing[index] = 1.0 - float(valid.mean())
        self.left_out[index] = missing > self._max_missing or missing == 1.0
        if self.left_out[index]:
            return Record(str(tile), error=f"left out: {missing:.0%} no-data")
        return Record(str(tile), np.ascontiguousarray(fill(pixels, valid)))


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

    def add(self, left: int, field: Map) -> None:
        """Add the map of a tile of the current row."""
        part = slice(left, left + self._grid.tile[1])
        self.total[:, part] += self._weight * field
        self.share[:, part] += self._weight

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

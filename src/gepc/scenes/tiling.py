"""A scene as overlapping tiles, each an image for the detector; what is missing in a tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gepc.core.errors import InputError, OptionError
from gepc.images.formats import Pixels
from gepc.images.sources import Images, Record
from gepc.scenes.reading import Valid

Size = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """One tile: its place in the grid and the scene's line and column of its upper left pixel."""

    row: int
    column: int
    top: int
    left: int

    def __str__(self) -> str:
        return f"the tile at line {self.top}, column {self.left}"


def starts(length: int, tile: int, stride: int) -> tuple[int, ...]:
    """0, stride, 2 stride, ... and length - tile, so that the last tile ends where the scene ends."""
    return tuple(sorted({*range(0, length - tile + 1, stride), length - tile}))


@dataclass(frozen=True)
class Grid:
    """All tiles of a scene; every pixel is in at least one."""

    height: int
    width: int
    tile: Size
    tops: tuple[int, ...]
    lefts: tuple[int, ...]

    @classmethod
    def over(cls, height: int, width: int, tile: Size, stride: Size, name: str = "the scene") -> Grid:
        """Tiles of `tile` = (height, width) pixels, `stride` apart, and one more at each far edge where needed."""
        if min(tile) < 1 or min(stride) < 1:
            raise OptionError(f"tile and stride must be at least 1 pixel, got {tile} and {stride}")
        if stride[0] > tile[0] or stride[1] > tile[1]:
            raise OptionError(f"a stride of {_text(stride)} leaves gaps between tiles of {_text(tile)} pixels")
        if height < tile[0] or width < tile[1]:
            raise InputError(f"{name} has {height}x{width} pixels, less than one tile of {_text(tile)}")
        return cls(height, width, tile, starts(height, tile[0], stride[0]), starts(width, tile[1], stride[1]))

    def __len__(self) -> int:
        return len(self.tops) * len(self.lefts)

    def tiles(self, rows: Sequence[int], columns: Sequence[int]) -> list[Tile]:
        """The tiles of those rows and columns of the grid, row by row."""
        return [Tile(row, column, self.tops[row], self.lefts[column]) for row in rows for column in columns]

    def lines_done_after(self, row: int) -> int:
        """How many lines, from that row's top on, no later row touches."""
        return self.tops[row + 1] - self.tops[row] if row + 1 < len(self.tops) else self.tile[0]

    def blocks(self, first_row: int, tiles: int, pixels: int) -> list[range]:
        """Rows from `first_row` on, taken together until they hold `tiles` tiles, while they span at most `pixels`."""
        lines = max(self.tile[0], pixels // self.width)
        found, row = [], first_row
        while row < len(self.tops):
            end = row + 1
            while (
                end < len(self.tops)
                and (end - row) * len(self.lefts) < tiles
                and self.tops[end] + self.tile[0] - self.tops[row] <= lines
            ):
                end += 1
            found.append(range(row, end))
            row = end
        return found

    def segments(self, pixels: int) -> list[range]:
        """Columns taken together while one row of their tiles spans at most `pixels`."""
        wide = max(self.tile[1], pixels // self.tile[0])
        found, column = [], 0
        while column < len(self.lefts):
            end = column + 1
            while end < len(self.lefts) and self.lefts[end] + self.tile[1] - self.lefts[column] <= wide:
                end += 1
            found.append(range(column, end))
            column = end
        return found


def fill(pixels: Pixels, valid: Valid) -> Pixels:
    """Every missing pixel gets the value of the nearest pixel of the same tile that is there."""
    if valid.all():
        return pixels
    from scipy.ndimage import distance_transform_edt

    nearest = distance_transform_edt(~valid, return_distances=False, return_indices=True)
    return np.asarray(pixels[tuple(nearest)])


class TileImages(Images):
    """Tiles as images for the detector. One with too much missing, or that cannot be read, is a record with a reason.

    `cut` gives a tile's pixels and where they are there; `missing[i]` is known once tile i has been asked for.
    """

    def __init__(self, tiles: list[Tile], cut: Callable[[Tile], tuple[Pixels, Valid]], max_missing: float) -> None:
        self.tiles, self._cut, self._max_missing = tiles, cut, max_missing
        self.missing = np.full(len(tiles), np.nan)

    def __len__(self) -> int:
        return len(self.tiles)

    def __getitem__(self, index: int) -> Record:
        tile = self.tiles[index]
        try:
            pixels, valid = self._cut(tile)
        except InputError as error:
            return Record(str(tile), error=str(error))
        missing = self.missing[index] = 1.0 - float(valid.mean())
        if missing > self._max_missing or missing == 1.0:
            return Record(str(tile), error=f"left out: {missing:.0%} no-data")
        return Record(str(tile), np.ascontiguousarray(fill(pixels, valid)))


def _text(size: Size) -> str:
    return f"{size[0]}x{size[1]}"

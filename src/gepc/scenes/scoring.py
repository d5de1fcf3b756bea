"""The tiles of a scene through the detector, block of rows by block of rows, each block committed when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gepc.core.errors import InputError
from gepc.detector.detector import Detector
from gepc.features.extraction import OnProgress
from gepc.features.maps import Map
from gepc.images.batches import OnBadImage, chunks
from gepc.images.formats import Pixels
from gepc.images.preprocessing import warn_about_range
from gepc.scenes.folder import Progress, RunFolder
from gepc.scenes.plan import Plan
from gepc.scenes.reading import Scene, Valid
from gepc.scenes.stitching import Stitcher
from gepc.scenes.tiling import Size, Tile, TileImages
from gepc.verdicts.conformal import UNGROUPED

READ_BYTES = 1 << 26  # of raw pixels in memory at once, unless one tile is larger


@dataclass(frozen=True)
class Outcome:
    """What became of one tile."""

    tile: Tile
    missing: float
    score: float = np.nan
    p_value: float = np.nan
    error: str | None = None
    field: Map | None = None

    def record(self) -> tuple[Any, ...]:
        """The row that is kept of it; numbers in full."""
        place = (self.tile.row, self.tile.column, self.tile.top, self.tile.left)
        missing = "" if np.isnan(self.missing) else f"{self.missing:.6g}"
        if self.error is not None:
            return (*place, missing, "", "", self.error)
        return (*place, missing, repr(self.score), repr(self.p_value), "")


class Scoring:
    """The tiles of a scene, block of rows by block of rows."""

    def __init__(self, detector: Detector, scene: Scene, plan: Plan, folder: RunFolder) -> None:
        self.detector, self.scene, self.plan, self.folder = detector, scene, plan, folder
        self.grid, self.stitcher = plan.grid, Stitcher(plan.grid)
        self.pixels = READ_BYTES // (scene.pixel_bytes + 1)

    def run(self, on_progress: OnProgress | None) -> int:
        """Score what is not done; the number of tiles that were."""
        progress = self.folder.progress()
        if self.plan.with_map:
            if progress.rows == 0:
                self.folder.begin_map(self.grid.height, self.grid.width)
            if progress.sums:
                self.stitcher.restore(dict(progress.sums))
        resumed = progress.rows * len(self.grid.lefts)
        advance = on_progress or _unwatched
        advance(resumed)
        for rows in self.grid.blocks(progress.rows, self.detector.batch_size, self.pixels):
            progress = self._block(rows, progress, advance)
        return resumed

    def _block(self, rows: range, progress: Progress, advance: Callable[[int], None]) -> Progress:
        top = self.grid.tops[rows[0]]
        valid = np.zeros((self.grid.tops[rows[-1]] + self.grid.tile[0] - top, self.grid.width), dtype=bool)
        before = self.detector.backbone.forward_count, self.detector.backbone.jvp_count
        records, current = [], rows[0]
        # several rows are read together only where one segment holds their whole width
        segments = [range(len(self.grid.lefts))] if len(rows) > 1 else self.grid.segments(self.pixels)
        for columns in segments:
            images = self._tiles(rows, columns, valid, top)
            if rows[0] == 0 and columns[0] == 0:
                warn_about_range(images, self.detector.value_range)
            for outcome in self._outcomes(images):
                if outcome.tile.row != current:
                    self._finish_row(current, valid, top)
                    current = outcome.tile.row
                if outcome.field is not None:
                    self.stitcher.add(outcome.tile.left, outcome.field)
                records.append(outcome.record())
                advance(1)
        self._finish_row(current, valid, top)
        cost = (
            self.detector.backbone.forward_count - before[0],
            self.detector.backbone.jvp_count - before[1],
        )
        sums = self.stitcher.state() if self.plan.with_map else None
        return self.folder.commit(progress, rows[-1] + 1, records, cost, sums)

    def _tiles(self, rows: range, columns: range, valid: Valid, top: int) -> TileImages:
        """The tiles of a window that is read at once; where that fails, each tile is read by itself."""
        height, width = self.grid.tile
        tiles = self.grid.tiles(rows, columns)
        left = self.grid.lefts[columns[0]]
        across = self.grid.lefts[columns[-1]] + width - left
        try:
            pixels, there = self.scene.read(top, left, len(valid), across)
            valid[:, left : left + across] = there
        except InputError:

            def cut(tile: Tile) -> tuple[Pixels, Valid]:
                own, seen = self.scene.read(tile.top, tile.left, height, width)
                valid[tile.top - top : tile.top - top + height, tile.left : tile.left + width] |= seen
                return own, seen
        else:

            def cut(tile: Tile) -> tuple[Pixels, Valid]:
                part = (
                    slice(tile.top - top, tile.top - top + height),
                    slice(tile.left - left, tile.left - left + width),
                )
                return pixels[part], there[part]

        return TileImages(tiles, cut, self.plan.max_missing)

    def _outcomes(self, images: TileImages) -> Iterator[Outcome]:
        """In the order of the tiles."""
        detector, labels = self.detector, None
        for chunk in chunks(images, detector.preprocessing_, detector.batch_size, OnBadImage.ALL):
            found = {
                index: Outcome(images.tiles[index], float(images.missing[index]), error=error)
                for index, _, error in chunk.failures
            }
            if chunk.indices:
                scores, maps = detector.score_batch(chunk.images, with_maps=self.plan.with_map)
                if self.plan.group != UNGROUPED:
                    labels = np.array([self.plan.group] * len(scores))
                p_values = detector.reference_.p_values(scores, labels, None)
                for place, index in enumerate(chunk.indices):
                    field = None if maps is None else _fitted(maps[place], self.grid.tile)
                    numbers = (float(images.missing[index]), float(scores[place]), float(p_values[place]))
                    found[index] = Outcome(images.tiles[index], *numbers, field=field)
            for index in sorted(found):
                yield found[index]

    def _finish_row(self, row: int, valid: Valid, top: int) -> None:
        if not self.plan.with_map:
            return
        count, first = self.grid.lines_done_after(row), self.grid.tops[row]
        lines = self.stitcher.advance(count)
        lines[~valid[first - top : first - top + count]] = np.nan
        self.folder.write_lines(first, lines)


def _unwatched(count: int) -> None:
    """Nobody asked for progress."""


def _fitted(field: Map, tile: Size) -> Map:
    """The map of a tile that the network saw at another size, bilinearly brought back to the tile's pixels."""
    if field.shape == tile:
        return field
    from PIL import Image as PILImage

    resized = PILImage.fromarray(field).resize((tile[1], tile[0]), PILImage.Resampling.BILINEAR)
    return np.asarray(resized, dtype=np.float32)

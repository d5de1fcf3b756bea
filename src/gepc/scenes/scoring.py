"""The tiles of a scene through the detector, a block of rows at a time; every finished block is saved."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gepc.core.errors import InputError
from gepc.core.progress import OnProgress
from gepc.core.tables import escape_cell
from gepc.detector.fitted import FittedDetector
from gepc.detector.stream import stream
from gepc.images.formats import Pixels
from gepc.maps.drawing import resized
from gepc.methods.pooling import Map
from gepc.scenes.folder import ScanFolder, ScanState
from gepc.scenes.plan import ScanPlan
from gepc.scenes.reading import Scene, Valid
from gepc.scenes.tiling import Stitcher, Tile, TileImages

READ_BYTES = 1 << 26  # of raw pixels in memory at once, unless one tile is larger


@dataclass(frozen=True)
class TileResult:
    """The result of one tile; a tile without a score has an error, and is left out if it has too much missing data."""

    tile: Tile
    missing: float
    score: float = np.nan
    p_value: float = np.nan
    left_out: bool = False
    error: str | None = None
    field: Map | None = None

    def record(self) -> tuple[Any, ...]:
        """The row of the log, with all digits."""
        numbers = ("", "") if self.error is not None else (repr(self.score), repr(self.p_value))
        missing = "" if np.isnan(self.missing) else f"{self.missing:.6g}"
        place = (self.tile.row, self.tile.column, self.tile.top, self.tile.left)
        return (*place, missing, *numbers, "true" if self.left_out else "", escape_cell(self.error or ""))


class SceneScorer:
    """Scores the tiles of a scene and saves every finished block of rows."""

    def __init__(self, fitted: FittedDetector, scene: Scene, plan: ScanPlan, folder: ScanFolder) -> None:
        self.fitted, self.scene, self.plan, self.folder = fitted, scene, plan, folder
        self.grid, self.stitcher = plan.grid, Stitcher(plan.grid)
        self.pixels = READ_BYTES // (scene.pixel_bytes + 1)

    def run(self, on_progress: OnProgress | None) -> int:
        """Score the tiles that are not finished and return the number of those that were."""
        state = self.folder.resume()
        if self.plan.with_map:
            if state.rows == 0:
                self.folder.map.create(self.grid.height, self.grid.width)
            if state.sums:
                self.stitcher.restore(dict(state.sums))
        resumed = state.rows * len(self.grid.lefts)
        advance = on_progress or (lambda _: None)
        advance(resumed)
        for rows in self.grid.blocks(state.rows, self.fitted.batch_size, self.pixels):
            state = self._block(rows, state, advance)
        return resumed

    def _block(self, rows: range, state: ScanState, advance: Callable[[int], None]) -> ScanState:
        top = self.grid.tops[rows[0]]
        valid = np.zeros((self.grid.tops[rows[-1]] + self.grid.tile[0] - top, self.grid.width), dtype=bool)
        backbone = self.fitted.backbone
        before = backbone.forward_count, backbone.jvp_count
        records, current = [], rows[0]
        # several rows are read together only where one segment holds their whole width
        segments = [range(len(self.grid.lefts))] if len(rows) > 1 else self.grid.segments(self.pixels)
        for columns in segments:
            images = self._tiles(rows, columns, valid, top)
            for result in self._results(images):
                if result.tile.row != current:
                    self._finish_row(current, valid, top)
                    current = result.tile.row
                if result.field is not None:
                    self.stitcher.add(result.tile.left, result.field)
                records.append(result.record())
                advance(1)
        self._finish_row(current, valid, top)
        cost = (backbone.forward_count - before[0], backbone.jvp_count - before[1])
        sums = self.stitcher.state() if self.plan.with_map else None
        return self.folder.commit(state, rows[-1] + 1, records, cost, sums)

    def _tiles(self, rows: range, columns: range, valid: Valid, top: int) -> TileImages:
        """The tiles of a window that is read at once; where that fails, each tile is read by itself."""
        height, width = self.grid.tile
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
                line, column = tile.top - top, tile.left - left
                part = (slice(line, line + height), slice(column, column + width))
                return pixels[part], there[part]

        return TileImages(self.grid.tiles(rows, columns), cut, self.plan.max_missing)

    def _results(self, images: TileImages) -> Iterator[TileResult]:
        fitted = self.fitted
        labels, first = self.plan.labels(len(images)), images.items[0].row == 0 and images.items[0].left == 0
        for scored in stream(fitted, images, maps=self.plan.with_map, labels=labels, check_range=first):
            for result in scored.results:
                tile, missing = images.items[result.index], float(images.missing[result.index])
                if result.error is not None:
                    left_out = bool(images.left_out[result.index])
                    yield TileResult(tile, missing, left_out=left_out, error=result.error)
                    continue
                field = scored.map_of(result.index, fitted.map_part) if self.plan.with_map else None
                field = None if field is None else resized(field, self.grid.tile)
                yield TileResult(tile, missing, result.score, result.p_value, field=field)

    def _finish_row(self, row: int, valid: Valid, top: int) -> None:
        if not self.plan.with_map:
            return
        count, first = self.grid.lines_done_after(row), self.grid.tops[row]
        lines = self.stitcher.advance(count)
        lines[~valid[first - top : first - top + count]] = np.nan
        self.folder.map.write(first, lines)

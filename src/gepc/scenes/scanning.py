"""Scan a scene with a fitted detector: tiles, map, regions, detections, overview and `scene.json`.

The tiles go through the detector a block of rows at a time, and every finished block is saved.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gepc.core.errors import InputError
from gepc.core.files import StrPath, read_json
from gepc.core.options import build
from gepc.core.progress import OnProgress
from gepc.core.run_folder import storage_errors
from gepc.core.tables import escape_cell
from gepc.detector.detector import Detector
from gepc.detector.fitted import FittedDetector
from gepc.detector.stream import Result, stream
from gepc.images.formats import Pixels
from gepc.maps.drawing import resized
from gepc.methods.pooling import Map
from gepc.scenes.folder import ScanFolder, ScanState
from gepc.scenes.plan import ScanOptions, ScanPlan, make_plan
from gepc.scenes.reading import Scene, Valid, open_scene
from gepc.scenes.tiling import Stitcher, Tile, TileImages
from gepc.scenes.writing import SceneWriter

READ_BYTES = 1 << 26  # of raw pixels in memory at once, unless one tile is larger


@dataclass(frozen=True)
class SceneReport:
    """The folder of a scan, the content of its `scene.json`, and how many tiles an interrupted scan had finished."""

    out: Path
    summary: dict[str, Any]
    resumed: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of tiles, regions and detections."""
        return dict(self.summary["counts"])

    @property
    def guarantee(self) -> str:
        """The guarantee for the flags, with its assumptions."""
        return str(self.summary["guarantee"])

    @property
    def regions(self) -> list[dict[str, Any]]:
        """The regions, the highest score first."""
        return self._properties("regions.geojson")

    @property
    def detections(self) -> list[dict[str, Any]]:
        """The detections, the highest score first; empty for a method without maps."""
        return self._properties("detections.geojson") if "detections" in self.summary["files"] else []

    def _properties(self, name: str) -> list[dict[str, Any]]:
        return [feature["properties"] for feature in read_json(self.out / name)["features"]]


def plan_scan(detector: Detector, path: StrPath, out: StrPath | None = None, **options: Any) -> ScanPlan:
    """What `scan` with the same arguments would do; `out` is to count the tiles that an interrupted scan finished."""
    settings = build(ScanOptions, options, "scan")
    fitted = detector.fitted
    with _opened(fitted, path, settings) as scene:
        plan = make_plan(fitted, scene, settings)
    if out is None:
        return plan
    folder = ScanFolder(out)
    return dataclasses.replace(plan, done=plan.tiles if folder.done else folder.state().rows * len(plan.grid.lefts))


def scan(
    detector: Detector,
    path: StrPath,
    out: StrPath,
    *,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> SceneReport:
    """Score every tile of a scene and write the results to a folder.

    The folder receives `tiles.csv` (score, p-value and flag of every tile), the stitched map (`map.tif` or `map.npy`,
    NaN where there is no data), `regions.csv` and `regions.geojson` (connected flagged tiles), `detections.csv` and
    `detections.geojson` (connected pixels of the map above its limit), `overview.png` and finally `scene.json`. An
    interrupted scan resumes when it is called again with the same arguments.

    A tile is passed to the detector as it is in the file, so its score is that of the same crop given to `score`.
    Memory does not grow with the height of the scene. It grows with the width by 16 bytes for each line of a tile
    (twice that while progress is written), and with the number of tiles by about 20 bytes each.

    Parameters
    ----------
    detector : a fitted detector.
    path : the scene.
    out : folder for the results; one that holds a scan with other parameters is an `InputError`.
    on_progress : called with numbers of tiles.
    options : those of `ScanOptions`.
    """
    settings = build(ScanOptions, options, "scan")
    fitted = detector.fitted
    with _opened(fitted, path, settings) as scene:
        plan = make_plan(fitted, scene, settings)
        folder = ScanFolder(out)
        with folder.run.held(), storage_errors(folder.path):
            folder.run.begin(plan.identity)
            if folder.done:
                folder.complete()
                return SceneReport(folder.path, folder.summary(), plan.tiles)
            if plan.shortfall is not None:
                warnings.warn(plan.shortfall, UserWarning, stacklevel=2)
            resumed = SceneScorer(fitted, scene, plan, folder).run(on_progress)
            summary = SceneWriter(fitted, scene, plan, folder).write()
            return SceneReport(folder.path, summary, resumed)


def _opened(fitted: FittedDetector, path: StrPath, settings: ScanOptions) -> contextlib.closing[Scene]:
    return contextlib.closing(open_scene(path, settings.bands, settings.nodata, fitted.backbone.channels))


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
            for result, field in self._results(images):
                tile = images.items[result.index]
                if tile.row != current:
                    self._finish_row(current, valid, top)
                    current = tile.row
                if field is not None:
                    self.stitcher.add(tile.left, field)
                records.append(_record(tile, result, images))
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

    def _results(self, images: TileImages) -> Iterator[tuple[Result, Map | None]]:
        labels, first = self.plan.labels(len(images)), images.items[0].row == 0 and images.items[0].left == 0
        for scored in stream(self.fitted, images, maps=self.plan.with_map, labels=labels, check_range=first):
            for result in scored.results:
                field = None if result.error is not None else scored.map_of(result.index, self.fitted.map_part)
                yield result, None if field is None else resized(field, self.grid.tile)

    def _finish_row(self, row: int, valid: Valid, top: int) -> None:
        if not self.plan.with_map:
            return
        count, first = self.grid.lines_done_after(row), self.grid.tops[row]
        lines = self.stitcher.advance(count)
        lines[~valid[first - top : first - top + count]] = np.nan
        self.folder.map.write(first, lines)


def _record(tile: Tile, result: Result, images: TileImages) -> tuple[Any, ...]:
    """The row of the log, with all digits; a tile without a score has an error."""
    missing = float(images.missing[result.index])
    shown = "" if np.isnan(missing) else f"{missing:.6g}"
    numbers = ("", "") if result.error is not None else (repr(result.score), repr(result.p_value))
    left_out = "true" if images.left_out[result.index] else ""
    return (tile.row, tile.column, tile.top, tile.left, shown, *numbers, left_out, escape_cell(result.error or ""))

"""The tiles of a scene through the detector, a block of rows at a time; every finished block is saved, for resuming.

`run.json` comes first, `scene.json` last. In between, the folder `work` holds the tile records, the map so far and
`progress.safetensors`, which states what is finished: records beyond it are cut off, map lines are written again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from gepc.conformal.p_values import UNGROUPED, Labels
from gepc.core.errors import InputError, raising
from gepc.core.files import StrPath, read_json, replacing, write_arrays, write_json
from gepc.core.run_folder import RowLog, RunFolder
from gepc.core.tables import escape_cell
from gepc.detector.fitted import FittedDetector
from gepc.detector.stream import OnProgress, stream
from gepc.images.formats import Pixels
from gepc.maps.drawing import resized
from gepc.methods.pooling import Map
from gepc.scenes.reading import Scene, Valid
from gepc.scenes.tiling import Stitcher, Tile, TileImages

if TYPE_CHECKING:
    from gepc.scenes.scan import ScanPlan

READ_BYTES = 1 << 26  # of raw pixels in memory at once, unless one tile is larger
RECORD = ("row", "column", "top", "left", "missing", "score", "p_value", "left_out", "error")


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


@dataclass(frozen=True)
class ScanState:
    """What is finished: rows of the grid, bytes of the log, network passes, and the stitcher's sums."""

    rows: int = 0
    log_bytes: int = 0
    forward: int = 0
    jvp: int = 0
    sums: Mapping[str, npt.NDArray[np.float64]] | None = None


@dataclass(frozen=True)
class MapFile:
    """A map in a `.npy` file. It is mapped into memory for each access only, so the process stays small."""

    path: Path

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width)."""
        height, width = np.load(self.path, mmap_mode="r").shape
        return height, width

    def __getitem__(self, part: tuple[slice, slice]) -> Map:
        return np.array(np.load(self.path, mmap_mode="r")[part])

    def create(self, height: int, width: int) -> None:
        """Create the file, unless it exists."""
        if not self.path.exists():
            with replacing(self.path) as draft:
                np.lib.format.open_memmap(draft, mode="w+", dtype=np.float32, shape=(height, width)).flush()

    def write(self, top: int, lines: Map) -> None:
        """Write finished lines."""
        field = np.load(self.path, mmap_mode="r+")
        field[top : top + len(lines)] = lines
        field.flush()


class ScanFolder:
    """The files of a scan."""

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        self.work = self.path / "work"
        self.run = RunFolder(path, "work")
        self.log = RowLog(self.work / "tiles.csv", RECORD)

    @property
    def done(self) -> bool:
        """Whether the scan is finished."""
        return (self.path / "scene.json").is_file()

    @property
    def map(self) -> MapFile:
        """The map so far, or the final one."""
        working, final = self.work / "map.npy", self.path / "map.npy"
        return MapFile(final if final.exists() and not working.exists() else working)

    def state(self) -> ScanState:
        """What is finished."""
        path = self.work / "progress.safetensors"
        if not path.exists():
            return ScanState()
        damaged = f"{path} is damaged ({{error}}); remove {self.path} and start again"
        with raising(InputError, damaged, OSError, SafetensorError, KeyError, ValueError):
            arrays = load_file(path)
            rows, size, forward, jvp = (int(value) for value in arrays.pop("counts"))
        return ScanState(rows, size, forward, jvp, arrays)

    def resume(self) -> ScanState:
        """What is finished; records of unfinished rows are removed."""
        self.work.mkdir(exist_ok=True)
        state = self.state()
        self.log.recover(state.log_bytes)
        return state

    def commit(
        self, before: ScanState, rows: int, records: Sequence[Sequence[Any]], cost: tuple[int, int], sums: Any
    ) -> ScanState:
        """Append the records of a block, then mark all rows up to `rows` as finished."""
        after = ScanState(rows, self.log.append(records), before.forward + cost[0], before.jvp + cost[1], sums)
        counts = np.array([after.rows, after.log_bytes, after.forward, after.jvp], dtype=np.int64)
        write_arrays(self.work / "progress.safetensors", {"counts": counts, **(sums or {})})
        return after

    def finish(self, summary: dict[str, Any]) -> None:
        """Write `scene.json`, which marks the scan as finished, and remove the working files."""
        write_json(self.path / "scene.json", summary)
        self.remove_work()

    def remove_work(self) -> None:
        """Remove the working files."""
        shutil.rmtree(self.work, ignore_errors=True)

    def summary(self) -> dict[str, Any]:
        """Content of `scene.json`; the files that it names must exist."""
        summary: dict[str, Any] = read_json(self.path / "scene.json")
        for name in summary.get("files", {}).values():
            if not (self.path / name).is_file():
                raise InputError(f"{self.path} is a finished run but {name} is missing; give another folder")
        return summary


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
        labels: Labels | None = None
        if self.plan.group != UNGROUPED:
            labels = np.full(len(images), self.plan.group)
        first = images.items[0].row == 0 and images.items[0].left == 0
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

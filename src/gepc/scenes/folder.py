"""The folder of a scan, which an interrupted scan resumes from.

`run.json` comes first, `scene.json` last. In between, the folder `work` holds the tile records, the map so far and
`progress.safetensors`, which states what is finished: records beyond it are cut off, map lines are written again.
A finished scan writes `scene.json` into `work`, removes the other files there, and moves it to its place. So where
`scene.json` is, all results are whole and no working file is left; the next call completes what was interrupted.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from gepc.core.errors import InputError, raising
from gepc.core.files import StrPath, read_json, replacing, write_arrays, write_json
from gepc.core.run_folder import RowLog, RunFolder
from gepc.methods.pooling import Map

SUMMARY = "scene.json"
RECORD = ("row", "column", "top", "left", "missing", "score", "p_value", "left_out", "error")


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

    def read(self, top: int, left: int, height: int, width: int) -> tuple[Map, npt.NDArray[np.bool_]]:
        """A window, and where its values are known."""
        values = self[top : top + height, left : left + width]
        return values, ~np.isnan(values)

    def create(self, height: int, width: int) -> None:
        """Create the file, unless it exists."""
        if not self.path.exists():
            with replacing(self.path) as draft:
                np.lib.format.open_memmap(draft, mode="w+", dtype=np.float32, shape=(height, width)).flush()

    def write(self, top: int, lines: Map) -> None:
        """Write finished lines; not through a memory map, where a full disk ends the process with a signal."""
        with open(self.path, "rb+") as handle:
            np.lib.format.read_magic(handle)
            (_, width), _, dtype = np.lib.format.read_array_header_1_0(handle)
            handle.seek(top * width * dtype.itemsize, os.SEEK_CUR)
            handle.write(np.ascontiguousarray(lines, dtype).tobytes())
            handle.flush()
            os.fsync(handle.fileno())


class ScanFolder:
    """The files of a scan."""

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        self.work = self.path / "work"
        self.run = RunFolder(path, "work")
        self.log = RowLog(self.work / "tiles.csv", RECORD)

    @property
    def done(self) -> bool:
        """Whether the scan is finished, up to the removal of its working files."""
        return (self.path / SUMMARY).is_file() or (self.work / SUMMARY).is_file()

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
        """Mark the scan as finished: from now on only `complete` is left to do."""
        write_json(self.work / SUMMARY, summary)
        self.complete()

    def complete(self) -> None:
        """Remove the working files, then put `scene.json` into its place; after an interruption, call it again."""
        for path in self.work.glob("*"):
            if path.name != SUMMARY:
                path.unlink()
        if (self.work / SUMMARY).exists():
            os.replace(self.work / SUMMARY, self.path / SUMMARY)
        shutil.rmtree(self.work, ignore_errors=True)

    def summary(self) -> dict[str, Any]:
        """Content of `scene.json`; the files that it names must exist."""
        summary: dict[str, Any] = read_json(self.path / SUMMARY)
        for name in summary.get("files", {}).values():
            if not (self.path / name).is_file():
                raise InputError(f"{self.path} is a finished run but {name} is missing; give another folder")
        return summary

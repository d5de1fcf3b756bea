"""The folder of a run: what was asked, what is done, and how an interrupted run goes on.

`run.json` comes first and says what was asked; `scene.json` comes last and says that all is there. In between, `work/`
holds the tile records (`tiles.csv`, appended and flushed), the map so far (`map.npy`) and `progress.safetensors`,
which is replaced at once after every block of rows and is the only word on what is done: records beyond the length
that it states are cut off, map lines beyond are written again. So a run killed at any moment goes on with the first
row that is not done, and no tile is lost or repeated.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, StorageError
from gepc.core.files import only_writer, read_json, remove_drafts, replacing, write_arrays, write_json
from gepc.features.maps import Map

ASKED, DONE, WORK = "run.json", "scene.json", "work"
RECORD = ("row", "column", "top", "left", "missing", "score", "p_value", "error")


@dataclass(frozen=True)
class Progress:
    """Rows of the grid that are done, the length of their records in bytes, network passes, the stitcher's sums."""

    rows: int = 0
    record_bytes: int = 0
    forward: int = 0
    jvp: int = 0
    sums: Mapping[str, npt.NDArray[np.float64]] | None = None


class StoredMap:
    """A map in a `.npy` file, read part by part; nothing stays mapped, so the process stays small."""

    def __init__(self, path: Path) -> None:
        self._path = path
        height, width = np.load(path, mmap_mode="r").shape
        self.shape: tuple[int, int] = (height, width)

    def __getitem__(self, part: tuple[slice, slice]) -> Map:
        return np.array(np.load(self._path, mmap_mode="r")[part])


class RunFolder:
    """The files of one run below `path`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.work = self.path / WORK

    @contextlib.contextmanager
    def claimed(self, asked: dict[str, Any]) -> Iterator[None]:
        """Make the folder, or take up one that was begun with the same words; hold it against a second process."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; give a folder")
        begun = (self.path / ASKED).exists()
        if not begun and self.path.exists() and any(not p.name.startswith(".") for p in self.path.iterdir()):
            raise InputError(f"{self.path} is not empty and holds no run of this command; give another folder")
        if begun:
            _check_same(self.path, asked, read_json(self.path / ASKED))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with only_writer(self.path):
                remove_drafts(self.path)
                if not begun:
                    write_json(self.path / ASKED, asked)
                self.work.mkdir(exist_ok=True)
                yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"cannot write in {self.path}: {error.strerror or error}") from error

    @property
    def done(self) -> bool:
        """Whether everything has been written."""
        return (self.path / DONE).is_file()

    def rows_done(self) -> int:
        """Rows of an interrupted run that are done; reads only."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        with contextlib.suppress(OSError, SafetensorError, KeyError):
            return int(load_file(self.work / "progress.safetensors")["counts"][0])
        return 0

    # --- while tiles are scored --------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """What is done; records of rows that are not done are cut off."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        records, state = self.work / "tiles.csv", self.work / "progress.safetensors"
        if not state.exists():
            records.write_bytes(b"")
            return Progress()
        try:
            arrays = load_file(state)
            rows, size, forward, jvp = (int(value) for value in arrays.pop("counts"))
            if records.stat().st_size < size:
                raise InputError("records are missing")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InputError(f"{self.work} is damaged ({error}); remove {self.path} and start again") from error
        os.truncate(records, size)
        return Progress(rows, size, forward, jvp, arrays)

    def commit(
        self, before: Progress, rows: int, records: Sequence[Sequence[Any]], cost: tuple[int, int], sums: Any
    ) -> Progress:
        """Append the records of a block of rows, then say that all rows up to `rows` are done."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(records)
        content = text.getvalue().encode("utf-8")
        with open(self.work / "tiles.csv", "ab") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        after = Progress(rows, before.record_bytes + len(content), before.forward + cost[0], before.jvp + cost[1], sums)
        counts = np.array([after.rows, after.record_bytes, after.forward, after.jvp], dtype=np.int64)
        write_arrays(self.work / "progress.safetensors", {"counts": counts, **(sums or {})})
        return after

    def records(self) -> Iterator[list[str]]:
        """The records of all tiles, one by one."""
        with open(self.work / "tiles.csv", newline="", encoding="utf-8") as handle:
            yield from csv.reader(handle)

    # --- the map -----------------------------------------------------------------------------------------------

    def begin_map(self, height: int, width: int) -> None:
        """A file for the map, its lines still to come."""
        path = self.work / "map.npy"
        if not path.exists():
            with replacing(path) as draft:
                np.lib.format.open_memmap(draft, mode="w+", dtype=np.float32, shape=(height, width)).flush()

    def write_lines(self, top: int, lines: Map) -> None:
        """Put finished lines in their place."""
        field = np.load(self.work / "map.npy", mmap_mode="r+")
        field[top : top + len(lines)] = lines
        field.flush()

    def map(self) -> StoredMap:
        """The finished map."""
        working = self.work / "map.npy"
        return StoredMap(working if working.exists() else self.path / "map.npy")

    def keep_map(self) -> None:
        """Make the working map the final one."""
        if (self.work / "map.npy").exists():
            os.replace(self.work / "map.npy", self.path / "map.npy")

    # --- at the end --------------------------------------------------------------------------------------------

    def write_rows(self, name: str, header: Sequence[str], rows: Iterator[Sequence[Any]]) -> None:
        """A CSV file, whole or not at all."""
        with replacing(self.path / name) as draft, open(draft, "w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle, lineterminator="\n")
            writer.writerow(header)
            writer.writerows(rows)

    def finish(self, summary: dict[str, Any]) -> None:
        """Say that all is there and remove what was only needed on the way."""
        write_json(self.path / DONE, summary)
        self.tidy()

    def discard(self) -> None:
        """Remove a run that came to nothing, and the folder where nothing else is in it."""
        self.tidy()
        (self.path / ASKED).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def tidy(self) -> None:
        """Remove the working files of a finished run."""
        shutil.rmtree(self.work, ignore_errors=True)

    def summary(self) -> dict[str, Any]:
        """`scene.json`, after a look that what it names is there."""
        summary: dict[str, Any] = read_json(self.path / DONE)
        for name in summary.get("files", {}).values():
            if not (self.path / name).is_file():
                raise InputError(f"{self.path} is a finished run but {name} is missing; give another folder")
        return summary


def _check_same(path: Path, asked: dict[str, Any], before: Any) -> None:
    found = _flat(before if isinstance(before, dict) else {})
    for name, value in _flat(asked).items():
        if found.get(name) != value:
            raise InputError(
                f"{path} holds a run with other parameters: {name} was {found.get(name)!r} and is {value!r} now; "
                "give another folder"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name} ") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat

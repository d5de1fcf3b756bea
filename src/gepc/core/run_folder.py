"""Long computations on disk: what is computed, one writer at a time, and finished pieces, so that a killed run resumes.

A `RunFolder` holds `run.json`, which identifies the run, and pieces that are whole or absent. A `RowLog` is a CSV file
that grows by whole rows.
"""

import contextlib
import csv
import io
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gepc.core.errors import InputError, StorageError, raising
from gepc.core.files import StrPath, only_writer, read_json, remove_drafts, write_json

DESCRIPTION, SCHEMA = "run.json", 1


def storage_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn an `OSError` of the block into a `StorageError` that names `path`."""
    return raising(StorageError, f"cannot write {path}: {{reason}}", OSError, passing=StorageError)


class RunFolder:
    """A folder with the pieces of one run.

    The regular expression `pieces` matches the names of what belongs to a run, other than `run.json`; `advice`
    completes the error messages, which name `options`.
    """

    def __init__(
        self, path: StrPath, pieces: str, advice: str = "give another folder", options: Sequence[str] = ()
    ) -> None:
        self.path, self.advice, self.options = Path(path), advice, options
        self._pieces = re.compile(pieces)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Create the folder and keep other processes from writing into it; a folder left empty is removed."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; give another place")
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            with only_writer(self.path):
                yield
        finally:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def begin(
        self, identity: Mapping[str, Any], layout: Mapping[str, Any] | None = None, restart: bool = False
    ) -> dict[str, Any]:
        """Start a run, or resume the one in the folder if it has the same identity; the stored identity and layout.

        The identity is everything the results depend on, as JSON values; the layout is how they are stored, and a
        resumed run keeps its own. With `restart`, a run that is there is discarded.
        """
        place, entries = self.path / DESCRIPTION, self._entries()
        left_over = bool(entries) and all(self._pieces.fullmatch(path.name) for path in entries)
        if restart and (place.exists() or left_over):
            self.clear()
        elif left_over:
            raise InputError(
                f"{self.path} holds pieces of a run and no {DESCRIPTION}; {self.advice}", options=self.options
            )
        elif entries and not place.exists():
            raise InputError(f"{self.path} is not empty and contains no run; give another folder")
        if not place.exists():
            write_json(place, {"schema": SCHEMA, **identity, **(layout or {})})
        remove_drafts(self.path)
        return self._check_identity(read_json(place), identity, layout or {})

    def _check_identity(self, stored: Any, identity: Mapping[str, Any], layout: Iterable[str]) -> dict[str, Any]:
        place = self.path / DESCRIPTION
        if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
            raise InputError(f"{place} is not a run of this version; {self.advice}", options=self.options)
        for name in [*identity, *layout]:
            if name not in stored:
                raise InputError(f"{place} has no {name!r}; {self.advice}", options=self.options)
        found = _flat(stored)
        for name, value in _flat(identity).items():
            if found.get(name) != value:
                changed = f"other parameters: {name} was {_short(found.get(name))} and is {_short(value)} now"
                raise InputError(f"{self.path} holds a run with {changed}; {self.advice}", options=self.options)
        return stored

    def clear(self) -> None:
        """Delete the pieces, and the description last: if this is interrupted, what is left is still a run."""
        for path in self._entries():
            if self._pieces.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (self.path / DESCRIPTION).unlink(missing_ok=True)

    def _entries(self) -> list[Path]:
        """What the folder holds, without drafts and locks."""
        return [path for path in self.path.iterdir() if not path.name.startswith(".")] if self.path.is_dir() else []


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name} ") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _short(value: Any) -> str:
    """Digests by their first digits."""
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 24 else repr(value)


class RowLog:
    """A CSV file that grows by whole rows and stays readable after a crash.

    No cell may hold a line ending (`gepc.core.tables.escape_cell` makes text fit): a row that was cut short is what
    follows the last one.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, tuple(columns)

    def recover(self, size: int | None = None) -> None:
        """Cut the file to `size` bytes, or after its last whole row; start one where there is none."""
        header = (",".join(self.columns) + "\r\n").encode()
        if not self.path.exists():
            self.append([self.columns])
            return
        unreadable = raising(InputError, f"{self.path} cannot be read: {{reason}}; give another file", OSError)
        with unreadable, open(self.path, "rb") as handle:
            start = handle.read(len(header))
            if not header.startswith(start):
                raise InputError(f"{self.path} is not a log of this kind; give another file")
            if size is None:
                size = (start + handle.read()).rfind(b"\r\n") + 2 if start == header else 0
        if size > self.path.stat().st_size:
            raise InputError(f"{self.path} is damaged: rows are missing")
        with storage_errors(self.path):
            os.truncate(self.path, size)
        if size == 0:
            self.append([self.columns])

    def append(self, rows: Iterable[Sequence[Any]]) -> int:
        """Write rows to the disk, flushed before this returns; the file's size in bytes."""
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as handle:
                handle.write(text.getvalue().encode("utf-8"))
                handle.flush()
                os.fsync(handle.fileno())
                return handle.tell()

    def rows(self) -> Iterator[dict[str, str]]:
        """Yield the rows one by one, by column. A damaged line raises `InputError`."""
        damaged = f"{self.path} is damaged ({{error}}); remove the row, or give another file"
        with (
            raising(InputError, damaged, csv.Error),
            open(self.path, newline="", encoding="utf-8", errors="surrogateescape") as handle,
        ):
            for number, row in enumerate(csv.reader(handle, strict=True), 1):
                if len(row) != len(self.columns):
                    raise InputError(f"{self.path}, row {number} is damaged; remove it, or give another file")
                if number > 1:
                    yield dict(zip(self.columns, row, strict=True))

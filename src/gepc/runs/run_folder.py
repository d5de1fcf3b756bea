"""A run on disk: `run.json` says what it is, `shard-00012.csv` holds the rows of one range of the list of images.

A shard is written beside its name and renamed when complete, so the shards that are there are whole, and a run that was
killed at any moment goes on with those that are not. Nothing else is remembered.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gepc.core.errors import InputError, StorageError
from gepc.core.files import LOCK, read_json, remove_drafts, write_json
from gepc.detector.detector import Detector, Result
from gepc.detector.storage import detector_digest, versions
from gepc.images.sources import FileImages, Images, UrlImages, iterate
from gepc.runs.tables import read_shard, write_shard

SCHEMA = 1
DESCRIPTION, LISTING = "run.json", "images.json"
SHARD_NAME = re.compile(r"shard-\d{5,}\.(csv|parquet)")
SHARD_SIZE = 1024


@dataclass(frozen=True)
class Shard:
    """The images of the list from `start` up to, not including, `stop`."""

    number: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Identity:
    """What a run computes. Two runs with the same identity have the same rows."""

    detector: str
    images: str
    count: int
    groups: str | None

    @classmethod
    def of(cls, detector: Detector, images: Images, labels: Iterable[str] | None = None) -> Identity:
        """The detector with its weights, the list of images, and the groups they are compared within."""
        groups = None if labels is None else _digest(str(label) for label in labels)
        return cls(detector_digest(detector), list_digest(images), len(images), groups)


class Run:
    """The shards of a run, in `folder`; see `open_run`."""

    def __init__(self, folder: Path, count: int, shard_size: int, kind: str) -> None:
        self.folder, self.count, self.kind = folder, count, kind
        starts = range(0, count, shard_size)
        self.shards = [Shard(number, start, min(start + shard_size, count)) for number, start in enumerate(starts)]

    def path(self, shard: Shard) -> Path:
        """Where the rows of that shard are, or will be."""
        return self.folder / f"shard-{shard.number:05d}.{self.kind}"

    def pending(self) -> list[Shard]:
        """The shards that are not there yet."""
        return [shard for shard in self.shards if not self.path(shard).exists()]

    def write(self, shard: Shard, results: Sequence[Result]) -> None:
        """Make a shard complete; every image of its range must have exactly one row."""
        if [result.index for result in results] != list(range(shard.start, shard.stop)):
            raise ValueError(f"shard {shard.number} needs the rows {shard.start} to {shard.stop - 1}, once each")
        try:
            write_shard(self.path(shard), results)
        except StorageError as error:
            done = len(self.shards) - len(self.pending())
            raise StorageError(
                f"{error}. {done} of {len(self.shards)} shards are finished; make room and run the same command again"
            ) from error

    def results(self) -> Iterator[list[Result]]:
        """The rows of every shard, in order."""
        for shard in self.shards:
            results = read_shard(self.path(shard))
            if [result.index for result in results] != list(range(shard.start, shard.stop)):
                raise InputError(f"{self.path(shard)} has lost rows; delete it and run the same command again")
            yield results

    def remove(self) -> None:
        """Delete the folder: its rows are in the merged table."""
        _empty(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


def open_run(
    folder: Path,
    identity: Identity,
    images: Images,
    kind: str = "csv",
    shard_size: int = SHARD_SIZE,
    restart: bool = False,
) -> Run:
    """A new run in `folder`, or the one that is there if it is the same; another one is refused.

    A run that is taken up keeps its own shard size and format.
    """
    if restart and ((folder / DESCRIPTION).exists() or _is_left_over(folder)):
        _empty(folder)
    if (folder / DESCRIPTION).exists():
        run = join_run(folder, identity)
        remove_drafts(folder)
        return run
    _check_usable(folder)
    if isinstance(images, FileImages):
        write_json(folder / LISTING, images.names)
    write_json(folder / DESCRIPTION, _description(identity, kind, shard_size))
    return Run(folder, identity.count, shard_size, kind)


def join_run(folder: Path, identity: Identity) -> Run:
    """The run that is in `folder`, where others may be writing: nothing is changed."""
    stored = _stored(folder)
    _check_same(folder, Identity(*(stored[name] for name in ("detector", "images", "count", "groups"))), identity)
    return Run(folder, identity.count, stored["shard_size"], stored["format"])


def _empty(folder: Path) -> None:
    """Throw a run away; the folder itself, which a process may be holding, stays.

    The description goes last: if this is killed, what is left is still a run.
    """
    shards = [path for path in folder.glob("shard-*") if SHARD_NAME.fullmatch(path.name)]
    for path in [*shards, folder / LISTING, folder / DESCRIPTION]:
        path.unlink(missing_ok=True)


def _is_left_over(folder: Path) -> bool:
    """A folder of shards, drafts and a list alone: a run whose description is lost."""
    return folder.is_dir() and all(
        path.name in (LISTING, LOCK) or path.suffix == ".part" or SHARD_NAME.fullmatch(path.name)
        for path in folder.iterdir()
    )


def _check_usable(folder: Path) -> None:
    """A place for a new run: not there yet, empty, or left by a run that was killed before it had begun."""
    if not folder.exists():
        return
    if not folder.is_dir() or any(
        path.name not in (LISTING, LOCK) and path.suffix != ".part" for path in folder.iterdir()
    ):
        hint = "--restart throws its shards away" if _is_left_over(folder) else "give another folder"
        raise InputError(f"{folder} exists and holds no run; {hint}")
    remove_drafts(folder)


def listed(folder: Path) -> FileImages:
    """The files or addresses that a run was started with."""
    if not (folder / LISTING).exists():
        raise InputError(f"{folder} holds no list of files; start the run without --as-listed")
    names = [str(name) for name in read_json(folder / LISTING)]
    # no path holds two slashes in a row
    return UrlImages(names) if names and "://" in names[0] else FileImages([Path(name) for name in names])


def _description(identity: Identity, kind: str, shard_size: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "detector": identity.detector,
        "images": identity.images,
        "count": identity.count,
        "groups": identity.groups,
        "shard_size": shard_size,
        "format": kind,
        "versions": versions(),
    }


def _stored(folder: Path) -> dict[str, Any]:
    stored = read_json(folder / DESCRIPTION)
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        raise InputError(f"{folder / DESCRIPTION} is not a run of this version; --restart begins anew")
    missing = [name for name in _description(Identity("", "", 0, None), "", 0) if name not in stored]
    if missing:
        raise InputError(f"{folder / DESCRIPTION} has no {missing[0]!r}; --restart begins anew")
    return stored


def _check_same(folder: Path, stored: Identity, asked: Identity) -> None:
    if stored == asked:
        return
    if stored.detector != asked.detector:
        what = "was made with another detector"
    elif (stored.images, stored.count) != (asked.images, asked.count):
        what = f"has another list of images ({stored.count} then, {asked.count} now)"
        if (folder / LISTING).exists():
            what += "; --as-listed goes on with those listed then"
    else:
        what = "was made with other groups"
    raise InputError(f"the unfinished run in {folder} {what}; --restart throws its shards away and begins anew")


def list_digest(images: Images) -> str:
    """Of files, their names in order; of arrays and other collections, which have no names, their pixels."""
    if isinstance(images, FileImages):
        return _digest(images.names)
    digest = hashlib.sha256()
    for record in iterate(images):
        content = b"" if record.pixels is None else np.ascontiguousarray(record.pixels).tobytes()
        digest.update(f"{record.name}|{len(content)}|".encode() + content)
    return digest.hexdigest()


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode("utf-8", "surrogateescape")
        digest.update(f"{len(encoded)}|".encode() + encoded)
    return digest.hexdigest()

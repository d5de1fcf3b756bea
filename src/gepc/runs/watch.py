"""Files as they appear: each scored once, each a row, whatever happens in between.

The CSV is the only memory. A row is one write, flushed to the disk; a row cut short by a crash is removed at the next
start and its file scored again; the monitor's state is replayed from the rows. So no file is lost and none repeated.
"""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gepc.core.errors import InputError, StorageError
from gepc.detector.detector import Detector, Result
from gepc.images.formats import EXTENSIONS
from gepc.images.sources import FileImages
from gepc.verdicts.monitor import Monitor, Verdict

COLUMNS = ("path", "score", "p_value", "alarm", "error", "alarm_rate", "log10_capital", "drifted")


@dataclass(frozen=True)
class Row:
    """One file of the stream: the detector's result and, where it could be scored, the monitor's verdict."""

    result: Result
    verdict: Verdict | None

    def cells(self) -> tuple[str, ...]:
        """The row of the CSV."""
        if self.verdict is None:
            return (self.result.name, "", "", "", self.result.error or "", "", "", "")
        return (
            self.result.name,
            repr(self.result.score),
            f"{self.verdict.p_value:.9g}",
            str(self.verdict.alarm).lower(),
            "",
            f"{self.verdict.alarm_rate:.6g}",
            f"{self.verdict.log10_capital:.6g}",
            str(self.verdict.drifted).lower(),
        )


class Watch:
    """A folder, a detector, a monitor and the CSV that remembers.

    `settle` is how many seconds a file must have been left alone before it is read; `patience` how long one that cannot
    be decoded is given, since it may still be arriving.
    """

    def __init__(
        self, folder: Path, detector: Detector, monitor: Monitor, log: Path, settle: float = 1.0, patience: float = 10.0
    ) -> None:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder")
        self.folder, self.detector, self.monitor, self.log = folder, detector, monitor, log
        self.settle, self.patience = settle, patience
        self.done: set[str] = set()
        self._take_up()

    def _take_up(self) -> None:
        """Read the log, cut off a row that was not finished, and replay the scores."""
        if not self.log.exists():
            self._append(COLUMNS)
            return
        text = self.log.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            with open(self.log, "rb+") as handle:
                handle.truncate(whole)
        rows = list(csv.DictReader(io.StringIO(text[:whole].decode("utf-8"), newline="")))
        if whole == 0:
            self._append(COLUMNS)
        elif text[:whole].split(b"\r\n", 1)[0].decode("utf-8", "replace") != ",".join(COLUMNS):
            raise InputError(f"{self.log} is not a log of this command; give another --out")
        for row in rows:
            self.done.add(row["path"])
            if row["score"]:
                self.monitor.update(float(row["score"]))

    def step(self) -> Iterator[Row]:
        """Score every file that has appeared and settled since the last step, oldest first."""
        for start in range(0, len(ready := self._ready()), self.detector.batch_size):
            paths = ready[start : start + self.detector.batch_size]
            for result in self.detector.results(FileImages(paths)):
                if result.error is not None and self._age(Path(result.name)) < self.patience:
                    continue
                verdict = None if result.error is not None else self.monitor.update(result.score)
                row = Row(result, verdict)
                self._append(row.cells())
                self.done.add(result.name)
                yield row

    def _ready(self) -> list[Path]:
        fresh = (p for p in self.folder.rglob("*") if p.suffix.lower() in EXTENSIONS and str(p) not in self.done)
        return sorted((p for p in fresh if self._age(p) >= self.settle), key=lambda p: (self._modified(p), p))

    def _age(self, path: Path) -> float:
        return time.time() - self._modified(path)

    @staticmethod
    def _modified(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:  # it was removed between the listing and now
            return float("inf")

    def _append(self, cells: tuple[str, ...]) -> None:
        line = io.StringIO()
        csv.writer(line).writerow(cells)
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                data = line.getvalue().encode("utf-8")
                if os.write(handle, data) != len(data):
                    raise StorageError(f"{self.log}: the disk is full; the file is scored again at the next start")
                os.fsync(handle)
            finally:
                os.close(handle)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"cannot write {self.log}: {error.strerror or error}") from error

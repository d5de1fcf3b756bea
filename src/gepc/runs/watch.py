"""Score files as they appear in a folder: each file once, each file one row, also across crashes.

The CSV file is the only state. Rows are flushed to the disk one by one; at the start, a row that was cut short by a
crash is removed and the monitor's state is recomputed from the rows. So no file is lost and none is scored twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gepc.core.errors import InputError
from gepc.core.run_folder import RowLog
from gepc.detector.detector import Detector, Result
from gepc.images.formats import EXTENSIONS
from gepc.images.sources import FileImages
from gepc.verdicts.monitor import Monitor, Verdict

COLUMNS = ("path", "score", "p_value", "alarm", "error", "alarm_rate", "log10_capital", "drifted")


@dataclass(frozen=True)
class WatchedFile:
    """One file of the stream: the detector's result and, where it could be scored, the monitor's verdict."""

    result: Result
    verdict: Verdict | None

    def cells(self) -> tuple[str, ...]:
        """The row of the CSV file."""
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
    """A watched folder.

    Parameters
    ----------
    folder : the folder, with its subfolders.
    detector : scores the files.
    monitor : judges the stream of scores.
    log : CSV file that rows are appended to; an existing one is resumed.
    settle : seconds that a file's size and modification time must stay the same before it is read.
    patience : the same for a file that cannot be decoded, since it may still be incomplete.
    """

    def __init__(
        self, folder: Path, detector: Detector, monitor: Monitor, log: Path, settle: float = 1.0, patience: float = 10.0
    ) -> None:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder")
        self.folder, self.detector, self.monitor = folder, detector, monitor
        self.settle, self.patience = settle, patience
        self.log = RowLog(log, COLUMNS)
        self.log.recover()
        self.done: set[str] = set()
        self._arriving: dict[str, tuple[tuple[int, int], float]] = {}
        for row in self.log.rows():
            self.done.add(row["path"])
            if row["score"]:
                monitor.update(float(row["score"]))

    def step(self) -> Iterator[WatchedFile]:
        """Score every file that has appeared and settled since the last step, oldest first."""
        ready = self._ready()
        for start in range(0, len(ready), self.detector.batch_size):
            for result in self.detector.results(FileImages(ready[start : start + self.detector.batch_size])):
                if result.error is not None and self._unchanged_for(Path(result.name)) < self.patience:
                    continue
                verdict = None if result.error is not None else self.monitor.update(result.score)
                row = WatchedFile(result, verdict)
                self.log.append([row.cells()])
                self.done.add(result.name)
                self._arriving.pop(result.name, None)
                yield row

    def _ready(self) -> list[Path]:
        fresh = (p for p in self.folder.rglob("*") if p.suffix.lower() in EXTENSIONS and str(p) not in self.done)
        settled = [path for path in fresh if self._unchanged_for(path) >= self.settle]
        return sorted(settled, key=lambda path: (self._arriving[str(path)][0][0], path))

    def _unchanged_for(self, path: Path) -> float:
        """Seconds since the file was seen to change, by this machine's clock: file times may be set by another."""
        try:
            facts = path.stat()
        except OSError:  # removed since it was listed
            return -1.0
        now, state = time.monotonic(), (facts.st_mtime_ns, facts.st_size)
        if self._arriving.get(str(path), (None,))[0] != state:
            self._arriving[str(path)] = (state, now)
        return now - self._arriving[str(path)][1]

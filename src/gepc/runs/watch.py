"""Score files as they appear in a folder: each file once, each file one row, also across crashes.

The CSV file is the only state: at the start, a row that was cut short is removed and the monitor's state is recomputed
from the rows. A file that has changed since is scored again. Files are decoded in a process of their own.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from gepc.conformal.monitor import Monitor, Verdict
from gepc.conformal.p_values import UNGROUPED
from gepc.core.errors import InputError, raising
from gepc.core.run_folder import RowLog
from gepc.core.tables import escape_cell, unescape_cell
from gepc.detector.fitted import FittedDetector
from gepc.detector.stream import Result, stream
from gepc.images.decoder import DecoderProcess
from gepc.images.formats import Pixels
from gepc.images.preprocessing import warn_about_range
from gepc.images.sources import FileImages, ItemImages, file_stamp, image_files, masks_among
from gepc.runs.shards import format_of

COLUMNS = ("path", "score", "p_value", "alarm", "error", "alarm_rate", "log10_capital", "drifted", "stamp", "time")


@dataclass(frozen=True)
class WatchedFile:
    """The result for one file, the verdict of the monitor if it could be scored, and its stamp before it was read."""

    result: Result
    verdict: Verdict | None
    stamp: str

    def cells(self) -> tuple[str, ...]:
        """The row of the CSV file; the time is that of scoring, in UTC."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        name, error, verdict = escape_cell(self.result.name), escape_cell(self.result.error or ""), self.verdict
        if verdict is None:
            return (name, "", "", "", error, "", "", "", self.stamp, now)
        judged = (f"{verdict.p_value:.9g}", str(verdict.alarm).lower())
        drift = (f"{verdict.alarm_rate:.6g}", f"{verdict.log10_capital:.6g}", str(verdict.drifted).lower())
        return (name, repr(self.result.score), *judged, error, *drift, self.stamp, now)


class Watch:
    """A watched folder, with its subfolders.

    A monitor judges the stream of scores. A detector that was fitted with groups has one for each group, and the group
    of a file is the name of its folder. Rows are appended to the CSV file `log`, and an existing one is resumed. A file
    is read when its size and modification time have stayed the same for `settle` seconds; one that cannot be decoded,
    since it may still be incomplete, gets a row after `patience` seconds. While the file `pause`, whose name is that of
    the log with `.pause` behind it, exists, nothing is scored.
    """

    def __init__(
        self,
        folder: Path,
        fitted: FittedDetector,
        monitors: Mapping[str, Monitor],
        log: Path,
        settle: float = 1.0,
        patience: float = 10.0,
    ) -> None:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder")
        if format_of(log) != "csv":
            raise InputError(f"{log}: the log is a CSV file; give a name that ends in .csv")
        self.folder, self.fitted, self.monitors = folder, fitted, monitors
        self.settle, self.patience, self.pause = settle, patience, log.with_name(f"{log.name}.pause")
        self.log = RowLog(log, COLUMNS)
        self.log.recover()
        self.done: dict[str, str] = {}  # path -> stamp
        self._arriving: dict[str, tuple[str, float]] = {}
        self._masks: set[Path] = set()
        self._decoder = DecoderProcess()
        damaged = f"{log} is damaged: {{error}}; remove the row, or give another file"
        for row in self.log.rows():
            name = unescape_cell(row["path"])
            self.done[name] = row["stamp"]
            if row["score"] and (monitor := monitors.get(self.group(name))) is not None:
                with raising(InputError, damaged, ValueError):
                    monitor.update(float(row["score"]), row["stamp"])

    def group(self, name: str) -> str:
        """The group of a file."""
        return Path(name).parent.name if self.fitted.reference.grouped else UNGROUPED

    def step(self) -> Iterator[WatchedFile]:
        """Score every file that has appeared and settled since the last step, oldest first, unless it is paused."""
        ready = [] if self.pause.exists() else self._ready()
        stamps = {str(path): file_stamp(str(path)) for path in ready}
        lowest: list[Pixels] = []  # of each file, for a check of their range that does not decode them again

        def read(path: str) -> Pixels:
            pixels = self._decoder.read_file(path)
            if pixels.size:
                lowest.append(pixels.min().reshape(1, 1))
            return pixels

        for scored in stream(self.fitted.without_groups(), FileImages(ready, read), check_range=False):
            for result in map(self._within_groups, scored.results):
                if result.error is not None and self._unchanged_for(Path(result.name)) < self.patience:
                    continue
                stamp = stamps[result.name]
                verdict = None
                if result.error is None:
                    verdict = self.monitors[self.group(result.name)].update(result.score, stamp)
                row = WatchedFile(result, verdict, stamp)
                self.log.append([row.cells()])
                self.done[result.name] = row.stamp
                self._arriving.pop(result.name, None)
                yield row
        warn_about_range(ItemImages(lowest), self.fitted.preprocessing.value_range)

    def _within_groups(self, result: Result) -> Result:
        """The result, or an error for a file whose folder is not a group of the detector."""
        group = self.group(result.name)
        if group in self.monitors or result.error is not None:
            return result
        known = ", ".join(self.monitors)
        return replace(result, error=f"is in the folder {group!r}, which is not a group of the detector: {known}")

    def _ready(self) -> list[Path]:
        paths = list(image_files(self.folder))
        masks = masks_among(paths)
        if not masks <= self._masks:
            warnings.warn(f"{self.folder}: masks beside images are skipped, such as {min(masks)}", stacklevel=2)
        self._masks = masks
        fresh = [path for path in set(paths) - masks if self.done.get(str(path)) != file_stamp(str(path))]
        self._arriving = {str(path): self._arriving[str(path)] for path in fresh if str(path) in self._arriving}
        settled = [path for path in fresh if self._unchanged_for(path) >= self.settle]
        return sorted(settled, key=lambda path: (_modified(path), path))

    def _unchanged_for(self, path: Path) -> float:
        """Seconds since the file was seen to change, by this machine's clock: file times may be set by another."""
        now, stamp = time.monotonic(), file_stamp(str(path))
        if not stamp and not path.is_symlink():  # removed since it was listed
            return -1.0
        if self._arriving.get(str(path), (None,))[0] != stamp:
            self._arriving[str(path)] = (stamp, now)
        return now - self._arriving[str(path)][1]


def _modified(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0

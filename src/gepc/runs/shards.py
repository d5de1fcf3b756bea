"""A scoring run: `run.json` identifies it, and `shard-00012.csv` holds the rows of one range of the list of images.

Shards are whole or absent, so a run that was killed continues with those that are absent. `files.txt` tells whether the
files are still those that were scored. When no shard is absent, they are merged into one table.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gepc.conformal.p_values import Labels
from gepc.core.errors import InputError, OptionError, StorageError, raising
from gepc.core.files import StrPath, replacing, write_bytes
from gepc.core.run_folder import RunFolder, storage_errors
from gepc.core.tables import escape_cell, unescape_cell
from gepc.detector.fitted import FittedDetector
from gepc.detector.storage import detector_digest, versions
from gepc.detector.stream import Result, stream
from gepc.images.sources import FileImages, Images, file_stamp

PIECES = r"shard-\d{5,}\.(csv|parquet)|files\.txt|images\.json"  # images.json: written by earlier versions
SHARD_SIZE, FILES = 1024, "files.txt"
NOT_WRITTEN = (".xlsx", ".xls", ".ods", ".json", ".feather", ".h5")
COLUMNS = ("path", "score", "p_value", "alarm", "error")
SHARD_COLUMNS = ("index", "path", "score", "p_value", "error")
REASON = "reason"  # a further column of shards, and of tables on request
Alarm = bool | None  # None where nothing was decided
Append = Callable[[Sequence[Result], Sequence[Alarm]], None]
Decide = Callable[[npt.NDArray[np.float64], npt.NDArray[np.float64]], npt.NDArray[np.bool_]]
"""p-values and scores, NaN for images that could not be scored -> which images alarm."""


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
    """What a run computes: digests of the detector, the list of images and their groups, and the number of images."""

    detector: str
    count: int
    images: str
    groups: str | None

    @classmethod
    def of(cls, fitted: FittedDetector, images: Images, labels: Iterable[str] | None = None) -> Identity:
        """The identity of a run that scores `images` with `fitted` within the groups `labels`."""
        groups = None if labels is None else _digest(str(label) for label in labels)
        return cls(detector_digest(fitted), len(images), list_digest(images), groups)


class ScoreRun:
    """The shards of a scoring run of `count` images; `open_run` starts or resumes one.

    `names` are the paths or URLs of the images; none for images that are not files. `outdated` is the number of shards
    that were removed because their files have changed.
    """

    def __init__(self, folder: Path, count: int, shard_size: int, names: Sequence[str] = ()) -> None:
        self.folder, self.count, self.names = folder, count, names
        self.outdated = 0
        starts = range(0, count, shard_size)
        self.shards = [Shard(number, start, min(start + shard_size, count)) for number, start in enumerate(starts)]

    def path(self, shard: Shard) -> Path:
        """The file of a shard, whether it exists or not."""
        return self.folder / f"shard-{shard.number:05d}.csv"

    def pending(self) -> list[Shard]:
        """The shards that are not written yet."""
        return [shard for shard in self.shards if not self.path(shard).exists()]

    @property
    def finished(self) -> str:
        """How many shards are written, in words."""
        count = len(self.shards)
        return f"{count - len(self.pending())} of {count} {'shard is' if count == 1 else 'shards are'} finished"

    def begin(self, shard: Shard) -> None:
        """Note the state of a shard's files; call it before they are read."""
        if self.names:
            with storage_errors(self.folder), open(self.folder / FILES, "a") as handle:
                handle.write(f"\n{shard.number} {self._state(shard)}")  # cut short, it says that the files have changed

    def _state(self, shard: Shard) -> str:
        return _digest(file_stamp(name) for name in self.names[shard.start : shard.stop])[:16]

    def drop_outdated(self) -> None:
        """Remove the finished shards whose files are not those that were read."""
        lines = (self.folder / FILES).read_text().splitlines() if (self.folder / FILES).exists() else []
        noted = dict(line.partition(" ")[::2] for line in lines)
        for shard in self.shards if self.names else ():
            if self.path(shard).exists() and noted.get(str(shard.number)) != self._state(shard):
                self.path(shard).unlink()
                self.outdated += 1

    def write(self, shard: Shard, results: Sequence[Result]) -> None:
        """Write a complete shard: one row for each image of its range, in order."""
        _check_rows(shard, results)
        try:
            write_bytes(self.path(shard), shard_text(results).encode("utf-8"))
        except StorageError as error:
            raise StorageError(f"{error}. {self.finished}; free some space and run it again") from error

    def results(self) -> Iterator[list[Result]]:
        """The rows of every shard, in order."""
        for shard in self.shards:
            path = self.path(shard)
            reason = f"{path} is damaged ({{error}}); delete it and run it again"
            with raising(InputError, reason, OSError, ValueError, csv.Error):
                results = parse_shard(path.read_bytes().decode("utf-8", "surrogateescape"))
                _check_rows(shard, results)
            yield results

    def remove(self) -> None:
        """Delete the run, and its folder if it holds nothing else."""
        run_folder(self.folder).clear()
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _check_rows(shard: Shard, results: Sequence[Result]) -> None:
    if [result.index for result in results] != list(range(shard.start, shard.stop)):
        raise ValueError(f"shard {shard.number} needs the rows {shard.start} to {shard.stop - 1}, once each")


def run_folder(folder: Path) -> RunFolder:
    """The folder of a scoring run, to hold while writing."""
    return RunFolder(folder, PIECES, "restart to discard its shards, or give another folder", ("restart",))


def open_run(
    folder: Path, identity: Identity, shard_size: int = SHARD_SIZE, restart: bool = False, names: Sequence[str] = ()
) -> ScoreRun:
    """Start a run in `folder`, or resume the one that is there, which must have the same identity; or discard it.

    A resumed run keeps its number of images in a shard. `names` are paths or URLs of the images: finished shards whose
    files have changed since are removed.
    """
    layout = {"shard_size": shard_size, "versions": versions()}
    stored = run_folder(folder).begin(dataclasses.asdict(identity), layout, restart)
    run = ScoreRun(folder, identity.count, stored["shard_size"], names)
    run.drop_outdated()
    return run


def score_shards(
    run: ScoreRun,
    shards: Sequence[Shard],
    fitted: FittedDetector,
    images: Images,
    labels: Labels | None = None,
    workers: int = 1,
    on_progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Score some shards of a run, such as `run.pending()`, and write each as soon as it is complete.

    Parameters
    ----------
    run : the run.
    shards : the shards to score.
    fitted : the fitted detector.
    images, labels : the images of all shards, and their groups for a detector that was fitted with groups.
    workers : threads that read images ahead.
    on_progress : called with numbers of images.
    """

    def indices() -> Iterator[int]:
        for shard in shards:
            run.begin(shard)
            yield from range(shard.start, shard.stop)

    scored = stream(fitted, images, labels=labels, indices=indices(), threads=max(1, workers), on_progress=on_progress)
    waiting: list[Result] = []
    left = iter(shards)
    shard = next(left, None)
    for chunk in scored:
        waiting += chunk.results
        while shard is not None and len(waiting) >= len(shard):
            run.write(shard, waiting[: len(shard)])
            waiting = waiting[len(shard) :]
            shard = next(left, None)


def list_digest(images: Images) -> str:
    """Hash of the names of files, in order, or of the pixels of images that have no names."""
    if isinstance(images, FileImages):
        return _digest(images.names)
    digest = hashlib.sha256()
    for record in images:
        content = b"" if record.pixels is None else np.ascontiguousarray(record.pixels).tobytes()
        digest.update(f"{record.name}|{len(content)}|".encode() + content)
    return digest.hexdigest()


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode("utf-8", "surrogateescape")
        digest.update(f"{len(encoded)}|".encode() + encoded)
    return digest.hexdigest()


def merge(run: ScoreRun, decide: Decide | None, append: Append) -> tuple[int, int]:
    """Pass every row of a complete run to `append`, in order; the numbers of alarms and of images without a score.

    The shards are read twice, so that only p-values and scores are in memory: `decide` needs all of them. Without
    it, the rows have no decision.
    """
    p_values, scores = np.full((2, run.count), np.nan)
    failures = 0
    for results in run.results():
        for result in results:
            if result.error is None:
                p_values[result.index], scores[result.index] = result.p_value, result.score
            failures += result.error is not None
    alarms = None if decide is None else decide(p_values, scores)
    for results in run.results():
        append(results, [None if alarms is None else bool(alarms[result.index]) for result in results])
    return 0 if alarms is None else int(alarms.sum()), failures


def format_of(path: StrPath) -> str:
    """The format of a table by the suffix of its name: Parquet or CSV."""
    suffix = Path(path).suffix.lower()
    if suffix in NOT_WRITTEN:
        raise OptionError(f"{path}: tables are CSV or Parquet, not {suffix}; give a name that ends in .csv or .parquet")
    return "parquet" if suffix in (".parquet", ".pq") else "csv"


def arrow() -> Any:
    """Import pyarrow, which reads and writes Parquet."""
    with raising(OptionError, "Parquet needs pyarrow: pip install 'gepc[parquet]', or write CSV", ImportError):
        import pyarrow
        import pyarrow.parquet
    return pyarrow


def shard_text(results: Sequence[Result]) -> str:
    """The rows of a shard as CSV, with all digits."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow((*SHARD_COLUMNS, REASON))
    for result in results:
        numbers = ("", "") if result.error is not None else (repr(result.score), repr(result.p_value))
        reason = "" if result.reason is None else f"{result.reason} {result.evidence[result.reason]!r}"
        writer.writerow((result.index, escape_cell(result.name), *numbers, escape_cell(result.error or ""), reason))
    return text.getvalue()


def parse_shard(text: str) -> list[Result]:
    """The rows of a shard from its text; `ValueError` if it is damaged."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    if tuple(next(rows, ())) not in (SHARD_COLUMNS, (*SHARD_COLUMNS, REASON)):  # earlier versions gave no reasons
        raise ValueError("unexpected columns")
    results = []
    for index, name, score, p_value, error, *reasons in rows:
        numbers = (math.nan, math.nan) if error else (float(score), float(p_value))
        parts = (reason.rpartition(" ") for reason in reasons if reason)
        evidence = {part: float(probability) for part, _, probability in parts}
        results.append(Result(int(index), unescape_cell(name), *numbers, unescape_cell(error) or None, evidence))
    return results


@contextlib.contextmanager
def result_table(path: Path, explain: bool = False) -> Iterator[Append]:
    """Yield `append(results, alarms)` for a table at `path`, which appears once all rows are written.

    With `explain`, the column `reason` names the part of the score that is most unusual, and its tail probability.
    """
    with replacing(path) as draft:
        if format_of(path) == "parquet":
            pa = arrow()
            types = (pa.string(), pa.float64(), pa.float64(), pa.bool_(), pa.string())
            schema = pa.schema(dict(zip(COLUMNS, types, strict=True)) | ({REASON: pa.string()} if explain else {}))
            with open(draft, "wb") as sink, pa.parquet.ParquetWriter(sink, schema) as writer:
                yield lambda results, alarms: writer.write_table(
                    pa.Table.from_pylist([_row(*pair) for pair in zip(results, alarms, strict=True)], schema)
                )
        else:
            with open(draft, "w", newline="", encoding="utf-8") as handle:
                yield csv_table(handle, explain=explain)


def read_table(path: Path) -> list[tuple[Result, Alarm]]:
    """The rows of a table of `result_table`, or of a log of `gepc watch`."""
    reason = f"{path} is not a table of scores ({{reason}}); give one that `gepc score` or `gepc watch` wrote"
    with raising(InputError, reason, OSError, ValueError, TypeError, KeyError, csv.Error):
        if format_of(path) == "parquet":
            rows = arrow().parquet.read_table(path).to_pylist()
        else:
            rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))
        return [_read_row(index, *(row[name] for name in COLUMNS)) for index, row in enumerate(rows)]


def _read_row(index: int, name: str, score: Any, p_value: Any, alarm: Any, error: str | None) -> tuple[Result, Alarm]:
    numbers = (math.nan, math.nan) if error else (float(score), float(p_value))
    decided = None if alarm in ("", None) else str(alarm).lower() == "true"
    return Result(index, unescape_cell(name), *numbers, unescape_cell(error or "") or None), decided


def _row(result: Result, alarm: Alarm) -> dict[str, Any]:
    """A row of a table; a value that is missing has no entry or is None."""
    if result.error is not None:
        return {"path": escape_cell(result.name), "error": escape_cell(result.error)}
    numbers = {"score": result.score, "p_value": result.p_value}
    reason = "" if result.reason is None else f"{result.reason} ({result.evidence[result.reason]:.3g})"
    return {"path": escape_cell(result.name), **numbers, "alarm": alarm, REASON: reason}


def csv_table(handle: IO[str], lineterminator: str = "\r\n", explain: bool = False) -> Append:
    """Write the header and return `append(results, alarms)`; see `escape_cell` for odd file names."""
    columns = (*COLUMNS, REASON) if explain else COLUMNS
    writer = csv.writer(handle, lineterminator=lineterminator)
    writer.writerow(columns)

    def append(results: Sequence[Result], alarms: Sequence[Alarm]) -> None:
        rows = map(_row, results, alarms)
        writer.writerows([_cell(row.get(name)) for name in columns] for row in rows)

    return append


def _cell(value: str | float | bool | None) -> str | None:
    """A value as a CSV cell: nine digits of a number, and a decision in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.9g}" if isinstance(value, float) else value

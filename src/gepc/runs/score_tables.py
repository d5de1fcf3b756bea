"""Results in CSV or Parquet files: the shards of a run, and the table that they are merged into."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, OptionError, check_choice
from gepc.core.files import replacing, write_bytes
from gepc.core.tables import escape_cell, unescape_cell
from gepc.detector.detector import Result

if TYPE_CHECKING:
    from gepc.runs.shards import ScoreRun

FORMATS = ("csv", "parquet")
COLUMNS = ("path", "score", "p_value", "alarm", "error")
SHARD_COLUMNS = ("index", "path", "score", "p_value", "error")
Append = Callable[[Sequence[Result], Sequence[bool]], None]
Flags = npt.NDArray[np.bool_]
Decide = Callable[[npt.NDArray[np.float64]], Flags]
"""p-values, NaN for images that could not be scored -> which images alarm."""


@dataclass(frozen=True)
class TableSummary:
    """The number of images in a table, of alarms, and of images that could not be scored."""

    images: int
    alarms: int
    failures: int


def merge(run: ScoreRun, decide: Decide, append: Append) -> TableSummary:
    """Pass every row of a complete run to `append`, in order.

    The shards are read twice, so that only the p-values are in memory: `decide` needs all of them.
    """
    p_values = np.full(run.count, np.nan)
    failures = 0
    for results in run.results():
        for result in results:
            p_values[result.index] = np.nan if result.error is not None else result.p_value
            failures += result.error is not None
    alarms = decide(p_values)
    for results in run.results():
        append(results, [bool(alarms[result.index]) for result in results])
    return TableSummary(run.count, int(alarms.sum()), failures)


def format_of(path: str | os.PathLike[str] | None, asked: str | None) -> str:
    """The format asked for, else that of the suffix of `path`, else CSV."""
    if asked is not None:
        check_choice("format", asked, FORMATS)
        return asked
    return "parquet" if path is not None and Path(path).suffix.lower() in (".parquet", ".pq") else "csv"


def arrow() -> Any:
    """Import pyarrow, which reads and writes Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise OptionError("Parquet needs pyarrow: pip install 'gepc[parquet]', or write CSV") from error
    return pyarrow


def write_shard(path: Path, results: Sequence[Result]) -> None:
    """Write the results of a shard with all digits, in the format of the suffix of `path`."""
    if path.suffix == ".parquet":
        sink = io.BytesIO()
        table = _arrow_table(results, [False] * len(results), _schema(SHARD_COLUMNS))
        arrow().parquet.write_table(table, sink)
        write_bytes(path, sink.getvalue())
        return
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(SHARD_COLUMNS)
    for result in results:
        numbers = ("", "") if result.error is not None else (repr(result.score), repr(result.p_value))
        writer.writerow((result.index, escape_cell(result.name), *numbers, escape_cell(result.error or "")))
    write_bytes(path, text.getvalue().encode("utf-8"))


def read_shard(path: Path) -> list[Result]:
    """Read the results of a shard."""
    pa = arrow() if path.suffix == ".parquet" else None
    try:
        if pa is not None:
            table = pa.parquet.read_table(io.BytesIO(path.read_bytes()))
            return [_result(*(row[name] for name in SHARD_COLUMNS)) for row in table.to_pylist()]
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        rows = csv.reader(io.StringIO(text, newline=""))
        if tuple(next(rows, ())) != SHARD_COLUMNS:
            raise ValueError("unexpected columns")
        return [_result(*row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError, NotImplementedError, csv.Error) as error:
        raise InputError(f"{path} is damaged ({error}); delete it and run it again") from error


def _result(index: Any, name: str, score: Any, p_value: Any, error: str | None) -> Result:
    if error:
        return Result(int(index), unescape_cell(name), math.nan, math.nan, unescape_cell(error))
    return Result(int(index), unescape_cell(name), float(score), float(p_value))


def _schema(columns: Sequence[str]) -> Any:
    pa = arrow()
    types = {"index": pa.int64(), "score": pa.float64(), "p_value": pa.float64(), "alarm": pa.bool_()}
    return pa.schema([(name, types.get(name, pa.string())) for name in columns])


def _arrow_table(results: Sequence[Result], alarms: Sequence[bool], schema: Any) -> Any:
    rows = []
    for result, alarm in zip(results, alarms, strict=True):
        row: dict[str, Any] = {"index": result.index, "path": escape_cell(result.name)}
        if result.error is None:
            row |= {"score": result.score, "p_value": result.p_value, "alarm": bool(alarm)}
        else:
            row["error"] = escape_cell(result.error)
        rows.append(row)
    return arrow().Table.from_pylist(rows, schema=schema)


@contextlib.contextmanager
def result_table(path: Path, kind: str) -> Iterator[Append]:
    """Yield `append(results, alarms)` for a table at `path`, which appears once all rows are written."""
    with replacing(path) as draft:
        if kind == "parquet":
            schema = _schema(COLUMNS)
            with open(draft, "wb") as sink, arrow().parquet.ParquetWriter(sink, schema) as writer:
                yield lambda results, alarms: writer.write_table(_arrow_table(results, alarms, schema))
        else:
            with open(draft, "w", newline="", encoding="utf-8") as handle:
                yield csv_table(handle)


def csv_table(handle: IO[str], lineterminator: str = "\r\n") -> Append:
    """Write the header and return `append(results, alarms)`; see `escape_cell` for odd file names."""
    writer = csv.writer(handle, lineterminator=lineterminator)
    writer.writerow(COLUMNS)

    def append(results: Sequence[Result], alarms: Sequence[bool]) -> None:
        for result, alarm in zip(results, alarms, strict=True):
            numbers = (f"{result.score:.9g}", f"{result.p_value:.9g}", str(bool(alarm)).lower())
            scored = ("", "", "") if result.error is not None else numbers
            writer.writerow((escape_cell(result.name), *scored, escape_cell(result.error or "")))

    return append

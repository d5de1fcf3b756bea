"""Rows of results in files, CSV or Parquet: whole or absent, and the same numbers when read back."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from gepc.core.errors import InputError, OptionError, check_choice
from gepc.core.files import replacing, write_bytes
from gepc.detector.detector import Result

FORMATS = ("csv", "parquet")
COLUMNS = ("path", "score", "p_value", "alarm", "error")
SHARD_COLUMNS = ("index", "path", "score", "p_value", "error")
Append = Callable[[Sequence[Result], Sequence[bool]], None]


def format_of(path: str | os.PathLike[str] | None, asked: str | None) -> str:
    """The format asked for, else the one that the file's name says; CSV otherwise."""
    if asked is not None:
        check_choice("format", asked, FORMATS)
        return asked
    return "parquet" if path is not None and Path(path).suffix.lower() in (".parquet", ".pq") else "csv"


def arrow() -> Any:
    """The library that reads and writes Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise OptionError("Parquet needs pyarrow: pip install 'gepc[parquet]', or write CSV") from error
    return pyarrow


def write_shard(path: Path, results: Sequence[Result]) -> None:
    """All results of a shard with every digit; the format is the file's suffix."""
    if path.suffix == ".parquet":
        write_bytes(path, _parquet_bytes(results))
        return
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(SHARD_COLUMNS)
    for result in results:
        numbers = ("", "") if result.error is not None else (repr(result.score), repr(result.p_value))
        writer.writerow((result.index, result.name, *numbers, result.error or ""))
    # a file's name may hold bytes that are no text; they come out as they went in
    write_bytes(path, text.getvalue().encode("utf-8", "surrogateescape"))


def read_shard(path: Path) -> list[Result]:
    """The results of a shard as they were written."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        rows = csv.reader(io.StringIO(text, newline=""))
        if tuple(next(rows, ())) != SHARD_COLUMNS:
            raise ValueError("it has other columns")
        return [_result(*row) for row in rows]
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise _damaged(path, error) from error


def _result(index: str, name: str, score: str, p_value: str, error: str) -> Result:
    if error:
        return Result(int(index), name, math.nan, math.nan, error)
    return Result(int(index), name, float(score), float(p_value))


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} is damaged ({error}); delete it and run the same command again")


def _parquet_bytes(results: Sequence[Result]) -> bytes:
    pa = arrow()
    schema = pa.schema([("index", pa.int64()), *_result_fields(pa)])
    columns = {"index": [result.index for result in results], **_result_columns(results)}
    sink = io.BytesIO()
    pa.parquet.write_table(pa.table(columns, schema=schema), sink)
    return sink.getvalue()


def _result_fields(pa: Any) -> list[tuple[str, Any]]:
    return [("path", pa.string()), ("score", pa.float64()), ("p_value", pa.float64()), ("error", pa.string())]


def _result_columns(results: Sequence[Result]) -> dict[str, list[Any]]:
    failed = [result.error is not None for result in results]
    return {
        "path": [printable(result.name) for result in results],
        "score": [None if bad else result.score for result, bad in zip(results, failed, strict=True)],
        "p_value": [None if bad else result.p_value for result, bad in zip(results, failed, strict=True)],
        "error": [None if result.error is None else printable(result.error) for result in results],
    }


def _read_parquet(path: Path) -> list[Result]:
    pa = arrow()
    try:
        rows = pa.parquet.read_table(io.BytesIO(path.read_bytes())).to_pylist()
        return [
            Result(row["index"], row["path"], row["score"], row["p_value"])
            if row["error"] is None
            else Result(row["index"], row["path"], math.nan, math.nan, row["error"])
            for row in rows
        ]
    except (OSError, KeyError, pa.ArrowException) as error:
        raise _damaged(path, error) from error


def printable(text: str) -> str:
    """Text that UTF-8 can hold: bytes of a file's name that are no text become escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@contextlib.contextmanager
def table(path: Path, kind: str) -> Iterator[Append]:
    """Yield `append(results, alarms)` for the user's table at `path`, which appears when all rows are in it."""
    with replacing(path) as draft:
        if kind == "parquet":
            with _parquet_table(draft) as append:
                yield append
        else:
            with open(draft, "w", newline="", encoding="utf-8", errors="surrogateescape") as handle:
                yield csv_table(handle)


class _Lines:
    """Ends rows otherwise than the writer does, which quotes only what is in its own ending: always both CR and LF."""

    def __init__(self, handle: IO[str], ending: str) -> None:
        self.handle, self.ending = handle, ending

    def write(self, row: str) -> None:
        self.handle.write(row.removesuffix("\r\n") + self.ending)


def csv_table(handle: IO[str], lineterminator: str = "\r\n") -> Append:
    """Write the header, and give `append(results, alarms)`."""
    writer = csv.writer(_Lines(handle, lineterminator))
    writer.writerow(COLUMNS)

    def append(results: Sequence[Result], alarms: Sequence[bool]) -> None:
        writer.writerows(_cells(result, alarm) for result, alarm in zip(results, alarms, strict=True))

    return append


def _cells(result: Result, alarm: bool) -> tuple[str, ...]:
    if result.error is not None:
        return (result.name, "", "", "", result.error)
    return (result.name, f"{result.score:.9g}", f"{result.p_value:.9g}", str(bool(alarm)).lower(), "")


@contextlib.contextmanager
def _parquet_table(draft: Path) -> Iterator[Append]:
    pa = arrow()
    path, score, p_value, error = _result_fields(pa)
    schema = pa.schema([path, score, p_value, ("alarm", pa.bool_()), error])
    with open(draft, "wb") as handle, pa.parquet.ParquetWriter(handle, schema) as writer:

        def append(results: Sequence[Result], alarms: Sequence[bool]) -> None:
            flags = [None if r.error is not None else bool(flag) for r, flag in zip(results, alarms, strict=True)]
            writer.write_table(pa.table({**_result_columns(results), "alarm": flags}, schema=schema))

        yield append

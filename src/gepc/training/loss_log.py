"""`loss.csv`: a row per `LOG_EVERY` steps, right also after a run was interrupted and taken up again."""

from __future__ import annotations

import csv
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from gepc.core.errors import StorageError
from gepc.core.files import write_text

NAME = "loss.csv"
LOG_EVERY = 20


@dataclass(frozen=True)
class Row:
    """The mean loss since the row before, and the state at its step; seconds count from the run's first start."""

    step: int
    loss: float
    learning_rate: float
    images_per_second: float
    seconds: float
    cpu_seconds: float


FIELDS = tuple(field.name for field in fields(Row))


def read_rows(folder: Path, last_step: int | None = None) -> list[Row]:
    """The rows up to `last_step`; lines that a crash or a full disk cut short are left out."""
    path = folder / NAME
    if not path.exists():
        return []
    rows: list[Row] = []
    with open(path, newline="", encoding="utf-8") as handle:
        for cells in csv.reader(handle):
            try:
                row = Row(int(cells[0]), *map(float, cells[1:]))
            except (ValueError, TypeError, IndexError):
                continue
            in_order = not rows or row.step > rows[-1].step
            if in_order and (last_step is None or row.step <= last_step):
                rows.append(row)
    return rows


class LossLog:
    """The log of a run that stands at `step`: later rows, of steps that will be done again, are dropped first."""

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / NAME
        header = ",".join(FIELDS) + "\n"
        write_text(self._path, header + "".join(_line(row) for row in read_rows(folder, step)))

    def append(self, row: Row) -> None:
        """Add one row."""
        try:
            with open(self._path, "a", newline="", encoding="utf-8") as handle:
                handle.write(_line(row))
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror or error}") from error


def _line(row: Row) -> str:
    step, *values = astuple(row)
    return ",".join([str(step), *(f"{value:.6g}" for value in values)]) + "\n"

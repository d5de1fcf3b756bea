"""From the shards of a run to one table, in two readings: p-values decide the alarms, then the rows are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.runs.run_folder import Run
from gepc.runs.tables import Append

Flags = npt.NDArray[np.bool_]
Decide = Callable[[npt.NDArray[np.float64], Flags], Flags]
"""(p-values, which images could be scored) -> which of them alarm."""


@dataclass(frozen=True)
class Summary:
    """What a table holds."""

    images: int
    alarms: int
    failures: int


def merge(run: Run, decide: Decide, append: Append) -> Summary:
    """Hand every row of a complete run to `append`, in order. Of the whole run only p-values are held in memory."""
    p_values = np.full(run.count, np.nan)
    scored = np.zeros(run.count, dtype=bool)
    for results in run.results():
        for result in results:
            p_values[result.index], scored[result.index] = result.p_value, result.error is None
    flags = decide(p_values, scored)
    for results in run.results():
        append(results, [bool(flags[result.index]) for result in results])
    return Summary(run.count, int(flags.sum()), int((~scored).sum()))

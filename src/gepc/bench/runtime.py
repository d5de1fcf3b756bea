"""What an image costs, as a ratio to one bare network pass measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from gepc.bench import published
from gepc.bench.ablations import CALIBRATIONS
from gepc.bench.evaluate import Bench
from gepc.bench.rows import read_rows
from gepc.core.tables import Cell, ResultTable
from gepc.features.base import Batch, Extractor
from gepc.scoring import Aggregation, create_calibrator

REPEATS = 3
TIMED_IMAGES = 32  # as many rows as a bare pass needs to be at its best
LEAST_PASSES = 30  # per image, of a method that is timed: cheap ones are repeated


@dataclass(frozen=True)
class Spent:
    """What one image costs: F and J as the backbone counts them, and the time in bare passes of the same run."""

    forward: float
    jvp: float
    in_passes: float

    @property
    def passes(self) -> float:
        """F + J."""
        return self.forward + self.jvp

    def __str__(self) -> str:
        return f"{self.forward:g}F+{self.jvp:g}J"


def measure(bench: Bench, extractor: Extractor, batch: Batch, timesteps: Sequence[int]) -> Spent:
    """Run a method on some images and read the counters and the clock; bare passes are timed before and after.

    On a processor the clock is the process' own time, which other programs do not disturb.
    """
    backbone = bench.backbone
    clock = time.process_time if backbone.device.type == "cpu" else time.perf_counter
    estimated = extractor.cost(backbone, batch.size, len(timesteps))
    repeats = max(1, round(LEAST_PASSES / max(1, estimated.forward + estimated.jvp)))
    bare, times = [_seconds(lambda: _bare_pass(bench, batch), clock)], []
    forward, jvp = backbone.forward_count, backbone.jvp_count
    for _ in range(repeats):
        begun = clock()
        extractor.extract(backbone, batch, timesteps)
        times.append(clock() - begun)
    looked = repeats * len(batch)
    counted = (backbone.forward_count - forward) / looked, (backbone.jvp_count - jvp) / looked
    bare.append(_seconds(lambda: _bare_pass(bench, batch), clock))
    return Spent(*counted, statistics.median(times) / statistics.mean(bare))


def runtime_table(bench: Bench, data: Path) -> ResultTable:
    """Milliseconds per image of the main detector under each calibration, and the ratio to one bare pass."""
    name, seed = next(iter(bench.protocol.pairs)), bench.protocol.seeds[0]
    method, kept = bench.main_extractor, bench.scores(name, bench.main, seed).kept
    batch = read_rows(bench, data, name, "test", range(bench.protocol.batch_size))
    bare = _seconds(lambda: _bare_pass(bench, batch)) / len(batch)
    extraction = _seconds(lambda: method.extract(bench.backbone, batch, kept)) / len(batch)
    columns = method.columns(method.extract(bench.backbone, batch, kept))
    passes = method.cost(bench.backbone, batch.size, len(kept)).forward
    weights = np.full(len(kept), 1.0 / len(kept))
    train = bench.columns(name, "train", seed, bench.main, kept)
    rows: list[tuple[Cell, ...]] = []
    for calibration in CALIBRATIONS:
        calibrator = create_calibrator(calibration).fit(train)
        scoring = _seconds(partial(calibrator.score, columns, weights, Aggregation())) / len(batch)
        total = extraction + scoring
        paper = published.RUNTIME_MS.get(calibration)
        rows.append((f"GEPC_s + {calibration}", passes, 1000.0 * total, total / bare, total / bare / passes, paper))
    header = ("variant", "F", "ms per image", "in bare passes", "overhead over F bare passes", "paper, ms (16 F, GPU)")
    note = (
        f"One bare pass takes {1000.0 * bare:.2f} ms per image in this run (median of {REPEATS}, batches of "
        f"{len(batch)}). "
        "The paper's figures are for another network on an RTX 4060 laptop GPU."
    )
    return ResultTable("runtime", "Runtime and passes", header, tuple(rows), note)


def _bare_pass(bench: Bench, batch: Batch) -> None:
    bench.backbone.eps(batch.clean(bench.backbone), 0)


def _seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    times = []
    work()
    for _ in range(REPEATS):
        start = clock()
        work()
        times.append(clock() - start)
    return statistics.median(times)

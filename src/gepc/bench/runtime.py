"""What an image costs, as a ratio to one bare network pass measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from gepc.batching import Forgive, chunks
from gepc.bench import published
from gepc.bench.ablations import CALIBRATIONS
from gepc.bench.collect import open_split, preprocessing
from gepc.bench.evaluate import Bench
from gepc.bench.tables import Cell, ResultTable
from gepc.calibrators import Aggregation, create_calibrator
from gepc.extractors.base import Batch

REPEATS = 3


def runtime_table(bench: Bench, data: Path) -> ResultTable:
    """Milliseconds per image of the main detector under each calibration, and the ratio to one bare pass."""
    name = next(iter(bench.protocol.pairs))
    batch = _some_images(bench, data, name)
    kept = bench.scores(name, bench.main, bench.protocol.seeds[0]).kept
    bare = _seconds(lambda: _bare_pass(bench, batch)) / len(batch)
    extraction = _seconds(lambda: bench.extractor.extract(bench.backbone, batch, kept)) / len(batch)
    columns = bench.extractor.columns(bench.extractor.extract(bench.backbone, batch, kept))[:, :, :1]
    passes = bench.extractor.cost(bench.backbone, batch.size, len(kept)).forward
    weights = np.full(len(kept), 1.0 / len(kept))
    rows: list[tuple[Cell, ...]] = []
    for calibration in CALIBRATIONS:
        calibrator = create_calibrator(calibration).fit(columns)
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


def _some_images(bench: Bench, data: Path, name: str) -> Batch:
    images = open_split(bench.protocol, data, name, "test")
    shape = preprocessing(bench.protocol, bench.backbone)
    chunk = next(iter(chunks(images, shape, bench.protocol.batch_size, Forgive.ALL)))
    return Batch(chunk.stacked(), chunk.keys, 0, bench.protocol.batch_size)


def _bare_pass(bench: Bench, batch: Batch) -> None:
    bench.backbone.eps(batch.clean(bench.backbone), 0)


def _seconds(work: Callable[[], object]) -> float:
    times = []
    work()
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)

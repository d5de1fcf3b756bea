"""Scoring in one process: the stream's results, written to shards as they complete."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from gepc.detector.fitted import FittedDetector
from gepc.detector.stream import Result, stream
from gepc.images.batches import MAX_CHUNK_PIXELS
from gepc.images.sources import Images
from gepc.runs.shards import ScoreRun, Shard

Labels = npt.NDArray[np.str_]
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
WORTH_IT = 0.97  # a larger batch takes more memory, so it must be faster by three per cent


def score_shards(
    run: ScoreRun,
    shards: Sequence[Shard],
    fitted: FittedDetector,
    images: Images,
    labels: Labels | None = None,
    workers: int = 0,
    on_progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Score some shards of a run, such as `run.pending()`, and write each as soon as it is complete.

    Parameters
    ----------
    run : the run.
    shards : the shards to score.
    fitted : the fitted detector.
    images, labels : the images of all shards, and their groups for a detector that was fitted with groups.
    workers : processes that read images; 0 reads in a thread.
    on_progress : called with numbers of images.
    """

    def indices() -> Iterator[int]:
        for shard in shards:
            run.begin(shard)
            yield from range(shard.start, shard.stop)

    scored = stream(fitted, images, labels=labels, indices=indices(), workers=workers, on_progress=on_progress)
    waiting: list[Result] = []
    left = iter(shards)
    shard = next(left, None)
    for chunk in scored:
        waiting += chunk.results
        while shard is not None and len(waiting) >= len(shard):
            run.write(shard, waiting[: len(shard)])
            waiting = waiting[len(shard) :]
            shard = next(left, None)


def fastest(seconds_per_image: Callable[[int], float], sizes: Iterable[int] = SIZES) -> int:
    """The batch size with the least time per image.

    The search stops at the first size that is not faster than the one before, or that does not fit into memory.
    """
    best, least = 0, float("inf")
    for size in sizes:
        try:
            seconds = seconds_per_image(size)
        except (MemoryError, RuntimeError) as error:
            full = isinstance(error, MemoryError) or re.search("out of memory|can't allocate memory", str(error), re.I)
            if best == 0 or not full:
                raise
            break
        if seconds > least * WORTH_IT:
            break
        best, least = size, seconds
    return best


def fastest_batch_size(fitted: FittedDetector, images: int) -> int:
    """Measure the fastest batch size on random images, for a run of `images` images."""
    height, width = fitted.input_size
    counts = fitted.backbone.counts

    def seconds_per_image(size: int) -> float:
        shape = (size, fitted.backbone.channels, height, width)
        noise = np.random.default_rng(0).uniform(-1.0, 1.0, shape).astype(np.float32)
        start = time.perf_counter()
        replace(fitted, batch_size=size).evaluate(list(noise))
        return (time.perf_counter() - start) / size

    seconds_per_image(1)  # the first call of a network is slower than the others
    most = max(1, MAX_CHUNK_PIXELS // (height * width))
    sizes = [size for size in SIZES if size <= min(images, most)] or [min(SIZES[0], most)]
    best = fastest(seconds_per_image, sizes)
    fitted.backbone.counts = counts
    return best

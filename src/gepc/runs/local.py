"""Scoring in one process: the stream's results, written to shards as they complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gepc.detector.fitted import FittedDetector
from gepc.detector.stream import Result, stream
from gepc.images.sources import Images
from gepc.runs.shards import ScoreRun, Shard

Labels = npt.NDArray[np.str_]


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

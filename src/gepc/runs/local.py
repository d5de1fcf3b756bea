"""The engine of one process: readers ahead of it, one network in it, rows out as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gepc.detector.detector import Detector, Result
from gepc.images.batches import Chunk
from gepc.images.sources import Images
from gepc.runs.reading import Part, part, pieces, read_ahead
from gepc.runs.run_folder import Run, Shard

Labels = npt.NDArray[np.str_]


class DedupScorer:
    """Chunks to results. With `dedup`, an image whose content was seen before gets the score it got then.

    What is remembered is 16 bytes of every image's content, its group, score and p-value: some 200 MB for a million.
    """

    def __init__(self, detector: Detector, dedup: bool = False) -> None:
        self.detector, self.dedup = detector, dedup
        self._known: dict[bytes, tuple[float, float]] = {}

    def __call__(self, chunk: Chunk, labels: Labels | None = None) -> list[Result]:
        """Results in order; `labels` are the groups of all images of the chunk, also of those that failed."""
        own = None if labels is None else _of_readable(chunk, labels)
        return self._each_once(chunk, own) if self.dedup else self.detector.score_chunk(chunk, own)

    def _each_once(self, chunk: Chunk, labels: Labels | None) -> list[Result]:
        marks = chunk.keys if labels is None else [key + _bytes(labels[row]) for row, key in enumerate(chunk.keys)]
        first = {mark: row for row, mark in reversed(list(enumerate(marks))) if mark not in self._known}
        rows = sorted(first.values())
        fresh = Chunk(
            [chunk.indices[row] for row in rows],
            [chunk.names[row] for row in rows],
            [chunk.keys[row] for row in rows],
            [chunk.images[row] for row in rows],
            chunk.failures,
        )
        found = self.detector.score_chunk(fresh, None if labels is None else labels[rows])
        scored = {result.index: (result.score, result.p_value) for result in found if result.error is None}
        self._known.update({marks[row]: scored[chunk.indices[row]] for row in rows})
        repeated = zip(marks, chunk.indices, chunk.names, strict=True)
        results = [Result(index, name, *self._known[mark]) for mark, index, name in repeated]
        return sorted([*results, *(r for r in found if r.error is not None)], key=lambda result: result.index)


def _bytes(label: np.str_) -> bytes:
    return str(label).encode("utf-8", "surrogateescape")


def _of_readable(chunk: Chunk, labels: Labels) -> Labels:
    start = min([*chunk.indices, *(index for index, _, _ in chunk.failures)])
    return labels[[index - start for index in chunk.indices]]


def score_shards(
    run: Run,
    shards: Sequence[Shard],
    detector: Detector,
    images: Images,
    labels: Labels | None = None,
    workers: int = 0,
    dedup: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Score those shards of the run and write each as soon as it is complete."""
    ranges = ((shard, piece) for shard in shards for piece in pieces(shard.start, shard.stop, detector.batch_size))
    parts: Iterator[Part] = (part(images, start, stop) for _, (start, stop) in ranges)
    judge = DedupScorer(detector, dedup)
    stream = read_ahead(parts, detector.preprocessing_, workers)
    for shard in shards:
        results: list[Result] = []
        while len(results) < len(shard):
            chunk = next(stream)
            place = shard.start + len(results)
            results += judge(chunk, None if labels is None else labels[place : place + len(chunk)])
            if on_progress is not None:
                on_progress(len(chunk))
        run.write(shard, results)


def score_part(judge: DedupScorer, images: Images, start: int, labels: Labels | None, threads: int) -> list[Result]:
    """The results of one part of the list, read ahead in threads: what an actor of a cluster does."""
    cuts = pieces(0, len(images), judge.detector.batch_size)
    parts = (Part(start + first, part(images, first, last).images) for first, last in cuts)
    results: list[Result] = []
    for chunk in read_ahead(parts, judge.detector.preprocessing_, threads=threads):
        place = len(results)
        results += judge(chunk, None if labels is None else labels[place : place + len(chunk)])
    return results

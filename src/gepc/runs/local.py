"""Scoring in one process: images are read ahead, one network scores them, and shards are written as they complete."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import GepcError, OptionError
from gepc.detector.detector import Detector, Result
from gepc.features.base import Batch, extract_table
from gepc.images.batches import Chunk, OnBadImage, chunks
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import FileImages, Images, Record
from gepc.runs.shards import ScoreRun, Shard

Labels = npt.NDArray[np.str_]
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
WORTH_IT = 0.97
"""A larger batch takes more memory, so it must be faster by three per cent."""


class DedupScorer:
    """Scores chunks; optionally scores images with equal content once.

    Parameters
    ----------
    detector : a fitted detector.
    dedup : reuse the score of an image with the same content and group. This stores 16 bytes of every image's content,
        its group, score and p-value: about 200 MB for a million images.
    """

    def __init__(self, detector: Detector, dedup: bool = False) -> None:
        self.detector, self.dedup = detector, dedup
        self._known: dict[bytes, tuple[float, float]] = {}

    def __call__(self, chunk: Chunk, labels: Labels | None = None) -> list[Result]:
        """Results in order, failures included; `labels` are the groups of the readable images."""
        return self._each_once(chunk, labels) if self.dedup else self.detector.score_chunk(chunk, labels)

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


def score_shards(
    run: ScoreRun,
    shards: Sequence[Shard],
    detector: Detector,
    images: Images,
    labels: Labels | None = None,
    workers: int = 0,
    dedup: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Score shards of a run and write each as soon as it is complete.

    Parameters
    ----------
    run : where the shards are written.
    shards : those to score, such as `run.pending()`.
    detector : a fitted detector.
    images : all images of the run.
    labels : the group of each image, for a detector fitted with groups.
    workers : processes that read images; 0 reads in a thread.
    dedup : score images with equal content once.
    on_progress : called with numbers of images.
    """

    def cuts() -> Iterator[tuple[int, int]]:
        for shard in shards:
            run.begin(shard)
            yield from pieces(shard.start, shard.stop, detector.batch_size)

    ranges = (image_range(images, start, stop) for start, stop in cuts())
    stream = _scored(DedupScorer(detector, dedup), ranges, labels, workers=workers)
    for shard in shards:
        results: list[Result] = []
        while len(results) < len(shard):
            found = next(stream)
            results += found
            if on_progress is not None:
                on_progress(len(found))
        run.write(shard, results)


def score_part(scorer: DedupScorer, images: Images, start: int, labels: Labels | None, threads: int) -> list[Result]:
    """Results of one part of a list of images: what an actor of a cluster computes.

    Parameters
    ----------
    scorer : scores the chunks.
    images : the images of the part.
    start : index of the first of them in the list.
    labels : the groups of the images of the part.
    threads : threads that read images.
    """
    cuts = pieces(0, len(images), scorer.detector.batch_size)
    ranges = (ImageRange(start + first, image_range(images, first, last).images) for first, last in cuts)
    return [result for found in _scored(scorer, ranges, labels, start, threads=threads) for result in found]


def _scored(
    scorer: DedupScorer,
    ranges: Iterable[ImageRange],
    labels: Labels | None,
    offset: int = 0,
    workers: int = 0,
    threads: int = 1,
) -> Iterator[list[Result]]:
    """The results of each range; `labels[i]` is the group of image `offset + i`."""
    for chunk in read_ahead(ranges, scorer.detector.preprocessing_, workers, threads):
        yield scorer(chunk, None if labels is None else labels[[index - offset for index in chunk.indices]])


def fastest(seconds_per_image: Callable[[int], float], sizes: Iterable[int] = SIZES) -> int:
    """The batch size with the least time per image.

    The search stops at the first size that is not faster than the one before, or that does not fit into memory.
    """
    best, least = 0, float("inf")
    for size in sizes:
        try:
            seconds = seconds_per_image(size)
        except (MemoryError, RuntimeError) as error:
            if best == 0 or not _is_out_of_memory(error):
                raise
            break
        if seconds > least * WORTH_IT:
            break
        best, least = size, seconds
    return best


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def fastest_batch_size(detector: Detector, images: int) -> int:
    """Measure the fastest batch size on random images at the first kept noise level, for a run of `images` images."""
    shape = (detector.backbone.channels, *detector.input_size)
    kept = tuple(detector.kept_[:1])
    counts = detector.backbone.counts

    def seconds_per_image(size: int) -> float:
        noise = np.random.default_rng(0).uniform(-1.0, 1.0, (size, *shape)).astype(np.float32)
        batch = Batch(noise, [image_key(image) for image in noise], detector.seed, size)
        start = time.perf_counter()
        extract_table(detector.extractor, detector.backbone, batch, kept)
        return (time.perf_counter() - start) / size

    seconds_per_image(SIZES[0])  # the first call of a network is slower than the others
    best = fastest(seconds_per_image, [size for size in SIZES if size <= images] or SIZES[:1])
    detector.backbone.counts = counts
    return best


@dataclass(frozen=True)
class ProcessGroup:
    """This process among `size` processes; `wait` returns when all of them have called it."""

    rank: int = 0
    size: int = 1
    wait: Callable[[], None] = lambda: None

    @property
    def is_first(self) -> bool:
        """Whether this process creates the run folder and merges the shards."""
        return self.rank == 0

    def share(self, shards: Iterable[Shard]) -> list[Shard]:
        """The shards of this process: every `size`-th by number, whichever are finished already."""
        return [shard for shard in shards if shard.number % self.size == self.rank]


def process_group() -> ProcessGroup:
    """The processes that a launcher started together, or this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        return ProcessGroup()
    import torch

    try:
        from accelerate import PartialState
    except ImportError as error:
        raise OptionError("several processes need accelerate: pip install 'gepc[train]'") from error
    # the first process to finish waits for the last; the default timeout is half an hour
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=30))
    if state.num_processes != size:
        raise OptionError(
            f"WORLD_SIZE is {size} but {state.num_processes} processes found each other; "
            "start them with accelerate launch or torchrun, or unset WORLD_SIZE to run one process"
        )
    return ProcessGroup(state.process_index, size, lambda: _wait(state.wait_for_everyone))


def _wait(for_everyone: Callable[[], None]) -> None:
    try:
        for_everyone()
    except RuntimeError as error:  # torch lost a connection
        raise GepcError(
            "another process of this run has ended; finished shards are kept: run it again to continue"
        ) from error


AHEAD = 2
"""Ranges that each reader may be ahead of the network."""


class Records(Images):
    """Images that are in memory already."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]


@dataclass(frozen=True)
class ImageRange:
    """Consecutive images of a list; `start` is the index of the first."""

    start: int
    images: Images


def image_range(images: Images, start: int, stop: int) -> ImageRange:
    """Images `start` to `stop - 1`: files by their names, to be read later; other images are read here."""
    if isinstance(images, FileImages):
        return ImageRange(start, images.between(start, stop))
    return ImageRange(start, Records([images[index] for index in range(start, stop)]))


def pieces(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a range into pieces of `size`."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


@dataclass(frozen=True)
class Reader:
    """Reads a range as one chunk; images that cannot be used are failures of the chunk."""

    preprocessing: Preprocessing

    def __call__(self, part: ImageRange) -> Chunk:
        """The chunk, with the indices that the images have in the list."""
        (chunk,) = chunks(part.images, self.preprocessing, len(part.images), OnBadImage.ALL)
        chunk.indices = [index + part.start for index in chunk.indices]
        chunk.failures = [(index + part.start, name, error) for index, name, error in chunk.failures]
        return chunk

    __getitem__ = __call__  # for a DataLoader, a reader is a data set and ranges are its indices


def read_ahead(
    parts: Iterable[ImageRange], preprocessing: Preprocessing, workers: int = 0, threads: int = 1
) -> Iterator[Chunk]:
    """The ranges as chunks, in order: read by `workers` processes, or by threads of this process if there are none."""
    reader = Reader(preprocessing)
    if workers == 0:
        return _in_threads(parts, reader, threads)
    return _in_processes(parts, reader, workers)


def _in_threads(parts: Iterable[ImageRange], reader: Callable[[ImageRange], Chunk], threads: int) -> Iterator[Chunk]:
    waiting: deque[Future[Chunk]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for each in parts:
            waiting.append(pool.submit(reader, each))
            if len(waiting) > threads * AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_processes(parts: Iterable[ImageRange], reader: Reader, workers: int) -> Iterator[Chunk]:
    # the processes of torch's loader end when this one is killed
    from torch.utils.data import DataLoader

    build: Any = DataLoader  # its type stubs know whole numbers as indices only
    loader = build(
        reader,
        batch_size=None,
        sampler=parts,
        num_workers=workers,
        prefetch_factor=AHEAD,
        collate_fn=_unchanged,
        multiprocessing_context="spawn",
    )
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise GepcError(
            "a process that reads images died, possibly for lack of memory; finished shards are kept: "
            "run it again with fewer workers"
        ) from error


def _unchanged(chunk: Chunk) -> Chunk:
    return chunk

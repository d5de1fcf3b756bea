"""Scoring in one process: images are read ahead, one network scores them, and shards are written as they complete."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from gepc.core.errors import GepcError
from gepc.detector.detector import Detector, Result
from gepc.images.batches import Chunk, OnBadImage, chunks
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import FileImages, Images, Record
from gepc.methods.base import Batch, extract_table
from gepc.runs.shards import ScoreRun, Shard

Labels = npt.NDArray[np.str_]
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
WORTH_IT = 0.97  # a larger batch takes more memory, so it must be faster by three per cent


def score_shards(
    run: ScoreRun,
    shards: Sequence[Shard],
    detector: Detector,
    images: Images,
    labels: Labels | None = None,
    workers: int = 0,
    on_progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Score some shards of a run, such as `run.pending()`, and write each as soon as it is complete.

    `images` and `labels`, the groups for a detector fitted with groups, are those of all shards. `workers` processes
    read images; 0 reads in a thread. `on_progress` is called with numbers of images.
    """

    def ranges() -> Iterator[ImageRange]:
        for shard in shards:
            run.begin(shard)
            yield from image_ranges(images, shard.start, shard.stop, detector.batch_size)

    stream = _scored(detector, ranges(), labels, workers=workers)
    for shard in shards:
        results: list[Result] = []
        while len(results) < len(shard):
            found = next(stream)
            results += found
            on_progress(len(found))
        run.write(shard, results)


def score_part(detector: Detector, images: Images, start: int, labels: Labels | None, threads: int) -> list[Result]:
    """Results of the images of one part of a list, which begins at `start`: what an actor of a cluster computes."""
    ranges = image_ranges(images, 0, len(images), detector.batch_size, offset=start)
    return [result for found in _scored(detector, ranges, labels, start, threads=threads) for result in found]


def _scored(
    detector: Detector,
    ranges: Iterable[ImageRange],
    labels: Labels | None,
    offset: int = 0,
    workers: int = 0,
    threads: int = 1,
) -> Iterator[list[Result]]:
    """The results of each range; `labels[i]` is the group of image `offset + i`."""
    for chunk in read_ahead(ranges, detector.preprocessing_, workers, threads):
        groups = None if labels is None else labels[[index - offset for index in chunk.indices]]
        yield detector.score_chunk(chunk, groups)


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


AHEAD = 2  # ranges that each reader may be ahead of the network


class Records(Images):
    """Images that are in memory already."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.items = self._records = records

    def __getitem__(self, index: int) -> Record:
        return self._records[index]


@dataclass(frozen=True)
class ImageRange:
    """Consecutive images of a list; `start` is the index of the first."""

    start: int
    images: Images


def image_ranges(images: Images, start: int, stop: int, size: int, offset: int = 0) -> Iterator[ImageRange]:
    """Images `start` to `stop - 1`, `size` at a time: files by their names, to be read later; others are read here."""
    for first in range(start, stop, size):
        last = min(first + size, stop)
        files = images.between(first, last) if isinstance(images, FileImages) else None
        yield ImageRange(offset + first, files or Records([images[index] for index in range(first, last)]))


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
    build: Any = DataLoader  # its type stubs know whole numbers as indices only
    loader = build(
        reader,
        batch_size=None,
        sampler=parts,
        num_workers=workers,
        prefetch_factor=AHEAD,
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

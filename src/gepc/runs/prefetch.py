"""Images are read and preprocessed by other processes or threads while the network works.

A reader receives a range of the list of images, not the whole list, so memory does not grow with the list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gepc.core.errors import GepcError
from gepc.images.batches import Chunk, OnBadImage, chunks
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import FileImages, Images, Record

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

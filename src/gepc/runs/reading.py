"""Reading ahead: images are decoded and preprocessed in other processes or threads while the network works.

What goes to a reader is a part of the list, not the list: memory does not grow with the number of images.
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
"""Parts that wait for the network, for each reader."""


class Records(Images):
    """Images that are in memory already, under the names they have in the list."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._records[index]


@dataclass(frozen=True)
class Part:
    """Consecutive images of a list, by themselves; `start` is the place of the first."""

    start: int
    images: Images


def part(images: Images, start: int, stop: int) -> Part:
    """Files are passed on by their names and read later; anything else is read here."""
    if isinstance(images, FileImages):
        return Part(start, images.between(start, stop))
    return Part(start, Records([images[index] for index in range(start, stop)]))


def pieces(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """The range cut into pieces of `size`."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


@dataclass(frozen=True)
class Reader:
    """Reads one part; a bad image is a failure of its chunk, with the reason."""

    preprocessing: Preprocessing

    def __call__(self, part: Part) -> Chunk:
        """The part as one chunk, with the places the images have in the list."""
        (chunk,) = chunks(part.images, self.preprocessing, len(part.images), OnBadImage.ALL)
        chunk.indices = [index + part.start for index in chunk.indices]
        chunk.failures = [(index + part.start, name, error) for index, name, error in chunk.failures]
        return chunk

    __getitem__ = __call__  # to a DataLoader a reader is a data set whose indices are parts


def read_ahead(
    parts: Iterable[Part], preprocessing: Preprocessing, workers: int = 0, threads: int = 1
) -> Iterator[Chunk]:
    """The parts as chunks, in order: read by `workers` processes, or by threads of this one where there are none."""
    reader = Reader(preprocessing)
    if workers == 0:
        return _in_threads(parts, reader, threads)
    return _in_processes(parts, reader, workers)


def _in_threads(parts: Iterable[Part], reader: Callable[[Part], Chunk], threads: int) -> Iterator[Chunk]:
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


def _in_processes(parts: Iterable[Part], reader: Reader, workers: int) -> Iterator[Chunk]:
    # torch's loader: its processes end by themselves when this one is killed
    from torch.utils.data import DataLoader

    build: Any = DataLoader  # typed for data sets with numbers for indices
    loader = build(
        reader,
        batch_size=None,
        sampler=parts,
        num_workers=workers,
        prefetch_factor=AHEAD,
        collate_fn=_as_it_is,
        multiprocessing_context="spawn",
    )
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise GepcError(
            "a process that reads images died, perhaps for want of memory; what is finished is kept: "
            "run the same command again with fewer --workers"
        ) from error


def _as_it_is(chunk: Chunk) -> Chunk:
    return chunk

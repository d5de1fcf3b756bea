"""Chunks of images: read ahead, preprocessed and keyed. The one reader that fitting, scoring and benchmarks share.

A chunk holds consecutive images of one size. The number of its images is bounded, and so is the number of its pixels:
the memory of a network pass grows with pixels, not with images.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import numpy as np

from gepc.core.errors import InputError
from gepc.images.formats import Pixels, size_text
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing, warn_about_range
from gepc.images.sources import Image, Images, Record

MAX_CHUNK_PIXELS = 1 << 19  # of one network call: 512 images of 32x32 pixels, or 8 of 256x256
MAX_AHEAD_PIXELS = 1 << 21  # of images that are read and wait for the network
MAX_IMAGE_PIXELS = 1 << 21  # of one image, six to nine gigabytes in a pass of an embedded network
STREAM_HEAD = 16  # images of a stream among which one must be readable to set the size


@dataclass(frozen=True)
class ReadImage:
    """One image of a collection: preprocessed, (C, H, W), or the reason why it cannot be used."""

    index: int  # position in the collection
    name: str
    image: Image | None = None
    error: str = ""
    unreadable: bool = False  # whether there are no pixels at all, as in a damaged file
    shape: tuple[int, int] = (0, 0)  # (H, W) of the pixels as they were read
    pixels: Pixels | None = None  # the pixels as they were read, if they were asked for
    options: tuple[str, ...] = ()  # that the error names

    @property
    def weight(self) -> int:
        """The number of pixels that the image keeps in memory."""
        own = 0 if self.image is None else self.image.shape[1] * self.image.shape[2]
        return own if self.pixels is None else own + self.shape[0] * self.shape[1]


@dataclass
class Chunk:
    """Consecutive images of a collection: those that can be scored, and the reasons for those that cannot."""

    indices: list[int] = field(default_factory=list)  # positions in the collection
    names: list[str] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the content, see `image_key`
    images: list[Image] = field(default_factory=list)  # preprocessed, (C, H, W) each, of one size
    failures: list[tuple[int, str, str]] = field(default_factory=list)  # (position, name, reason)
    read: list[ReadImage] = field(default_factory=list)  # as they were read, in the order of `images`
    weight: int = 0  # of the images that were added

    def add(self, item: ReadImage) -> None:
        """Append an image, or the reason why it cannot be used."""
        if item.image is None:
            self.failures.append((item.index, item.name, item.error))
            return
        self.indices.append(item.index)
        self.names.append(item.name)
        self.keys.append(image_key(item.image))
        self.images.append(item.image)
        self.read.append(item)
        self.weight += item.weight

    def has_room_for(self, item: ReadImage, most_pixels: int) -> bool:
        """Whether an image fits: all have one size, within a number of pixels."""
        if item.image is None or not self.images:
            return True
        return item.image.shape == self.images[0].shape and self.weight + item.weight <= most_pixels

    def stacked(self) -> Image:
        """The readable images as (N, C, H, W)."""
        return np.stack(self.images)

    def __len__(self) -> int:
        return len(self.indices) + len(self.failures)


class OnBadImage(Enum):
    """Which images that cannot be used become failures of their chunk; any other one is an `InputError`.

    NONE: no image. UNREADABLE: those without pixels, such as damaged files. ALL: also those that the preprocessing
    refuses, for instance because of NaN pixels or their size.
    """

    NONE = "none"
    UNREADABLE = "unreadable"
    ALL = "all"


def _prepared(index: int, record: Record, preprocessing: Preprocessing, keep_pixels: bool) -> ReadImage:
    """Preprocess a record; an image that cannot be used gives the reason."""
    try:
        image = preprocessing.prepare(record)
        height, width = image.shape[1:]
        if height * width > MAX_IMAGE_PIXELS:
            seen = f"{record.label} would have {size_text((height, width))} in the network"
            advice = "a pass takes three to five kilobytes for each. Set `size`, or scan large images as scenes"
            most = f"at most {MAX_IMAGE_PIXELS:,} pixels are allowed"
            raise InputError(f"{seen}, where {most}: {advice}", options=("size",))
    except InputError as error:
        unreadable = record.pixels is None
        return ReadImage(index, record.name, error=str(error), unreadable=unreadable, options=error.options)
    pixels = record.pixels_for(preprocessing.channels)
    shape = (pixels.shape[0], pixels.shape[1])
    return ReadImage(index, record.name, image, shape=shape, pixels=pixels if keep_pixels else None)


def chunks(
    images: Images,
    preprocessing: Preprocessing,
    size: int,
    on_bad_image: OnBadImage,
    *,
    indices: Iterable[int] | None = None,
    threads: int = 1,
    keep_pixels: bool = False,
    most_pixels: int | None = None,
) -> Iterator[Chunk]:
    """Read and preprocess a collection in order, ahead of whoever takes the chunks.

    If the preprocessing has no size, the first image sets that of all.

    Parameters
    ----------
    images : the collection.
    preprocessing : how pixels become the network's input.
    size : the largest number of images in a chunk. There are fewer where sizes differ or images are large.
    on_bad_image : what happens to an image that cannot be used.
    indices : the positions to read, in that order; None reads all images.
    threads : the number of threads that read ahead. A stream, which can be read once and in order only, is read in the
        caller's thread.
    keep_pixels : keep the pixels as they were read, in `Chunk.read`.
    most_pixels : the largest number of pixels of a chunk of several images; None takes `MAX_CHUNK_PIXELS`.

    Returns
    -------
    An iterator of `Chunk`: consecutive images of one size, with the failures among them.
    """

    def read() -> Iterator[ReadImage]:
        prepare = partial(_prepared, preprocessing=settled(preprocessing, images), keep_pixels=keep_pixels)
        if images.once:
            yield from itertools.starmap(prepare, enumerate(images))
        else:
            positions = iter(range(len(images)) if indices is None else indices)
            yield from _in_threads(lambda index: prepare(index, images[index]), positions, threads, 2 * size)

    return _grouped(_accepted(read(), on_bad_image), size, most_pixels or MAX_CHUNK_PIXELS)


def prepared_chunks(images: Iterable[Image], size: int, most_pixels: int = MAX_CHUNK_PIXELS) -> Iterator[Chunk]:
    """Chunks of images (C, H, W) that are preprocessed already, named by their positions; see `chunks`."""
    items = (ReadImage(index, str(index), image, shape=image.shape[1:]) for index, image in enumerate(images))
    return _grouped(items, size, most_pixels)


def _accepted(read: Iterable[ReadImage], on_bad_image: OnBadImage) -> Iterator[ReadImage]:
    """Every image that was read; one that cannot be used and may not become a failure is an `InputError`."""
    for item in read:
        accepted = on_bad_image is OnBadImage.ALL or (on_bad_image is OnBadImage.UNREADABLE and item.unreadable)
        if item.image is None and not accepted:
            raise InputError(item.error, options=item.options)
        yield item


def _grouped(items: Iterable[ReadImage], size: int, most_pixels: int) -> Iterator[Chunk]:
    """Consecutive images in chunks, each of which is given out as soon as it is full."""
    chunk = Chunk()
    for item in items:
        if not chunk.has_room_for(item, most_pixels):
            yield chunk
            chunk = Chunk()
        chunk.add(item)
        if len(chunk) == size:
            yield chunk
            chunk = Chunk()
    if len(chunk):
        yield chunk


def settled(preprocessing: Preprocessing, images: Images) -> Preprocessing:
    """The preprocessing with the size of the first readable image, where no size is set.

    A stream cannot be searched without holding its images, so the first `STREAM_HEAD` of them must contain one.
    """
    if not preprocessing.is_open:
        return preprocessing
    for record in images.first(STREAM_HEAD) if images.once else images:
        try:
            shape = preprocessing.prepare(record).shape
        except InputError:
            continue
        return preprocessing.for_images_of(shape)
    return preprocessing


def _in_threads(
    read: Callable[[int], ReadImage], indices: Iterator[int], threads: int, most_ahead: int
) -> Iterator[ReadImage]:
    """Read images in threads. The number that waits for the caller shrinks as the images grow."""
    waiting: deque[Future[ReadImage]] = deque()
    allowed = 1
    pool = ThreadPoolExecutor(threads, thread_name_prefix="gepc-read")
    try:
        for index in indices:
            waiting.append(pool.submit(read, index))
            while len(waiting) > allowed:
                item = waiting.popleft().result()
                fitting = MAX_AHEAD_PIXELS // max(1, item.weight)
                allowed = min(most_ahead, max(1, fitting))
                yield item
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def load_all(images: Images, preprocessing: Preprocessing) -> Image:
    """Every image as one (N, C, H, W) array; an image that cannot be read or differs in size is an `InputError`."""
    if len(images) == 0:
        raise InputError("there are no images")
    warn_about_range(images, preprocessing.value_range)
    stacked = [chunk.stacked() for chunk in chunks(images, preprocessing, len(images), OnBadImage.NONE)]
    if len({part.shape[1:] for part in stacked}) > 1:
        raise InputError("the images have several sizes; set `size` to bring them to one", options=("size",))
    return np.concatenate(stacked)

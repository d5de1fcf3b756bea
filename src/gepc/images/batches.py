"""Chunks of images: read, preprocessed and keyed, a bounded number at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from gepc.core.errors import InputError
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing, warn_about_range
from gepc.images.sources import Image, Images


@dataclass
class Chunk:
    """Consecutive images of a collection: those that can be scored, and the reasons for those that cannot."""

    indices: list[int] = field(default_factory=list)  # positions in the collection
    names: list[str] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the content, see `image_key`
    images: list[Image] = field(default_factory=list)  # preprocessed, (C, H, W) each
    failures: list[tuple[int, str, str]] = field(default_factory=list)  # (position, name, reason)

    def stacked(self) -> Image:
        """The readable images as (N, C, H, W)."""
        return np.stack(self.images)

    def __len__(self) -> int:
        return len(self.indices) + len(self.failures)


class OnBadImage(Enum):
    """Which images that cannot be used become failures of their chunk; any other one is an `InputError`.

    NONE: none of them. UNREADABLE: those without pixels, such as damaged files. ALL: also those that the preprocessing
    refuses, for instance because of NaN pixels or their size.
    """

    NONE = "none"
    UNREADABLE = "unreadable"
    ALL = "all"


def chunks(images: Images, preprocessing: Preprocessing, size: int, on_bad_image: OnBadImage) -> Iterator[Chunk]:
    """Read and preprocess a collection in order, `size` images per chunk; fewer where their sizes differ.

    If the preprocessing has no size, the first image sets that of all.
    """
    chunk = Chunk()
    for index, record in enumerate(images):
        try:
            image = preprocessing.prepare(record)
        except InputError as error:
            unreadable = record.pixels is None and on_bad_image is OnBadImage.UNREADABLE
            if not unreadable and on_bad_image is not OnBadImage.ALL:
                raise
            chunk.failures.append((index, record.name, str(error)))
        else:
            preprocessing = preprocessing.for_images_of(image.shape)
            if chunk.images and image.shape != chunk.images[0].shape:  # images that keep their size
                yield chunk
                chunk = Chunk()
            chunk.indices.append(index)
            chunk.names.append(record.name)
            chunk.keys.append(image_key(image))
            chunk.images.append(image)
        if len(chunk) == size:
            yield chunk
            chunk = Chunk()
    if len(chunk):
        yield chunk


def load_all(images: Images, preprocessing: Preprocessing) -> Image:
    """Every image as one (N, C, H, W) array; one that cannot be read or differs in size is an `InputError`."""
    if len(images) == 0:
        raise InputError("there are no images")
    warn_about_range(images, preprocessing.value_range)
    (chunk,) = chunks(images, preprocessing, len(images), OnBadImage.NONE)
    return chunk.stacked()

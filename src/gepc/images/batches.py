"""Images on their way to an extractor: read, preprocessed, keyed and grouped, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from gepc.core.errors import InputError
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import Image, Images


@dataclass
class Chunk:
    """Consecutive images of a collection: the ones that can be scored, and the reasons for those that cannot."""

    indices: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    failures: list[tuple[int, str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, images: Sequence[Image]) -> Chunk:
        """A chunk of images that are preprocessed already, named by their numbers."""
        indices = list(range(len(images)))
        return cls(indices, [str(index) for index in indices], [image_key(image) for image in images], list(images))

    def stacked(self) -> Image:
        """The readable images as (N, C, H, W)."""
        return np.stack(self.images)

    def __len__(self) -> int:
        return len(self.indices) + len(self.failures)


class OnBadImage(Enum):
    """Which images that cannot be used become failures of their chunk instead of an `InputError`."""

    NONE = "none"
    UNREADABLE = "unreadable"
    ALL = "all"


def chunks(images: Images, preprocessing: Preprocessing, size: int, on_bad_image: OnBadImage) -> Iterator[Chunk]:
    """Read `images` in order, `size` at a time. Where the preprocessing fixes no size, the first image does."""
    chunk = Chunk()
    for index in range(len(images)):
        record = images[index]
        try:
            if record.pixels is None:
                raise InputError(record.error or f"{record.name} cannot be read")
            image = preprocessing(record.pixels, _label(record.name))
        except InputError as error:
            forgiven = on_bad_image is OnBadImage.ALL or (
                on_bad_image is OnBadImage.UNREADABLE and record.pixels is None
            )
            if not forgiven:
                raise
            chunk.failures.append((index, record.name, str(error)))
        else:
            preprocessing = preprocessing.for_images_of(image.shape)
            chunk.indices.append(index)
            chunk.names.append(record.name)
            chunk.keys.append(image_key(image))
            chunk.images.append(image)
        if len(chunk) == size:
            yield chunk
            chunk = Chunk()
    if len(chunk):
        yield chunk


def _label(name: str) -> str:
    return f"image {name}" if name.isdigit() else name

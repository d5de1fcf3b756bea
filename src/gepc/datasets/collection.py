"""The forms in which the readers of this folder hand over images: pixels in memory, files on disk, a part of either."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from gepc.core.errors import InputError
from gepc.images.sources import ArrayImages, Images, Pixels, Record, read_pixels


class PixelImages(Images):
    """One or several arrays of images one after the other, (N,H,W,C) or (N,C,H,W), in memory or memory-mapped.

    A record is named `test/17` after the split and the image's number in it, which a subset keeps.
    """

    def __init__(self, arrays: Sequence[Pixels], split: str, numbers: Sequence[int] | None = None) -> None:
        self._parts = [ArrayImages(array) for array in arrays]
        self._ends = list(accumulate(len(part) for part in self._parts))
        self._split = split
        self._numbers = range(self._ends[-1]) if numbers is None else numbers
        self.mapped = all(isinstance(array, np.memmap) for array in arrays)
        if not self._numbers:
            raise InputError("there is no image in it")

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Record:
        index = range(len(self))[index]
        part = bisect_right(self._ends, index)
        start = self._ends[part - 1] if part else 0
        return Record(f"{self._split}/{self._numbers[index]}", self._parts[part][index - start].pixels)

    def copy(self, indices: Sequence[int]) -> PixelImages:
        """Some of the images in an array of their own, so that the whole can be freed."""
        pixels = np.stack([np.asarray(self[index].pixels) for index in indices])
        return PixelImages([pixels], self._split, [self._numbers[index] for index in indices])


class NamedFiles(Images):
    """Image files, decoded when asked for; a record is named by its path below `folder`, with forward slashes.

    `finish` is what the data set does to an image after decoding. A file that is missing or cannot be decoded is a
    record with the reason; it is an `InputError` when not a single one is there.
    """

    def __init__(self, folder: Path, names: Sequence[str], finish: Callable[[Pixels], Pixels] | None = None) -> None:
        self._folder, self._names, self._finish = folder, names, finish
        if not any((folder / name).is_file() for name in names):
            raise InputError(f"none of the {len(names)} images is in {folder}" if names else f"no image in {folder}")

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Record:
        name = self._names[index]
        try:
            pixels = read_pixels(self._folder / name)
            return Record(name, pixels if self._finish is None else self._finish(pixels))
        except InputError as error:
            text = str(error)
            return Record(name, error=text if name in text else f"{self._folder / name}: {text}")


class Subset(Images):
    """Some images of another collection, which is kept."""

    def __init__(self, images: Images, indices: Sequence[int]) -> None:
        self._images, self._indices = images, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Record:
        return self._images[self._indices[index]]


def choose(images: Images, indices: Sequence[int]) -> Images:
    """Some of the images, holding no more in memory than they need."""
    if isinstance(images, PixelImages) and not images.mapped:
        return images.copy(indices)
    return Subset(images, indices)


def first_of(root: Path, *names: str) -> Path:
    """The first of `names` (paths below `root`) that is there; `root` may also be the folder or file it begins with."""
    for name in names:
        for base in (root, root.parent):
            if (base == root or Path(name).parts[0] == root.name) and (base / name).exists():
                return base / name
    raise InputError(f"{root} holds {'no' if len(names) == 1 else 'none of'} {', '.join(names)}")

"""Collections that the readers of this package return: arrays, files on disk, and subsets of either."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from gepc.core.errors import InputError
from gepc.images.formats import Pixels
from gepc.images.sources import ArrayImages, Images, Record, read_record


class PixelImages(Images):
    """Consecutive arrays of images. A record is named `test/17` after the split and its position in the split.

    Parameters
    ----------
    arrays : (N,H,W,C) or (N,C,H,W) each, in memory or memory-mapped.
    split : the split's name.
    numbers : the position of each image in the split, for a subset.
    """

    def __init__(self, arrays: Sequence[Pixels], split: str, numbers: Sequence[int] | None = None) -> None:
        self._arrays, self._parts = arrays, [ArrayImages(array) for array in arrays]
        self._ends = list(accumulate(len(part) for part in self._parts))
        self._split = split
        self._numbers = range(self._ends[-1]) if numbers is None else numbers
        self.mapped = all(isinstance(array, np.memmap) for array in arrays)
        if not self._numbers:
            raise InputError("it holds no image")

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Record:
        part, place = self._place(index)
        return replace(self._parts[part][place], name=f"{self._split}/{self._numbers[index]}")

    def _place(self, index: int) -> tuple[int, int]:
        """Which array holds an image, and where."""
        index = range(len(self))[index]
        part = bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)

    def copy(self, indices: Sequence[int]) -> PixelImages:
        """A copy of some images, so that the memory of the others can be freed."""
        places = [self._place(index) for index in indices]
        pixels = np.stack([np.asarray(self._arrays[part][place]) for part, place in places])
        return PixelImages([pixels], self._split, [self._numbers[index] for index in indices])


class NamedFiles(Images):
    """Image files below a folder. A file that is missing or damaged is a record with the reason.

    Parameters
    ----------
    folder : where the files are; at least one of them must exist.
    names : the paths below `folder`, with forward slashes, which are also the names of the records.
    finish : applied to the decoded pixels.
    """

    def __init__(self, folder: Path, names: Sequence[str], finish: Callable[[Pixels], Pixels] | None = None) -> None:
        self._folder, self._names, self._finish = folder, names, finish
        if not any((folder / name).is_file() for name in names):
            raise InputError(f"none of the {len(names)} images is in {folder}" if names else f"no image in {folder}")

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Record:
        path = self._folder / self._names[index]
        record = read_record(self._names[index], path)
        if self._finish is None or record.pixels is None:
            return record
        try:
            return replace(record, pixels=self._finish(record.pixels))
        except InputError as error:
            return Record(record.name, error=f"{path}: {error}")


class Subset(Images):
    """Some images of another collection, which is kept."""

    def __init__(self, images: Images, indices: Sequence[int]) -> None:
        self._images, self._indices = images, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Record:
        return self._images[self._indices[index]]


def choose(images: Images, indices: Sequence[int]) -> Images:
    """Some of the images, without keeping others in memory."""
    if isinstance(images, PixelImages) and not images.mapped:
        return images.copy(indices)
    return Subset(images, indices)


def first_of(root: Path, *names: str) -> Path:
    """The first of `names` (paths below `root`) that exists; `root` may also be the folder or file it begins with."""
    for name in names:
        for base in (root, root.parent):
            if (base == root or Path(name).parts[0] == root.name) and (base / name).exists():
                return base / name
    raise InputError(f"{root} holds {'no' if len(names) == 1 else 'none of'} {', '.join(names)}")

"""The registry of data sets: the layout that each expects on disk, and the choice of a subset."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import numpy as np

from gepc.core.errors import InputError, OptionError, check_choice, raising
from gepc.core.files import StrPath
from gepc.images import noise
from gepc.images.formats import Pixels, read_file
from gepc.images.sources import ArrayImages, Images, ReadFile, Record, read_record

SPLITS = ("train", "test")


@dataclass(frozen=True)
class DatasetSpec:
    """One family of data sets."""

    family: str  # the name in the registry, which is what precedes the colon in `npz:celeba32.npz`
    layout: str  # a description of the files on disk, for error messages
    home: str  # where to get the data
    read: Callable[[Path, str], Images]  # takes the place of the files, and the split

    def open(self, root: Path, split: str, rest: str) -> Images:
        """Open the whole split; a missing or damaged file is an `InputError` that describes the expected layout."""
        place = root / rest
        home = f"; get it from {self.home}, or with `gepc data get`" if self.home else ""
        reason = f"{self.family}, {split} split: {{error}}. Expected in {place}: {self.layout}{home}"
        with raising(InputError, reason, InputError, OSError):
            if not place.exists():
                raise InputError(f"{place} does not exist")
            return self.read(place, split)


Reader = TypeVar("Reader", bound=Callable[[Path, str], Images])
_DATASETS: dict[str, DatasetSpec] = {}


def register(family: str, layout: str, home: str = "") -> Callable[[Reader], Reader]:
    """Function decorator: register a reader as a data set; see `DatasetSpec` for the parameters."""

    def add(read: Reader) -> Reader:
        if family in _DATASETS:
            raise OptionError(f"a data set named {family!r} exists already")
        _DATASETS[family] = DatasetSpec(family, layout, home, read)
        return read

    return add


def _known() -> dict[str, DatasetSpec]:
    """Every registered data set; those of this package are registered when they are first asked for."""
    import_module("gepc.lab.datasets.layouts")
    return _DATASETS


def list_datasets() -> list[str]:
    """List the names of the data sets. Each may take a path after a colon.

    Returns
    -------
    list of str

    Examples
    --------
    >>> import gepc
    >>> "npz" in gepc.list_datasets()
    True
    """
    return sorted(_known())


def find_dataset(name: str) -> DatasetSpec:
    """The entry of a data set in the registry: its layout, its home, its reader."""
    family, known = name.partition(":")[0], _known()
    check_choice("data set", family, known)
    return known[family]


def open_dataset(name: str, root: StrPath, split: str, limit: int | None = None, seed: int | None = None) -> Images:
    """Open the images of one split of a data set, which are read when they are asked for.

    Parameters
    ----------
    name : one of `list_datasets()`; `FAMILY:PATH` looks at a path below the root (`npz:celeba32.npz`, `folder:radar`).
    root : the folder that contains the folder or file of the data set, or that folder or file itself.
    split : `train` or `test`, as the data set defines them. They are read from different files and never overlap.
    limit : keep at most this many images. Without a seed they are the first ones.
    seed : draw the `limit` images at random instead. The draw depends only on (name, split, seed) and the number of
        images. The images are in the order of the draw: a larger limit begins with the images of a smaller one, so
        that their cached features are found.

    Returns
    -------
    A sequence of images. An image that cannot be decoded is a record with an `error`.

    Raises
    ------
    InputError
        If an archive is missing or damaged.
    OptionError
        If the name or the split is unknown.

    Examples
    --------
    >>> import gepc, tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(Path(folder, "scans.npz"), test_x=np.zeros((5, 8, 8, 3), np.uint8))
    ...     len(gepc.open_dataset("npz:scans.npz", folder, "test", limit=3))
    3
    """
    check_choice("split", split, SPLITS)
    for option, value, least in (("limit", limit, 1), ("seed", seed, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise OptionError(f"{option} must be a whole number of at least {least}, or None; got {value!r}")
    images = find_dataset(name).open(Path(root), split, name.partition(":")[2])
    if limit is None or (seed is None and limit >= len(images)):
        return images
    return images.take(range(limit) if seed is None else _draw(name, split, seed, len(images), limit))


def _draw(name: str, split: str, seed: int, count: int, limit: int) -> list[int]:
    """Positions of the `limit` lowest of `count` raw random numbers, whose stream is the same in all numpy releases."""
    numbers = noise.generator(seed, f"{name}|".encode(), f"subset of {split}").bit_generator.random_raw(count)
    return [int(index) for index in np.argsort(numbers, kind="stable")[:limit]]


class PixelImages(Images):
    """An array of images, (N,H,W,C) or (N,C,H,W).

    A record is named `test/17` after the split and its position there, which is in `numbers` for a subset.
    """

    def __init__(self, pixels: Pixels, split: str, numbers: Sequence[int] | None = None) -> None:
        self._pixels, self._images, self._split = pixels, ArrayImages(pixels), split
        self.items = range(len(pixels)) if numbers is None else numbers
        if not self.items:
            raise InputError("it contains no image")

    def __getitem__(self, index: int) -> Record:
        return replace(self._images[index], name=f"{self._split}/{self.items[index]}")

    def take(self, indices: Sequence[int]) -> Images:
        """Some of the images, copied, so that the memory of the others can be freed."""
        return PixelImages(self._pixels[list(indices)], self._split, [self.items[index] for index in indices])


class NamedFiles(Images):
    """Image files `names` below a folder, at least one of which must exist; `read` decodes the file at a path.

    A file that is missing or damaged is a record with the reason.
    """

    def __init__(self, folder: Path, names: Sequence[str], read: ReadFile = read_file) -> None:
        self._folder, self.items, self._read = folder, names, read
        if not any((folder / name).is_file() for name in names):
            raise InputError(f"none of the {len(names)} images is in {folder}" if names else f"no image in {folder}")

    def __getitem__(self, index: int) -> Record:
        return read_record(self.items[index], self._folder / self.items[index], self._read)


def first_of(root: Path, *names: str) -> Path:
    """The first of `names` (paths below `root`) that exists; `root` may also be the folder or file it begins with."""
    for name in names:
        for base in (root, root.parent):
            if (base == root or Path(name).parts[0] == root.name) and (base / name).exists():
                return base / name
    raise InputError(f"{root} contains {'no' if len(names) == 1 else 'none of'} {', '.join(names)}")

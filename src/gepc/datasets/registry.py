"""The registry of data sets: the layout that each expects on disk, and the choice of a subset."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TypeVar

import numpy as np

from gepc.core.errors import InputError, OptionError, check_choice, nearest
from gepc.datasets.collection import choose
from gepc.images import noise
from gepc.images.sources import Images

SPLITS = ("train", "test")


@dataclass(frozen=True)
class DatasetSpec:
    """One family of data sets.

    Parameters
    ----------
    family : the name in the registry, which is what precedes the colon in `hf:NAME`.
    layout : a description of the files on disk, for error messages.
    home : where to get the data.
    read : the reader. It takes (root, split), or (root, split, name) with `by_name`.
    by_name : whether what follows the colon is a name for the reader; otherwise it is a path below the root.
    """

    family: str
    layout: str
    home: str
    read: Callable[..., Images]
    by_name: bool = False

    def open(self, root: Path, split: str, rest: str) -> Images:
        """Open the whole split; a missing or damaged file is an `InputError` that describes the expected layout."""
        if self.by_name and not rest:
            raise OptionError(f"{self.family} needs a name: write {self.family}:NAME")
        place = root if self.by_name else root / rest
        try:
            if self.by_name:
                return self.read(place, split, rest)
            if not place.exists():
                raise InputError(f"{place} does not exist")
            return self.read(place, split)
        except (InputError, OSError) as error:
            home = f"; it is never downloaded, get it from {self.home}" if self.home else ""
            raise InputError(
                f"{self.family}, {split} split: {error}. Expected in {place}: {self.layout}{home}"
            ) from error


Reader = TypeVar("Reader", bound=Callable[..., Images])
_DATASETS: dict[str, DatasetSpec] = {}


def register(family: str, layout: str, home: str = "", by_name: bool = False) -> Callable[[Reader], Reader]:
    """Function decorator: register a reader as a data set; see `DatasetSpec` for the parameters."""

    def add(read: Reader) -> Reader:
        if family in _DATASETS:
            raise OptionError(f"a data set named {family!r} exists already")
        _DATASETS[family] = DatasetSpec(family, layout, home, read, by_name)
        return read

    return add


def _known() -> dict[str, DatasetSpec]:
    """Every registered data set; the modules of this package register theirs when they are first imported."""
    package = import_module("gepc.datasets")
    for module in iter_modules(package.__path__, "gepc.datasets."):
        import_module(module.name)
    return _DATASETS


def list_datasets() -> list[str]:
    """Names of the data sets; `hf` takes a name after a colon, the others may take a path."""
    return sorted(_known())


def find_dataset(name: str) -> DatasetSpec:
    """The entry of a data set in the registry: its layout, its home, its reader."""
    family, known = name.partition(":")[0], _known()
    if family not in known:
        raise OptionError(f"unknown data set {family!r}; {nearest(family, known)}")
    return known[family]


def open_dataset(
    name: str, root: str | os.PathLike[str], split: str, limit: int | None = None, seed: int | None = None
) -> Images:
    """The images of one split of a data set, read when they are asked for.

    Parameters
    ----------
    name:
        One of `list_datasets()`; `FAMILY:PATH` looks at a path below the root (`npz:celeba32.npz`, `folder:radar`),
        `hf:NAME` is a Hugging Face data set.
    root:
        The folder that contains the folder or archive of the data set, or that folder or archive itself.
    split:
        `train` or `test`, as the data set defines them. They are read from different files and never overlap.
    limit:
        Keep at most this many images. Without a seed they are the first ones.
    seed:
        Draw the `limit` images at random instead. The draw depends only on (name, split, seed) and the number of
        images. The images are in the order of the draw: a larger limit begins with the images of a smaller one, so
        that their cached features are found.

    An image that cannot be decoded is a record with an `error`; a missing or damaged archive is an `InputError`.
    """
    check_choice("split", split, SPLITS)
    for option, value, least in (("limit", limit, 1), ("seed", seed, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise OptionError(f"{option} must be a whole number of at least {least}, or None; got {value!r}")
    images = find_dataset(name).open(Path(root), split, name.partition(":")[2])
    if limit is None or (seed is None and limit >= len(images)):
        return images
    return choose(images, range(limit) if seed is None else _draw(name, split, seed, len(images), limit))


def _draw(name: str, split: str, seed: int, count: int, limit: int) -> list[int]:
    """Positions of the `limit` lowest of `count` raw random numbers, whose stream is the same in all numpy releases."""
    numbers = noise.generator(seed, f"{name}|".encode(), f"subset of {split}").bit_generator.random_raw(count)
    return [int(index) for index in np.argsort(numbers, kind="stable")[:limit]]

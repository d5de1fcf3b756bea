"""Images as numpy arrays, (N,H,W,C) or (N,C,H,W): `train_x` and `test_x` in one `.npz`, or in one `.npy` file each."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from gepc.core.errors import InputError
from gepc.datasets.collection import PixelImages, first_of
from gepc.datasets.registry import register
from gepc.images.sources import DAMAGED_ARRAY


@register("npz", layout="an .npz file with the arrays train_x and test_x, or one of them")
def npz(root: Path, split: str) -> PixelImages:
    """The array `train_x` or `test_x` of the file, loaded at once; the other one is not read."""
    if root.is_dir():
        raise InputError(f"{root} is a folder; name the file in it, as in npz:FILE.npz")
    if not zipfile.is_zipfile(root):
        raise InputError(f"{root} is not a whole, plain .npz archive")
    try:
        with open(root, "rb") as handle, np.load(handle, allow_pickle=False) as archive:
            names = list(archive.files)
            if f"{split}_x" in names:
                return PixelImages([np.asarray(archive[f"{split}_x"])], split)
    except InputError as error:
        raise InputError(f"{split}_x in {root}: {error}") from error
    except DAMAGED_ARRAY as error:
        raise InputError(f"{root} is not a whole, plain .npz archive: {error}") from error
    raise InputError(f"{root} has no {split} split: it holds no array {split}_x but {', '.join(names) or 'nothing'}")


@register("npy", layout="train_x.npy and test_x.npy in a folder, or one .npy file whose images are all test images")
def npy(root: Path, split: str) -> PixelImages:
    """The array of the split, memory-mapped."""
    if root.is_file() and split == "train":
        raise InputError(f"{root} is one array, so all its images are test images")
    path = root if root.is_file() else first_of(root, f"{split}_x.npy")
    try:
        return PixelImages([np.lib.format.open_memmap(path, mode="r")], split)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except DAMAGED_ARRAY as error:
        raise InputError(f"{path} is not a whole, plain .npy array: {error}") from error

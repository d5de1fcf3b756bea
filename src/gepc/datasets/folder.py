"""Any folder of images, subfolders included, in sorted order.

With `train/` or `test/` in it, those are the splits. Without them all images are the test split and there is no
training split: the same image never serves to calibrate and to evaluate.
"""

from __future__ import annotations

from pathlib import Path

from gepc.core.errors import InputError
from gepc.datasets.collection import NamedFiles
from gepc.datasets.registry import SPLITS, register
from gepc.images.sources import FileImages


@register("folder", layout="train/ and test/ with image files, or image files that are all test images")
def folder(root: Path, split: str) -> NamedFiles:
    """The images below `train/` or `test/`, or all of them."""
    divided = any((root / name).is_dir() for name in SPLITS)
    if not divided and split == "train":
        raise InputError(f"{root} has no train/, so all its images are test images")
    place = root / split if divided else root
    if not place.is_dir():
        raise InputError(f"{place} is not a folder")
    return NamedFiles(root, [path.relative_to(root).as_posix() for path in FileImages.below(place).paths])

"""Describable Textures (Cimpoi et al., 2014): 47 classes, images of various sizes, and ten ways to split them.

The first way is used: `test1.txt` is the test split, `train1.txt` and `val1.txt` together the training split.
"""

from __future__ import annotations

from pathlib import Path

from gepc.core.errors import InputError
from gepc.datasets.collection import NamedFiles, first_of
from gepc.datasets.registry import register

LISTS = {"train": ("train1.txt", "val1.txt"), "test": ("test1.txt",)}


@register(
    "dtd",
    layout="dtd/ (unpack dtd-r1.0.1.tar.gz) with images/<class>/*.jpg and labels/train1.txt, val1.txt, test1.txt",
    home="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
)
def dtd(root: Path, split: str) -> NamedFiles:
    """3,760 training and 1,880 test images."""
    folder = first_of(root, "dtd/images", "images").parent
    names: list[str] = []
    for name in LISTS[split]:
        path = first_of(folder, f"labels/{name}")
        try:
            names += [f"images/{line}" for line in path.read_text(encoding="utf-8").split()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not a text file that can be read: {error}") from error
    return NamedFiles(folder, names)

"""Tiny-ImageNet (Stanford CS231n, 2015): 200 classes at 64x64.

The test split is the owners' validation part: their test part has no labels and is seldom used.
"""

from __future__ import annotations

from pathlib import Path

from gepc.datasets.collection import NamedFiles, first_of
from gepc.datasets.registry import register


@register(
    "tinyimagenet",
    layout="tiny-imagenet-200/ (unpack tiny-imagenet-200.zip) with train/<class>/images/*.JPEG and val/images/*.JPEG",
    home="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
)
def tiny_imagenet(root: Path, split: str) -> NamedFiles:
    """100,000 training images, 10,000 test images."""
    part, pattern = ("train", "train/*/images/*.JPEG") if split == "train" else ("val", "val/images/*.JPEG")
    folder = first_of(root, f"tiny-imagenet-200/{part}", part).parent
    return NamedFiles(folder, sorted(path.relative_to(folder).as_posix() for path in folder.glob(pattern)))

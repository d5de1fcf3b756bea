"""CelebA, aligned and cropped (Liu et al., 2015): a folder of 178x218 JPEGs and the list of who is in which split.

An image is given as the 140x140 window in its middle, as diffusion models on CelebA are trained; resizing to 32x32 is
left to `Preprocessing`. The owners' validation images (partition 1) are in neither split.
"""

from __future__ import annotations

from pathlib import Path

from gepc.core.errors import InputError
from gepc.datasets.collection import NamedFiles, first_of
from gepc.datasets.registry import register
from gepc.images.sources import Pixels

CROP = 140
PARTITION = {"0": "train", "1": "validation", "2": "test"}


@register(
    "celeba",
    layout="img_align_celeba/ with the .jpg files (unpack img_align_celeba.zip) and beside it list_eval_partition.txt "
    "(lines such as `000001.jpg 0`) or list_eval_partition.csv",
    home="https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
)
def celeba(root: Path, split: str) -> NamedFiles:
    """162,770 training and 19,962 test images."""
    folder = first_of(root, "img_align_celeba/img_align_celeba", "img_align_celeba", "Img/img_align_celeba")
    names = ("list_eval_partition.txt", "list_eval_partition.csv", "Eval/list_eval_partition.txt")
    return NamedFiles(folder, _members(first_of(root, *names), split), finish=centre_crop)


def _members(path: Path, split: str) -> list[str]:
    """The file names that the partition file gives to a split, in its order."""
    members = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a text file that can be read: {error}") from error
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words or words == ["image_id", "partition"]:
            continue
        if len(words) != 2 or words[1] not in PARTITION:
            raise InputError(f"line {number} of {path} is not a file name and 0, 1 or 2: {line[:80]!r}")
        if PARTITION[words[1]] == split:
            members.append(words[0])
    if not members:
        raise InputError(f"{path} has no image in the {split} split")
    return members


def centre_crop(pixels: Pixels) -> Pixels:
    """The 140x140 window in the middle."""
    height, width = pixels.shape[:2]
    if min(height, width) < CROP:
        raise InputError(f"the image is {height}x{width}, too small for the centre crop of {CROP}x{CROP}")
    top, left = (height - CROP) // 2, (width - CROP) // 2
    return pixels[top : top + CROP, left : left + CROP]

"""Data sets as image files or array files: folders, arrays, CelebA, CIFAR and SVHN."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gepc.core.errors import InputError, raising
from gepc.core.files import StrPath
from gepc.images.formats import Pixels, read_file, read_npz
from gepc.images.sources import FileImages
from gepc.lab.datasets.registry import SPLITS, NamedFiles, PixelImages, first_of, register

_CROP = 140
_CELEBA_PARTITION = {"0": "train", "1": "validation", "2": "test"}


@register("folder", layout="train/ and test/ with image files, or image files that are all test images")
def folder(root: Path, split: str) -> NamedFiles:
    """The images below `train/` or `test/`, in sorted order; without these folders all images are the test split."""
    divided = any((root / name).is_dir() for name in SPLITS)
    if not divided and split == "train":  # no image is used both to calibrate and to evaluate
        raise InputError(f"{root} has no train/, so all its images are test images")
    place = root / split if divided else root
    if not place.is_dir():
        raise InputError(f"{place} is not a folder")
    return NamedFiles(root, [path.relative_to(root).as_posix() for path in FileImages.below(place).paths])


@register("npz", layout="an .npz file with the arrays train_x and test_x, or one of them")
def npz(root: Path, split: str) -> PixelImages:
    """The array `train_x` or `test_x` of the file, (N,H,W,C) or (N,C,H,W); the other one is not read."""
    if root.is_dir():
        raise InputError(f"{root} is a folder; name the file in it, as in npz:FILE.npz")
    pixels = read_npz(root, f"{split}_x")
    with raising(InputError, f"{split}_x in {root}: {{error}}", InputError):
        return PixelImages(pixels, split)


@register(
    "celeba",
    layout="img_align_celeba/ with the .jpg files (unpack img_align_celeba.zip) and beside it list_eval_partition.txt "
    "(lines such as `000001.jpg 0`) or list_eval_partition.csv",
    home="https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
)
def celeba(root: Path, split: str) -> NamedFiles:
    """CelebA, aligned (Liu et al., 2015): 162,770 training and 19,962 test images, without the validation images.

    An image is the 140x140 window in the middle of the 178x218 JPEG, as in the training of diffusion models on CelebA.
    """
    images = first_of(root, "img_align_celeba/img_align_celeba", "img_align_celeba", "Img/img_align_celeba")
    lists = ("list_eval_partition.txt", "list_eval_partition.csv", "Eval/list_eval_partition.txt")
    path, members = first_of(root, *lists), []
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        words = line.replace(",", " ").split()
        if not words or words == ["image_id", "partition"]:
            continue
        if len(words) != 2 or words[1] not in _CELEBA_PARTITION:
            raise InputError(f"line {number} of {path} is not a file name and 0, 1 or 2: {line[:80]!r}")
        if _CELEBA_PARTITION[words[1]] == split:
            members.append(words[0])
    if not members:
        raise InputError(f"{path} has no image in the {split} split")
    return NamedFiles(images, members, _read_centre)


def _read_centre(path: StrPath) -> Pixels:
    pixels = read_file(path)
    height, width = pixels.shape[:2]
    if min(height, width) < _CROP:
        raise InputError(f"{path}: the image is {height}x{width}, too small for the centre crop of {_CROP}x{_CROP}")
    top, left = (height - _CROP) // 2, (width - _CROP) // 2
    return pixels[top : top + _CROP, left : left + _CROP]


def _read_text(path: Path) -> str:
    with raising(InputError, f"{path} is not a text file that can be read: {{error}}", OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")


@register(
    "svhn",
    layout="train_32x32.mat and test_32x32.mat (format 2, cropped digits)",
    home="http://ufldl.stanford.edu/housenumbers/",
)
def svhn(root: Path, split: str) -> PixelImages:
    """SVHN, cropped digits (Netzer et al., 2011): 73,257 training and 26,032 test images of 32x32."""
    from scipy.io import loadmat

    path = first_of(root, f"{split}_32x32.mat")
    # scipy raises many kinds of errors
    with raising(InputError, f"{path} is not a complete MATLAB 5 file: {{error}}", Exception):
        pixels = loadmat(path, variable_names=["X"]).get("X")
    if pixels is None:
        raise InputError(f"{path} contains no array X")
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[2] != 3:
        raise InputError(f"X in {path} is {pixels.dtype} of shape {pixels.shape} instead of bytes (32, 32, 3, N)")
    return PixelImages(pixels.transpose(3, 0, 1, 2), split)


_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"


@register(
    "cifar10",
    layout="cifar-10-batches-bin/ (unpack cifar-10-binary.tar.gz) with data_batch_1.bin to data_batch_5.bin and "
    "test_batch.bin",
    home=_CIFAR_HOME,
)
def cifar10(root: Path, split: str) -> PixelImages:
    """CIFAR-10 (Krizhevsky, 2009): 50,000 training images in five batches, 10,000 test images, 32x32."""
    train = [f"data_batch_{number}.bin" for number in range(1, 6)]
    return _read_cifar(root, split, "cifar-10-batches-bin", train if split == "train" else ["test_batch.bin"], labels=1)


@register(
    "cifar100",
    layout="cifar-100-binary/ (unpack cifar-100-binary.tar.gz) with train.bin and test.bin",
    home=_CIFAR_HOME,
)
def cifar100(root: Path, split: str) -> PixelImages:
    """CIFAR-100 (Krizhevsky, 2009): 50,000 training images, 10,000 test images, 32x32."""
    return _read_cifar(root, split, "cifar-100-binary", [f"{split}.bin"], labels=2)


def _read_cifar(root: Path, split: str, folder: str, names: Sequence[str], labels: int) -> PixelImages:
    """Files of records: `labels` bytes, then 1024 red, 1024 green and 1024 blue bytes."""
    place, record = first_of(root, folder), labels + 3 * 32 * 32
    batches = []
    for name in names:
        if not (place / name).is_file():
            raise InputError(f"{place} lacks {name}")
        content = np.fromfile(place / name, np.uint8)
        if len(content) % record:
            raise InputError(f"{name} in {place} is cut short: {len(content)} bytes are not whole records of {record}")
        batches.append(content.reshape(-1, record)[:, labels:].reshape(-1, 3, 32, 32))
    return PixelImages(np.concatenate(batches), split)

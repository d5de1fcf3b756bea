"""The registry of data sets: the layout that each expects on disk, the choice of a subset, and the readers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from gepc.core.errors import InputError, OptionError, check_choice, raising
from gepc.core.files import StrPath
from gepc.images import noise
from gepc.images.formats import Pixels, read_file, read_npz
from gepc.images.sources import ArrayImages, FileImages, Images, ReadFile, Record, read_record

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
    return sorted(_DATASETS)


def find_dataset(name: str) -> DatasetSpec:
    """The entry of a data set in the registry: its layout, its home, its reader."""
    family = name.partition(":")[0]
    check_choice("data set", family, _DATASETS)
    return _DATASETS[family]


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
            raise InputError(
                f"{folder} has none of the images, such as {names[0]}" if names else f"no image in {folder}"
            )

    def __getitem__(self, index: int) -> Record:
        return read_record(self.items[index], self._folder / self.items[index], self._read)


def first_of(root: Path, *names: str) -> Path:
    """The first of `names` (paths below `root`) that exists; `root` may also be the folder or file it begins with."""
    for name in names:
        for base in (root, root.parent):
            if (base == root or Path(name).parts[0] == root.name) and (base / name).exists():
                return base / name
    raise InputError(f"{root} contains {'no' if len(names) == 1 else 'none of'} {', '.join(names)}")


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
    with raising(InputError, f"{path} is not a text file that can be read: {{error}}", OSError, UnicodeDecodeError):
        lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
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

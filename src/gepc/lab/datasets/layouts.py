"""Data sets as image files or array files: any folder or array, CelebA, DTD, Tiny-ImageNet, MNIST and SVHN."""

import gzip
import math
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, first_line, raising
from gepc.images.formats import DAMAGED_ARRAY, Pixels, read_npz
from gepc.images.sources import IMAGE_NAMES, FileImages, Images, ItemImages
from gepc.lab.datasets.registry import SPLITS, NamedFiles, PixelImages, first_of, register

_CROP = 140
_CELEBA_PARTITION = {"0": "train", "1": "validation", "2": "test"}
_DTD_LISTS = {"train": ("train1.txt", "val1.txt"), "test": ("test1.txt",)}


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
        return PixelImages([pixels], split)


@register("npy", layout="train_x.npy and test_x.npy in a folder, or one .npy file whose images are all test images")
def npy(root: Path, split: str) -> PixelImages:
    """The array of the split, (N,H,W,C) or (N,C,H,W), memory-mapped."""
    if root.is_file() and split == "train":
        raise InputError(f"{root} is one array, so all its images are test images")
    path = root if root.is_file() else first_of(root, f"{split}_x.npy")
    try:
        return PixelImages([np.lib.format.open_memmap(path, mode="r")], split)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except DAMAGED_ARRAY as error:
        raise InputError(f"{path} is not a complete, plain .npy array: {error}") from error


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
    return NamedFiles(images, members, finish=_centre_crop)


def _centre_crop(pixels: Pixels) -> Pixels:
    height, width = pixels.shape[:2]
    if min(height, width) < _CROP:
        raise InputError(f"the image is {height}x{width}, too small for the centre crop of {_CROP}x{_CROP}")
    top, left = (height - _CROP) // 2, (width - _CROP) // 2
    return pixels[top : top + _CROP, left : left + _CROP]


@register(
    "dtd",
    layout="dtd/ (unpack dtd-r1.0.1.tar.gz) with images/<class>/*.jpg and labels/train1.txt, val1.txt, test1.txt",
    home="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
)
def dtd(root: Path, split: str) -> NamedFiles:
    """Describable Textures (Cimpoi et al., 2014), first partition: 3,760 training or validation, 1,880 test images."""
    home = first_of(root, "dtd/images", "images").parent
    lists = [_read_text(first_of(home, f"labels/{name}")) for name in _DTD_LISTS[split]]
    return NamedFiles(home, [f"images/{line}" for text in lists for line in text.split()])


def _read_text(path: Path) -> str:
    with raising(InputError, f"{path} is not a text file that can be read: {{error}}", OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")


@register(
    "tinyimagenet",
    layout="tiny-imagenet-200/ (unpack tiny-imagenet-200.zip) with train/<class>/images/*.JPEG and val/images/*.JPEG",
    home="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
)
def tiny_imagenet(root: Path, split: str) -> NamedFiles:
    """Tiny-ImageNet (Stanford CS231n, 2015): 100,000 training and 10,000 official validation images of 64x64."""
    part, pattern = ("train", "train/*/images/*.JPEG") if split == "train" else ("val", "val/images/*.JPEG")
    home = first_of(root, f"tiny-imagenet-200/{part}", part).parent
    return NamedFiles(home, sorted(path.relative_to(home).as_posix() for path in home.glob(pattern)))


_IDX_NAMES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}
_IDX_LAYOUT = "{}/ with train-images-idx3-ubyte and t10k-images-idx3-ubyte, unpacked or as .gz"


@register("mnist", layout=_IDX_LAYOUT.format("mnist"), home="https://yann.lecun.com/exdb/mnist/")
def mnist(root: Path, split: str) -> PixelImages:
    """MNIST (LeCun et al., 1998): 60,000 training and 10,000 test images of 28x28, grey."""
    return _read_idx(root, split, "mnist", "MNIST/raw")


@register(
    "fashion-mnist",
    layout=_IDX_LAYOUT.format("fashion-mnist"),
    home="https://github.com/zalandoresearch/fashion-mnist",
)
def fashion_mnist(root: Path, split: str) -> PixelImages:
    """Fashion-MNIST (Xiao et al., 2017): 60,000 training and 10,000 test images of 28x28, grey."""
    return _read_idx(root, split, "fashion-mnist", "FashionMNIST/raw")


def _read_idx(root: Path, split: str, *folders: str) -> PixelImages:
    """A file of the IDX format: the bytes 0, 0, 8, 3, three counts as big-endian integers, and the pixels."""
    name = _IDX_NAMES[split]
    path = first_of(root, *(f"{folder}/{name}{end}" for folder in (*folders, ".") for end in ("", ".gz")))
    reason = f"{path} is not a complete IDX file of images: {{error}}"
    with raising(InputError, reason, OSError, EOFError, ValueError, struct.error, zlib.error):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as handle:
            magic, *shape = struct.unpack(">4i", handle.read(16))
            pixels = np.frombuffer(handle.read(), np.uint8)
        if magic != 0x803 or math.prod(shape) != len(pixels):
            raise ValueError(f"its header announces {shape} pixels, and it holds {len(pixels)}")
        return PixelImages([pixels.reshape(*shape, 1)], split)


@register(
    "svhn",
    layout="train_32x32.mat and test_32x32.mat (format 2, cropped digits)",
    home="http://ufldl.stanford.edu/housenumbers/",
)
def svhn(root: Path, split: str) -> PixelImages:
    """SVHN, cropped digits (Netzer et al., 2011): 73,257 training and 26,032 test images of 32x32."""
    path = first_of(root, f"{split}_32x32.mat")
    pixels = read_matlab_bytes(path, "X")
    if pixels.ndim != 4 or pixels.shape[2] != 3:
        raise InputError(f"X in {path} has shape {pixels.shape} instead of (32, 32, 3, N)")
    return PixelImages([pixels.transpose(3, 0, 1, 2)], split)


_Bytes = npt.NDArray[np.uint8]
_HEADER = 128
_ORDERS = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}
_UINT8, _MATRIX, _COMPRESSED = 2, 14, 15
MAX_UNPACKED = 4 << 30  # four times the largest split of SVHN


def read_matlab_bytes(path: Path, name: str) -> _Bytes:
    """The array of bytes `name` in a MATLAB 5 file, its axes in MATLAB's order; memory-mapped if not compressed.

    scipy's reader crashes on some damaged files. A file is a header of 128 bytes and a sequence of elements, each a
    type, a size and its content. A variable is an element that holds others (flags, shape, name, numbers), and may be
    compressed as a whole.
    """
    reason = f"{path} is not a complete MATLAB 5 file: {{error}}"
    with raising(InputError, reason, OSError, ValueError, struct.error, zlib.error):
        content = np.memmap(path, np.uint8, mode="r")
        order = _ORDERS.get(content[_HEADER - 4 : _HEADER].tobytes())
        if order is None:
            raise ValueError("it has another header")
        for fields in _variables(content[_HEADER:], order):
            if len(fields) > 3 and fields[2][1].tobytes() == name.encode():
                (_, shape), _, (kind, numbers) = fields[1:4]
                if kind != _UINT8:
                    raise ValueError(f"{name} is not an array of bytes")
                return numbers.reshape(shape.view(f"{order}i4"), order="F")
    raise InputError(f"{path} holds no array {name}")


def _variables(content: _Bytes, order: str) -> Iterator[list[tuple[int, _Bytes]]]:
    for kind, element in _elements(content, order):
        if kind == _COMPRESSED:
            unpacked = np.frombuffer(zlib.decompressobj().decompress(element.data, MAX_UNPACKED), np.uint8)
            kind, element = next(_elements(unpacked, order), (0, element))
        if kind == _MATRIX:
            yield list(_elements(element, order))


def _elements(content: _Bytes, order: str) -> Iterator[tuple[int, _Bytes]]:
    """(type, content) of each element, as views."""
    at = 0
    while at < len(content):
        kind, size = struct.unpack_from(f"{order}II", content.data, at)
        start, end = at + 8, at + 8 + size
        if kind >> 16:  # a small element: size and type share a word and the content is the next word
            kind, size = kind & 0xFFFF, kind >> 16
            start, end = at + 4, at + 4 + size
        if end > len(content):
            raise ValueError("it is cut short")
        yield kind, content[start:end]
        at = end if kind == _COMPRESSED else end + -end % 8


_SWITCHES = (
    ("datasets.config", "HF_DATASETS_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
)


@register(
    "hf",
    layout="a folder of that name, written by save_to_disk or in a form that load_dataset reads; or the data set in "
    "the cache of the datasets library, where its own load_dataset puts it",
    home="https://huggingface.co/datasets",
    by_name=True,
)
def hugging_face(root: Path, split: str, name: str) -> Images:
    """The split of that name; images are decoded when asked for."""
    with raising(InputError, "hf needs the package `datasets`: pip install datasets", ImportError):
        library = import_module("datasets")
    path, _, configuration = name.partition(":")
    try:
        with _offline(library):
            table = _load(library, root / path, path, configuration or None)
    except InputError:
        raise
    except Exception as error:  # whatever the reader of that data set raises
        raise InputError(f"{path} is neither below {root} nor in the cache: {first_line(error)}") from error
    if split not in table:
        raise InputError(f"{path} has no {split} split but {', '.join(map(str, table)) or 'none'}")
    rows = table[split]
    if not set(IMAGE_NAMES) & set(rows.column_names):
        raise InputError(f"no column is called {', '.join(IMAGE_NAMES)}; there are {', '.join(rows.column_names)}")
    return ItemImages(rows, f"{split}/")


def _load(library: Any, folder: Path, name: str, configuration: str | None) -> Any:
    """The mapping from splits to tables; a table that was saved alone, without the name of a split, is a test set."""
    saved = [name for name in ("dataset_dict.json", "state.json") if (folder / name).is_file()]
    if saved:
        if configuration is not None:
            raise InputError(f"a data set written by save_to_disk has no configurations; leave out {configuration!r}")
        found = library.load_from_disk(str(folder))
        return found if saved[0] == "dataset_dict.json" else {str(found.split or "test"): found}
    return library.load_dataset(str(folder) if folder.is_dir() else name, configuration)


@contextmanager
def _offline(library: Any) -> Iterator[None]:
    """Turn the offline switches of the libraries on, and the progress bars off."""
    modules = [(sys.modules.get(module), switch) for module, switch in _SWITCHES]
    before = [(module, switch, getattr(module, switch)) for module, switch in modules if hasattr(module, switch)]
    hidden = library.are_progress_bars_disabled()
    library.disable_progress_bars()
    try:
        for module, switch, _ in before:
            setattr(module, switch, True)
        yield
    finally:
        for module, switch, value in before:
            setattr(module, switch, value)
        if not hidden:
            library.enable_progress_bars()

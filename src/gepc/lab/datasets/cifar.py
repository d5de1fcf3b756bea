"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), in the Python or the binary version, unpacked or in the `.tar.gz`.

Both versions hold the same images in the same order, each image as 1024 red, 1024 green and 1024 blue bytes.
"""

import math
import pickletools
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, raising
from gepc.lab.datasets.registry import PixelImages, first_of, register

Bytes = npt.NDArray[np.uint8]
_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
_PIXELS = 3 * 32 * 32
_ALLOWED_NAMES = (
    *("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"),
    "_codecs encode",  # how Python 3 writes bytes for Python 2
)


class _Version(NamedTuple):
    """One form of distribution: its folder and archive, the suffix of a batch file, and how a batch is decoded."""

    folder: str
    archive: str
    suffix: str
    decode: Callable[[Bytes], Bytes]


def decode_pickle(content: Bytes) -> Bytes:
    """The (N, 3072) array of bytes in a batch of the Python version, without unpickling it.

    A pickle is a program that names functions and has them called. Here its instructions are read and not run: those
    of an array of bytes are its shape, the type `u1`, whether it is stored by columns, and its content.
    """
    numbers: list[int] = []
    shape: tuple[int, ...] | None = None
    order: Literal["C", "F"] = "C"
    pixels: Bytes | None = None
    reason = "it is damaged or cut short: {error}"
    with raising(InputError, reason, ValueError, LookupError, EOFError, passing=InputError):
        for operation, argument, _ in pickletools.genops(content.tobytes()):
            if operation.name == "GLOBAL" and argument not in _ALLOWED_NAMES:
                name = str(argument).replace(" ", ".")
                raise InputError(f"it asks to run {name}, which no data set needs: do not trust this file")
            if isinstance(argument, int) and operation.name in ("BININT", "BININT1", "BININT2"):
                numbers.append(argument)
            elif operation.name in ("NEWTRUE", "NEWFALSE"):
                order = "F" if operation.name == "NEWTRUE" else "C"
            elif argument in ("u1", b"u1"):
                shape = tuple(numbers[-2:])
            elif shape is not None and isinstance(argument, (str, bytes)) and len(argument) == math.prod(shape):
                # Python 2 wrote bytes as text, and Python 3 does so for Python 2
                written = argument.encode("latin1") if isinstance(argument, str) else argument
                pixels = np.frombuffer(written, np.uint8).reshape(shape, order=order)
    if pixels is None or pixels.shape[1:] != (_PIXELS,):
        raise InputError(f"it does not hold an array of bytes of shape (N, {_PIXELS})")
    return pixels


def _decode_records(labels: int) -> Callable[[Bytes], Bytes]:
    """The binary version: records of `labels` bytes and 3072 pixels, viewed in place."""

    def decode(content: Bytes) -> Bytes:
        if not len(content) or len(content) % (labels + _PIXELS):
            raise InputError(f"its {len(content)} bytes are not whole records of {labels + _PIXELS}: it is cut short")
        return content.reshape(-1, labels + _PIXELS)[:, labels:]

    return decode


def _read(root: Path, split: str, versions: Sequence[_Version], batches: Sequence[str]) -> PixelImages:
    places = [version.folder for version in versions] + [version.archive for version in versions]
    place = first_of(root, *places)
    version = versions[places.index(place.name) % len(versions)]
    files = [batch + version.suffix for batch in batches]
    contents = _map_files(place, files) if place.is_dir() else _unpack(place, version.folder, files)
    decoded = []
    for name, content in zip(files, contents, strict=True):
        try:
            pixels = version.decode(content)
        except InputError as error:
            where = place / name if place.is_dir() else f"{name} in {place}"
            raise InputError(f"{where} cannot be read: {error}") from error
        decoded.append(pixels.reshape(len(pixels), 3, 32, 32))
    return PixelImages(decoded, split)


def _map_files(folder: Path, names: Sequence[str]) -> list[Bytes]:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder} lacks {', '.join(missing)}")
    for name in names:
        if (folder / name).stat().st_size == 0:
            raise InputError(f"{folder / name} is empty")
    return [np.memmap(folder / name, np.uint8, mode="r") for name in names]


def _unpack(archive: Path, folder: str, names: Sequence[str]) -> list[Bytes]:
    """The named files of the archive, read into memory; nothing is written to disk."""
    found: dict[str, Bytes] = {}
    reason = f"{archive} is damaged or cut short: {{error}}"
    failing = raising(InputError, reason, OSError, EOFError, tarfile.TarError, zlib.error)
    with failing, tarfile.open(archive, "r:*") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            stream = tar.extractfile(member) if path.parent.name == folder and path.name in names else None
            if stream is not None:
                found[path.name] = np.frombuffer(stream.read(), np.uint8)
            if len(found) == len(names):
                break
    missing = [f"{folder}/{name}" for name in names if name not in found]
    if missing:
        raise InputError(f"{archive} lacks {', '.join(missing)}")
    return [found[name] for name in names]


_CIFAR10 = (
    _Version("cifar-10-batches-py", "cifar-10-python.tar.gz", "", decode_pickle),
    _Version("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", _decode_records(labels=1)),
)
_CIFAR100 = (
    _Version("cifar-100-python", "cifar-100-python.tar.gz", "", decode_pickle),
    _Version("cifar-100-binary", "cifar-100-binary.tar.gz", ".bin", _decode_records(labels=2)),
)


@register(
    "cifar10",
    layout="cifar-10-batches-py/ with data_batch_1 to data_batch_5 and test_batch, or cifar-10-batches-bin/ with the "
    "same names and .bin, or cifar-10-python.tar.gz or cifar-10-binary.tar.gz",
    home=_HOME,
)
def cifar10(root: Path, split: str) -> PixelImages:
    """50,000 training images in five batches, 10,000 test images, 32x32."""
    train = [f"data_batch_{number}" for number in range(1, 6)]
    return _read(root, split, _CIFAR10, train if split == "train" else ["test_batch"])


@register(
    "cifar100",
    layout="cifar-100-python/ with train and test, or cifar-100-binary/ with train.bin and test.bin, or "
    "cifar-100-python.tar.gz or cifar-100-binary.tar.gz",
    home=_HOME,
)
def cifar100(root: Path, split: str) -> PixelImages:
    """50,000 training images, 10,000 test images, 32x32."""
    return _read(root, split, _CIFAR100, [split])

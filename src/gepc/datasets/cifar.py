"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), in the Python or the binary version, unpacked or in the `.tar.gz`.

Both versions hold the same images in the same order, each image as 1024 red, 1024 green and 1024 blue bytes.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError
from gepc.datasets.collection import PixelImages, first_of
from gepc.datasets.plain_pickle import byte_array, read_plain_pickle
from gepc.datasets.registry import register

Bytes = npt.NDArray[np.uint8]
HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class _Version:
    """One way of distribution: a folder, the archive it comes in, how the file of a batch ends and is read."""

    folder: str
    archive: str
    suffix: str
    decode: Callable[[Bytes], Bytes]


def _decode_pickle(content: Bytes) -> Bytes:
    """The (N, 3072) array `data` of a batch of the Python version."""
    batch = read_plain_pickle(content.tobytes())
    if "data" not in batch:
        raise InputError(f"it holds no 'data' but {', '.join(sorted(batch)) or 'nothing'}")
    pixels = byte_array(batch["data"])
    if pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        raise InputError(f"its data has shape {pixels.shape} instead of (N, {PIXELS})")
    return pixels


def _decode_records(labels: int) -> Callable[[Bytes], Bytes]:
    """The binary version: records of `labels` bytes and 3072 pixels, viewed in place."""

    def decode(content: Bytes) -> Bytes:
        if not len(content) or len(content) % (labels + PIXELS):
            raise InputError(f"its {len(content)} bytes are not whole records of {labels + PIXELS}: it is cut short")
        return content.reshape(-1, labels + PIXELS)[:, labels:]

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
    empty = [name for name in names if (folder / name).stat().st_size == 0]
    if empty:
        raise InputError(f"{folder / empty[0]} is empty")
    return [np.memmap(folder / name, np.uint8, mode="r") for name in names]


def _unpack(archive: Path, folder: str, names: Sequence[str]) -> list[Bytes]:
    """The named files of the archive, read into memory; nothing is written to disk."""
    found: dict[str, Bytes] = {}
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                stream = tar.extractfile(member) if path.parent.name == folder and path.name in names else None
                if stream is not None:
                    found[path.name] = np.frombuffer(stream.read(), np.uint8)
                if len(found) == len(names):
                    break
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise InputError(f"{archive} is damaged or cut short: {error}") from error
    missing = [f"{folder}/{name}" for name in names if name not in found]
    if missing:
        raise InputError(f"{archive} lacks {', '.join(missing)}")
    return [found[name] for name in names]


CIFAR10 = (
    _Version("cifar-10-batches-py", "cifar-10-python.tar.gz", "", _decode_pickle),
    _Version("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", _decode_records(labels=1)),
)
CIFAR100 = (
    _Version("cifar-100-python", "cifar-100-python.tar.gz", "", _decode_pickle),
    _Version("cifar-100-binary", "cifar-100-binary.tar.gz", ".bin", _decode_records(labels=2)),
)


@register(
    "cifar10",
    layout="cifar-10-batches-py/ with data_batch_1 to data_batch_5 and test_batch, or cifar-10-batches-bin/ with the "
    "same names and .bin, or cifar-10-python.tar.gz or cifar-10-binary.tar.gz",
    home=HOME,
)
def cifar10(root: Path, split: str) -> PixelImages:
    """50,000 training images in five batches, 10,000 test images, 32x32."""
    train = [f"data_batch_{number}" for number in range(1, 6)]
    return _read(root, split, CIFAR10, train if split == "train" else ["test_batch"])


@register(
    "cifar100",
    layout="cifar-100-python/ with train and test, or cifar-100-binary/ with train.bin and test.bin, or "
    "cifar-100-python.tar.gz or cifar-100-binary.tar.gz",
    home=HOME,
)
def cifar100(root: Path, split: str) -> PixelImages:
    """50,000 training images, 10,000 test images, 32x32."""
    return _read(root, split, CIFAR100, [split])

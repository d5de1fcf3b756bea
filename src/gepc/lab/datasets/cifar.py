"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), in the Python or the binary version, unpacked or in the `.tar.gz`.

Both versions hold the same images in the same order, each image as 1024 red, 1024 green and 1024 blue bytes.
"""

import io
import math
import pickle
import pickletools
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, raising
from gepc.lab.datasets.registry import PixelImages, first_of, register

Bytes = npt.NDArray[np.uint8]
_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
_PIXELS = 3 * 32 * 32


class _Version(NamedTuple):
    """One form of distribution: its folder and archive, the suffix of a batch file, and how a batch is decoded."""

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
    if pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise InputError(f"its data has shape {pixels.shape} instead of (N, {_PIXELS})")
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
    _Version("cifar-10-batches-py", "cifar-10-python.tar.gz", "", _decode_pickle),
    _Version("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", _decode_records(labels=1)),
)
_CIFAR100 = (
    _Version("cifar-100-python", "cifar-100-python.tar.gz", "", _decode_pickle),
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


# --- pickled batches --------------------------------------------------------------------------------------------------

_ALLOWED_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 3 writes bytes for Python 2
}
_ALLOWED_OPERATIONS = {  # what protocols 2 to 4 need for such a dictionary
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINUNICODE", "SHORT_BINUNICODE"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
}
# what a damaged pickle makes the unpickler raise
_DAMAGED_PICKLE = (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, OverflowError)


class _Call:
    """A call that the pickle asks for: recorded, not made."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Call]:
        if (module, name) not in _ALLOWED_NAMES:
            raise InputError(f"it asks to run {module}.{name}, which no data set needs: do not trust this file")
        return type(name, (_Call,), {})  # a new class each time: a pickle may modify it


def _check_operations(content: bytes) -> None:
    """Refuse operations that are not needed, and numbers that would make the unpickler allocate at will."""
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if operation.name not in _ALLOWED_OPERATIONS:
            raise InputError(f"it uses the operation {operation.name}, which no data set needs, or is damaged")
        if operation.name == "LONG_BINPUT" and int(argument or 0) > count:
            raise ValueError("it refers to more objects than it holds")


def read_plain_pickle(content: bytes) -> dict[str, Any]:
    """Read a pickled dictionary of numbers, text and byte arrays without running anything that it asks for.

    A pickle is a program: it names functions and has them called. Here the few names that an array needs are replaced
    by a class that records its arguments, and any other name or operation is an `InputError`. The keys of the result
    are text; its arrays are read with `byte_array`.
    """
    with raising(InputError, "it is damaged or cut short: {error}", *_DAMAGED_PICKLE, passing=InputError):
        _check_operations(content)
        found = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(found, dict):
            raise InputError(f"it holds a {type(found).__name__}, not a dictionary")
        return {str(_bytes(key), "latin1") if not isinstance(key, str) else key: value for key, value in found.items()}


def _bytes(value: Any) -> Any:
    """`value`, or the bytes that it encodes where Python 3 wrote them for Python 2."""
    if isinstance(value, _Call) and type(value).__name__ == "encode":
        return value.arguments[0].encode("latin1")
    return value


def byte_array(value: Any) -> npt.NDArray[np.uint8]:
    """The pixels of a pickled array of unsigned bytes; any other type is an `InputError`."""
    try:
        shape, dtype, by_columns, content = value.state[-4:]
        content = _bytes(content)
        plain = dtype.arguments[0] in ("u1", b"u1") and isinstance(content, bytes)
        if plain and all(isinstance(n, int) and n >= 0 for n in shape) and math.prod(shape) == len(content):
            return np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")
    except (AttributeError, TypeError, ValueError, LookupError):
        pass
    raise InputError("it does not hold an array of bytes where the pixels should be")

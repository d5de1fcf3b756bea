"""Where images come from: arrays, files, folders, data sets; one record each, read when it is asked for."""

from __future__ import annotations

import errno
import heapq
import os
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError

Pixels = npt.NDArray[Any]
Image = npt.NDArray[np.float32]

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm", ".npy")
# what numpy raises for an array file that is cut short, altered, or holds Python objects
DAMAGED_ARRAY = (
    *(OSError, ValueError, TypeError, EOFError, NotImplementedError, OverflowError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, TokenError),
)


@dataclass(frozen=True)
class Record:
    """One image of a collection: its name and pixels (H, W) or (H, W, C), or the reason why there are none."""

    name: str
    pixels: Pixels | None = None
    error: str | None = None


class Images(ABC):
    """A collection of images that is read one at a time."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Record: ...


def open_images(source: Any) -> Images:
    """Accept what users have: a 4-D array or tensor, a folder, a file, a list of files or arrays, a torch Dataset.

    A folder may be an address that fsspec knows (`s3://bucket/photos`, `gs://...`); see `gepc.runs.remote`.

    An `.npz` archive or a 4-D `.npy` file is an array of images; `data.npz:test_x` names the array.
    """
    if isinstance(source, Images):
        return source
    if isinstance(source, (str, os.PathLike)):
        archive, _, key = str(source).partition(".npz")
        if key.startswith(":") or str(source).endswith(".npz"):
            return ArrayImages(read_npz(Path(f"{archive}.npz"), key.removeprefix(":") or None))
        if _is_stack(Path(source)):
            return ArrayImages(np.load(source, mmap_mode="r", allow_pickle=False))
        if "://" in str(source):
            from gepc.runs.remote import UrlImages

            return UrlImages.at(str(source))
        return FileImages.below(Path(source))
    if hasattr(source, "__array__") or hasattr(source, "detach"):
        return ArrayImages(_as_numpy(source))
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, (str, os.PathLike)) for item in source):
        return FileImages([Path(item) for item in source])
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return ItemImages(source)
    raise InputError(
        f"cannot read images from {type(source).__name__}; "
        "give a folder, a list of files, an (N,C,H,W) or (N,H,W,C) array or tensor, or a Dataset"
    )


def read_npz(path: Path, key: str | None = None, usual: tuple[str, ...] = ("x", "images", "train_x")) -> Pixels:
    """One array of an `.npz` archive: the one named, or the only one, or the first that has a usual name."""
    try:
        with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as archive:
            names = list(archive.files)
            if key is None:
                key = names[0] if len(names) == 1 else next((name for name in usual if name in names), None)
            if key in names:
                return np.asarray(archive[key])
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except DAMAGED_ARRAY as error:
        raise InputError(f"{path} is not a whole, plain .npz archive") from error
    wanted = f"no array {key!r}" if key else "several arrays"
    raise InputError(f"{path} holds {wanted}; say which with {path.name}:NAME ({', '.join(names)})")


def _is_stack(path: Path) -> bool:
    """Whether this is a `.npy` file of many images."""
    if path.suffix.lower() != ".npy":
        return False
    try:
        return bool(np.load(path, mmap_mode="r", allow_pickle=False).ndim == 4)
    except (OSError, ValueError, EOFError):
        return False


def iterate(images: Images) -> Iterator[Record]:
    """The records in order."""
    for index in range(len(images)):
        yield images[index]


def _as_numpy(array: Any) -> Pixels:
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        if str(array.dtype) in ("torch.bfloat16", "torch.float16"):
            array = array.float()
    return np.asarray(array)


def check_numbers(pixels: Pixels, name: str) -> None:
    """Refuse text, dates and records, which numpy would turn into numbers or into an error of its own."""
    if pixels.dtype.kind not in "uifbc":
        raise InputError(f"{name} holds {pixels.dtype}, not numbers; save the pixels as integers or floats")


def _channels_last(shape: tuple[int, ...], what: str) -> bool:
    """Whether the last of the axes (first, ..., last) holds the channels; ambiguous shapes are refused."""
    first, last = shape[0] in (1, 3), shape[-1] in (1, 3, 4)
    if first == last:
        reason = "both the first and the last axis could be channels" if first else "no axis of 1 or 3 channels"
        raise InputError(f"{what} has shape {shape}: {reason}; give (C,H,W) or (H,W,C) with 1 or 3 channels")
    return last


class ArrayImages(Images):
    """An (N,C,H,W), (N,H,W,C) or grey (N,H,W) array."""

    def __init__(self, array: Pixels) -> None:
        if array.ndim == 3 and array.shape[0] not in (1, 3) and array.shape[2] not in (1, 3, 4):
            array = array[..., None]
        if array.ndim != 4:
            raise InputError(
                f"an array of images must be (N,C,H,W) or (N,H,W,C), got shape {array.shape}; "
                "for one image add an axis in front (x[None])"
            )
        if len(array) and not _channels_last(array.shape[1:], "each image of the array"):
            array = array.transpose(0, 2, 3, 1)
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int) -> Record:
        return Record(str(index), self._array[index])


class ItemImages(Images):
    """A list of arrays, a torch Dataset, anything with `len` and indexing; a label beside the image is dropped."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Record:
        item = self._items[index]
        if isinstance(item, (tuple, list)) and item:
            item = item[0]
        if isinstance(item, dict):
            item = item.get("image", item.get("pixel_values", item))
        try:
            return Record(str(index), _pixels_of(item, f"image {index}"))
        except InputError as error:
            return Record(str(index), error=str(error))


def _pixels_of(item: Any, name: str) -> Pixels:
    if hasattr(item, "convert") and hasattr(item, "mode"):  # a PIL picture
        return _decode(item)
    pixels = _as_numpy(item)
    if pixels.ndim not in (2, 3):
        raise InputError(f"{name} has shape {pixels.shape}; give (H,W), (C,H,W) or (H,W,C)")
    if pixels.ndim == 3 and not _channels_last(pixels.shape, name):
        pixels = pixels.transpose(1, 2, 0)
    return pixels


class FileImages(Images):
    """Image files, read when asked for. A file that cannot be read is a record with a reason, not an exception."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    @classmethod
    def below(cls, path: Path) -> FileImages:
        """All image files in a folder and its subfolders, in sorted order; or the one file named.

        Links to folders are followed, and every folder is read once, whatever leads to it. One that cannot be read is
        an `InputError`, for its images would be missing without a word; a link to no file is a record with a reason.
        """
        try:
            if path.is_file():
                return cls([path])
            if not path.is_dir():
                raise InputError(f"{path} does not exist; give a folder of images, an image file or an array")
            paths = sorted(_image_files(path))
        except OSError as error:
            raise InputError(
                f"{error.filename or path} cannot be read: {_why(error)}; its images would be missing"
            ) from error
        if not paths:
            raise InputError(f"{path} holds no image file ({', '.join(EXTENSIONS)})")
        return cls(paths)

    @property
    def names(self) -> list[str]:
        """What each file is called, in order: what a run lists, and what finds the files again."""
        return [str(path) for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Record:
        path = self.paths[index]
        try:
            return Record(str(path), read_pixels(path))
        except InputError as error:
            return Record(str(path), error=str(error))


def _image_files(root: Path) -> Iterator[Path]:
    """Every image file below `root`, in no order."""
    folders, links, seen = [str(root)], list[str](), set[tuple[int, int]]()
    while folders or links:
        # links last: a folder that has its own place below the root is read there
        folder = folders.pop() if folders else heapq.heappop(links)
        for entry in _entries(folder, seen):
            is_image = entry.name.lower().endswith(EXTENSIONS) and Path(entry.name).suffix != ""
            try:
                if entry.is_dir() and entry.is_symlink():
                    heapq.heappush(links, entry.path)
                elif entry.is_dir():
                    folders.append(entry.path)
                elif is_image and (entry.is_file() or _leads_nowhere(entry)):
                    yield Path(entry.path)
            except OSError as error:
                if is_image:
                    yield Path(entry.path)  # reading it will say why it cannot be read
                elif error.errno != errno.ELOOP:
                    raise


def _entries(folder: str, seen: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where it was read before or has gone in the meantime."""
    try:
        facts = Path(folder).stat()
        if (facts.st_dev, facts.st_ino) in seen:
            return []
        seen.add((facts.st_dev, facts.st_ino))
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not Path(entry.path).exists()


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def read_pixels(path: str | os.PathLike[str], content: IO[bytes] | None = None) -> Pixels:
    """Decode one file to (H, W) or (H, W, C) in its own depth: 8 or 16 bits, or float for `.npy` and float TIFF.

    `content` is the file opened already, where `path` is no place of this machine.
    """
    if content is None:
        with _opened(path) as handle:
            return read_pixels(path, handle)
    if Path(path).suffix.lower() == ".npy":
        return _read_npy(path, content)
    from PIL import Image as PILImage
    from PIL import UnidentifiedImageError

    try:
        with PILImage.open(content) as picture:
            picture.load()
            return _decode(picture)
    except InputError as error:
        raise InputError(f"{path} {error}") from error
    except UnidentifiedImageError as error:
        raise InputError(f"{path} is not an image that can be decoded") from error
    except PILImage.DecompressionBombError as error:
        raise InputError(f"{path} has too many pixels to be decoded safely: {error}") from error
    except Exception as error:  # a decoder may raise anything on damaged bytes
        raise InputError(f"{path} is damaged or cut short: {error}") from error


def _opened(path: str | os.PathLike[str]) -> IO[bytes]:
    try:
        return open(path, "rb")
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {_why(error)}") from error


def _decode(picture: Any) -> Pixels:
    if picture.mode in ("I;16", "I;16B", "I;16L"):
        return np.asarray(picture).astype(np.uint16)
    if picture.mode == "I":  # a 16-bit PNG opens as 32-bit integers in some decoders
        array = np.asarray(picture)
        if array.min() >= 0 and array.max() <= 65535:
            return array.astype(np.uint16)
        raise InputError("has 32-bit integer pixels; save it as .npy and give value_range")
    if picture.mode == "F":
        return np.asarray(picture)
    grey = picture.mode in ("1", "L", "LA")
    return np.asarray(picture.convert("L" if grey else "RGB"))


def _read_npy(path: str | os.PathLike[str], content: IO[bytes]) -> Pixels:
    try:
        array = np.load(content, allow_pickle=False)
    except DAMAGED_ARRAY as error:
        raise InputError(f"{path} is not a plain .npy array: {error}") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path} is an archive of arrays; name it .npz")
    if array.ndim == 3 and not _channels_last(array.shape, str(path)):
        array = array.transpose(1, 2, 0)
    if array.ndim not in (2, 3):
        raise InputError(f"{path} holds an array of shape {array.shape}; one image per file, (H,W), (C,H,W) or (H,W,C)")
    return np.asarray(array)

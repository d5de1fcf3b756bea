"""Collections of images: arrays, files, folders, URLs, data sets. Each image is read when it is asked for."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, OptionError, raising
from gepc.core.files import StrPath
from gepc.images import formats
from gepc.images.formats import EXTENSIONS, Pixels, channels_last, file_system, is_npy, is_url, read_file, reason_of

Image = npt.NDArray[np.float32]
ReadFile = Callable[[str], Pixels]
_TEXT_KINDS = "UOT"  # kinds of numpy arrays that may hold names of files
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
_MASK = re.compile("(.+)[_-](mask|gt|label|seg)s?", re.IGNORECASE)  # of the stem of a file
_NOTES = ("", ".txt", ".csv", ".json", ".xml", ".yaml", ".yml", ".md", ".html", ".db", ".ini")
"""Suffixes of files that lie beside images, such as labels. They are left out without a word; others are counted."""
DECODING = (OSError, ValueError, RuntimeError, SyntaxError)  # what decoders raise for a damaged image
IMAGE_NAMES = ("image", "img", "pixel_values", "images")  # names that data sets give their images


@dataclass(frozen=True)
class Record:
    """One image of a collection: its pixels, (H, W) or (H, W, C), or the reason why it cannot be read."""

    name: str  # the path, the URL, or the position in an array
    pixels: Pixels | None = None
    error: str | None = None
    axes_known: bool = True  # False for an array that may be (C, H, W) or (H, W, C); `pixels_for` decides

    @classmethod
    def of_array(cls, name: str, pixels: Pixels, label: str) -> Record:
        """The record of an (H, W), (C, H, W) or (H, W, C) array; `label` is what errors call it."""
        if pixels.ndim not in (2, 3):
            raise InputError(f"{label} has shape {pixels.shape}; give (H,W), (C,H,W) or (H,W,C)")
        if formats.axes_need_count(pixels.shape):
            return cls(name, pixels, axes_known=False)
        return cls(name, channels_last(pixels, label))

    @property
    def label(self) -> str:
        """What errors call the image."""
        return f"image {self.name}" if self.name.isdigit() else self.name

    def content_hash(self) -> int:
        """64-bit hash of the pixels as they were read, before any preprocessing; `InputError` if there are none."""
        if self.pixels is None:
            raise InputError(self.error or f"{self.name} cannot be read")
        pixels = self.pixels[..., None] if self.pixels.ndim == 2 else self.pixels
        content = hashlib.blake2b(f"{pixels.shape} {pixels.dtype.str}".encode(), digest_size=8)
        content.update(np.ascontiguousarray(pixels).tobytes())
        return int.from_bytes(content.digest(), "little")

    def pixels_for(self, channels: int) -> Pixels:
        """The pixels as (H, W) or (H, W, C) for a backbone of so many channels; `InputError` if there are none."""
        if self.pixels is None:
            raise InputError(self.error or f"{self.name} cannot be read")
        return self.pixels if self.axes_known else channels_last(self.pixels, self.label, channels)


class Images(ABC):
    """A collection of images that is read one at a time."""

    items: Any  # what the images are read from, a sequence with one item for each
    once = False  # whether they can only be read once, in order

    def __len__(self) -> int:
        return len(self.items)

    @abstractmethod
    def __getitem__(self, index: int) -> Record: ...

    def __iter__(self) -> Iterator[Record]:
        for index in range(len(self)):
            yield self[index]

    def take(self, indices: Sequence[int]) -> Images:
        """Some of the images, in this order, with the names that they have in the collection."""
        return Subset(self, indices)

    def first(self, count: int) -> Iterator[Record]:
        """The first images, at most `count`, one at a time; they are still part of the next iteration."""
        return (self[index] for index in range(min(count, len(self))))


class Subset(Images):
    """The images of another collection at some positions, in their order."""

    def __init__(self, images: Images, items: Sequence[int]) -> None:
        self.items, self._images = items, images

    def __getitem__(self, index: int) -> Record:
        return self._images[self.items[index]]


class ObservedImages(Images):
    """A collection that passes every readable image to a function when it is read: `seen` has position -> result."""

    def __init__(self, images: Images, observe: Callable[[Record], Any]) -> None:
        self.items = self._images = images
        self.once = images.once
        self._observe = observe
        self.seen: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Record:
        return self._observed(index, self._images[index])

    def __iter__(self) -> Iterator[Record]:
        return itertools.starmap(self._observed, enumerate(self._images))

    def first(self, count: int) -> Iterator[Record]:
        """The first images, not passed to the function."""
        return self._images.first(count)

    def _observed(self, index: int, record: Record) -> Record:
        if record.pixels is not None:
            self.seen[index] = self._observe(record)
        return record


def open_images(source: Any) -> Images:
    """Open images in any of the forms that users have.

    Parameters
    ----------
    source : one of

        - a folder, which is searched with its subfolders, or an image file; hidden files and `__MACOSX` are left out;
        - a URL that fsspec knows (`s3://bucket/photos`, `gs://...`), of a folder or a file;
        - an `.npz` archive (`data.npz`, or `data.npz:test_x` to name the array) or a 4-D `.npy` file;
        - an (N,C,H,W), (N,H,W,C) or grey (N,H,W) array or tensor;
        - a list, an array or a pandas `Series` of files, or a list of arrays, tensors or PIL pictures;
        - one PIL picture;
        - anything with `__len__` and `__getitem__`, such as a torch `Dataset`; labels are ignored;
        - any other iterable, such as a `DataLoader`, an `IterableDataset` or a generator, of images or of batches; it
          is read once, in order, and never held in memory.

    `gepc.images.formats.channels_last` says how (C,H,W) and (H,W,C) are told apart.
    """
    if isinstance(source, Images):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _open_path(source)
    if _is_picture(source):
        return ItemImages([source])
    if hasattr(source, "columns"):
        raise InputError("a whole table is not a collection of images; give a column of paths, for example df['path']")
    if hasattr(source, "__array__") or hasattr(source, "detach"):
        array = _as_numpy(source)
        return open_images(list(array)) if array.ndim == 1 and array.dtype.kind in _TEXT_KINDS else ArrayImages(array)
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, (str, os.PathLike)) for item in source):
        return FileImages(source)
    if not isinstance(source, (Mapping, bytes)):
        # torch's IterableDataset inherits a __getitem__ that only raises, and has no __len__
        if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            return ItemImages(source)
        if isinstance(source, Iterable):
            return StreamImages(source)
    raise InputError(
        f"cannot read images from {type(source).__name__}; give a folder, a list of files, an (N,C,H,W) or (N,H,W,C) "
        "array or tensor, a Dataset, a DataLoader or another iterable of images"
    )


def _open_path(source: StrPath) -> Images:
    archive = formats.split_archive(source)
    if archive is not None and not is_url(source):
        return ArrayImages(formats.read_npz(*archive))
    if formats.is_stack(Path(source)):
        return ArrayImages(np.load(source, mmap_mode="r", allow_pickle=False))
    return FileImages.below(source)


def _is_picture(item: Any) -> bool:
    """Whether this is a PIL picture."""
    return hasattr(item, "convert") and hasattr(item, "mode")


def _as_numpy(array: Any) -> Pixels:
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        if str(array.dtype) in ("torch.bfloat16", "torch.float16"):
            array = array.float()
    return np.asarray(array)


class ItemImages(Images):
    """A list of arrays, a torch Dataset, anything with `len` and indexing; other items are records with a reason."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __getitem__(self, index: int) -> Record:
        name = str(range(len(self))[index])
        try:
            item = self.items[index]
        except DECODING as error:
            return _not_decoded(name, error)
        return _record_of(name, item)


class ArrayImages(ItemImages):
    """Images in an (N,C,H,W), (N,H,W,C) or grey (N,H,W) array; an array that may be one colour image is refused."""

    def __init__(self, array: Pixels) -> None:
        if array.ndim == 3 and array.shape[0] not in (1, 3) and array.shape[2] not in (1, 3, 4):
            array = array[..., None]
        if array.ndim != 4:
            given = f"an array of images must be (N,C,H,W) or (N,H,W,C), got shape {array.shape}"
            raise InputError(f"{given}; for one image add an axis in front (x[None])")
        super().__init__(array)
        if len(array):
            Record.of_array("0", array[0], "each image of the array")


class StreamImages(Images):
    """A DataLoader, an IterableDataset, any iterable: read once in order, in constant memory, without a length.

    It yields images, (image, label) pairs, dictionaries with an image, files, or batches of images: a `DataLoader` with
    a batch size yields batches, (images, labels) or dictionaries with images; elsewhere a 4-D array is a batch.
    """

    once = True

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._batched = any(getattr(source, name, None) is not None for name in ("batch_size", "batch_sampler"))
        self._head: list[Record] = []
        self._rest = self._read()

    def __len__(self) -> int:
        raise OptionError("a stream of images has no length; give a list, a Dataset or a folder where one is needed")

    def __getitem__(self, index: int) -> Record:
        raise OptionError("a stream of images is read in order; give a list, a Dataset or a folder to pick from it")

    def __iter__(self) -> Iterator[Record]:
        head, rest = self._head, self._rest
        self._head, self._rest = [], self._read()
        yield from head
        yield from rest

    def first(self, count: int) -> Iterator[Record]:
        """The first images, kept for the iteration that follows."""
        self._head += itertools.islice(self._rest, max(0, count - len(self._head)))
        return iter(self._head[:count])

    def _read(self) -> Iterator[Record]:
        images = itertools.chain.from_iterable(map(self._split, self._source))  # not begun until a record is asked for
        yield from (_record_of(str(index), image) for index, image in enumerate(images))

    def _split(self, item: Any) -> Iterable[Any]:
        image = _image_of(item)
        return image if self._batched or getattr(image, "ndim", 0) == 4 else (image,)


def _image_of(item: Any) -> Any:
    """The image, or the images, in an item of a data set: alone, before its label, or under a usual name."""
    if isinstance(item, (tuple, list)) and item:
        item = item[0]
    if isinstance(item, Mapping):
        item = next((item[name] for name in IMAGE_NAMES if name in item), item)
    return item


def _record_of(name: str, item: Any) -> Record:
    image = _image_of(item)
    if isinstance(image, (str, os.PathLike)):
        return read_record(str(image), image)
    try:
        if _is_picture(image):
            return Record(name, formats.decode_picture(image))
        if image is None or isinstance(image, (Mapping, float)):
            known = f"an array, a picture or a path, in a dictionary under one of {', '.join(IMAGE_NAMES)}"
            raise InputError(f"{Record(name).label} is of type {type(image).__name__}; give {known}")
        return Record.of_array(name, _as_numpy(image), Record(name).label)
    except InputError as error:
        return Record(name, error=str(error))
    except DECODING as error:  # Pillow decodes a picture when its pixels are asked for
        return _not_decoded(name, error)


def _not_decoded(name: str, error: Exception) -> Record:
    return Record(name, error=f"{Record(name).label} cannot be decoded: {reason_of(error)}")


def read_record(name: str, path: StrPath, read: ReadFile = read_file) -> Record:
    """The record of one file. A file that cannot be read is a record with the reason, not an exception."""
    try:
        pixels = read(str(path))
        return Record.of_array(name, pixels, str(path)) if is_npy(path) else Record(name, pixels)
    except InputError as error:
        return Record(name, error=str(error))


def file_stamp(name: str) -> str:
    """Return a text that changes whenever the content of a file or URL changes; empty if it does not exist."""
    try:
        if is_url(name):
            system, place = file_system(name)
            return str(system.ukey(place))
        facts = Path(name).stat()  # a file that is moved over another keeps its times, except that of the status
        return f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"
    except Exception:  # noqa: BLE001 - every file system of fsspec raises errors of its own
        return ""


class FileImages(Images):
    """Image files, by paths or URLs (whatever fsspec knows). One that cannot be read is a record with a reason."""

    def __init__(self, names: Sequence[StrPath], read: ReadFile = read_file) -> None:
        self._read = read
        self.items = self.names = [str(name) if is_url(name) else str(Path(name)) for name in names]

    @classmethod
    def below(cls, place: StrPath) -> FileImages:
        """All image files in a folder and its subfolders, in sorted order; or the one file named.

        Links to folders are followed, and every folder is read once, even if several links lead to it. A folder that
        cannot be read is an `InputError`, because its images would be missing silently; a broken link, a pipe, a socket
        or a device with the name of an image is a record with the reason. Hidden files and folders are left out, and a
        warning counts the files of other formats.
        """
        return cls(_urls_below(str(place)) if is_url(place) else _paths_below(Path(place)))

    @cached_property
    def paths(self) -> list[Path]:
        """The files as paths; those of URLs serve for the names of folders only."""
        return [Path(name) for name in self.names]

    def __getitem__(self, index: int) -> Record:
        return read_record(self.names[index], self.names[index], self._read)


def _paths_below(place: Path) -> list[Path]:
    try:
        if place.suffix.lower() in _ARCHIVES and place.is_file():
            raise InputError(f"{place} is an archive; unpack it and give the folder with the images")
        if place.is_file():
            return [place]
        if not place.is_dir():
            raise InputError(f"{place} does not exist; give a folder of images, an image file or an array")
        skipped = Counter[str]()
        paths = sorted(image_files(place, skipped))
    except OSError as error:
        where = error.filename or place
        raise InputError(f"{where} cannot be read: {reason_of(error)}; its images would be missing") from error
    if not paths:
        raise InputError(f"{place} contains no image file ({', '.join(EXTENSIONS)}){_skipped_text(skipped, '; ')}")
    if skipped:
        warnings.warn(f"{place}: {_skipped_text(skipped)}", stacklevel=2)
    masks = masks_among(paths)
    if masks:
        warnings.warn(f"{place}: {len(masks)} masks beside images are skipped, such as {min(masks).name}", stacklevel=2)
    return [path for path in paths if path not in masks]


def masks_among(paths: Sequence[Path]) -> set[Path]:
    """The files that are masks by their names, beside the image that they belong to.

    These are `a_mask.png` beside `a.jpg`, and `a.png` beside `a.jpg`, as data sets of defects are distributed.
    """
    images = {(path.parent, path.stem) for path in paths}
    photographs = {(path.parent, path.stem) for path in paths if path.suffix.lower() in (".jpg", ".jpeg")}
    masks = set()
    for path in paths:
        named = _MASK.fullmatch(path.stem)
        same_name = path.suffix.lower() == ".png" and (path.parent, path.stem) in photographs
        if same_name or (named is not None and (path.parent, named[1]) in images):
            masks.add(path)
    return masks


def _skipped_text(skipped: Counter[str], start: str = "") -> str:
    kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(skipped.items()))
    return f"{start}files of other formats are skipped ({kinds}); convert or unpack them" if skipped else ""


def _urls_below(url: str) -> list[str]:
    system, place = file_system(url)
    # every file system of fsspec raises errors of its own
    with raising(InputError, f"{url} cannot be listed: {{error}}", Exception):
        found = [place] if system.isfile(place) else system.find(place)
    files = {path: PurePosixPath(path).suffix.lower() for path in found if not _is_hidden(path.removeprefix(place))}
    urls = sorted(str(system.unstrip_protocol(path)) for path, suffix in files.items() if suffix in EXTENSIONS)
    skipped = Counter(suffix for suffix in files.values() if suffix not in (*EXTENSIONS, *_NOTES))
    if urls and skipped:
        warnings.warn(f"{url}: {_skipped_text(skipped)}", stacklevel=2)
    if not urls:
        raise InputError(f"{url} does not exist or contains no image file ({', '.join(EXTENSIONS)})")
    return urls


def _is_hidden(path: str) -> bool:
    """Whether a relative path leads through something hidden, or through the folder that macOS adds to archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(path).parts)


def image_files(root: Path, skipped: Counter[str] | None = None) -> Iterator[Path]:
    """Everything below `root` that is called like an image and is neither a folder nor hidden, in no order.

    `skipped` counts, by their suffixes, other files that are neither notes nor hidden.
    """
    seen: set[Path] = set()
    for folder, subfolders, names in os.walk(root, onerror=_unless_deleted, followlinks=True):
        place = Path(folder).resolve()
        if place in seen:
            subfolders.clear()
            continue
        seen.add(place)
        # links last: a folder that is also here by its own name is read by that name
        shown = [name for name in subfolders if not _is_hidden(name)]
        subfolders[:] = sorted(shown, key=lambda name: (Path(folder, name).is_symlink(), name))
        for name in names:
            suffix = Path(name).suffix.lower()
            if _is_hidden(name):
                continue
            if suffix in EXTENSIONS:
                yield Path(folder, name)
            elif skipped is not None and suffix not in _NOTES:
                skipped[suffix] += 1


def _unless_deleted(error: OSError) -> None:
    """Raise the error of a folder that cannot be read, unless it has been deleted in the meantime."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error

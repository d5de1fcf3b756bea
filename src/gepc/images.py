"""Images in, one float32 (C, H, W) array in [-1, 1] out. Nothing about range, size or channels is guessed silently."""

from __future__ import annotations

import math
import os
import warnings
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gepc.errors import InputError, OptionError, ValueRangeWarning, check_choice
from gepc.sar.magnitude import MAGNITUDES, NORMALISATIONS, log_magnitude, normalised

Pixels = npt.NDArray[Any]
Image = npt.NDArray[np.float32]

EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm", ".npy")
RESIZES = ("stretch", "crop", "cut", "exact")
# what numpy raises for an array file that is cut short, altered, or holds Python objects
DAMAGED_ARRAY = (
    *(OSError, ValueError, TypeError, EOFError, NotImplementedError, OverflowError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, TokenError),
)
_DTYPE_RANGE = {"uint8": (0.0, 255.0), "uint16": (0.0, 65535.0), "bool": (0.0, 1.0)}
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)


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

    A folder may be an address that fsspec knows (`s3://bucket/photos`, `gs://...`); see `gepc.engines.remote`.

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
            from gepc.engines.remote import UrlImages

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
        """All image files in a folder and its subfolders, in sorted order; or the one file named."""
        if path.is_file():
            return cls([path])
        if not path.is_dir():
            raise InputError(f"{path} does not exist; give a folder of images, an image file or an array")
        paths = sorted(p for p in path.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
        if not paths:
            raise InputError(f"{path} holds no image file ({', '.join(EXTENSIONS)})")
        return cls(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Record:
        path = self.paths[index]
        try:
            return Record(str(path), read_pixels(path))
        except InputError as error:
            return Record(str(path), error=str(error))


def read_pixels(path: str | os.PathLike[str], content: IO[bytes] | None = None) -> Pixels:
    """Decode one file to (H, W) or (H, W, C) in its own depth: 8 or 16 bits, or float for `.npy` and float TIFF.

    `content` is the file opened already, where `path` is no place of this machine.
    """
    if Path(path).suffix.lower() == ".npy":
        return _read_npy(path, content)
    from PIL import Image as PILImage
    from PIL import UnidentifiedImageError

    try:
        with PILImage.open(path if content is None else content) as picture:
            picture.load()
            return _decode(picture)
    except InputError as error:
        raise InputError(f"{path} {error}") from error
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except UnidentifiedImageError as error:
        raise InputError(f"{path} is not an image that can be decoded") from error
    except PILImage.DecompressionBombError as error:
        raise InputError(f"{path} has too many pixels to be decoded safely: {error}") from error
    except Exception as error:  # a decoder may raise anything on damaged bytes
        raise InputError(f"{path} is damaged or cut short: {error}") from error


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


def _read_npy(path: str | os.PathLike[str], content: IO[bytes] | None) -> Pixels:
    try:
        array = np.load(path if content is None else content, allow_pickle=False)
    except DAMAGED_ARRAY as error:
        raise InputError(f"{path} is not a plain .npy array: {error}") from error
    if array.ndim == 3 and not _channels_last(array.shape, str(path)):
        array = array.transpose(1, 2, 0)
    if array.ndim not in (2, 3):
        raise InputError(f"{path} holds an array of shape {array.shape}; one image per file, (H,W), (C,H,W) or (H,W,C)")
    return np.asarray(array)


@dataclass(frozen=True)
class Preprocessing:
    """How pixels become the network's input. Stored with a detector and repeated by it.

    Parameters
    ----------
    value_range:
        The numbers that mean black and white. None reads it off the type: uint8 is [0, 255], uint16 [0, 65535],
        a float array is [-1, 1].
    size:
        (H, W) to bring every image to; None keeps the images' own size, which must then be the same for all.
    resize:
        `stretch` (bilinear with antialiasing, aspect ratio not kept), `crop` (the shorter side is resized, the middle
        kept), `cut` (the middle as it is: nothing is resampled, so speckle stays; a smaller image is an error) or
        `exact` (another size is an error).
    channels:
        1 or 3. Grey is repeated to three channels; colour becomes its luma for one.
    magnitude, normalise:
        For radar: `log` takes the log-magnitude of real or complex pixels, on one scale for all (`fixed`, which keeps
        differences of level between patches) or on the patch's own (`patch`); see `gepc.sar.magnitude`. `linear`
        leaves the values as they are.
    """

    value_range: tuple[float, float] | None = None
    size: tuple[int, int] | None = None
    resize: str = "stretch"
    channels: int = 3
    magnitude: str = "linear"
    normalise: str = "fixed"

    def __post_init__(self) -> None:
        check_choice("resize", self.resize, RESIZES)
        check_choice("magnitude", self.magnitude, MAGNITUDES)
        check_choice("normalise", self.normalise, NORMALISATIONS)
        if self.magnitude == "linear" and self.normalise != "fixed":
            raise OptionError("normalise='patch' goes with magnitude='log'")
        if self.channels not in (1, 3):
            raise OptionError(f"channels must be 1 or 3, got {self.channels}")
        if self.value_range is not None:
            low, high = (float(value) for value in self.value_range)
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise OptionError(f"value_range must be (low, high) with low < high, got {self.value_range}")
            object.__setattr__(self, "value_range", (low, high))
        if self.size is not None:
            object.__setattr__(self, "size", (int(self.size[0]), int(self.size[1])))
            if min(self.size) < 1:
                raise OptionError(f"size must be (height, width) of at least 1, got {self.size}")

    def __call__(self, pixels: Pixels, name: str = "image") -> Image:
        """One image as contiguous float32 (C, H, W) in [-1, 1]."""
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if 0 in pixels.shape:
            raise InputError(f"{name} is empty: shape {pixels.shape}")
        if self.magnitude == "log":
            unit = normalised(log_magnitude(pixels, self.value_range, name), self.normalise)
        else:
            unit = self._to_unit(pixels, name)
        image = self._to_channels(unit)
        image = self._to_size(image, name)
        return np.ascontiguousarray(image.transpose(2, 0, 1))

    def _to_unit(self, pixels: Pixels, name: str) -> Image:
        if np.iscomplexobj(pixels):
            raise InputError(f"{name} is complex; give its magnitude, or magnitude='log' for radar")
        if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
            raise InputError(f"{name} has NaN or infinite pixels; mask or replace them first")
        low, high = self.value_range or _range_of(pixels, name)
        # float64 here: the same picture as uint8 and as float must give the same float32
        unit = (pixels.astype(np.float64) - low) * (2.0 / (high - low)) - 1.0
        worst = max(float(unit.max()) - 1.0, -1.0 - float(unit.min()))
        if worst > 1e-3:
            raise InputError(
                f"{name} has values from {pixels.min():g} to {pixels.max():g}, outside [{low:g}, {high:g}]; "
                "say what black and white are with value_range=(low, high)"
            )
        return unit.clip(-1.0, 1.0).astype(np.float32)

    def _to_channels(self, image: Image) -> Image:
        image = image[..., :3]  # a fourth channel is transparency
        if image.shape[2] == self.channels:
            return image
        if self.channels == 3:
            return np.repeat(image[..., :1], 3, axis=2)
        return (image @ _LUMA)[..., None]

    def _to_size(self, image: Image, name: str) -> Image:
        if self.size is None or image.shape[:2] == self.size:
            return image
        if self.resize == "exact":
            height, width = self.size
            raise InputError(
                f"{name} is {image.shape[0]}x{image.shape[1]} but {height}x{width} is expected; "
                "give size= (and resize='stretch' or 'crop') to bring all images to one size"
            )
        if self.resize == "cut":
            return _cut_middle(image, self.size, name)
        if self.resize == "crop":
            image = _crop_to_aspect(image, self.size)
        return _resize(image, self.size)

    def for_images_of(self, shape: tuple[int, ...]) -> Preprocessing:
        """The same with the size fixed to that of a first image, when none was asked for."""
        return self if self.size is not None else replace(self, size=(shape[-2], shape[-1]), resize="exact")


def _range_of(pixels: Pixels, name: str) -> tuple[float, float]:
    if pixels.dtype.kind == "f":
        return (-1.0, 1.0)
    known = _DTYPE_RANGE.get(pixels.dtype.name)
    if known is None:
        raise InputError(f"{name} has {pixels.dtype} pixels, whose range is not known; give value_range=(low, high)")
    return known


def _cut_middle(image: Image, size: tuple[int, int], name: str) -> Image:
    spare = (image.shape[0] - size[0], image.shape[1] - size[1])
    if min(spare) < 0:
        raise InputError(f"{name} is {image.shape[0]}x{image.shape[1]}, too small to cut {size[0]}x{size[1]} out of it")
    top, left = spare[0] // 2, spare[1] // 2
    return image[top : top + size[0], left : left + size[1]]


def _crop_to_aspect(image: Image, size: tuple[int, int]) -> Image:
    """The largest centred window with the aspect ratio of `size`."""
    height, width = image.shape[:2]
    scale = min(height / size[0], width / size[1])
    rows, columns = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    top, left = (height - rows) // 2, (width - columns) // 2
    return image[top : top + rows, left : left + columns]


def _resize(image: Image, size: tuple[int, int]) -> Image:
    """Bilinear with antialiasing, per channel in float: no rounding to 8 bits on the way."""
    from PIL import Image as PILImage

    planes = [
        PILImage.fromarray(np.ascontiguousarray(image[..., channel])).resize(
            (size[1], size[0]), PILImage.Resampling.BILINEAR
        )
        for channel in range(image.shape[2])
    ]
    return np.stack([np.asarray(plane, dtype=np.float32) for plane in planes], axis=2).clip(-1.0, 1.0)


def warn_about_range(images: Images, value_range: tuple[float, float] | None, look_at: int = 16) -> None:
    """Warn when float images hold no negative value: they are read as [-1, 1] and are perhaps in [0, 1]."""
    if value_range is not None:
        return
    suspicious = False
    for index in range(min(len(images), look_at)):
        pixels = images[index].pixels
        if pixels is None or not pixels.size or pixels.dtype.kind != "f" or not np.isfinite(pixels).all():
            continue
        if (pixels < 0).any():
            return
        suspicious = True
    if suspicious:
        warnings.warn(
            "float images without a negative value are read as [-1, 1]; if they are in [0, 1], pass value_range=(0, 1)",
            ValueRangeWarning,
            stacklevel=3,
        )


def load_all(images: Images, preprocessing: Preprocessing) -> tuple[Image, Preprocessing]:
    """Every image as one (N, C, H, W) array; one that cannot be read or differs in size is an `InputError`."""
    if len(images) == 0:
        raise InputError("there are no images")
    warn_about_range(images, preprocessing.value_range)
    loaded: list[Image] = []
    for record in iterate(images):
        if record.pixels is None:
            raise InputError(record.error or f"{record.name} cannot be read")
        loaded.append(preprocessing(record.pixels, record.name))
        preprocessing = preprocessing.for_images_of(loaded[0].shape)
    return np.stack(loaded), preprocessing

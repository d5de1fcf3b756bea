"""Decode one file to pixels: pictures, TIFF with any number of bands, `.npy` and `.npz` arrays."""

import contextlib
import math
import warnings
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, OptionError, raising
from gepc.core.files import StrPath, open_regular

Pixels = npt.NDArray[Any]

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
"""What Pillow may decode, whatever a file is called. Its other formats start programs, or parse much and are rare."""
EXTENSIONS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm", ".npy")
MAX_PIXELS = 178_956_970  # where Pillow itself refuses to go on
MAX_SCANS = 64
_ANIMATED = ("GIF", "PNG", "WEBP")  # further frames of a JPEG are previews, and those of a TIFF bands
# GDAL reads the file it is given and no other: no side-car files, no network
GDAL_OPTIONS = {
    "GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR",
    "GDAL_PAM_ENABLED": "NO",
    "CPL_VSIL_CURL_ALLOWED_EXTENSIONS": ".none",
}
# what numpy raises for an array file that is truncated, corrupted, or holds Python objects
DAMAGED_ARRAY = (
    *(OSError, ValueError, TypeError, EOFError, NotImplementedError, OverflowError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, TokenError),
)
_COMMON_COUNTS = (1, 3)
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
NPY_START = b"\x93NUMPY"
_SUBFILE, _PHOTOMETRIC, _SAMPLES, _EXTRA_SAMPLES, _SAMPLE_FORMAT, _BITS = 254, 262, 277, 338, 339, 258  # TIFF tags
_SIGNED = 2  # the sample format of signed integers
_PREVIEW_OR_MASK = 1 | 4  # bits of the kind of subfile
_GREY_OR_RGB, _ALPHA = (0, 1, 2), (1, 2)  # photometric interpretations, and kinds of extra samples
_ORIENTATION = 0x0112  # the EXIF tag
_ARRAY_NAMES = ("x", "images", "train_x")


class FirstFrameWarning(UserWarning):
    """Only the first frame of an animated picture is read."""


def warn_about_frames() -> None:
    """Warn that only the first frame is read; without a name, so that Python shows the warning once."""
    warnings.warn("only the first frame of animated pictures is read", FirstFrameWarning, stacklevel=2)


def size_text(shape: tuple[int, ...]) -> str:
    """Return the size of an image of shape (H, W, ...) as messages state it.

    >>> size_text((3000, 4000, 3))
    '4000x3000 pixels (width x height)'
    """
    return f"{shape[1]}x{shape[0]} pixels (width x height)"


def channels_last(pixels: Pixels, name: str, channels: int | None = None) -> Pixels:
    """Return an image array as (H, W) or (H, W, C), whichever of (C, H, W) and (H, W, C) it was.

    The channel axis is the first or the last one. The first rule that selects exactly one of the two decides: it has 1
    or 3 elements; it has as many as the backbone has `channels`, if these are known; it is shorter than both other
    axes. If both have 1 or 3 elements, or no rule decides, the array is refused; the error calls it `name`.
    """
    if pixels.ndim == 2:
        return pixels
    first, middle, last = pixels.shape
    common = (first in _COMMON_COUNTS, last in _COMMON_COUNTS)
    asked_for = (first == channels, last == channels)
    shorter = (first < min(middle, last), last < min(first, middle))
    rules = (common, asked_for, shorter)
    for is_first, is_last in rules[:1] if all(common) else rules:
        if is_first != is_last:
            return pixels.transpose(1, 2, 0) if is_first else pixels
    raise InputError(
        f"{name} has shape {pixels.shape}: it is not clear whether the first or the last axis holds the channels; "
        "give (C,H,W) or (H,W,C) arrays of images that are larger than their number of channels"
    )


def axes_need_count(shape: tuple[int, ...]) -> bool:
    """Whether only the backbone's number of channels can tell (C, H, W) from (H, W, C)."""
    return len(shape) == 3 and shape[0] != shape[2] and not set(_COMMON_COUNTS) & {shape[0], shape[2]}


def read_pixels(path: StrPath) -> Pixels:
    """Decode one file to (H, W) or (H, W, C) in its own depth."""
    pixels = read_file(path)
    return channels_last(pixels, str(path)) if is_npy(path) else pixels


def read_file(path: StrPath) -> Pixels:
    """Decode the file at a path or URL: 8 or 16 bits per channel, or float for `.npy` and float TIFF.

    A picture is (H, W) or (H, W, C), upright as its EXIF orientation says, without an alpha channel; an `.npy` array is
    as it was saved. Only the first frame of an animation is read, with a `FirstFrameWarning`.
    """
    with raising(InputError, f"{path} {{error}}", InputError), open_file(path) as content:
        return decode(content, Path(path).suffix)


def decode(content: IO[bytes], suffix: str, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Decode one file, in one of `FORMATS`, a TIFF with any number of bands, or an array by its suffix or first bytes.

    Larger images than `max_pixels` are refused before they are decoded. An `InputError` has a text that goes on after
    the name of the file.
    """
    from PIL import Image as PILImage
    from PIL import UnidentifiedImageError

    start = content.read(6)
    content.seek(0)
    if suffix.lower() == ".npy" or start == NPY_START:
        return _read_npy(content, max_pixels)
    try:
        with PILImage.open(content, formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > max_pixels:
                raise InputError(f"has {size_text((height, width))}, more than the {max_pixels:,} allowed")
            if _data_bands(picture) in _COMMON_COUNTS:
                if picture.format in ("JPEG", "MPO"):
                    _check_scans(content)
                return _read_pages(picture, max_pixels)
    except InputError:
        raise
    except UnidentifiedImageError as error:
        if start[:4] not in _TIFF_STARTS:
            raise InputError("is not an image that can be decoded") from error
    except PILImage.DecompressionBombError as error:
        raise InputError(f"has more than the {max_pixels:,} pixels allowed") from error
    except Exception as error:  # a decoder may raise anything on damaged bytes
        raise InputError(f"is damaged or cut short: {error}") from error
    content.seek(0)
    return _read_bands(content, max_pixels)


def _check_scans(content: IO[bytes]) -> None:
    """Refuse a JPEG of very many scans: each takes as long as decoding the whole image, and a repeated one no bytes."""
    place = content.tell()
    content.seek(0)
    scans = content.read().count(b"\xff\xda")
    content.seek(place)
    if scans > MAX_SCANS:
        raise InputError(f"has {scans} JPEG scans, more than the {MAX_SCANS} allowed; save it again")


def is_npy(path: StrPath) -> bool:
    """Whether the file is a numpy array by its name."""
    return Path(path).suffix.lower() == ".npy"


def is_url(path: StrPath) -> bool:
    """Whether this is a URL for fsspec rather than a path."""
    return "://" in str(path)


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path in it; `s3://` and `gs://` need the packages s3fs and gcsfs."""
    with raising(OptionError, f"{url} cannot be opened: {{error}}", ImportError, ValueError):
        import fsspec.core

        system, path = fsspec.core.url_to_fs(url)
    return system, str(path)


def reason_of(error: Exception) -> str:
    """What the operating system says about a file, in lower case, or any other error as it is."""
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


def open_file(path: StrPath) -> IO[bytes]:
    """Open the file at a path or URL; the text of an `InputError` goes on after its name."""
    try:
        if is_url(path):
            system, place = file_system(str(path))
            return cast(IO[bytes], system.open(place, "rb"))
        return open_regular(path)
    except OptionError:
        raise
    except FileNotFoundError as error:
        raise InputError("does not exist") from error
    except Exception as error:  # every file system of fsspec raises errors of its own
        raise InputError(f"cannot be read: {reason_of(error)}") from error


def decode_picture(picture: Any) -> Pixels:
    """Pixels of a PIL picture: grey (H, W) in 8 bits, 16 bits or float, colour (H, W, 3) in 8 bits; alpha is dropped.

    The picture is turned upright as its EXIF orientation says. Palettes and other colour spaces become RGB. A TIFF with
    further bands, which PIL would drop, is an `InputError`.
    """
    bands = _data_bands(picture)
    if bands not in _COMMON_COUNTS:
        raise InputError(f"has {bands} bands, which Pillow does not decode; read it from a file or give an array")
    tags = getattr(picture, "tag_v2", {})
    signed, bits = _SIGNED in tags.get(_SAMPLE_FORMAT, ()), tags.get(_BITS, (8,))
    picture = upright(picture)
    if signed:  # the preprocessing asks for their range
        return np.asarray(picture).astype(f"int{bits[0]}")
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


def upright(picture: Any) -> Any:
    """Turn a PIL picture as its EXIF orientation says."""
    from PIL import ImageOps

    picture.load()  # Pillow turns a TIFF when it decodes it, and then forgets its orientation
    with contextlib.suppress(Exception):  # damaged EXIF data does not make the pixels unreadable
        if picture.getexif().get(_ORIENTATION, 1) != 1:
            return ImageOps.exif_transpose(picture)
    return picture


def _data_bands(picture: Any) -> int:
    """How many bands of a grey or RGB TIFF are not declared as alpha; 3 for any other picture."""
    tags = getattr(picture, "tag_v2", None)
    if tags is None or tags.get(_PHOTOMETRIC) not in _GREY_OR_RGB:
        return 3
    return int(tags.get(_SAMPLES, 1)) - sum(kind in _ALPHA for kind in tags.get(_EXTRA_SAMPLES, ()))


def _read_pages(picture: Any, max_pixels: int) -> Pixels:
    """The pages of a TIFF as bands, (H, W, pages), where previews and masks are no bands; otherwise the first frame."""
    if picture.format != "TIFF" or picture.n_frames == 1:
        if picture.format in _ANIMATED and getattr(picture, "is_animated", False):
            warn_about_frames()
        return decode_picture(picture)
    pages: list[Pixels] = []
    for number in range(picture.n_frames):
        picture.seek(number)
        if not picture.tag_v2.get(_SUBFILE, 0) & _PREVIEW_OR_MASK:
            pages.append(decode_picture(picture))
        if sum(page.size for page in pages) > max_pixels:
            raise InputError(f"has more than the {max_pixels:,} values allowed")
    if len(pages) == 1:
        return pages[0]
    if len({(page.shape, page.dtype) for page in pages}) != 1 or pages[0].ndim != 2:
        raise InputError(f"has {len(pages)} pages that are not grey bands of one size; save one image per file")
    return np.stack(pages, axis=2)


def _read_bands(content: IO[bytes], max_pixels: int) -> Pixels:
    """(H, W, C) of a TIFF that PIL cannot decode whole, without the bands that are declared as alpha."""
    reason = "is not a grey or RGB image; other TIFF files need rasterio: pip install 'gepc[scenes]'"
    with raising(InputError, reason, ImportError):
        import rasterio
        from rasterio.enums import ColorInterp
    with (
        raising(InputError, "is not an image that can be decoded: {error}", rasterio.errors.RasterioError, OSError),
        warnings.catch_warnings(),
        rasterio.Env(**GDAL_OPTIONS),
        rasterio.MemoryFile(content.read()) as memory,
    ):
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with memory.open(driver="GTiff") as file:
            bands = [band for band, colour in enumerate(file.colorinterp, 1) if colour != ColorInterp.alpha]
            if file.height * file.width * len(bands) > max_pixels:
                raise InputError(f"has more than the {max_pixels:,} values allowed")
            return np.asarray(file.read(bands).transpose(1, 2, 0))


def _read_npy(content: IO[bytes], max_pixels: int) -> Pixels:
    with raising(InputError, "is not a plain .npy array: {error}", *DAMAGED_ARRAY, passing=InputError):
        if content.read(2) == b"PK":
            raise InputError("is an archive of arrays; name it .npz")
        content.seek(0)
        version = np.lib.format.read_magic(content)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape = read_header(content)[0]
        if len(shape) not in (2, 3):
            raise InputError(f"holds an array of shape {shape}; one image per file, (H,W), (C,H,W) or (H,W,C)")
        if math.prod(shape) > max_pixels:
            raise InputError(f"holds an array of shape {shape}, more than the {max_pixels:,} numbers allowed")
        content.seek(0)
        return np.asarray(np.load(content, allow_pickle=False))


def is_stack(path: Path) -> bool:
    """Whether this is an `.npy` file of many images."""
    with contextlib.suppress(*DAMAGED_ARRAY):
        array = np.load(path, mmap_mode="r", allow_pickle=False) if is_npy(path) and path.is_file() else None
        return isinstance(array, np.ndarray) and array.ndim == 4
    return False


def split_archive(source: StrPath) -> tuple[Path, str | None] | None:
    """Split `data.npz[:NAME]` into path and name; None for anything else. `data.npz.d/train.npz` is one path."""
    text = str(source)
    path, colon, key = text.rpartition(".npz:")
    if text.endswith(".npz") and (not colon or Path(text).exists()):
        return Path(text), None
    return (Path(f"{path}.npz"), key or None) if colon else None


def read_npz(path: Path, key: str | None = None) -> Pixels:
    """Read the array `key` of an `.npz` archive, or the only one, or else `x`, `images` or `train_x` with a warning."""
    damaged = f"{path} is not a complete, plain .npz archive"
    with (
        raising(InputError, f"{damaged}: {{error}}", *DAMAGED_ARRAY, passing=InputError),
        raising(InputError, f"{path} does not exist", FileNotFoundError),
        open_regular(path) as handle,
    ):
        if not zipfile.is_zipfile(handle):
            raise InputError(damaged)
        handle.seek(0)
        with np.load(handle, allow_pickle=False) as archive:
            names = list(archive.files)
            if key is None:
                key = names[0] if len(names) == 1 else next((name for name in _ARRAY_NAMES if name in names), None)
                if key is not None and len(names) > 1:
                    others = f"{path} holds several arrays ({', '.join(names)})"
                    warnings.warn(f"{others}: {key} is read; name another one as {path.name}:NAME", stacklevel=3)
            if key in names:
                return np.asarray(archive[key])
    if key or not names:
        raise InputError(f"{path} contains no array {key or 'at all'}, only {', '.join(names) or 'nothing'}")
    raise InputError(f"{path} contains several arrays; choose one with {path.name}:NAME ({', '.join(names)})")

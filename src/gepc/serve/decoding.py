"""Bytes from a stranger to pixels: the format by content, the size before the pixels, every failure a sentence."""

from __future__ import annotations

import io
import threading
import warnings
from typing import Any

from gepc.core.errors import InputError
from gepc.images.formats import Pixels
from gepc.images.sources import open_images

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP")
LARGE = 2_000_000
_one_large_at_a_time = threading.Lock()


def decode(data: bytes, max_pixels: int) -> Pixels:
    """The first picture in `data` in its own depth, as `gepc.images.sources.read_pixels` gives it for a file.

    Raises `InputError` with a sentence that names no file; a decoder's own words are not passed on.
    """
    from PIL import Image as PILImage
    from PIL import UnidentifiedImageError

    if not data:
        raise InputError("the file is empty")
    try:
        with PILImage.open(io.BytesIO(data), formats=FORMATS) as picture:
            _check_size(picture, max_pixels)
            picture.load()
            return _pixels(picture)
    except InputError:
        raise
    except UnidentifiedImageError as error:
        raise InputError(f"not an image that can be read; send one of {', '.join(FORMATS)}") from error
    except (PILImage.DecompressionBombError, PILImage.DecompressionBombWarning) as error:
        raise InputError(f"the image has more than {max_pixels:,} pixels; send a smaller one") from error
    except Exception as error:  # a decoder may raise anything on hostile bytes
        raise InputError("the image is damaged or cut short") from error


def quieten() -> None:
    """Leave the size check to `decode`: the decoder's own warning would fill the log at a stranger's will."""
    from PIL import Image as PILImage

    warnings.filterwarnings("ignore", category=PILImage.DecompressionBombWarning)


def prepared(data: bytes, max_pixels: int, preprocessing: Any) -> Any:
    """The network's input made from `data`. Large images go one at a time, for they take a hundred bytes per pixel."""
    pixels = decode(data, max_pixels)
    if pixels.size < LARGE:
        return preprocessing(pixels, "the image")
    with _one_large_at_a_time:
        return preprocessing(pixels, "the image")


def _check_size(picture: Any, max_pixels: int) -> None:
    width, height = picture.size
    if width * height > max_pixels:
        raise InputError(
            f"the image has {width} x {height} pixels, more than the {max_pixels:,} allowed; send a smaller one"
        )


def _pixels(picture: Any) -> Pixels:
    record = open_images([picture])[0]
    if record.pixels is None:
        raise InputError(f"the image {record.error}")
    return record.pixels

"""Preprocessing: pixels in, one float32 (C, H, W) array in [-1, 1] out.

Value range, size and channels are never guessed silently. `magnitude="log"` is for radar: with a = |x| / white,

    y = log(1 + 255 a) / log(1 + 255)  in [0, 1].

The 255 is the same for every depth, so that a scene gives the same y as 8-bit, 16-bit, float or complex pixels. No
step except resizing mixes pixels, so speckle is preserved.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image as PILImage

from gepc.core.errors import AdviceWarning, InputError, OptionError, ValueRangeWarning
from gepc.core.options import at_least, check_fields, coerce_fields, one_of
from gepc.images.formats import Pixels, read_file, size_text
from gepc.images.sources import Image, Images, Record

Array = npt.NDArray[np.float64]
OWN_SIZE = {"native": 1, "half": 2}  # what keeps the size of every image -> by how much it is reduced
VALUE_RANGES = {"uint8": (0.0, 255.0), "uint16": (0.0, 65535.0), "bool": (0.0, 1.0)}
"""The numbers that mean black and white, for the types that define them."""
LUMA = np.array([0.299, 0.587, 0.114])  # weights of red, green and blue in grey (ITU-R BT.601)
_LOG_SCALE = 255.0
_PATCH_DEVIATIONS = 4.0
_RANGE_SAMPLE = 16
_BLOCK = 1 << 18  # values that are converted at once, in double precision
LARGE_SIDE, DEFAULT_SIDE = 512, 256  # pixels; see `Preprocessing.for_images_of`


Flags = npt.NDArray[np.bool_]
MOST_RUNS, MOST_PIXELS = 10_000, 1 << 24


@dataclass(frozen=True)
class Mask:
    """Pixels of an image that are ignored.

    Parameters
    ----------
    size : (height, width)
        The size of the images as they are given. Images of another size have the mask stretched to theirs.
    runs : tuple of int
        The lengths of runs of pixels, row by row: counted, ignored, counted, and so on.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.images.preprocessing import Mask
    >>> Mask.of(np.array([[False, True], [True, False]]))
    Mask(size=(2, 2), runs=(1, 2, 1))
    """

    size: tuple[int, int]
    runs: tuple[int, ...]

    def __post_init__(self) -> None:
        height, width = self.size
        if min(height, width) < 1 or height * width > MOST_PIXELS or min(self.runs, default=-1) < 0:
            raise InputError("the mask of ignored pixels has an impossible size; draw it again")
        if sum(self.runs) != height * width or sum(self.runs[1::2]) == height * width:
            raise InputError("the mask of ignored pixels does not fit its size, or ignores every pixel")

    @classmethod
    def of(cls, given: Any) -> Mask:
        """Read a mask.

        Parameters
        ----------
        given : array_like of bool (H, W), or str or path
            True where a pixel is ignored; or a picture, or the path of one, whose pixels that are not black are
            ignored.

        Returns
        -------
        Mask
            The mask, of the size of the array or the picture.

        Raises
        ------
        InputError : the picture cannot be read, or the mask ignores every pixel.
        OptionError : the array is not (H, W), or the mask has too many edges.

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.images.preprocessing import Mask
        >>> Mask.of(np.array([[True, True, False]])).runs
        (0, 2, 1)
        """
        pixels = np.asarray(read_file(given) if isinstance(given, (str, os.PathLike)) else given)
        ignored = pixels.any(axis=2) if pixels.ndim == 3 else pixels.astype(bool)
        if ignored.ndim != 2:
            raise OptionError(f"ignore must be a picture, or a boolean array (H, W); got shape {pixels.shape}")
        flat = ignored.ravel()
        starts = np.flatnonzero(np.diff(flat, prepend=False))
        runs = np.diff(starts, prepend=0, append=flat.size)
        if len(runs) > MOST_RUNS:
            raise OptionError("the mask has too many edges; draw simpler shapes", options=("ignore",))
        return cls((ignored.shape[0], ignored.shape[1]), tuple(runs.tolist()))

    def array(self, size: tuple[int, int]) -> Flags:
        """Return the mask for images of one size.

        Parameters
        ----------
        size : (height, width) of the images.

        Returns
        -------
        bool array (height, width)
            True where a pixel is ignored.

        Examples
        --------
        >>> from gepc.images.preprocessing import Mask
        >>> Mask(size=(1, 2), runs=(1, 1)).array((1, 4)).tolist()
        [[False, False, True, True]]
        """
        flags = np.repeat(np.arange(len(self.runs)) % 2 == 1, self.runs).reshape(self.size)
        if size == self.size:
            return flags
        return np.asarray(PILImage.fromarray(flags).resize(size[::-1], PILImage.Resampling.NEAREST))


@dataclass(frozen=True)
class Preprocessing:
    """How pixels become the backbone's input. A detector stores it and applies it to every image.

    Parameters
    ----------
    value_range : the numbers that mean black and white; pixels outside are an error, or saturate with
        `magnitude="log"`. By default they follow from the type: uint8 is [0, 255], uint16 is [0, 65535], and float is
        [-1, 1].
    size : (H, W) that every image is resized to. By default images keep their size, which must be the same for all.
    resize : how images of another size are treated. `stretch` resizes both sides (bilinear with antialiasing) and may
        change the aspect ratio. `crop` takes the largest centred window with the aspect ratio of `size` and resizes
        it. `cut` takes the centre without resampling; a smaller image is an error. `exact` refuses any other size.
        `native` keeps the size of every image up to `multiple`, for networks that take any size; `half` does so at
        half the resolution.
    channels : the backbone's number of channels. Grey is repeated for 3 channels and RGB becomes its luma for 1; any
        other difference between image and backbone is an `InputError`.
    magnitude : `linear` keeps the values; `log` takes the log-magnitude of real or complex radar pixels.
    normalise : how the log-magnitude y is mapped to [-1, 1]. `fixed` is 2 y - 1 and preserves differences in brightness
        between images. `patch` is (y - mean) / (4 std), clipped to [-1, 1], which removes each image's own brightness
        and contrast.
    multiple : with `native` and `half`, the sides that the network sees are cut to multiples of this around the centre.
    ignore : pixels that do not count. Before an image is resized, they are replaced by the mean of its other pixels, so
        that their values have no influence at all.

    Raises
    ------
    OptionError : an option is unknown or contradicts another one.

    Examples
    --------
    >>> import gepc, numpy as np
    >>> prepare = gepc.Preprocessing(size=(2, 2), channels=1)
    >>> prepare(np.full((4, 6), 255, dtype=np.uint8))
    array([[[1., 1.],
            [1., 1.]]], dtype=float32)

    See Also
    --------
    create_detector : takes these options and stores them with the detector.
    """

    value_range: tuple[float, float] | None = None
    size: tuple[int, int] | None = None
    resize: str = one_of("stretch", "crop", "cut", "exact", "native", "half")
    channels: int = at_least(1, 3)
    magnitude: str = one_of("linear", "log")
    normalise: str = one_of("fixed", "patch")
    multiple: int = at_least(1, 1)
    ignore: Mask | None = None

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_fields(self)
        if self.magnitude == "linear" and self.normalise != "fixed":
            raise OptionError("`normalise` needs `magnitude` to be 'log'", options=("normalise", "magnitude"))
        if self.ignore is not None and self.normalise == "patch":
            raise OptionError("`ignore` needs `normalise` to be 'fixed'", options=("ignore", "normalise"))
        low, high = self.value_range or (0.0, 1.0)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise OptionError(f"value_range must be (low, high) with low < high, got {self.value_range}")
        if self.resize in OWN_SIZE and self.size is not None:
            raise OptionError(f"resize={self.resize!r} keeps every size; leave `size` out", options=("size",))
        if self.size is not None and min(self.size) < 1:
            raise OptionError(f"size must be (height, width) of at least 1, got {self.size}")

    def __call__(self, pixels: Pixels, name: str = "image") -> Image:
        """Preprocess pixels (H, W) or (H, W, C) to contiguous float32 (C, H, W) in [-1, 1]; errors call them `name`."""
        pixels = np.asarray(pixels)
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if pixels.ndim != 3 or 0 in pixels.shape:
            raise InputError(f"{name} is empty or not (H, W) or (H, W, C): shape {pixels.shape}")
        if pixels.shape[2] not in accepted_channels(self.channels):
            raise InputError(f"{name} has {pixels.shape[2]} channels, the backbone takes {self.channels}")
        if self.magnitude == "log":
            unit = _normalised(log_magnitude(pixels, self.value_range, name), self.normalise)
        else:
            unit = self._to_unit(pixels, name)
        if self.ignore is not None:
            ignored = self.ignore.array((unit.shape[0], unit.shape[1]))
            if ignored.all():
                raise InputError(f"{name} is too small for the mask: no pixel would count")
            unit[ignored] = unit[~ignored].mean(axis=0)
        if unit.shape[2] != self.channels:
            unit = np.repeat(unit, 3, axis=2) if self.channels == 3 else (unit @ LUMA.astype(np.float32))[..., None]
        return np.ascontiguousarray(self._to_size(unit, name).transpose(2, 0, 1))

    def prepare(self, record: Record) -> Image:
        """Preprocess one image of a collection; an image that cannot be read is an `InputError`."""
        return self(record.pixels_for(self.channels), record.label)

    @property
    def is_open(self) -> bool:
        """Whether the first image still has to set the size of all."""
        return self.size is None and self.resize not in OWN_SIZE

    def for_images_of(self, shape: tuple[int, ...]) -> Preprocessing:
        """The same preprocessing with the size of a first image of this shape, if no size was given.

        Images of more than `LARGE_SIDE` pixels along a side, such as photographs, are resized to squares of
        `DEFAULT_SIDE` pixels instead: full resolution would take hours and gigabytes that nobody asked for.
        """
        if not self.is_open:
            return self
        height, width = shape[-2:]
        if max(height, width) <= LARGE_SIDE:
            return replace(self, size=(height, width), resize="exact")
        side = f"{DEFAULT_SIDE}x{DEFAULT_SIDE} pixels"
        message = f"the first image is {size_text((height, width))}; all images are resized to {side}"
        warnings.warn(AdviceWarning(f"{message}. Set `size` for another size", options=("size",)), stacklevel=2)
        return replace(self, size=(DEFAULT_SIDE, DEFAULT_SIDE), resize="stretch")

    def _to_unit(self, pixels: Pixels, name: str) -> Image:
        _check_numbers(pixels, name)
        if np.iscomplexobj(pixels):
            raise InputError(f"{name} is complex; set `magnitude` to 'log' for radar", options=("magnitude",))
        if self.value_range is None and pixels.dtype.kind == "f":
            low, high = -1.0, 1.0
        else:
            low, high = self.value_range or _type_range(pixels, name, "(low, high)")
        darkest, brightest, slack = float(pixels.min()), float(pixels.max()), 5e-4 * (high - low)
        if darkest < low - slack or brightest > high + slack:
            given = f"{name} has values from {darkest:g} to {brightest:g}, outside [{low:g}, {high:g}]"
            raise InputError(f"{given}; set `value_range` to black and white", options=("value_range",))
        unit, rows = np.empty(pixels.shape, dtype=np.float32), max(1, _BLOCK // pixels[0].size)
        for top in range(0, len(pixels), rows):
            # float64 here: the same picture as uint8 and as float must give the same float32
            block = (pixels[top : top + rows].astype(np.float64) - low) * (2.0 / (high - low)) - 1.0
            unit[top : top + rows] = block.clip(-1.0, 1.0)
        return unit

    def _to_size(self, image: Image, name: str) -> Image:
        least = OWN_SIZE.get(self.resize, 0) * self.multiple
        if min(image.shape[:2]) < least:
            raise InputError(f"{name} is smaller than {least} pixels, the smallest that the network takes")
        if self.size is not None and image.shape[:2] != self.size:
            given, wanted = size_text(image.shape), f"{self.size[1]}x{self.size[0]}"
            if self.resize == "exact":
                advice = "set `size` (and `resize` to 'stretch' or 'crop') to bring all images to one size"
                raise InputError(f"{name} has {given} but {wanted} is expected; {advice}", options=("size", "resize"))
            if self.resize == "cut" and (image.shape[0] < self.size[0] or image.shape[1] < self.size[1]):
                raise InputError(f"{name} has {given}, too small to cut {wanted} out of it")
        top, left, height, width = self.window((image.shape[0], image.shape[1]))
        part = image[top : top + height, left : left + width]
        size = self.network_size((image.shape[0], image.shape[1]))
        return part if size == (height, width) else _resized(part, size)

    def ignored(self, size: tuple[int, ...]) -> npt.NDArray[np.bool_] | None:
        """The ignored pixels of a map of this (height, width), each touched by the mask; None without a mask."""
        if self.ignore is None:
            return None
        top, left, height, width = self.window(self.ignore.size)
        part = self.ignore.array(self.ignore.size)[top : top + height, left : left + width]
        return _resized(part[..., None].astype(np.float32), (size[0], size[1]))[..., 0] > 0.0

    def network_size(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(H, W) of an image of this (H, W) as the network sees it."""
        _, _, height, width = self.window(shape)
        by = OWN_SIZE.get(self.resize, 1)
        return self.size or (height // by, width // by)

    def shown(self, pixels: Pixels, name: str, most: int) -> Image:
        """The part of an image that is used, preprocessed at its own resolution, with sides of at most `most` pixels.

        It is for pictures: the network may see fewer pixels.
        """
        whole = replace(self, size=None, resize="exact")(pixels, name)
        top, left, height, width = self.window((whole.shape[1], whole.shape[2]))
        part = whole[:, top : top + height, left : left + width]
        shrink = max(height, width) / most
        if shrink <= 1.0:
            return part
        size = (max(1, round(height / shrink)), max(1, round(width / shrink)))
        return np.ascontiguousarray(_resized(part.transpose(1, 2, 0), size).transpose(2, 0, 1))

    def window(self, shape: tuple[int, int]) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the part of an image of this (H, W) that is used, before it is resized."""
        height, width = shape
        if self.resize in OWN_SIZE:
            step = OWN_SIZE[self.resize] * self.multiple
            height, width = height - height % step, width - width % step
        elif self.size is not None and self.resize == "cut":
            height, width = self.size
        elif self.size is not None and self.resize == "crop":
            scale = min(height / self.size[0], width / self.size[1])
            height, width = max(1, round(self.size[0] * scale)), max(1, round(self.size[1] * scale))
        return (shape[0] - height) // 2, (shape[1] - width) // 2, height, width


def accepted_channels(channels: int) -> tuple[int, ...]:
    """Channel counts of images that a backbone of `channels` can take: grey and RGB are converted to each other."""
    return (1, 3) if channels in (1, 3) else (channels,)


def log_magnitude(pixels: Pixels, value_range: tuple[float, float] | None = None, name: str = "image") -> Array:
    """Log-magnitude y in [0, 1] of real or complex pixels, as defined at the top of this module.

    Pixels brighter than white in `value_range`, (no echo, white), saturate, as in 8-bit products.
    """
    _check_numbers(pixels, name)
    black, white = value_range or _type_range(pixels, name, "(0, white)")
    magnitude = np.abs(pixels).astype(np.float64) if np.iscomplexobj(pixels) else pixels.astype(np.float64)
    share = (magnitude - black) / (white - black)
    if float(share.min()) < -1e-3:
        below = f"{name} has magnitudes down to {magnitude.min():g}, below {black:g}"
        advice = "for pixels in decibels set `magnitude` to 'linear' and `value_range` to (low, high)"
        raise InputError(f"{below}; {advice}", options=("magnitude", "value_range"))
    return np.asarray(np.log1p(_LOG_SCALE * share.clip(0.0, 1.0)) / np.log1p(_LOG_SCALE))


def from_log_magnitude(y: Array) -> Array:
    """The magnitude |x| / white of a log-magnitude y: the inverse of `log_magnitude`."""
    return np.asarray(np.expm1(y * np.log1p(_LOG_SCALE)) / _LOG_SCALE)


def rgb_picture(image: Image, bands: tuple[int, ...] | None = None) -> Image:
    """A preprocessed image (C, H, W) as (H, W, 3) in [0, 1] for display.

    `bands` are shown as red, green and blue, or one as grey, counted from 1; by default the first three, or the first.
    """
    if bands is None:
        bands = (1, 2, 3) if len(image) >= 3 else (1,)
    if len(bands) not in (1, 3) or not all(1 <= band <= len(image) for band in bands):
        raise OptionError(f"choose one or three bands to show, from 1 to {len(image)}; got {bands}")
    shown = image[[band - 1 for band in (bands if len(bands) == 3 else bands * 3)]]
    return np.asarray(((shown.transpose(1, 2, 0) + 1.0) * 0.5).clip(0.0, 1.0), dtype=np.float32)


def _normalised(y: Array, normalise: str) -> Image:
    if normalise == "fixed":
        return np.asarray(2.0 * y - 1.0, dtype=np.float32)
    deviation = float(y.std())
    if deviation < 1e-9:  # no contrast
        return np.zeros(y.shape, dtype=np.float32)
    return np.asarray(((y - y.mean()) / (_PATCH_DEVIATIONS * deviation)).clip(-1.0, 1.0), dtype=np.float32)


def _check_numbers(pixels: Pixels, name: str) -> None:
    """Refuse what is not finite, and text, dates and records, which numpy would convert or reject in its own words."""
    if pixels.dtype.kind not in "uifbc":
        raise InputError(f"{name} holds {pixels.dtype}, not numbers; save the pixels as integers or floats")
    if pixels.dtype.kind in "fc" and not np.isfinite(pixels).all():
        raise InputError(f"{name} has NaN or infinite pixels; mask or replace them, or leave the image out")


def _type_range(pixels: Pixels, name: str, example: str) -> tuple[float, float]:
    known = VALUE_RANGES.get(pixels.dtype.name)
    if known is None:
        unknown = f"{name} has {pixels.dtype} pixels, whose range is not known"
        raise InputError(f"{unknown}; set `value_range` to {example}", options=("value_range",))
    return known


def _resized(image: Image, size: tuple[int, int]) -> Image:
    """Bilinear with antialiasing, per channel in float: no rounding to 8 bits on the way."""
    planes = (PILImage.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(image, 2, 0))
    resized = [plane.resize((size[1], size[0]), PILImage.Resampling.BILINEAR) for plane in planes]
    return np.stack([np.asarray(plane, dtype=np.float32) for plane in resized], axis=2).clip(-1.0, 1.0)


def warn_about_range(images: Images, value_range: tuple[float, float] | None) -> None:
    """Warn if the first float images have no negative value: they are read as [-1, 1], but may be in [0, 1]."""
    if value_range is not None:
        return
    arrays = (record.pixels for record in images.first(_RANGE_SAMPLE) if record.pixels is not None)
    floats = (pixels for pixels in arrays if pixels.dtype.kind == "f" and pixels.size and np.isfinite(pixels).all())
    lowest = [pixels.min() for pixels in floats]
    if lowest and min(lowest) >= 0.0:
        message = "float images without a negative value are read as [-1, 1]"
        advice = "if they are in [0, 1], set `value_range` to (0, 1)"
        warnings.warn(ValueRangeWarning(f"{message}; {advice}", options=("value_range",)), stacklevel=3)


def window_starts(length: int, size: int, stride: int, slack: int = 0) -> list[int]:
    """First positions of windows of `size` pixels along a side of `length`: 0, stride, 2 stride, ...

    A last window, flush with the end, is added where more than `slack` pixels would not be covered.
    """
    starts = list(range(0, length - size + 1, stride))
    return [*starts, length - size] if length - size - starts[-1] > slack else starts

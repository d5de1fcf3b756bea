"""Pixels in, one float32 (C, H, W) array in [-1, 1] out. Nothing about range, size or channels is guessed silently."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import numpy as np

from gepc.core.errors import InputError, OptionError, ValueRangeWarning, check_choice
from gepc.images.magnitude import MAGNITUDES, NORMALISATIONS, log_magnitude, normalised
from gepc.images.sources import Image, Images, Pixels, check_numbers, iterate

RESIZES = ("stretch", "crop", "cut", "exact")
_DTYPE_RANGE = {"uint8": (0.0, 255.0), "uint16": (0.0, 65535.0), "bool": (0.0, 1.0)}
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)


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
        differences of level between patches) or on the patch's own (`patch`); see `gepc.images.magnitude`. `linear`
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
        check_numbers(pixels, name)
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


def warn_about_range(images: Images, value_range: tuple[float, float] | None, checked: int = 16) -> None:
    """Warn when float images hold no negative value: they are read as [-1, 1] and are perhaps in [0, 1]."""
    if value_range is not None:
        return
    suspicious = False
    for index in range(min(len(images), checked)):
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

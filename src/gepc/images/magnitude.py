"""Log-magnitude of radar pixels, in [-1, 1]. Pixel by pixel: nothing here smooths, so speckle stays as it is.

With a = |x| / white in [0, 1] and D = 255,

    y = log(1 + D a) / log(1 + D)  in [0, 1]

D is the same for every depth, so that one scene gives the same y as 8-bit, 16-bit, float or complex pixels. Then

    fixed   2 y - 1: levels stay comparable between patches; a brighter sea is a brighter picture.
    patch   (y - mean)/(4 std), cut at -1 and 1: the patch's own level and contrast are taken out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError
from gepc.images.sources import check_numbers

MAGNITUDES = ("linear", "log")
NORMALISATIONS = ("fixed", "patch")
DYNAMIC = 255.0
SPREAD = 4.0
_WHITE = {"uint8": 255.0, "uint16": 65535.0, "bool": 1.0}


def log_magnitude(
    pixels: npt.NDArray[Any], value_range: tuple[float, float] | None = None, name: str = "image"
) -> npt.NDArray[np.float64]:
    """y in [0, 1]. `value_range` is (no echo, white); brighter pixels saturate, as they do in 8-bit products.

    Float and complex pixels have no white of their own: the range must be given.
    """
    check_numbers(pixels, name)
    black, white = _range(pixels, value_range, name)
    magnitude = np.abs(pixels).astype(np.float64) if np.iscomplexobj(pixels) else pixels.astype(np.float64)
    if not np.isfinite(magnitude).all():
        count = int((~np.isfinite(magnitude)).sum())
        raise InputError(f"{name} has {count} NaN or infinite pixels (no data); leave such patches out or mask them")
    share = (magnitude - black) / (white - black)
    if float(share.min()) < -1e-3:
        raise InputError(
            f"{name} has magnitudes down to {magnitude.min():g}, below {black:g}; magnitudes are not negative. "
            "For pixels in decibels use magnitude='linear' with value_range=(low, high)"
        )
    return np.asarray(np.log1p(DYNAMIC * share.clip(0.0, 1.0)) / np.log1p(DYNAMIC))


def normalised(y: npt.NDArray[np.float64], how: str) -> npt.NDArray[np.float32]:
    """[0, 1] to [-1, 1]; a patch without any contrast is 0 everywhere under `patch`."""
    if how == "fixed":
        return np.asarray(2.0 * y - 1.0, dtype=np.float32)
    deviation = float(y.std())
    if deviation < 1e-9:
        return np.zeros(y.shape, dtype=np.float32)
    return np.asarray(((y - y.mean()) / (SPREAD * deviation)).clip(-1.0, 1.0), dtype=np.float32)


def _range(pixels: npt.NDArray[Any], given: tuple[float, float] | None, name: str) -> tuple[float, float]:
    if given is not None:
        return given
    white = _WHITE.get(pixels.dtype.name)
    if white is None:
        raise InputError(f"{name} has {pixels.dtype} pixels, whose white is not known; give value_range=(0, white)")
    return (0.0, white)

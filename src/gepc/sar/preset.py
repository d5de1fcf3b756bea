"""Options of a radar detector, derived from the size of the targets. No image with a target is used.

**Group.** A half turn keeps the range and azimuth axes, whose resolution and clutter correlation differ; a quarter turn
would exchange them. It costs two passes per level.

**Pooling.** Ships cover about a thousandth of a patch, so the mean over the top 30 % of the pixels carries no
information on them. For a target of A pixels in a patch of H x W, the map is averaged in a box with two thirds of the
target's side, 2/3 sqrt(A), which fits into targets up to twice as long as wide, and pooled over the A/(H W) largest
values.

**Sides.** One-sided calibration (`z`, or `raw`, which gives the same order at a single level) treats only larger
residuals as suspicious. Use it if the backbone knows the clutter, or if targets are brighter and sharper than clutter,
so that structure can only increase the residual. Two-sided calibration (`abs_z`, `zscore`, `kde`) treats smaller
residuals as suspicious too. Use it if this is unknown, for instance if a backbone of another domain finds some targets
smoother than clutter; the price is more false alarms on calm sea.
"""

from __future__ import annotations

import math
from typing import Any

from gepc.core.errors import OptionError, check_choice

TARGET_PIXELS = 200
SIDES = {"one": "z", "two": "kde"}
LEVEL = 0.99


def local_pooling(target_pixels: float, size: int) -> dict[str, Any]:
    """The options `pool`, `window` and `topk` for targets of `target_pixels` pixels in patches of size x size."""
    if not 1 <= target_pixels <= size * size / 4:
        raise OptionError(f"target_pixels must be between 1 and a quarter of the patch, got {target_pixels}")
    window = 2 * round((2.0 / 3.0 * math.sqrt(target_pixels) - 1.0) / 2.0) + 1
    return {"pool": "local", "window": max(1, window), "topk": target_pixels / size**2}


def sar_options(
    target_pixels: float = TARGET_PIXELS, size: int = 256, sides: str = "one", normalise: str = "fixed"
) -> dict[str, Any]:
    """Options for `gepc.GEPC(backbone, **sar_options(...))`; change entries of the dictionary to override them.

    Parameters
    ----------
    target_pixels : area of a target in pixels.
    size : side of a patch in pixels.
    sides : `one` (only larger residuals are suspicious) or `two` (smaller ones too).
    normalise : `fixed` (one scale for all patches) or `patch` (mean and contrast of each patch removed).
    """
    check_choice("sides", sides, SIDES)
    return {
        "levels": str(LEVEL),
        "keep": None,
        "group": ["id", "rot180"],
        **local_pooling(target_pixels, size),
        "calibration": SIDES[sides],
        "size": size,
        "resize": "cut",
        "magnitude": "log",
        "normalise": normalise,
    }

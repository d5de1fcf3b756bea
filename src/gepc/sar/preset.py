"""The options of a radar detector, from the size of what it is to find. Nothing here looks at an image with a target.

**Group.** A half turn keeps the axes of range and azimuth, along which resolution and clutter correlation differ; a
quarter turn exchanges them. It costs two passes a level.

**Pooling.** Ships cover a thousandth of a patch, so a mean over the upper 30 % of the pixels says nothing of them.
For a target of A pixels in a patch of H x W, the map is averaged in a box whose side is two thirds of the target's,
2/3 sqrt(A), which fits into targets up to twice as long as wide, and pooled over the A/(H W) largest values.

**Sides.** One-sided (`z`, or `raw`, which orders one level alike): only a larger residual is suspicious. Right where
the backbone knows the clutter, or where targets are brighter and sharper: structure then only adds disagreement.
Two-sided (`abs_z`, `zscore`, `kde`): a smaller residual is suspicious too. Right where that is not known, as when a
backbone from another domain finds some targets smoother than clutter; it pays for this with false alarms on calm sea.
"""

from __future__ import annotations

import math
from typing import Any

from gepc.core.errors import OptionError

TARGET_PIXELS = 200
SIDES = {"one": "z", "two": "kde"}
LEVEL = 0.99


def local_pooling(target_pixels: float, size: int) -> dict[str, Any]:
    """`pool`, `window` and `topk` for targets of that many pixels in patches of size x size."""
    if not 1 <= target_pixels <= size * size / 4:
        raise OptionError(f"target_pixels must be between 1 and a quarter of the patch, got {target_pixels}")
    window = 2 * round((2.0 / 3.0 * math.sqrt(target_pixels) - 1.0) / 2.0) + 1
    return {"pool": "local", "window": max(1, window), "topk": target_pixels / size**2}


def sar_options(
    target_pixels: float = TARGET_PIXELS, size: int = 256, sides: str = "one", normalise: str = "fixed"
) -> dict[str, Any]:
    """Options for `gepc.GEPC(backbone, **sar_options(...))`; what is changed afterwards wins."""
    if sides not in SIDES:
        raise OptionError(f"sides is 'one' or 'two', got {sides!r}")
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

"""Maps as pictures: overlays, a colour bar and boxes, on one common scale or on one in which structure is visible."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image as PILImage
from PIL import ImageDraw

from gepc.core.palette import LIGHT
from gepc.images.sources import Image
from gepc.maps.regions import Region
from gepc.methods.pooling import Map

CAPTION, FRAME = 20, 4  # pixels
WHOLE = "unusual as a whole"


def readable_range(field: Map, limit: float) -> tuple[float, float]:
    """The values at which the colours of a map begin, and how far they reach, so that its structure is visible.

    Parameters
    ----------
    field : array (H, W)
        The map.
    limit : float
        The end of the common scale, `FittedDetector.map_limit`.

    Returns
    -------
    start : float
        0, or the median of a map that lies above the limit almost everywhere: the image is unusual as a whole.
    scale : float
        The limit, or the 99.5 % quantile of what exceeds `start` if that is larger. So a map below the limit has the
        colours of the common scale.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.maps.drawing import readable_range
    >>> readable_range(np.full((4, 4), 0.5), 3.0), readable_range(np.full((4, 4), 9.0), 3.0)
    ((0.0, 3.0), (9.0, 3.0))
    """
    median = float(np.median(field))
    start = median if median > limit else 0.0
    return start, max(limit, float(np.quantile(field, 0.995)) - start)


def drawn(
    picture: Image, field: Map, scale: float, regions: Sequence[Region], caption: str, start: float = 0.0
) -> PILImage.Image:
    """The image beside its overlay with numbered boxes and one colour bar, under a line of text.

    The colours run from `start` to `start + scale`. A start above 0 means that the image is unusual as a whole, which a
    frame and a label say; see `readable_range`.
    """
    enlarge = max(1, 256 // len(picture))
    both = np.concatenate([picture, overlay(picture, field - start, scale)], axis=1)
    pixels = np.rint(np.clip(both, 0.0, 1.0) * 255.0).astype(np.uint8).repeat(enlarge, axis=0).repeat(enlarge, axis=1)
    pixels = np.concatenate([pixels, colour_bar(len(pixels), scale, start=start)], axis=1)
    canvas = PILImage.new("RGB", (pixels.shape[1], len(pixels) + CAPTION), "white")
    canvas.paste(PILImage.fromarray(pixels), (0, CAPTION))
    pen = ImageDraw.Draw(canvas)
    pen.text((4, 4), caption, fill="black")
    if start > 0.0:
        height, width = enlarge * picture.shape[0], enlarge * picture.shape[1]
        pen.rectangle((width, CAPTION, 2 * width - 1, CAPTION + height - 1), outline=LIGHT["outside"], width=FRAME)
        where = (width + height // 32 + FRAME, CAPTION + height - FRAME - 16)
        pen.text(where, WHOLE, fill="white", stroke_width=1, stroke_fill=LIGHT["outside"])
    for region in regions:
        top, left, bottom, right = (side * enlarge for side in region.box)
        left, right = left + enlarge * picture.shape[1], right + enlarge * picture.shape[1]
        pen.rectangle((left, top + CAPTION, right - 1, bottom + CAPTION - 1), outline=LIGHT["inside"], width=2)
        pen.text((left + 3, top + CAPTION + 1), str(region.number), fill=LIGHT["inside"])
    return canvas


def colour_bar(height: int, scale: float, width: int = 64, start: float = 0.0) -> npt.NDArray[np.uint8]:
    """(height, width, 3): the colours of `overlay` on grey from `start` below over `scale`, with both numbers."""
    field = np.linspace(scale, 0.0, height, dtype=np.float32)[:, None].repeat(width // 4, axis=1)
    strip = overlay(np.full((*field.shape, 3), 0.5), field, scale)
    canvas = PILImage.new("RGB", (width, height), "white")
    canvas.paste(PILImage.fromarray((strip * 255.0).round().astype(np.uint8)), (4, 0))
    pen = ImageDraw.Draw(canvas)
    pen.text((width // 4 + 8, 2), f"{start + scale:.3g}", fill="black")
    pen.text((width // 4 + 8, max(14, height - 14)), f"{start:.3g}", fill="black")
    return np.asarray(canvas)


def overlay(picture: npt.NDArray[np.floating[Any]], field: Map, scale: float, strength: float = 0.75) -> Any:
    """An (H, W, 3) picture in [0, 1] under its map: transparent at 0, dark red to yellow at `scale` and above."""
    level = np.clip(field / scale, 0.0, 1.0)[..., None]
    heat = np.concatenate([np.clip(2.0 * level, 0.3, 1.0), np.clip(2.0 * level - 0.8, 0.0, 1.0), 0.1 * level], axis=2)
    opacity = strength * level
    return picture * (1.0 - opacity) + heat * opacity


def resized(field: Map, size: tuple[int, int]) -> Map:
    """A map resized bilinearly to (height, width)."""
    if field.shape == size:
        return field
    return np.asarray(PILImage.fromarray(field).resize(size[::-1], PILImage.Resampling.BILINEAR), dtype=np.float32)

"""One picture of the whole scene: the map over it on the common scale, and the numbered regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.core.files import replacing
from gepc.core.palette import DARK
from gepc.detector.maps import overlay
from gepc.images.formats import Pixels
from gepc.scenes.folder import StoredMap
from gepc.scenes.reading import Scene, Valid
from gepc.scenes.regions import Region

LONGEST, FOOTER, SMALL = 2000, 56, 900
WINDOW_PIXELS = 1 << 20
NUMBERED = 99
_NO_DATA = 0.35

Read = Callable[[int, int, int, int], tuple[Pixels, Valid]]


def shrink(read: Read, height: int, width: int, factor: int) -> npt.NDArray[np.float64]:
    """Means over factor x factor blocks of the pixels that are there, (H', W', C); NaN where none is. By windows."""
    rows, columns = -(-height // factor), -(-width // factor)
    high = max(1, min(rows, WINDOW_PIXELS // (factor * factor * columns)))
    wide = max(1, min(columns, WINDOW_PIXELS // (factor * factor * high)))
    out: npt.NDArray[np.float64] | None = None
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            top, left = row * factor, column * factor
            lines, places = min(high * factor, height - top), min(wide * factor, width - left)
            part = _block_means(*read(top, left, lines, places), factor)
            if out is None:
                out = np.full((rows, columns, part.shape[2]), np.nan)
            out[row : row + part.shape[0], column : column + part.shape[1]] = part
    assert out is not None
    return out


def _block_means(pixels: Pixels, valid: Valid, factor: int) -> npt.NDArray[np.float64]:
    values = np.where(valid[..., None], pixels if pixels.ndim == 3 else pixels[..., None], 0).astype(np.float64)
    lines, places = np.arange(0, values.shape[0], factor), np.arange(0, values.shape[1], factor)
    total = np.add.reduceat(np.add.reduceat(values, lines, axis=0), places, axis=1)
    count = np.add.reduceat(np.add.reduceat(valid.astype(np.float64), lines, axis=0), places, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / count[..., None])


def write_overview(
    path: Path, scene: Scene, field: StoredMap | None, scale: float | None, regions: Sequence[Region], caption: str
) -> None:
    """A PNG of at most 2000 pixels on its longer side.

    Scene and map are shrunk by block means. 8-bit scenes are shown as they are, others between the 2 % and 98 %
    quantiles of what is shown; this concerns the picture only. Missing pixels are grey.
    """
    longest = max(scene.height, scene.width)
    factor = -(-longest // (LONGEST - FOOTER))
    picture = _shown(shrink(scene.read_around_damage, scene.height, scene.width, factor), scene.dtype)
    if field is not None and scale is not None:
        picture = _heated(picture, field, scale, factor)
    enlarge = max(1, SMALL // max(picture.shape[:2]))
    pixels = np.rint(picture.clip(0.0, 1.0) * 255.0).astype(np.uint8).repeat(enlarge, 0).repeat(enlarge, 1)
    _draw(path, pixels, enlarge / factor, regions, scale if field is not None else None, caption)


def _shown(values: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.float64]:
    """(H, W, 3) in [0, 1]."""
    values = values[..., :3] if values.shape[2] >= 3 else np.repeat(values[..., :1], 3, axis=2)
    there = ~np.isnan(values).any(axis=2)
    low, high = 0.0, 255.0
    if dtype != "uint8" and there.any():
        low, high = (float(value) for value in np.quantile(values[there], [0.02, 0.98]))
    picture = np.full(values.shape, _NO_DATA)
    picture[there] = ((values[there] - low) / ((high - low) or 1.0)).clip(0.0, 1.0)
    return picture


def _heated(picture: npt.NDArray[np.float64], field: StoredMap, scale: float, factor: int) -> npt.NDArray[np.float64]:
    def read(top: int, left: int, height: int, width: int) -> tuple[Pixels, Valid]:
        part = field[top : top + height, left : left + width]
        return part, ~np.isnan(part)

    means = shrink(read, field.shape[0], field.shape[1], factor)[..., 0]
    heated = overlay(picture, np.nan_to_num(means, nan=0.0).astype(np.float32), scale or 1.0)
    return np.asarray(heated, dtype=np.float64)


def _draw(
    path: Path, pixels: npt.NDArray[np.uint8], zoom: float, regions: Sequence[Region], scale: float | None, caption: str
) -> None:
    from PIL import Image, ImageDraw, ImageFont

    height, width = pixels.shape[:2]
    sheet = Image.new("RGB", (max(width, 420), height + FOOTER), DARK["paper"])
    sheet.paste(Image.fromarray(pixels), (0, 0))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for region in reversed(regions):  # the first ones on top
        _draw_region(draw, region, zoom, font, (width, height))
    draw.text((8, height + 6), caption, fill=DARK["ink"], font=font)
    if scale is not None:
        _draw_bar(sheet, draw, height + 32, scale, font)
    with replacing(path) as draft:
        sheet.save(draft, format="PNG")


def _draw_region(draw: Any, region: Region, zoom: float, font: Any, size: tuple[int, int]) -> None:
    top, left, bottom, right = (round(edge * zoom) for edge in region.box)
    box = (left, top, min(max(right - 1, left + 2), size[0] - 1), min(max(bottom - 1, top + 2), size[1] - 1))
    draw.rectangle((box[0] - 1, box[1] - 1, box[2] + 1, box[3] + 1), outline=DARK["paper"])
    draw.rectangle(box, outline=DARK["series5"], width=2)
    if region.number > NUMBERED:
        return
    text = str(region.number)
    wide = draw.textlength(text, font=font) + 6
    x = min(left, size[0] - int(wide))
    y = top - 17 if top >= 17 else min(box[3] + 1, size[1] - 17)
    draw.rectangle((x, y, x + wide, y + 16), fill=DARK["series5"])
    draw.text((x + 3, y), text, fill=DARK["paper"], font=font)


def _draw_bar(sheet: Any, draw: Any, top: int, scale: float, font: Any) -> None:
    """The overlay's colours on black, from 0 to the common scale; what lies above has the colour of its end."""
    from PIL import Image

    ramp = np.repeat(np.linspace(0.0, 1.0, 160, dtype=np.float32)[None], 12, axis=0)
    colours = overlay(np.zeros((12, 160, 3)), ramp, 1.0, strength=1.0)
    sheet.paste(Image.fromarray(np.rint(colours * 255.0).astype(np.uint8)), (24, top + 3))
    draw.rectangle((23, top + 2, 184, top + 15), outline=DARK["muted"])
    draw.text((8, top), "0", fill=DARK["ink"], font=font)
    longest_first = (
        f"{scale:.3g} and above: map, common scale; grey: no data",
        f"{scale:.3g}+; grey: no data",
        f"{scale:.3g}",
    )
    fits = (text for text in longest_first if 190 + draw.textlength(text, font=font) <= sheet.width)
    draw.text((190, top), next(fits, longest_first[-1]), fill=DARK["ink"], font=font)

"""Formats of the results of a scan: an overview of the whole scene, and GeoJSON."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from gepc.core.files import replacing
from gepc.core.palette import DARK
from gepc.images.formats import Pixels
from gepc.maps.drawing import colour_bar, overlay
from gepc.scenes.folder import MapFile
from gepc.scenes.reading import PIXELS, Georeference, Scene, Valid
from gepc.scenes.regions import Detection, TileRegion

LONGEST, FOOTER, BAR, SMALL = 2000, 32, 64, 900  # pixels of the overview
WINDOW_PIXELS = 1 << 16
NO_DATA = 0.35
MARK = 9  # pixels, the radius of the circle around the peak of a detection

Read = Callable[[int, int, int, int], tuple[Pixels, Valid]]
Array = npt.NDArray[np.float64]


def write_overview(
    path: Path,
    scene: Scene,
    field: MapFile | None,
    scale: float | None,
    regions: Sequence[TileRegion],
    detections: Sequence[Detection],
    caption: str,
) -> None:
    """Write a PNG of the whole scene under its map, at most 2000 pixels on the longer side.

    Regions are numbered boxes, and detections are circles around their peaks.

    Scene and map are reduced by block means. 8-bit scenes are shown as they are, others between the 2 % and 98 %
    quantiles of the reduced scene. Missing pixels are grey. `scale` is the detector's common scale of maps.
    """
    factor = -(-max(scene.height, scene.width) // (LONGEST - BAR))
    picture = _shown(shrink(scene.read_or_missing, scene.height, scene.width, factor), scene.dtype)
    if field is not None and scale is not None:
        means = shrink(field.read, *field.shape, factor)[..., 0]
        picture = np.asarray(overlay(picture, np.nan_to_num(means).astype(np.float32), scale or 1.0))
    enlarge = max(1, SMALL // max(picture.shape[:2]))
    pixels = np.rint(picture.clip(0.0, 1.0) * 255.0).astype(np.uint8).repeat(enlarge, 0).repeat(enlarge, 1)
    if field is not None and scale is not None:
        pixels = np.concatenate([pixels, colour_bar(len(pixels), scale, BAR)], axis=1)
    height, width = pixels.shape[:2]
    sheet = Image.new("RGB", (max(width, 420), height + FOOTER), DARK["paper"])
    sheet.paste(Image.fromarray(pixels), (0, 0))
    draw, font, zoom = ImageDraw.Draw(sheet), ImageFont.load_default(14), enlarge / factor
    for detection in detections:
        y, x = (round((index + 0.5) * zoom) for index in detection.peak)
        draw.ellipse((x - MARK, y - MARK, x + MARK, y + MARK), outline=DARK["ink"], width=2)
    for region in reversed(regions):  # the first ones on top
        top, left, bottom, right = (round(edge * zoom) for edge in region.box)
        draw.rectangle(
            (left, top, max(right - 1, left + 2), max(bottom - 1, top + 2)), outline=DARK["series5"], width=2
        )
        draw.text((left + 4, top + 2), str(region.number), fill=DARK["series5"], font=font)
    draw.text((8, height + 6), f"{caption}; grey: no data", fill=DARK["ink"], font=font)
    with replacing(path) as draft:
        sheet.save(draft, format="PNG")


def shrink(read: Read, height: int, width: int, factor: int) -> Array:
    """Means over factor x factor blocks of the valid pixels, (H', W', C), NaN where there are none; read by windows."""
    rows, columns = -(-height // factor), -(-width // factor)
    high = max(1, min(rows, WINDOW_PIXELS // (factor * factor * columns)))
    wide = max(1, min(columns, WINDOW_PIXELS // (factor * factor * high)))
    strips = []
    for top in range(0, height, high * factor):
        lines = min(high * factor, height - top)
        cuts = range(0, width, wide * factor)
        windows = ((top, left, lines, min(wide * factor, width - left)) for left in cuts)
        strips.append(np.concatenate([_block_means(*read(*window), factor) for window in windows], axis=1))
    return np.concatenate(strips)


def _block_means(pixels: Pixels, valid: Valid, factor: int) -> Array:
    values = np.where(valid[..., None], pixels if pixels.ndim == 3 else pixels[..., None], 0).astype(np.float64)
    lines, places = np.arange(0, values.shape[0], factor), np.arange(0, values.shape[1], factor)
    total = np.add.reduceat(np.add.reduceat(values, lines, axis=0), places, axis=1)
    count = np.add.reduceat(np.add.reduceat(valid.astype(np.float64), lines, axis=0), places, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total / count[..., None])


def _shown(values: Array, dtype: str) -> Array:
    """(H, W, 3) in [0, 1]."""
    values = values[..., :3] if values.shape[2] >= 3 else np.repeat(values[..., :1], 3, axis=2)
    there = ~np.isnan(values).any(axis=2)
    low, high = 0.0, 255.0
    if dtype != "uint8" and there.any():
        low, high = (float(value) for value in np.quantile(values[there], [0.02, 0.98]))
    picture = np.full(values.shape, NO_DATA)
    picture[there] = ((values[there] - low) / ((high - low) or 1.0)).clip(0.0, 1.0)
    return picture


def geojson(items: Sequence[TileRegion | Detection], place: Georeference) -> dict[str, Any]:
    """A FeatureCollection in the coordinates of the file, with their CRS, or else in pixels with y downwards."""
    collection: dict[str, Any] = {"type": "FeatureCollection"}
    if place == PIXELS:
        collection["coordinates"] = "pixels: x to the right, y downwards, (0, 0) the upper left corner"
    elif place.crs is not None:
        name = place.crs if place.epsg is None else f"urn:ogc:def:crs:EPSG::{place.epsg}"
        collection["crs"] = {"type": "name", "properties": {"name": name}}
    collection["features"] = [
        {"type": "Feature", "geometry": item.geometry(place), "properties": item.properties(place)} for item in items
    ]
    return collection

"""The results of a scan, from its tile records: flags, regions, map, an overview picture and `scene.json`."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import label

from gepc.core.errors import InputError
from gepc.core.files import replacing, write_json, write_text
from gepc.core.palette import DARK
from gepc.core.tables import write_rows
from gepc.detector.fitted import FittedDetector
from gepc.detector.storage import versions
from gepc.images.formats import Pixels
from gepc.maps.drawing import overlay
from gepc.maps.regions import Box, Region, numbered
from gepc.methods.pooling import Map
from gepc.scenes.reading import CACHE_BYTES, Georeference, Scene, Valid
from gepc.scenes.scoring import MapFile, ScanFolder
from gepc.scenes.tiling import Grid

if TYPE_CHECKING:
    from gepc.scenes.scan import ScanPlan

COLUMNS = (
    *("region", "score", "p_value", "tiles", "top", "left", "bottom", "right"),
    *("peak", "peak_line", "peak_column", "hot_top", "hot_left", "hot_bottom", "hot_right", "x", "y"),
)
TILE_COLUMNS = ("row", "column", "top", "left", "missing", "score", "p_value", "alarm", "error")
LONGEST, FOOTER, SMALL = 2000, 56, 900  # pixels of the overview
BLOCK = 256  # pixels of a block of the TIFF
WINDOW_PIXELS = 1 << 20
NO_DATA = 0.35

# QGIS applies a style that has the name of the layer: the map as colours from transparent to its limit, regions as
# numbered outlines
MAP_STYLE, REGION_STYLE = (Path(__file__).with_name(name) for name in ("map.qml", "regions.qml"))

Read = Callable[[int, int, int, int], tuple[Pixels, Valid]]
Array = npt.NDArray[np.float64]
Boxes = npt.NDArray[np.int64]


class SceneWriter:
    """Writes the results of a scan whose tiles are all scored; if interrupted, it starts over."""

    def __init__(self, fitted: FittedDetector, scene: Scene, plan: ScanPlan, folder: ScanFolder) -> None:
        self.fitted, self.scene, self.plan, self.folder = fitted, scene, plan, folder
        shape = (len(plan.grid.tops), len(plan.grid.lefts))
        self.scores, self.p_values = np.full(shape, np.nan), np.full(shape, np.nan)
        self.flags = np.zeros(shape, dtype=bool)
        self.left_out = self.failed = 0

    def write(self) -> dict[str, Any]:
        """Write all files, `scene.json` last, and return its content."""
        self._gather()
        path, place = self.folder.path, self.scene.place
        scored = ~np.isnan(self.p_values)
        self.flags[scored] = self.plan.control.flags(self.p_values[scored])
        field, scale = (self.folder.map, self.fitted.map_limit()) if self.plan.with_map else (None, None)
        limit = scale or 1.0
        regions = find_regions(self.plan.grid, self.flags, self.scores, self.p_values, field, limit)
        write_rows(path / "tiles.csv", TILE_COLUMNS, self._rows())
        write_rows(path / "regions.csv", COLUMNS, (region.row(place) for region in regions))
        write_json(path / "regions.geojson", geojson(regions, place))
        write_text(path / "regions.qml", REGION_STYLE.read_text(encoding="utf-8"))
        caption = f"{len(regions)} regions, {self.flags.sum()} of {scored.sum()} tiles flagged"
        caption += f" ({self.plan.control.name}, {self.plan.control.alpha:g})"
        write_overview(path / "overview.png", self.scene, field, scale, regions, caption)
        summary = self._summary(len(regions), int(scored.sum()))
        if field is not None and self.plan.map_format == "tif":
            with replacing(path / "map.tif") as draft:
                write_tiff(draft, field, place)
            style = MAP_STYLE.read_text(encoding="utf-8").format(most=limit, half=limit / 2)
            write_text(path / "map.qml", style)
        elif field is not None:
            os.replace(field.path, path / "map.npy")
        self.folder.finish(summary)
        return self.folder.summary()

    def _gather(self) -> None:
        first: str | None = None
        for record in self.folder.log.rows():
            place = int(record["row"]), int(record["column"])
            if record["score"]:
                self.scores[place], self.p_values[place] = float(record["score"]), float(record["p_value"])
            elif record["left_out"]:
                self.left_out += 1
            else:
                self.failed += 1
                first = first or record["error"]
        if self.left_out + self.failed < len(self.plan.grid):
            return
        self.folder.run.clear()
        if first is None:
            raise InputError(
                f"{self.scene.path} has no tile to score: each of its {len(self.plan.grid)} tiles has more than "
                f"{self.plan.max_missing:.0%} no-data (max_missing)"
            )
        raise InputError(f"no tile of {self.scene.path} can be scored; the first error: {first}")

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for record in self.folder.log.rows():
            flagged = self.flags[int(record["row"]), int(record["column"])]
            record["alarm"] = str(bool(flagged)).lower() if record["score"] else ""
            yield tuple(record[name] for name in TILE_COLUMNS)

    def _summary(self, regions: int, scored: int) -> dict[str, Any]:
        plan, state, place = self.plan, self.folder.state(), self.scene.place
        n = plan.calibration_images
        files = {"tiles": "tiles.csv", "regions": "regions.csv", "geojson": "regions.geojson"}
        files |= {"overview": "overview.png", "region_style": "regions.qml"}
        if plan.with_map:
            files["map"] = f"map.{plan.map_format}"
            files |= {"map_style": "map.qml"} if plan.map_format == "tif" else {}
        counts = {"tiles": len(plan.grid), "scored": scored, "left_out": self.left_out, "failed": self.failed}
        return {
            "schema": 1,
            "scene": {"path": str(self.scene.path), **plan.identity["scene"]},
            "georeference": None if place is None else dataclasses.asdict(place),
            "detector": {"method": self.fitted.method.name, "digest": plan.identity["detector"]},
            "options": {name: value for name, value in plan.identity.items() if name not in ("scene", "detector")},
            "counts": {**counts, "flagged": int(self.flags.sum()), "regions": regions},
            "grid": {"rows": len(plan.grid.tops), "columns": len(plan.grid.lefts)},
            "network_passes": {"forward": state.forward, "jvp": state.jvp},
            "calibration_images": n,
            "smallest_p_value": 1.0 / (n + 1),
            "guarantee": plan.control.statement(scored, n),
            "warning": plan.control.shortfall(scored, n),
            "map_scale": self.fitted.map_limit() if plan.with_map else None,
            "files": files,
            "versions": versions("pillow", "scipy", "rasterio"),
        }


def write_tiff(path: Path, field: MapFile, place: Georeference | None) -> None:
    """Write a map as a cloud-optimised GeoTIFF with overviews, BigTIFF if needed, with NaN as the no-data value."""
    import rasterio
    from rasterio.errors import NotGeoreferencedWarning
    from rasterio.shutil import copy
    from rasterio.transform import Affine
    from rasterio.windows import Window

    height, width = field.shape
    plain = path.with_name(f"{path.name}.plain.part")  # a cloud-optimised file can only be written as a copy
    layout = {"driver": "GTiff", "tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK, "BIGTIFF": "IF_SAFER"}
    where = {} if place is None else {"transform": Affine(*place.transform), "crs": place.crs}
    with warnings.catch_warnings(), rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES):
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        try:
            with rasterio.open(
                plain, "w", width=width, height=height, count=1, dtype="float32", nodata=np.nan, **layout, **where
            ) as file:
                for top in range(0, height, BLOCK):
                    for left in range(0, width, 64 * BLOCK):
                        part = field[top : top + BLOCK, left : left + 64 * BLOCK]
                        file.write(part, 1, window=Window(left, top, part.shape[1], part.shape[0]))
            copy(plain, path, driver="COG", BLOCKSIZE=BLOCK, COMPRESS="DEFLATE", BIGTIFF="IF_SAFER")
        finally:
            plain.unlink(missing_ok=True)


def write_overview(
    path: Path, scene: Scene, field: MapFile | None, scale: float | None, regions: Sequence[TileRegion], caption: str
) -> None:
    """Write a PNG of the whole scene under its map, with numbered regions, at most 2000 pixels on the longer side.

    Scene and map are reduced by block means. 8-bit scenes are shown as they are, others between the 2 % and 98 %
    quantiles of the reduced scene. Missing pixels are grey. `scale` is the detector's common scale of maps.
    """
    factor = -(-max(scene.height, scene.width) // (LONGEST - FOOTER))
    picture = _shown(shrink(scene.read_around_damage, scene.height, scene.width, factor), scene.dtype)
    if field is not None and scale is not None:

        def part(top: int, left: int, height: int, width: int) -> tuple[Pixels, Valid]:
            values = field[top : top + height, left : left + width]
            return values, ~np.isnan(values)

        means = shrink(part, *field.shape, factor)[..., 0]
        picture = np.asarray(overlay(picture, np.nan_to_num(means).astype(np.float32), scale or 1.0))
    enlarge = max(1, SMALL // max(picture.shape[:2]))
    pixels = np.rint(picture.clip(0.0, 1.0) * 255.0).astype(np.uint8).repeat(enlarge, 0).repeat(enlarge, 1)
    _draw(path, pixels, enlarge / factor, regions, scale if field is not None else None, caption)


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


def _draw(
    path: Path, pixels: Pixels, zoom: float, regions: Sequence[TileRegion], scale: float | None, caption: str
) -> None:
    """Boxes with numbers on the picture; below it the caption and the colours of the overlay from 0 to `scale`."""
    height, width = pixels.shape[:2]
    sheet = Image.new("RGB", (max(width, 420), height + FOOTER), DARK["paper"])
    sheet.paste(Image.fromarray(pixels), (0, 0))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for region in reversed(regions):  # the first ones on top
        top, left, bottom, right = (round(edge * zoom) for edge in region.box)
        box = (left, top, min(max(right - 1, left + 2), width - 1), min(max(bottom - 1, top + 2), height - 1))
        draw.rectangle(box, outline=DARK["series5"], width=2)
        draw.text((left + 4, top + 2), str(region.number), fill=DARK["series5"], font=font)
    draw.text((8, height + 6), caption, fill=DARK["ink"], font=font)
    if scale is not None:
        ramp = np.repeat(np.linspace(0.0, 1.0, 160, dtype=np.float32)[None], 12, axis=0)
        colours = overlay(np.zeros((12, 160, 3)), ramp, 1.0, strength=1.0)
        sheet.paste(Image.fromarray(np.rint(colours * 255.0).astype(np.uint8)), (24, height + 35))
        draw.text((8, height + 32), "0", fill=DARK["ink"], font=font)
        draw.text((190, height + 32), f"{scale:.3g} and above; grey: no data", fill=DARK["ink"], font=font)
    with replacing(path) as draft:
        sheet.save(draft, format="PNG")


@dataclass(frozen=True)
class TileRegion(Region):
    """Connected flagged tiles."""

    tiles: int = 1
    peak: float | None = None  # the largest value of the map
    peak_place: tuple[int, int] | None = None
    hot: Box | None = None  # around the pixels above the common scale

    def row(self, place: Georeference | None) -> tuple[Any, ...]:
        """A row of `regions.csv`; x and y are the centre of the box in map coordinates, or in pixels."""
        top, left, bottom, right = self.box
        middle = ((left + right) / 2, (top + bottom) / 2)
        x, y = middle if place is None else place(*middle)
        numbers = (self.number, f"{self.score:.9g}", f"{self.p_value:.9g}", self.tiles, *self.box)
        peak = ("", "", "") if self.peak is None else (f"{self.peak:.6g}", *(self.peak_place or ("", "")))
        return (*numbers, *peak, *(self.hot or ("", "", "", "")), f"{x:.10g}", f"{y:.10g}")

    def feature(self, place: Georeference | None) -> dict[str, Any]:
        """A GeoJSON feature: the box as a polygon, rotated if the axes of the file are."""
        top, left, bottom, right = self.box
        corners = [(left, top), (left, bottom), (right, bottom), (right, top), (left, top)]
        ring = [list(map(float, corner)) if place is None else list(place(*corner)) for corner in corners]
        properties = {
            "region": self.number,
            "score": self.score,
            "p_value": self.p_value,
            "tiles": self.tiles,
            "pixel_box": {"top": top, "left": left, "bottom": bottom, "right": right},
            "peak": self.peak,
        }
        return {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}, "properties": properties}


def find_regions(
    grid: Grid, flags: Valid, scores: Array, p_values: Array, field: Map | MapFile | None = None, scale: float = 1.0
) -> list[TileRegion]:
    """Regions of the flagged tiles, the highest score first.

    The scene is cut along the borders of the flagged tiles, and cells of tiles are connected over sides and corners.
    `flags`, `scores` and `p_values` have the rows and columns of the grid; `field` is the map, hot above `scale`.
    """
    rows, columns = np.nonzero(flags)
    if len(rows) == 0:
        return []
    tops, lefts = np.asarray(grid.tops)[rows], np.asarray(grid.lefts)[columns]
    boxes = np.stack([tops, lefts, tops + grid.tile[0], lefts + grid.tile[1]], axis=1)
    lines, places = np.unique(boxes[:, ::2]), np.unique(boxes[:, 1::2])
    first, last = np.searchsorted(lines, boxes[:, ::2]).T
    left, right = np.searchsorted(places, boxes[:, 1::2]).T
    cells = np.zeros((len(lines), len(places)), dtype=bool)
    for tile in range(len(boxes)):
        cells[first[tile] : last[tile], left[tile] : right[tile]] = True
    labels = label(cells, structure=np.ones((3, 3)))[0][first, left]
    order = np.argsort(labels, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    scores, p_values = scores[rows, columns], p_values[rows, columns]
    return numbered(_region(boxes[tiles], scores[tiles], p_values[tiles], field, scale) for tiles in groups)


def _region(boxes: Boxes, scores: Array, p_values: Array, field: Map | MapFile | None, scale: float) -> TileRegion:
    region = TileRegion(0, float(scores.max()), float(p_values.min()), _around(boxes), len(boxes))
    peaks, hot = [], []
    for top, left, bottom, right in boxes.tolist() if field is not None else ():
        values = np.asarray(field[top:bottom, left:right])  # type: ignore[index]
        if np.isnan(values).all():  # no data
            continue
        line, column = (int(place) for place in np.unravel_index(int(np.nanargmax(values)), values.shape))
        peaks.append((float(values[line, column]), (top + line, left + column)))
        lines, columns = np.nonzero(values > scale)
        if len(lines):
            hot.append((top + lines.min(), left + columns.min(), top + lines.max() + 1, left + columns.max() + 1))
    if not peaks:
        return region
    peak, place = max(peaks, key=lambda found: found[0])
    return replace(region, peak=peak, peak_place=place, hot=_around(np.array(hot)) if hot else None)


def _around(boxes: Boxes) -> Box:
    top, left = boxes[:, :2].min(axis=0)
    bottom, right = boxes[:, 2:].max(axis=0)
    return int(top), int(left), int(bottom), int(right)


def geojson(regions: list[TileRegion], place: Georeference | None) -> dict[str, Any]:
    """A FeatureCollection in the coordinates of the file, with their CRS, or else in pixels with y downwards."""
    collection: dict[str, Any] = {"type": "FeatureCollection"}
    if place is None:
        collection["coordinates"] = "pixels: x to the right, y downwards, (0, 0) the upper left corner"
    elif place.crs is not None:
        name = place.crs if place.epsg is None else f"urn:ogc:def:crs:EPSG::{place.epsg}"
        collection["crs"] = {"type": "name", "properties": {"name": name}}
    collection["features"] = [region.feature(place) for region in regions]
    return collection

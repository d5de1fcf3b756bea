"""Regions: flagged tiles that touch or overlap, with their score, p-value and coordinates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.features.pooling import Map
from gepc.scenes.reading import Georeference
from gepc.scenes.scoring import MapFile
from gepc.scenes.tiling import Grid

Box = tuple[int, int, int, int]
COLUMNS = (
    *("region", "score", "p_value", "tiles", "top", "left", "bottom", "right"),
    *("peak", "peak_line", "peak_column", "hot_top", "hot_left", "hot_bottom", "hot_right", "x", "y"),
)


@dataclass(frozen=True)
class Region:
    """Connected flagged tiles. A box is (top, left, bottom, right), with the lower and right ends excluded.

    Parameters
    ----------
    number : 1 for the highest score.
    score : highest score of its tiles.
    p_value : smallest p-value of its tiles.
    tiles : number of tiles.
    box : box around its tiles.
    peak : largest value of the map, None if the method has no maps.
    peak_place : (line, column) of that value.
    hot : box around the pixels where the map exceeds the common scale, if there are any.
    """

    number: int
    score: float
    p_value: float
    tiles: int
    box: Box
    peak: float | None = None
    peak_place: tuple[int, int] | None = None
    hot: Box | None = None

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


@dataclass
class _Growing:
    score: float = -np.inf
    p_value: float = 1.0
    tiles: int = 0
    box: Box | None = None
    peak: float | None = None
    peak_place: tuple[int, int] | None = None
    hot: Box | None = None

    def add(self, box: Box, score: float, p_value: float) -> None:
        self.score, self.p_value = max(self.score, score), min(self.p_value, p_value)
        self.tiles += 1
        self.box = _around(self.box, box)

    def add_map(self, box: Box, values: Map, scale: float) -> None:
        """Include the map inside one tile; NaN is no-data."""
        if np.isnan(values).all():
            return
        line, column = (int(place) for place in np.unravel_index(int(np.nanargmax(values)), values.shape))
        value = float(values[line, column])
        if self.peak is None or value > self.peak:
            self.peak, self.peak_place = value, (box[0] + line, box[1] + column)
        lines, columns = np.nonzero(values > scale)
        if len(lines):
            inside = (lines.min(), columns.min(), lines.max() + 1, columns.max() + 1)
            top, left, bottom, right = (int(edge) for edge in inside)
            self.hot = _around(self.hot, (box[0] + top, box[1] + left, box[0] + bottom, box[1] + right))


def _around(first: Box | None, second: Box) -> Box:
    if first is None:
        return second
    low, high = np.minimum(first, second), np.maximum(first, second)
    return int(low[0]), int(low[1]), int(high[2]), int(high[3])


def find_regions(
    grid: Grid,
    flags: npt.NDArray[np.bool_],
    scores: npt.NDArray[np.float64],
    p_values: npt.NDArray[np.float64],
    field: Map | MapFile | None = None,
    scale: float = 1.0,
) -> list[Region]:
    """Regions of the flagged tiles, the highest score first.

    The scene is cut along the borders of all tiles; cells of flagged tiles are connected over sides and corners.

    Parameters
    ----------
    grid : the tiles; the arrays below have its rows and columns.
    flags : which tiles are flagged.
    scores : scores of the tiles.
    p_values : p-values of the tiles.
    field : the map of the scene.
    scale : common scale of maps; pixels above it are hot.
    """
    from scipy.ndimage import label

    cuts = [_cuts(grid.tops, grid.tile[0]), _cuts(grid.lefts, grid.tile[1])]
    cells = np.zeros((len(cuts[0]), len(cuts[1])), dtype=bool)
    flagged = [(int(row), int(column)) for row, column in np.argwhere(flags)]
    boxes = [_box(grid, row, column) for row, column in flagged]
    corners = [(*np.searchsorted(cuts[0], box[::2]), *np.searchsorted(cuts[1], box[1::2])) for box in boxes]
    for top, bottom, left, right in corners:
        cells[top:bottom, left:right] = True
    labels, count = label(cells, structure=np.ones((3, 3)))
    growing = [_Growing() for _ in range(count)]
    for (row, column), box, (top, _, left, _) in zip(flagged, boxes, corners, strict=True):
        region = growing[int(labels[top, left]) - 1]
        region.add(box, float(scores[row, column]), float(p_values[row, column]))
        if field is not None:
            region.add_map(box, np.asarray(field[box[0] : box[2], box[1] : box[3]]), scale)
    return list(_numbered(growing))


def _numbered(growing: list[_Growing]) -> Iterator[Region]:
    found = [
        Region(0, it.score, it.p_value, it.tiles, it.box, it.peak, it.peak_place, it.hot)
        for it in growing
        if it.box is not None
    ]
    for number, region in enumerate(sorted(found, key=lambda region: (-region.score, region.box)), start=1):
        yield replace(region, number=number)


def _cuts(starts: tuple[int, ...], tile: int) -> npt.NDArray[np.int64]:
    return np.unique(np.concatenate([np.asarray(starts), np.asarray(starts) + tile]))


def _box(grid: Grid, row: int, column: int) -> Box:
    top, left = grid.tops[row], grid.lefts[column]
    return top, left, top + grid.tile[0], left + grid.tile[1]


def geojson(regions: list[Region], place: Georeference | None) -> dict[str, Any]:
    """A FeatureCollection in the coordinates of the file, with their CRS, or else in pixels with y downwards."""
    collection: dict[str, Any] = {"type": "FeatureCollection"}
    if place is None:
        collection["coordinates"] = "pixels: x to the right, y downwards, (0, 0) the upper left corner"
    elif place.crs is not None:
        name = place.crs if place.epsg is None else f"urn:ogc:def:crs:EPSG::{place.epsg}"
        collection["crs"] = {"type": "name", "properties": {"name": name}}
    collection["features"] = [region.feature(place) for region in regions]
    return collection

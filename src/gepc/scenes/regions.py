"""Regions: flagged tiles of a scene that touch or overlap."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.ndimage import label

from gepc.maps.regions import Box, Region, numbered
from gepc.methods.pooling import Map
from gepc.scenes.folder import MapFile
from gepc.scenes.reading import Georeference, Valid
from gepc.scenes.tiling import Grid

EDGES = ("top", "left", "bottom", "right")
COLUMNS = (
    *("region", "score", "p_value", "tiles", *EDGES),
    *("peak", "peak_line", "peak_column", "hot_top", "hot_left", "hot_bottom", "hot_right", "x", "y"),
)
Array = npt.NDArray[np.float64]
Boxes = npt.NDArray[np.int64]


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
            "pixel_box": dict(zip(EDGES, self.box, strict=True)),
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
    for top, left, bottom, right in boxes.tolist():
        if field is None:
            break
        values = np.asarray(field[top:bottom, left:right])
        if np.isnan(values).all():  # no data
            continue
        line, column = (int(place) for place in np.unravel_index(int(np.nanargmax(values)), values.shape))
        peaks.append((float(values[line, column]), (top + line, left + column)))
        lines, columns = np.nonzero(values > scale)
        if len(lines):
            hot.append((top + lines.min(), left + columns.min(), top + lines.max() + 1, left + columns.max() + 1))
    if not peaks:
        return region
    peak, place = max(peaks, key=lambda peak: peak[0])
    return replace(region, peak=peak, peak_place=place, hot=_around(np.array(hot)) if hot else None)


def _around(boxes: Boxes) -> Box:
    top, left = boxes[:, :2].min(axis=0)
    bottom, right = boxes[:, 2:].max(axis=0)
    return int(top), int(left), int(bottom), int(right)

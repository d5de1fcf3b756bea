"""What a scene report lists: regions of flagged tiles, and detections in the stitched map.

A detection is a blob: connected pixels of the stitched map above its limit. The limit is that of the maps of single
tiles (`gepc.maps.statistics`): the map of an in-distribution tile exceeds it anywhere with probability at most alpha.
The stitched map is a weighted mean of the maps of the tiles, so it exceeds the limit only where the map of at least one
tile does. With m tiles and the p-value p of a peak, min(1, m p) is therefore valid for the scene, however the
overlapping tiles depend on each other (the union bound).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy.ndimage import label
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from gepc.conformal.p_values import Array, Guarantee, images_needed
from gepc.detector.fitted import FittedDetector
from gepc.maps.regions import Region, measured, numbered
from gepc.methods.pooling import Map
from gepc.scenes.folder import MapFile
from gepc.scenes.reading import Georeference, Valid
from gepc.scenes.tiling import Grid

STRIP_PIXELS = 1 << 20  # of the map in memory at once, unless one line is longer
Labels = npt.NDArray[np.integer[Any]]


EDGES, POINT = ("top", "left", "bottom", "right"), ("flagged", "x", "y")


@dataclass(frozen=True)
class TileRegion(Region):
    """Connected flagged tiles: their number, the highest score and the smallest p-value among them."""

    COLUMNS: ClassVar = ("region", "score", "p_value", "tiles", *EDGES, "x", "y")

    tiles: int = 1

    def properties(self, place: Georeference) -> dict[str, Any]:
        """The values under `COLUMNS`; (x, y) is the centre of the box in map coordinates."""
        top, left, bottom, right = self.box
        centre = place((left + right) / 2, (top + bottom) / 2)
        values = (self.number, self.score, self.p_value, self.tiles, *self.box, *centre)
        return dict(zip(self.COLUMNS, values, strict=True))

    def geometry(self, place: Georeference) -> dict[str, Any]:
        """The box as a GeoJSON polygon, rotated if the axes of the file are."""
        top, left, bottom, right = self.box
        corners = [(left, top), (left, bottom), (right, bottom), (right, top), (left, top)]
        return {"type": "Polygon", "coordinates": [[list(place(*corner)) for corner in corners]]}


@dataclass(frozen=True)
class Detection(Region):
    """A blob of the stitched map.

    Its score is the largest value of the map, at the pixel `peak` (line, column), and `area` is the number of pixels.
    `p_value` is valid within the map of one tile and `p_scene` within the scene. `flagged` states whether a flagged
    tile holds the peak.
    """

    COLUMNS: ClassVar = (*("detection", "score", "p_value", "p_scene", "area", "line", "column"), *EDGES, *POINT)

    area: int = 0
    peak: tuple[int, int] = (0, 0)
    p_scene: float = np.nan
    flagged: bool = False

    def properties(self, place: Georeference) -> dict[str, Any]:
        """The values under `COLUMNS`; (x, y) is the centre of the peak's pixel in map coordinates."""
        numbers = (self.number, self.score, self.p_value, self.p_scene, self.area, *self.peak, *self.box)
        return dict(zip(self.COLUMNS, (*numbers, self.flagged, *self._centre(place)), strict=True))

    def geometry(self, place: Georeference) -> dict[str, Any]:
        """A GeoJSON point at the peak."""
        return {"type": "Point", "coordinates": list(self._centre(place))}

    def _centre(self, place: Georeference) -> tuple[float, float]:
        line, column = self.peak
        return place(column + 0.5, line + 0.5)

    def joined(self, other: Detection) -> Detection:
        """One blob from two pieces; of two equal peaks the first one counts, in the order of reading."""
        highest = min(self, other, key=lambda piece: (-piece.score, piece.peak))
        (top, left, bottom, right), (up, start, down, end) = self.box, other.box
        box = (min(top, up), min(left, start), max(bottom, down), max(right, end))
        return replace(highest, box=box, area=self.area + other.area)


def find_regions(grid: Grid, flags: Valid, scores: Array, p_values: Array) -> list[TileRegion]:
    """Regions of the flagged tiles, the highest score first.

    The scene is cut along the borders of the flagged tiles, and cells of tiles are connected over sides and corners.
    `flags`, `scores` and `p_values` have the rows and columns of the grid.
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
    scores, p_values, regions = scores[rows, columns], p_values[rows, columns], []
    for tiles in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        upper, lower = boxes[tiles, :2].min(axis=0), boxes[tiles, 2:].max(axis=0)
        score, p_value = scores[tiles].max(), p_values[tiles].min()
        regions.append(TileRegion(0, float(score), float(p_value), (*upper.tolist(), *lower.tolist()), len(tiles)))
    return numbered(regions)


def find_detections(
    fitted: FittedDetector, field: MapFile, grid: Grid, flags: Valid, tiles: int, alpha: float
) -> list[Detection]:
    """The detections of a scene at the level `alpha` for the map of each tile, the highest score first.

    `flags` has the rows and columns of the grid, and `tiles` is the number of scored tiles. There are no detections
    without statistics of maps, or at a level that the calibration maps are too few for.
    """
    statistics = fitted.maps
    if statistics is None or not statistics.allows(alpha):
        return []
    ordered = numbered(blobs(field, fitted.map_limit(alpha)))
    p_values = statistics.p_values(np.array([blob.score for blob in ordered]), fitted.map_part)
    detections = []
    for blob, p in zip(ordered, p_values.tolist(), strict=True):
        flagged = bool(flags[grid.holding(*blob.peak)].any())
        detections.append(replace(blob, p_value=p, p_scene=min(tiles * p, 1.0), flagged=flagged))
    return detections


def statement(fitted: FittedDetector, tiles: int, alpha: float) -> str:
    """The guarantee for the detections of a scene of so many tiles, in words."""
    if fitted.maps is None:
        return "No detections: the detector has no statistics of maps; fit it again with maps='calibrated'."
    n = fitted.maps.maxima.shape[1]
    if not fitted.maps.allows(alpha):
        return f"No detections: alpha {alpha:g} needs at least {images_needed(alpha)} calibration maps, there are {n}."
    return (
        f"The map of an in-distribution tile exceeds {fitted.map_limit(alpha):.4g} anywhere with probability at most "
        f"{alpha:g} ({n} calibration maps){Guarantee.condition(fitted.maps.trimmed)}. The maps of at most "
        f"{alpha * tiles:.3g} of {tiles} such tiles are expected to exceed it by chance, and each of these can give "
        "several detections. p_value refers to the map of one tile. "
        f"p_scene = min(1, {tiles} p_value) bounds the probability that a scene of in-distribution tiles has such a "
        "detection."
    )


def blobs(field: Map | MapFile, limit: float) -> Iterator[Detection]:
    """Groups of pixels above a limit that are connected over sides and corners, without numbers and p-values.

    The map is read in strips, and the pieces of a blob are joined where strips meet. Memory therefore grows with the
    width of the map and the number of blobs, not with the height.
    """
    height, width = field.shape
    lines = max(1, STRIP_PIXELS // width)
    unfinished: list[Detection] = []  # the blobs that reach the line above the strip
    above = np.zeros(width, dtype=np.int64)  # for each pixel of that line, 1 + the index of its blob, or 0
    for top in range(0, height, lines):
        values = field[top : top + lines, 0:width]
        labels, count = label(np.vstack([above > 0, values > limit]), structure=np.ones((3, 3)))
        group_of = _groups(above, labels[0], len(unfinished), count)
        joined: dict[int, Detection] = {}
        for node, piece in chain(enumerate(unfinished), _pieces(values, labels[1:], top, len(unfinished))):
            group = int(group_of[node])
            joined[group] = piece if group not in joined else joined[group].joined(piece)
        last = labels[-1]
        groups, indices = np.unique(group_of[len(unfinished) + last[last > 0] - 1], return_inverse=True)
        above[:] = 0
        above[last > 0] = indices + 1
        unfinished = [joined.pop(int(group)) for group in groups]
        yield from joined.values()
    yield from unfinished


def _groups(above: Labels, first: Labels, unfinished: int, labels: int) -> Labels:
    """The group of every unfinished blob and of every label of a strip: they belong together where they share a pixel.

    Both arguments describe the line above the strip; the nodes are the blobs, followed by the labels.
    """
    shared = above > 0
    ends = (above[shared] - 1, unfinished + first[shared] - 1)
    edges = tuple(numbers.astype(np.int32) for numbers in ends)  # SciPy 1.11 takes no others
    nodes = unfinished + labels
    graph = coo_array((np.ones(int(shared.sum())), edges), shape=(nodes, nodes))
    return np.asarray(connected_components(graph, directed=False)[1])


def _pieces(values: Map, labels: Labels, top: int, offset: int) -> Iterator[tuple[int, Detection]]:
    """The piece of each label in a strip that begins at line `top`, with its node in the graph of `_groups`."""
    for number, mask, (line, column), (up, left, down, right) in measured(values, labels):
        box, peak = (top + up, left, top + down, right), (top + line, column)
        yield offset + number - 1, Detection(0, float(values[line, column]), np.nan, box, int(mask.sum()), peak)

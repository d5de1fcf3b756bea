"""Regions: where a map stands out, as boxes with a score, a p-value and the part that raised it."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.ndimage import find_objects, label

from gepc.core.tables import escape_cell
from gepc.maps.statistics import MapStatistics
from gepc.methods.pooling import Map

Box = tuple[int, int, int, int]
Window = tuple[int, int, int, int]
Mask = npt.NDArray[np.bool_]
COLUMNS = (
    *("path", "region", "score", "p_value", "part", "area", "top", "left", "bottom", "right"),
    *("peak_line", "peak_column"),
)


@dataclass(frozen=True)
class Region:
    """A region of an image: its highest score, by which regions are numbered, and its smallest p-value."""

    number: int
    score: float
    p_value: float
    box: Box  # (top, left, bottom, right), with the lower and right ends excluded


R_ = TypeVar("R_", bound=Region)


def numbered(regions: Iterable[R_]) -> list[R_]:
    """The regions, the highest score first, with their numbers."""
    ordered = sorted(regions, key=lambda region: (-region.score, region.box))
    return [replace(region, number=number) for number, region in enumerate(ordered, start=1)]


@dataclass(frozen=True)
class MapRegion(Region):
    """Connected pixels of a map above its limit: their number, and the map of each part at the highest of them."""

    area: int = 0
    peak: tuple[int, int] = (0, 0)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def part(self) -> str | None:
        """The part with the largest value at the peak."""
        return max(self.parts, key=self.parts.__getitem__) if self.parts else None


def map_regions(
    fields: Mapping[str, Map], part: str, limit: float, statistics: MapStatistics | None = None
) -> list[MapRegion]:
    """The regions of one image: connected pixels whose map is above a limit.

    Parameters
    ----------
    fields : the maps (H, W) of the image, by part.
    part : the part whose regions are wanted.
    limit : pixels above it belong to regions. With the limit of `statistics` at a rate alpha, a usual image has no
        region with probability at least 1 - alpha.
    statistics : what is usual in maps, for p-values; None for raw maps, which have none.

    Returns
    -------
    list of MapRegion
        The highest score first.
    """
    shown = fields[part]
    leading = () if statistics is None else statistics.leading
    labels, _ = label(shown > limit, structure=np.ones((3, 3)))
    regions = []
    for _, mask, peak, box in measured(shown, labels):
        p_value = np.nan if statistics is None else float(statistics.p_values(shown[peak], part))
        parts = {name: float(fields[name][peak]) for name in leading}
        regions.append(MapRegion(0, float(shown[peak]), p_value, box, int(mask.sum()), peak, parts))
    return numbered(regions)


def measured(values: Map, labels: npt.NDArray[Any]) -> Iterator[tuple[int, Mask, tuple[int, int], Box]]:
    """For each label: its number, its pixels within its box, the (line, column) of its highest value, and its box."""
    for number, part in enumerate(find_objects(labels), start=1):
        if part is None:  # no pixel has this label
            continue
        lines, columns = part
        mask = labels[part] == number
        inside = np.where(mask, values[part], -np.inf)
        line, column = (int(index) for index in np.unravel_index(int(inside.argmax()), inside.shape))
        peak = (line + lines.start, column + columns.start)
        yield number, mask, peak, (lines.start, columns.start, lines.stop, columns.stop)


def in_image(region: MapRegion, window: Window, size: tuple[int, int]) -> MapRegion:
    """A region of a map of `size` in pixels of the image, of which the map shows (top, left, height, width)."""
    top, left, height, width = window

    def point(x: float, y: float) -> tuple[float, float]:
        # the quotient comes last: exact where a side of a cell is one of a pixel, so that no box leaves the image
        return left + x * width / size[1], top + y * height / size[0]

    box, (line, column) = region.box, region.peak
    (x0, y0), (x1, y1), (x, y) = point(box[1], box[0]), point(box[3], box[2]), point(column + 0.5, line + 0.5)
    whole = (int(y0), int(x0), math.ceil(y1), math.ceil(x1))
    area = max(1, round(region.area * height * width / (size[0] * size[1])))
    return replace(region, box=whole, area=area, peak=(int(y), int(x)))


def csv_rows(path: str, regions: Sequence[MapRegion]) -> list[tuple[Any, ...]]:
    """Rows of `regions.csv`, under `COLUMNS`."""
    return [
        (
            *(escape_cell(path), one.number, f"{one.score:.6g}", "" if np.isnan(one.p_value) else f"{one.p_value:.6g}"),
            *(one.part or "", one.area, *one.box, *one.peak),
        )
        for one in regions
    ]


def coco(images: Sequence[tuple[str, tuple[int, int], Sequence[MapRegion]]]) -> dict[str, Any]:
    """Regions as COCO annotations, which labelling tools read: for each image its path, (height, width) and regions.

    The segmentation is the box. In addition to the fields of COCO, an annotation has `score`, `p_value` and `parts`.
    """
    annotations: list[dict[str, Any]] = []
    for number, (_, _, regions) in enumerate(images, start=1):
        for region in regions:
            top, left, bottom, right = region.box
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": 1,
                    "bbox": [left, top, right - left, bottom - top],
                    "area": region.area,
                    "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
                    "iscrowd": 0,
                    "score": region.score,
                    "p_value": None if np.isnan(region.p_value) else region.p_value,
                    "parts": region.parts,
                }
            )
    files = [
        {"id": number, "file_name": path, "height": height, "width": width}
        for number, (path, (height, width), _) in enumerate(images, start=1)
    ]
    return {"images": files, "annotations": annotations, "categories": [{"id": 1, "name": "anomaly"}]}

"""Names beside points, none over another: each goes to the nearest free place around its point."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gepc.core.palette import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FONT = 7
POINT = 4.0  # pixels around a point that stay free
RADII = range(6, 160, 5)
DIRECTIONS = 16
NEAR = 14  # pixels: a name farther away gets a line to its point

Box = tuple[float, float, float, float]


def place_labels(axes: Axes, x: Sequence[float], y: Sequence[float], names: Sequence[str]) -> list[Box]:
    """Write the names; returns their boxes (left, bottom, right, top) in pixels. Limits and scales must be set before.

    A name without a free place within the axes is written at its point all the same.
    """
    figure = axes.figure
    figure.draw_without_rendering()  # type: ignore[union-attr]
    inside = axes.get_window_extent()
    spots = [tuple(map(float, spot)) for spot in axes.transData.transform(list(zip(x, y, strict=True)))]
    taken: list[Box] = [(px - POINT, py - POINT, px + POINT, py + POINT) for px, py in spots]
    boxes: list[Box] = []
    for (px, py), name in zip(spots, names, strict=True):
        width, height = _size(axes, name)
        found = next(
            (box for box in _around(px, py, width, height) if _within(box, inside) and _free(box, taken)),
            (px, py, px + width, py + height),
        )
        taken.append(found)
        boxes.append(found)
        _write(axes, (px, py), found, name)
    return boxes


def _size(axes: Axes, name: str) -> tuple[float, float]:
    text = axes.text(0.0, 0.0, name, fontsize=FONT)
    box = text.get_window_extent()
    text.remove()
    return float(box.width), float(box.height)


def _around(px: float, py: float, width: float, height: float) -> Iterator[Box]:
    """Boxes around a point, the nearest first; at each distance first to the right."""
    for radius in RADII:
        for step in sorted(range(DIRECTIONS), key=lambda step: min(step, DIRECTIONS - step)):
            angle = 2.0 * math.pi * step / DIRECTIONS
            cx = px + math.cos(angle) * (radius + width / 2.0)
            cy = py + math.sin(angle) * (radius + height / 2.0)
            yield cx - width / 2.0, cy - height / 2.0, cx + width / 2.0, cy + height / 2.0


def _within(box: Box, inside: Any) -> bool:
    return bool(box[0] >= inside.x0 and box[1] >= inside.y0 and box[2] <= inside.x1 and box[3] <= inside.y1)


def _free(box: Box, taken: Sequence[Box]) -> bool:
    return not any(
        box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in taken
    )


def _write(axes: Axes, spot: tuple[float, float], box: Box, name: str) -> None:
    centre = ((box[0] + box[2]) / 2.0, (box[1] + box[3]) / 2.0)
    near = (min(max(spot[0], box[0]), box[2]), min(max(spot[1], box[1]), box[3]))
    back = axes.transData.inverted()
    if math.dist(spot, near) > NEAR:
        (x0, y0), (x1, y1) = back.transform([spot, near])
        axes.plot([x0, x1], [y0, y1], color=LIGHT["rule"], linewidth=0.7, zorder=1)
    where = back.transform(centre)
    axes.text(where[0], where[1], name, fontsize=FONT, ha="center", va="center", color=LIGHT["ink"])

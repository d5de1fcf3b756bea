"""Names next to points without overlap: each goes to the nearest free place around its point."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gepc.core.palette import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

FONT = 7
POINT = 4.0  # pixels around a point that stay free
RADII = range(6, 160, 5)
DIRECTIONS = 16
NEAR = 14  # pixels: a name farther away gets a line to its point


def place_labels(axes: Axes, x: Sequence[float], y: Sequence[float], names: Sequence[str]) -> list[Bbox]:
    """Write names next to points; returns their boxes in pixels.

    A name without a free place inside the axes is written at its point.

    Parameters
    ----------
    axes : where to write; its limits and scales must be set before.
    x : the points' first coordinates.
    y : the points' second coordinates.
    names : one for each point.
    """
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    inside = axes.get_window_extent()
    spots = [(float(px), float(py)) for px, py in axes.transData.transform(list(zip(x, y, strict=True)))]
    taken = [Bbox([spot, spot]).padded(POINT) for spot in spots]
    for spot, name in zip(spots, names, strict=True):
        text = axes.text(0.0, 0.0, name, fontsize=FONT, ha="center", va="center", color=LIGHT["ink"])
        size = text.get_window_extent()
        places = (Bbox.from_bounds(*place, size.width, size.height) for place in _around(spot, size))
        free = (box for box in places if _within(box, inside) and not box.count_overlaps(taken))
        box = next(free, Bbox.from_bounds(*spot, size.width, size.height))
        taken.append(box)
        middle_x, middle_y = axes.transData.inverted().transform(((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2))
        text.set_position((middle_x, middle_y))
        _connect(axes, spot, box)
    return taken[len(spots) :]


def _around(spot: tuple[float, float], size: Bbox) -> Iterator[tuple[float, float]]:
    """Lower left corners of boxes around a point, the nearest first; at each distance first to the right."""
    for radius in RADII:
        for step in sorted(range(DIRECTIONS), key=lambda step: min(step, DIRECTIONS - step)):
            angle = 2.0 * math.pi * step / DIRECTIONS
            right = math.cos(angle) * (radius + size.width / 2.0) - size.width / 2.0
            up = math.sin(angle) * (radius + size.height / 2.0) - size.height / 2.0
            yield spot[0] + right, spot[1] + up


def _within(box: Bbox, inside: Bbox) -> bool:
    return bool(inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1))


def _connect(axes: Axes, spot: tuple[float, float], box: Bbox) -> None:
    """A line from a point to its name, if that is not near."""
    near = (min(max(spot[0], box.x0), box.x1), min(max(spot[1], box.y0), box.y1))
    if math.dist(spot, near) > NEAR:
        line = axes.transData.inverted().transform([spot, near])
        axes.plot(line[:, 0], line[:, 1], color=LIGHT["rule"], linewidth=0.7, zorder=1)

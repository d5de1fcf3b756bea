"""Photographs of a pebble beach, made by a computer, with things that somebody lost there.

Stones and things are pieces of a height field. Where pieces overlap, the highest one is seen, so that a lost thing may
be half buried. Light falls from the upper left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.ndimage import gaussian_filter

from gepc.maps.regions import Region

Array = npt.NDArray[np.float64]
Colour = tuple[float, ...]
Shape = Callable[[Array, Array], Array]

STONES: tuple[Colour, ...] = (
    *((150, 146, 140), (120, 118, 116), (176, 168, 156), (98, 94, 92)),
    *((160, 140, 120), (134, 120, 106), (196, 190, 180), (110, 102, 100)),
)
SAND: Colour = (70, 62, 54)
AREA_OF_A_STONE = 150  # pixels of the picture for every stone; most stones are hidden below others
NOWHERE = -np.inf  # the height where a piece is not


@dataclass(frozen=True)
class Thing:
    """A kind of thing: its colour, its reach from its centre in pixels, and its height at (line, column) from there."""

    name: str
    colour: Colour
    reach: int
    height: Shape


@dataclass(frozen=True)
class Lost:
    """A thing that lies at a line and a column of a photograph."""

    thing: Thing
    line: int
    column: int

    def touches(self, region: Region) -> bool:
        """Whether the box of a region overlaps the thing."""
        (top, left, bottom, right), reach = region.box, self.thing.reach
        return top - reach < self.line < bottom + reach and left - reach < self.column < right + reach


def _disc(radius: float, relief: float) -> Shape:
    def height(v: Array, u: Array) -> Array:
        distance = np.hypot(u, v)
        stamp = 1.2 * (distance > radius - 3) + relief * np.sin(0.9 * u) * (distance < 0.6 * radius)
        return np.where(distance < radius, 20.0 + stamp, NOWHERE)

    return height


def _ring(v: Array, u: Array) -> Array:
    across = (np.hypot(u, 1.3 * v) - 16.0) / 3.0
    return np.where(abs(across) < 1.0, 19.0 + 3.0 * np.sqrt(np.maximum(0.0, 1.0 - across**2)), NOWHERE)


def _cap(v: Array, u: Array) -> Array:
    distance, rim = np.hypot(u, v), 18.5 + 1.5 * np.cos(21.0 * np.arctan2(v, u))
    return np.where(distance < rim, 22.0 + 2.0 * (distance < 15.0), NOWHERE)


def _shard(v: Array, u: Array) -> Array:
    return np.where((abs(u + 0.4 * v) < 12.0) & (abs(v - 0.3 * u) < 10.0), 18.0 + 0.12 * u, NOWHERE)


def _key(v: Array, u: Array) -> Array:
    bow = abs(np.hypot(u + 20.0, v) - 7.0) < 3.0
    blade = (abs(v) < 2.5) & (u > -12.0) & (u < 28.0)
    teeth = (v > 0.0) & (v < 8.0) & (u > 16.0) & (u < 28.0) & (u % 6.0 < 3.0)
    return np.where(bow | blade | teeth, 21.0, NOWHERE)


THINGS = (
    Thing("coin", (190, 160, 80), 20, _disc(20.0, 0.8)),
    Thing("ring", (215, 190, 110), 20, _ring),
    Thing("bottle cap", (165, 40, 40), 20, _cap),
    Thing("piece of green glass", (70, 150, 120), 20, _shard),
    Thing("key", (150, 150, 155), 30, _key),
    Thing("button of the colour of the stones", (130, 126, 120), 18, _disc(18.0, 0.8)),
)


def beach(seed: int, height: int, width: int, lost: Sequence[Lost] = ()) -> npt.NDArray[np.uint8]:
    """A photograph (height, width, 3) of pebbles. Different seeds give independent photographs of one beach."""
    rng = np.random.default_rng(seed)
    ground, colour = np.full((height, width), -5.0), np.full((height, width, 3), SAND, dtype=np.float64)
    for _ in range(height * width // AREA_OF_A_STONE):
        line, column = int(rng.uniform(-10, height + 10)), int(rng.uniform(-10, width + 10))
        paint = np.array(STONES[rng.integers(len(STONES))]) * rng.uniform(0.85, 1.1)
        _put(ground, colour, Lost(Thing("stone", tuple(paint), 24, _stone(rng)), line, column))
    for item in lost:
        _put(ground, colour, item)
    return _lit(ground, colour, rng)


def lose(things: Sequence[Thing], seed: int, height: int, width: int) -> list[Lost]:
    """Lay each thing somewhere in a cell of its own, of a grid of two rows."""
    rng = np.random.default_rng(seed)
    cell_height, cell_width = height // 2, 2 * width // len(things)
    lost = []
    for cell, thing in zip(rng.permutation(len(things)).tolist(), things, strict=True):
        row, column = cell % 2, cell // 2
        line = row * cell_height + rng.integers(thing.reach, cell_height - thing.reach)
        lost.append(Lost(thing, int(line), int(column * cell_width + rng.integers(32, cell_width - 32))))
    return lost


def _stone(rng: np.random.Generator) -> Shape:
    """Half an ellipsoid in some direction, at some height."""
    long = rng.uniform(9.0, 24.0)
    short, angle, base = long * rng.uniform(0.6, 0.95), rng.uniform(0.0, np.pi), rng.uniform(0.0, 14.0)
    cosine, sine = np.cos(angle), np.sin(angle)

    def height(v: Array, u: Array) -> Array:
        inside = 1.0 - ((u * cosine + v * sine) / long) ** 2 - ((v * cosine - u * sine) / short) ** 2
        return np.where(inside > 0.0, base + 0.55 * short * np.sqrt(np.maximum(0.0, inside)), NOWHERE)

    return height


def _put(ground: Array, colour: Array, item: Lost) -> None:
    """Add a stone or a thing to the picture where it is higher than what is there."""
    thing, (height, width) = item.thing, ground.shape
    lines = slice(max(0, item.line - thing.reach), min(height, item.line + thing.reach + 1))
    columns = slice(max(0, item.column - thing.reach), min(width, item.column + thing.reach + 1))
    v, u = np.ogrid[lines, columns]
    bump = thing.height(v - item.line, u - item.column)
    above = bump > ground[lines, columns]
    ground[lines, columns][above] = bump[above]
    colour[lines, columns][above] = thing.colour


def _lit(ground: Array, colour: Array, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """The picture that a camera takes of coloured ground: slopes, dark gaps, grain, blur and noise."""
    fine, coarse = (gaussian_filter(rng.standard_normal(ground.shape), sigma) for sigma in (0.7, 3.0))
    dy, dx = np.gradient(gaussian_filter(ground, 0.8))
    slope = np.clip((0.8 - 0.4 * dx - 0.5 * dy) / np.sqrt(1.0 + dx**2 + dy**2), 0.1, 1.4)
    gap = np.clip(1.0 + 0.05 * (ground - gaussian_filter(ground, 8.0)), 0.35, 1.15)
    image = (colour + (18.0 * fine + 60.0 * coarse)[..., None]) * (slope * gap)[..., None]
    image = gaussian_filter(image, (0.6, 0.6, 0.0)) + rng.normal(0.0, 2.5, image.shape)
    return np.asarray(image.clip(0.0, 255.0), dtype=np.uint8)

"""Targets of known contrast inserted into radar clutter: what a detector of bright pixels can see, and what it cannot.

Every function takes the intensity of a clutter patch (H, W) and returns it with one target in the middle, at a random
place and heading. The contrast r is the mean intensity inside the target divided by that of the clutter around it:
1 (0 dB) leaves the mean as it is.

    point      a non-fluctuating point with a Gaussian response of 3 pixels
    ship       a hull of scatterers with side lobes, normalised to the mean r: has structure at 0 dB
    hull       the clutter's own speckle, multiplied by r inside a hull: below 0 dB a ship darker than the sea
    wake       two bright arms at the Kelvin angle around a dark line, without a hull
    slick      a large ellipse multiplied by r: below 0 dB an oil-like slick
    texture    a disc whose texture has the shape 0.5, with the mean r: at 0 dB a change of texture alone
    stripe     four lines of interference, modulated along the line, with the mean r: structure at 0 dB
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gepc.lab.radar.simulate import (
    Array,
    Sea,
    Target,
    correlated_normal,
    gamma_quantile,
    ship_intensity,
    wake_reflectivity,
)


def axes(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Array, Array]:
    """Coordinates along and across a random heading, from a random centre near the middle."""
    rows, columns = shape
    y, x = np.mgrid[:rows, :columns].astype(np.float64)
    y -= rows / 2 + rng.uniform(-0.15, 0.15) * rows
    x -= columns / 2 + rng.uniform(-0.15, 0.15) * columns
    heading = rng.uniform(0.0, 2.0 * math.pi)
    along, across = x * math.cos(heading) + y * math.sin(heading), -x * math.sin(heading) + y * math.cos(heading)
    return along, across


def point(clutter: Array, r: float, rng: np.random.Generator) -> Array:
    """A point."""
    along, across = axes(clutter.shape, rng)
    response = np.exp(-(along**2 + across**2) / (2 * 1.5**2))
    return (1.0 - response) * clutter + response * r * clutter.mean()


def ship(clutter: Array, r: float, rng: np.random.Generator) -> Array:
    """A hull of scatterers, 30 by 8 pixels."""
    rows, columns = clutter.shape
    place = rng.uniform(0.35, 0.65, 2)
    target = Target(place[0] * columns, place[1] * rows, 30.0, 8.0, rng.uniform(0.0, 2.0 * math.pi), 1.0)
    field = ship_intensity(target, Sea(mean=1.0), rows, columns, rng)
    dx, dy = np.arange(columns)[None, :] - target.x, np.arange(rows)[:, None] - target.y
    along = dx * math.cos(target.heading) + dy * math.sin(target.heading)
    across = -dx * math.sin(target.heading) + dy * math.cos(target.heading)
    hull = (2 * along / target.length) ** 2 + (2 * across / target.width) ** 2 <= 1.0
    return np.where(hull, 0.0, clutter) + field * (r * clutter.mean() / field[hull].mean())


def hull(clutter: Array, r: float, rng: np.random.Generator) -> Array:
    """The clutter's own speckle, brighter or darker inside a hull of 30 by 8 pixels."""
    along, across = axes(clutter.shape, rng)
    return np.where((along / 15.0) ** 2 + (across / 4.0) ** 2 <= 1.0, r * clutter, clutter)


def wake(clutter: Array, r: float, rng: np.random.Generator) -> Array:
    """Two arms of contrast r and a line of contrast 1/r between them."""
    rows, columns = clutter.shape
    place = rng.uniform(0.35, 0.65, 2)
    heading = rng.uniform(0.0, 2.0 * math.pi)
    shape = wake_reflectivity(
        Target(place[0] * columns, place[1] * rows, heading=heading, wake=60.0, contrast=1.0), rows, columns
    )
    return clutter * r ** (shape - 1.0)


def slick(clutter: Array, r: float, rng: np.random.Generator) -> Array:
    """An ellipse of 60 by 24 pixels."""
    along, across = axes(clutter.shape, rng)
    return np.where((along / 30.0) ** 2 + (across / 12.0) ** 2 <= 1.0, r * clutter, clutter)


def texture(clutter: Array, r: float, rng: np.random.Generator) -> Array:
    """A disc of radius 20 under a spiky texture."""
    along, across = axes(clutter.shape, rng)
    inside = along**2 + across**2 <= 20.0**2
    spikes = gamma_quantile(correlated_normal(clutter.shape[0], clutter.shape[1], 1.5, rng), 0.5)
    return np.where(inside, r * clutter * spikes / spikes[inside].mean(), clutter)


def stripe(clutter: Array, r: float, rng: np.random.Generator) -> Array:
    """Four lines across the patch, modulated with a period of 7 pixels."""
    first = int(rng.uniform(0.3, 0.7) * len(clutter))
    found = clutter.copy()
    wave = 1.0 + np.cos(2.0 * math.pi * np.arange(clutter.shape[1]) / 7.0 + rng.uniform(0.0, 6.28))
    found[first : first + 4] = r * clutter.mean() * wave
    return found


KINDS: dict[str, Callable[[Array, float, np.random.Generator], Array]] = {
    "point": point,
    "ship": ship,
    "hull": hull,
    "wake": wake,
    "slick": slick,
    "texture": texture,
    "stripe": stripe,
}

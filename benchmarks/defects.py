"""Synthetic defects of grey parts, from the words of a quality engineer: holes, cracks, chips, wear, uneven finish.

Settings of inspection are chosen with them, so that real defects are used for measuring alone. Each function takes an
image (H, W) with values from 0 to 255 and a random generator. It returns the image with a defect, and the defect's
mask.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.ndimage import gaussian_filter
from scipy.special import expit

Field = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Made = tuple[Field, Mask]


def hole(image: Field, rng: np.random.Generator) -> Made:
    """A small dark hole with a soft edge."""
    height, width = image.shape
    radius = rng.uniform(0.012, 0.035) * min(height, width)
    row, column = rng.uniform(0.08, 0.92) * height, rng.uniform(0.08, 0.92) * width
    lines, columns = np.mgrid[:height, :width]
    distance = np.hypot(lines - row, (columns - column) / rng.uniform(0.6, 1.0))
    share = expit((radius - distance) / 0.8)
    return image * (1.0 - rng.uniform(0.3, 0.7) * share), share > 0.5


def crack(image: Field, rng: np.random.Generator) -> Made:
    """A thin dark line of low contrast that wanders."""
    height, width = image.shape
    row, column, angle = rng.uniform(0.15, 0.85) * height, rng.uniform(0.15, 0.85) * width, rng.uniform(0, 2 * np.pi)
    line = np.zeros(image.shape)
    for _ in range(int(rng.uniform(0.25, 0.8) * min(height, width))):
        angle += rng.normal(0, 0.15)
        row, column = row + np.sin(angle), column + np.cos(angle)
        if not (0 <= row < height and 0 <= column < width):
            break
        line[int(row), int(column)] = 1.0
    share = gaussian_filter(line, rng.uniform(0.6, 1.2))
    share /= share.max()
    return image - share * rng.uniform(0.1, 0.35) * image.mean(), share > 0.3


def chip(image: Field, rng: np.random.Generator) -> Made:
    """A piece broken off: an irregular area with another, rough surface."""
    height, width = image.shape
    side = rng.uniform(0.08, 0.3) * min(height, width)
    row, column = rng.uniform(0, height), rng.uniform(0, width)
    lines, columns = np.mgrid[:height, :width]
    distance = np.hypot(lines - row, (columns - column) / rng.uniform(0.5, 1.0)) / (side / 2)
    inside = distance + 0.25 * _smooth_noise(image.shape, side / 8, rng) < 1.0
    brightness = 1.0 + rng.choice([-1, 1]) * rng.uniform(0.15, 0.5)
    surface = image.mean() * (brightness + 0.1 * _smooth_noise(image.shape, rng.uniform(1, 4), rng))
    return _blend(image, surface, inside, 0.8), inside


def worn(image: Field, rng: np.random.Generator) -> Made:
    """A strip along a border that is worn off irregularly, with streaks across."""
    if rng.integers(2):
        changed, inside = worn_left(image.T, rng)
        return changed.T, inside.T
    return worn_left(image, rng)


def worn_left(image: Field, rng: np.random.Generator) -> Made:
    """The same along the left border or the right one."""
    height, width = image.shape
    jitter = _smooth_noise((height,), height / 30, rng)
    edge = rng.uniform(0.06, 0.2) * width * (1.0 + 0.4 * jitter)
    distance = np.arange(width)[:: rng.choice([-1, 1])]
    inside = distance[None] < edge[:, None]
    streaks = gaussian_filter(rng.standard_normal(image.shape), (rng.uniform(0.8, 2), rng.uniform(3, 8)))
    streaks *= rng.uniform(0.1, 0.25) / streaks.std()
    brightness = rng.choice([-1, 1]) * rng.uniform(0.05, 0.2)
    return _blend(image, image + (streaks + brightness) * image.mean(), inside, 1.5), inside


def uneven(image: Field, rng: np.random.Generator) -> Made:
    """A large area that is ground unevenly: another brightness and finish, with a soft border."""
    field = _smooth_noise(image.shape, rng.uniform(0.15, 0.3) * min(image.shape), rng)
    inside = field > np.quantile(field, 1.0 - rng.uniform(0.12, 0.4))
    brightness = rng.choice([-1, 1]) * rng.uniform(0.08, 0.3)
    ground = gaussian_filter(image, rng.uniform(0.7, 2.5)) + brightness * image.mean()
    return _blend(image, ground, inside, rng.uniform(1, 6)), inside


KINDS: dict[str, Callable[[Field, np.random.Generator], Made]] = {
    "hole": hole,
    "crack": crack,
    "chip": chip,
    "worn": worn,
    "uneven": uneven,
}


def with_defect(image: npt.NDArray[np.uint8], kind: str, seed: int) -> tuple[npt.NDArray[np.uint8], Mask]:
    """A grey image (H, W) with a defect of that kind, and the defect's mask."""
    changed, mask = KINDS[kind](image.astype(np.float64), np.random.default_rng(seed))
    return changed.clip(0, 255).round().astype(np.uint8), mask


def _smooth_noise(shape: tuple[int, ...], scale: float, rng: np.random.Generator) -> Field:
    """Smooth noise with standard deviation 1."""
    field = gaussian_filter(rng.standard_normal(shape), scale)
    return np.asarray(field / field.std())


def _blend(image: Field, other: Field, inside: Mask, softness: float) -> Field:
    share = gaussian_filter(inside.astype(np.float64), softness)
    return np.asarray(image * (1.0 - share) + other * share)

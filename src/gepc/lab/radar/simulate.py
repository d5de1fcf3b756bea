"""Simulated sea clutter, ships and wakes: a compound model whose statistics are known in closed form.

Intensity I = texture * speckle, independent and both of mean 1. Texture is gamma with shape nu, correlated over
`correlation` pixels; speckle of L looks is gamma with shape L, independent from pixel to pixel. I is then
K-distributed, with the moments

    E[I^n] / E[I]^n = [Gamma(nu + n) / (Gamma(nu) nu^n)] [Gamma(L + n) / (Gamma(L) L^n)]

The texture is a Gaussian field of correlation exp(-d^2/(2 l^2)) mapped through the quantile function of the gamma
distribution.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammainccinv, gammaincinv, ndtr

from gepc.core.options import check_fields, checked, not_negative, positive
from gepc.lab.radar.annotations import Box

Array = npt.NDArray[np.float64]
KELVIN = math.asin(1.0 / 3.0)  # half the opening angle of a ship's wake, 19.47 degrees
SPACING = 0.7  # pixel spacing in resolution cells


@dataclass(frozen=True)
class Sea:
    """Statistics of the clutter."""

    nu: float = checked(4.0, lambda shape: shape > 0, "positive")  # of the texture; small is spiky, inf is no texture
    looks: float = positive(2.0)  # shape of the speckle
    correlation: float = not_negative(6.0)  # correlation length l of the texture in pixels
    mean: float = positive(2e-3)  # mean intensity, where white is 1

    def __post_init__(self) -> None:
        check_fields(self)

    def texture(self, rows: int, columns: int, rng: np.random.Generator) -> Array:
        """Gamma texture of mean 1."""
        if math.isinf(self.nu):
            return np.ones((rows, columns))
        return gamma_quantile(correlated_normal(rows, columns, self.correlation, rng), self.nu)

    def intensity(self, rows: int, columns: int, rng: np.random.Generator, reflectivity: Array | float = 1.0) -> Array:
        """Clutter whose local mean is multiplied by `reflectivity`, which a wake increases and decreases."""
        speckle = rng.gamma(self.looks, 1.0 / self.looks, (rows, columns))
        return np.asarray(self.mean * reflectivity * self.texture(rows, columns, rng) * speckle)


@dataclass(frozen=True)
class Target:
    """A ship."""

    x: float  # column of its centre
    y: float  # row of its centre
    length: float = 40.0  # length in pixels
    width: float = 10.0  # width in pixels
    heading: float = 0.0  # heading in radians
    brightness: float = 100.0  # mean intensity of the hull relative to the sea
    wake: float = 0.0  # length of the wake in pixels; 0 for none
    contrast: float = 0.8  # contrast of the wake


def ship_intensity(target: Target, sea: Sea, rows: int, columns: int, rng: np.random.Generator) -> Array:
    """Coherent sum of scatterers along the hull with random strength and phase, each with a sinc response.

    Pixels are closer than the resolution, so that the side lobes of the sinc (-13 dB, -18 dB, ...) are visible.
    """
    count = max(3, round(target.length * target.width / 12.0))
    along = rng.uniform(-0.5, 0.5, count) * target.length
    across = rng.uniform(-0.5, 0.5, count) * target.width * np.sqrt(1.0 - (2.0 * along / target.length) ** 2)
    cos, sin = math.cos(target.heading), math.sin(target.heading)
    x, y = target.x + along * cos - across * sin, target.y + along * sin + across * cos
    hull = 0.25 * math.pi * target.length * target.width
    # a response of peak 1 has an energy of 1/SPACING^2 pixels
    power = target.brightness * sea.mean * hull / count * SPACING**2
    strength = np.sqrt(power * rng.exponential(1.0, count))
    phase = np.exp(2j * np.pi * rng.random(count))
    range_response = np.sinc(SPACING * (np.arange(columns)[None, :] - x[:, None]))
    azimuth_response = np.sinc(SPACING * (np.arange(rows)[None, :] - y[:, None]))
    field = np.einsum("k,kr,kc->rc", strength * phase, azimuth_response, range_response)
    return np.asarray(np.abs(field) ** 2)


def wake_reflectivity(target: Target, rows: int, columns: int) -> Array:
    """1 on open sea, dark on the turbulent line behind the ship, bright on the two arms at the Kelvin angle."""
    if target.wake <= 0:
        return np.ones((rows, columns))
    dx = np.arange(columns)[None, :] - target.x
    dy = np.arange(rows)[:, None] - target.y
    behind = -(dx * math.cos(target.heading) + dy * math.sin(target.heading))
    aside = -dx * math.sin(target.heading) + dy * math.cos(target.heading)
    fading = np.where(behind > 0, np.exp(-behind / target.wake), 0.0)
    width = 1.5 + 0.03 * np.clip(behind, 0.0, None)
    arms = sum(np.exp(-0.5 * ((aside - side * behind * math.tan(KELVIN)) / width) ** 2) for side in (-1, 1))
    centre = np.exp(-0.5 * (aside / width) ** 2)
    return np.asarray(1.0 + fading * target.contrast * (arms - 0.9 * centre))


def simulate(
    rows: int, columns: int, sea: Sea, targets: Sequence[Target] = (), seed: int = 0
) -> tuple[Array, list[Box]]:
    """Simulate one scene: its amplitude sqrt(I), where white is 1 (ships may exceed it), and the box of each hull.

    The seed is that of texture, speckle and scatterers.
    """
    rng = np.random.default_rng(seed)
    reflectivity = np.ones((rows, columns))
    for target in targets:
        reflectivity = reflectivity * wake_reflectivity(target, rows, columns)
    intensity = sea.intensity(rows, columns, rng, reflectivity.clip(0.0, None))
    for target in targets:
        intensity = intensity + ship_intensity(target, sea, rows, columns, rng)
    return np.sqrt(intensity), [hull_box(target) for target in targets]


def hull_box(target: Target) -> Box:
    """The axis-aligned box around the hull."""
    cos, sin = abs(math.cos(target.heading)), abs(math.sin(target.heading))
    width, height = target.length * cos + target.width * sin, target.length * sin + target.width * cos
    return Box(target.x - width / 2, target.y - height / 2, width, height)


def correlated_normal(rows: int, columns: int, length: float, rng: np.random.Generator) -> Array:
    """A standard normal field with correlation exp(-d^2/(2 l^2)), periodic at the edges."""
    white = rng.standard_normal((rows, columns))
    if length == 0:
        return white
    # white noise under a Gaussian filter of width l/sqrt(2) has the correlation of width l; unit variance by Parseval
    frequencies = np.fft.fftfreq(rows)[:, None] ** 2 + np.fft.fftfreq(columns)[None, :] ** 2
    transfer = np.exp(-((math.pi * length) ** 2) * frequencies)
    transfer /= np.sqrt(np.mean(transfer**2))
    return np.asarray(np.fft.ifft2(np.fft.fft2(white) * transfer).real)


def gamma_quantile(normal: Array, nu: float) -> Array:
    """Map standard normal values to gamma values of shape nu and mean 1 with the same rank."""
    # from the nearer tail: the other one rounds to 1 beyond 8 standard deviations
    tail = ndtr(-np.abs(normal))
    return np.asarray(np.where(normal > 0, gammainccinv(nu, tail), gammaincinv(nu, tail)) / nu)

"""Sea clutter, ships and wakes without data: a compound model whose statistics are known in closed form.

Intensity I = texture * speckle, both of mean 1 and independent. Texture is gamma with shape nu, correlated over
`correlation` pixels; speckle of L looks is gamma with shape L, independent from pixel to pixel. I is then
K-distributed, with the moments

    E[I^n] / E[I]^n = [Gamma(nu + n) / (Gamma(nu) nu^n)] [Gamma(L + n) / (Gamma(L) L^n)]

The texture is a Gaussian field g of correlation rho_g(d) = exp(-d^2/(2 l^2)), pushed through the quantile function of
the gamma distribution; `texture_correlation` says what correlation the texture gets by that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.core.errors import OptionError
from gepc.sar.annotations import Box

Array = npt.NDArray[np.float64]
KELVIN = math.asin(1.0 / 3.0)  # half the opening of a ship's wake, 19.47 degrees
SPACING = 0.7  # a pixel, in resolution cells


@dataclass(frozen=True)
class Sea:
    """Clutter: nu is the shape of the texture (small: spiky; inf: none), looks that of the speckle.

    mean : intensity of the sea, where white is 1. correlation : l, in pixels.
    """

    nu: float = 4.0
    looks: float = 2.0
    correlation: float = 6.0
    mean: float = 2e-3

    def __post_init__(self) -> None:
        for name in ("nu", "looks", "mean"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} must be positive, got {getattr(self, name)}")
        if self.correlation < 0:
            raise OptionError(f"correlation is a length in pixels, 0 or more, got {self.correlation}")

    def moment(self, order: int) -> float:
        """E[I^n]/E[I]^n of the K distribution."""
        return _gamma_moment(self.nu, order) * _gamma_moment(self.looks, order)

    def texture(self, rows: int, columns: int, rng: np.random.Generator) -> Array:
        """Gamma texture of mean 1."""
        if math.isinf(self.nu):
            return np.ones((rows, columns))
        return gamma_quantile(correlated_normal(rows, columns, self.correlation, rng), self.nu)

    def intensity(self, rows: int, columns: int, rng: np.random.Generator, reflectivity: Array | float = 1.0) -> Array:
        """Clutter on a sea whose local mean is multiplied by `reflectivity` (a wake brightens and darkens it)."""
        speckle = rng.gamma(self.looks, 1.0 / self.looks, (rows, columns))
        return np.asarray(self.mean * reflectivity * self.texture(rows, columns, rng) * speckle)


@dataclass(frozen=True)
class Target:
    """A ship: length and width in pixels, heading in radians, mean intensity of its hull over the sea's.

    side_lobes : amplitude of the point response's side lobes (a sinc in range and azimuth); 0 is a lone pixel each.
    wake : length of the wake in pixels, 0 for none; contrast of its arms.
    """

    x: float
    y: float
    length: float = 40.0
    width: float = 10.0
    heading: float = 0.0
    brightness: float = 100.0
    side_lobes: float = 1.0
    wake: float = 0.0
    contrast: float = 0.8


def ship_intensity(target: Target, sea: Sea, rows: int, columns: int, rng: np.random.Generator) -> Array:
    """Scatterers along the hull with random strength and phase, each spread by a sinc response, summed coherently.

    Pixels lie closer than the resolution, so that the sinc's side lobes (-13 dB, -18 dB, ...) show.
    """
    count = max(3, round(target.length * target.width / 12.0))
    along = rng.uniform(-0.5, 0.5, count) * target.length
    across = rng.uniform(-0.5, 0.5, count) * target.width * np.sqrt(1.0 - (2.0 * along / target.length) ** 2)
    x, y = _to_image(target, along, across)
    hull = 0.25 * math.pi * target.length * target.width
    # a response of peak 1 holds an energy of 1/SPACING^2 pixels
    power = target.brightness * sea.mean * hull / count * SPACING**2
    strength = np.sqrt(power * rng.exponential(1.0, count))
    phase = np.exp(2j * np.pi * rng.random(count))
    range_response = _response(np.arange(columns)[None, :] - x[:, None], target.side_lobes)
    azimuth_response = _response(np.arange(rows)[None, :] - y[:, None], target.side_lobes)
    field = np.einsum("k,kr,kc->rc", strength * phase, azimuth_response, range_response)
    return np.asarray(np.abs(field) ** 2)


def wake_reflectivity(target: Target, rows: int, columns: int) -> Array:
    """1 on open sea; dark on the turbulent line behind the ship, bright on the two arms of the Kelvin angle."""
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
    rows: int, columns: int, sea: Sea, targets: tuple[Target, ...] = (), seed: int = 0
) -> tuple[Array, list[Box]]:
    """Amplitude sqrt(I), where white is 1 (ships may exceed it), and the box around each ship's hull."""
    rng = np.random.default_rng(seed)
    reflectivity = np.ones((rows, columns))
    for target in targets:
        reflectivity = reflectivity * wake_reflectivity(target, rows, columns)
    intensity = sea.intensity(rows, columns, rng, reflectivity.clip(0.0, None))
    for target in targets:
        intensity = intensity + ship_intensity(target, sea, rows, columns, rng)
    return np.sqrt(intensity), [hull_box(target) for target in targets]


def random_targets(count: int, rows: int, columns: int, rng: np.random.Generator) -> tuple[Target, ...]:
    """Ships of 20 to 60 pixels anywhere inside, half of them with a wake."""
    return tuple(
        Target(
            x=rng.uniform(0.15, 0.85) * columns,
            y=rng.uniform(0.15, 0.85) * rows,
            length=(length := rng.uniform(20.0, 60.0)),
            width=length / rng.uniform(3.0, 5.0),
            heading=rng.uniform(0.0, 2.0 * np.pi),
            brightness=rng.uniform(30.0, 150.0),
            wake=float(rng.integers(0, 2)) * rng.uniform(1.0, 3.0) * length,
        )
        for _ in range(count)
    )


def hull_box(target: Target) -> Box:
    """The upright box around the hull."""
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
    """The gamma variable of shape nu and mean 1 with the same rank as a standard normal one."""
    from scipy.special import gammainccinv, gammaincinv, ndtr

    # from the nearer tail: the other one rounds to 1 beyond 8 standard deviations
    tail = ndtr(-np.abs(normal))
    return np.asarray(np.where(normal > 0, gammainccinv(nu, tail), gammaincinv(nu, tail)) / nu)


def texture_correlation(rho: npt.ArrayLike, nu: float, nodes: int = 40) -> Array:
    """Correlation of the gamma texture where the Gaussian field has correlation `rho`, by Gauss-Hermite quadrature.

    corr = nu (E[q(u) q(rho u + sqrt(1 - rho^2) v)] - 1) with u, v standard normal and q = `gamma_quantile`.
    """
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    first = gamma_quantile(points, nu)
    values = [
        weights @ ((first[:, None] * gamma_quantile(r * points[:, None] + math.sqrt(1 - r * r) * points, nu)) @ weights)
        for r in np.atleast_1d(np.asarray(rho, dtype=np.float64)).clip(-1.0, 1.0)
    ]
    return np.asarray(nu * (np.array(values) - 1.0))


def _gamma_moment(shape: float, order: int) -> float:
    if math.isinf(shape):
        return 1.0
    return math.exp(math.lgamma(shape + order) - math.lgamma(shape) - order * math.log(shape))


def _to_image(target: Target, along: Array, across: Array) -> tuple[Array, Array]:
    cos, sin = math.cos(target.heading), math.sin(target.heading)
    return target.x + along * cos - across * sin, target.y + along * sin + across * cos


def _response(offset: Array, side_lobes: float) -> Array:
    """sinc of the offset in resolution cells; what lies outside its main lobe is scaled by `side_lobes`."""
    value = np.sinc(SPACING * offset)
    return np.where(np.abs(SPACING * offset) <= 1.0, value, side_lobes * value)

"""The paper read literally and slowly: loops over images, levels, group elements and pixels; the identity evaluated.

Written from the paper's text alone, sharing no line with the library, to compare the library with.
One image is a list-like (C, H, W) float64 array; a network is a function of one image and one timestep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Network = Callable[[Array, int], Array]
Place = tuple[int, int]

# where the pixel at (h, w) of an H x W image goes; y points down, a quarter turn is counter-clockwise
DESTINATION: dict[str, Callable[[int, int, int, int], Place]] = {
    "id": lambda h, w, H, W: (h, w),
    "flip_x": lambda h, w, H, W: (h, W - 1 - w),
    "flip_y": lambda h, w, H, W: (H - 1 - h, w),
    "rot90": lambda h, w, H, W: (W - 1 - w, h),
    "rot180": lambda h, w, H, W: (H - 1 - h, W - 1 - w),
    "shift_x": lambda h, w, H, W: (h, (w + 1) % W),
    "shift_y": lambda h, w, H, W: ((h + 1) % H, w),
}


def move(name: str, image: Array) -> Array:
    """P_g: every pixel goes to its destination."""
    height, width = image.shape[1:]
    moved = np.full_like(image, np.nan)
    for h in range(height):
        for w in range(width):
            row, column = DESTINATION[name](h, w, height, width)
            moved[:, row, column] = image[:, h, w]
    return moved


def move_back(name: str, image: Array) -> Array:
    """P_g^-1: every pixel is fetched from its destination."""
    height, width = image.shape[1:]
    restored = np.full_like(image, np.nan)
    for h in range(height):
        for w in range(width):
            row, column = DESTINATION[name](h, w, height, width)
            restored[:, h, w] = image[:, row, column]
    return restored


def pool(energy: Array, kind: str, topk: float, window: int) -> float:
    """pool(A): mean over channels; then the mean of all, of the largest, or of the largest box averages."""
    channels, height, width = energy.shape
    pixels = [[sum(energy[c, h, w] for c in range(channels)) / channels for w in range(width)] for h in range(height)]
    if kind == "local":
        pixels = [[_box(pixels, h, w, window // 2) for w in range(width)] for h in range(height)]
    values = sorted((value for row in pixels for value in row), reverse=True)
    if kind != "mean":
        values = values[: max(1, math.floor(topk * height * width))]
    return sum(values) / len(values)


def _box(pixels: list[list[float]], row: int, column: int, reach: int) -> float:
    """The mean over the box around a pixel, as far as it lies inside the image."""
    inside = [
        pixels[h][w]
        for h in range(row - reach, row + reach + 1)
        for w in range(column - reach, column + reach + 1)
        if 0 <= h < len(pixels) and 0 <= w < len(pixels[0])
    ]
    return sum(inside) / len(inside)


@dataclass
class Literal:
    """The features of single images; `passes` counts the calls of the network."""

    network: Network
    alphas_cumprod: Array
    pool: str = "topk"
    topk: float = 0.3
    window: int = 9
    group: tuple[str, ...] = ("id", "flip_x", "flip_y", "rot90", "rot180", "shift_x", "shift_y")
    passes: int = field(default=0, init=False)

    def features(self, x0: Array, noise: Array, t: int) -> dict[str, float]:
        """Every scalar feature of one image at one level."""
        abar = self.alphas_cumprod[t]
        sigma = math.sqrt(1 - abar)
        x_t = math.sqrt(abar) * x0 + sigma * noise
        s = self._score(x_t, t, sigma)
        transported = [move_back(g, self._score(move(g, x_t), t, sigma)) for g in self.group]
        posterior_means = [(x_t + sigma**2 * s_g) / math.sqrt(abar) for s_g in transported]
        x0_hat = (x_t + sigma**2 * s) / math.sqrt(abar)
        b = self._pool(s**2)
        size = len(self.group)
        pairs = [(i, j) for i in range(size) for j in range(size) if i < j]
        return {
            "s": _mean([self._pool((s_g - s) ** 2) / b for s_g in transported]),
            "cos": _mean([1 - _cosine(s_g, s) for s_g in transported]),
            "pair": _mean([self._pool((transported[i] - transported[j]) ** 2) / b for i, j in pairs]),
            "walk": _mean([self._pool((transported[i - 1] - transported[i]) ** 2) / b for i in range(size)]),
            "x0": _mean([self._pool((m_g - x0_hat) ** 2) / self._pool(x0_hat**2) for m_g in posterior_means]),
            "b": b,
            "d": self._pool((-sigma * s - noise) ** 2),
        }

    def _score(self, x: Array, t: int, sigma: float) -> Array:
        self.passes += 1
        return -self.network(x, t) / sigma

    def _pool(self, energy: Array) -> float:
        return pool(energy, self.pool, self.topk, self.window)


def _cosine(a: Array, b: Array) -> float:
    dot = sum(x * y for x, y in zip(a.ravel(), b.ravel(), strict=True))
    return dot / math.sqrt(sum(x * x for x in a.ravel()) * sum(y * y for y in b.ravel()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """The population's: the mean square deviation, without n - 1."""
    centre = _mean(values)
    return math.sqrt(_mean([(value - centre) ** 2 for value in values]))


def _quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def select_levels(z: Array, keep: int, weighting: str) -> tuple[list[int], list[float]]:
    """Algorithm 1 on the base feature (images, levels): the K levels of lowest CV, ascending, and their weights."""
    cv = [_std(z[:, t]) / abs(_mean(z[:, t])) for t in range(z.shape[1])]
    kept = sorted(sorted(range(len(cv)), key=lambda t: cv[t])[:keep])
    shares = [1 / cv[t] if weighting == "inv_cv" else 1.0 for t in kept]
    return kept, [share / sum(shares) for share in shares]


def id_log_score(kind: str, value: float, samples: Sequence[float]) -> float:
    """l_{t,f}(z): how usual a value is among the ID samples of one level and feature; raw values count against it."""
    if kind == "raw":
        return -value
    if kind == "zscore":
        return -0.5 * ((value - _mean(samples)) / _std(samples)) ** 2
    spread = min(_std(samples), (_quantile(samples, 0.75) - _quantile(samples, 0.25)) / 1.34)
    h = 0.9 * spread * len(samples) ** (-1 / 5)
    exponents = [-0.5 * ((value - sample) / h) ** 2 for sample in samples]
    largest = max(exponents)
    density_at_scale = sum(math.exp(exponent - largest) for exponent in exponents)
    return largest + math.log(density_at_scale / (len(samples) * h * math.sqrt(2 * math.pi)))


def aggregate(kind: str, values: Sequence[float], weights: Sequence[float]) -> float:
    """Over levels, on values that are higher for more OOD images."""
    ordered = sorted(values)
    cut = math.floor(len(ordered) / 4)
    return {
        "wmean": sum(w * v for w, v in zip(weights, values, strict=True)),
        "mean": _mean(values),
        "max": ordered[-1],
        "min": ordered[0],
        "trimmed": _mean(ordered[cut : len(ordered) - cut]),
    }[kind]


def anomaly_score(
    calibration: str, z: Array, id_z: Array, weights: Sequence[float], over_levels: str, over_features: str
) -> float:
    """S of one image, z (levels, features), given ID values (images, levels, features): minus its ID log-score."""
    if calibration == "mvn":
        return _half_mahalanobis(z.ravel(), np.asarray([row.ravel() for row in id_z]))
    per_level = []
    for t in range(z.shape[0]):
        parts = [-id_log_score(calibration, z[t, f], id_z[:, t, f]) for f in range(z.shape[1])]
        per_level.append({"sum": sum, "mean": _mean, "max": max}[over_features](parts))
    return aggregate(over_levels, per_level, weights)


def _half_mahalanobis(z: Array, id_z: Array) -> float:
    """d^2/2 under the ID mean and covariance; standardised, the covariance gets 1e-6 I against collinear features."""
    mean = np.asarray([_mean(column) for column in id_z.T])
    size = len(mean)
    covariance = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            covariance[i, j] = _mean([(row[i] - mean[i]) * (row[j] - mean[j]) for row in id_z])
    for i in range(size):
        covariance[i, i] *= 1 + 1e-6
    return 0.5 * float((z - mean) @ np.linalg.inv(covariance) @ (z - mean))

"""Score images with an exported detector. This file needs numpy, onnxruntime and Pillow, and nothing else.

    python score.py photos/new/*.png --alpha 0.05

It prints path, score, p-value and alarm of every image as CSV, or the error if an image cannot be read. A good image
raises an alarm with a probability of at most alpha. The folder of this file has the network (`net.onnx`), the fitted
numbers (`calibration.npz`), and what to do with them (`calibration.json`), which also names the thresholds of the score
for some rates.

The features and their combination are those of the method gepc+ of the package gepc, which describes them at length.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

Array = npt.NDArray[Any]

TINY = 1e-30
NEIGHBOURS = 5
TAIL, GRID = 0.2, np.linspace(0.0, 1.0, 101)  # the share of scores in the tail, and where quantiles are known
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
TURNS = {"rot90": 1, "rot180": 2, "rot270": 3}
FLIPS = {"flip_x": -1, "flip_y": -2}
SHIFTS = {"ax": ((0, 1),), "ay": ((1, 0),), "ad": ((1, 1), (1, -1)), "ax2": ((0, 2),), "ay2": ((2, 0),)}
FEATURES = ("s", "d", *SHIFTS, "ac", "inner", "h")
ELEMENTS = (*TURNS, *FLIPS)


class Detector:
    """An exported detector."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        self.facts: dict[str, Any] = json.loads((folder / "calibration.json").read_text())
        with np.load(folder / "calibration.npz") as arrays:
            self.arrays = {name: arrays[name] for name in arrays.files}
        self.session = onnxruntime.InferenceSession(str(folder / "net.onnx"), providers=["CPUExecutionProvider"])

    # --- from pixels to the input of the network ---------------------------------------------------------------------

    def prepare(self, pixels: Array) -> Array:
        """8-bit pixels (H, W) or (H, W, C) as float32 (C, H, W) in [-1, 1], in the size of the network."""
        low, high = self.facts["value_range"]
        height, width = self.facts["size"]
        channels = self.facts["channels"]
        if pixels.dtype != np.uint8:
            raise ValueError("images must have 8 bits for each channel")
        image = pixels if pixels.ndim == 3 else pixels[..., None]
        unit = ((image.astype(np.float64) - low) * (2.0 / (high - low)) - 1.0).clip(-1.0, 1.0).astype(np.float32)
        if unit.shape[2] == 1 and channels == 3:
            unit = np.repeat(unit, 3, axis=2)
        if unit.shape[2] == 3 and channels == 1:
            unit = (unit @ LUMA)[..., None]
        if unit.shape[2] != channels:
            raise ValueError(f"the image has {unit.shape[2]} channels, and the network takes {channels}")
        if unit.shape[:2] != (height, width):
            if self.facts["resize"] == "exact":
                raise ValueError(f"the image must have {width}x{height} pixels")
            planes = [Image.fromarray(np.ascontiguousarray(unit[..., band])) for band in range(channels)]
            planes = [plane.resize((width, height), Image.Resampling.BILINEAR) for plane in planes]
            unit = np.stack([np.asarray(plane, dtype=np.float32) for plane in planes], axis=2).clip(-1.0, 1.0)
        return np.ascontiguousarray(unit.transpose(2, 0, 1))

    def noise(self, image: Array, timestep: int) -> Array:
        """Standard normal noise that is a function of the image's content and the noise level."""
        quantised = np.rint((image.astype(np.float64) + 1.0) * 32767.5).astype("<i4")
        content = hashlib.blake2b(quantised.tobytes(), digest_size=16)
        content.update(repr(quantised.shape).encode())
        text = f"{self.facts['seed']}|noise|{timestep}|0"
        digest = hashlib.blake2b(content.digest() + text.encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))
        return generator.standard_normal(image.shape, dtype=np.float32)

    # --- features ----------------------------------------------------------------------------------------------------

    def network(self, x: Array, timestep: int) -> tuple[Array, list[Array]]:
        """The predicted noise, and the activations of the inner layers."""
        inputs = {"x": np.ascontiguousarray(x[None]), "t": np.array([timestep], dtype=np.int64)}
        eps, *layers = (answer[0] for answer in self.session.run(None, inputs))
        return eps, layers

    def columns(self, image: Array, timestep: int, abar: float) -> Array:
        """The features of an image at one noise level, in the order in which they were calibrated."""
        noise = self.noise(image, timestep)
        x_t = image * np.float32(abar**0.5) + noise * np.float32((1.0 - abar) ** 0.5)
        eps, layers = self.network(x_t, timestep)
        error = eps - noise
        found: dict[str, Array] = {"d": log(self.pool((error**2).mean(0))), "h": statistics(layers)}
        found |= {name: autocorrelation(error, shifts) for name, shifts in SHIFTS.items()}
        if len(error) > 1:
            power = (error**2).sum(dtype=np.float64)
            found["ac"] = ((error.sum(0) ** 2).sum(dtype=np.float64) / power - 1.0) / (len(error) - 1)
        residuals, inner = [], []
        highest = -(-image.shape[1] // image.shape[2])  # of a grid with a single column
        grids = [place for place, layer in enumerate(layers) if layer.shape[2] > 1 or layer.shape[1] <= highest]
        for element in self.facts["elements"]:
            moved, moved_layers = self.network(act(element, x_t), timestep)
            gap = ((act(element, moved, back=True) - eps) ** 2).mean(0)
            residuals.append(log(self.pool(gap) / self.pool((eps**2).mean(0))))
            pairs = [(layers[place], act(element, moved_layers[place], back=True)) for place in grids]
            inner.append(np.concatenate([relative_gap(*pair) for pair in pairs]))
        if residuals:
            found |= {"s": np.array(residuals), "inner": log(np.mean(inner, axis=0))}
        return np.concatenate([np.atleast_1d(found[name]) for name in self.facts["features"]])

    def pool(self, field: Array) -> float:
        """The mean of the largest pixels (H, W)."""
        count = max(1, math.floor(self.facts["topk"] * field.size))
        return float(np.sort(field, axis=None)[-count:].mean())

    # --- score and p-value -------------------------------------------------------------------------------------------

    def score(self, pixels: Array) -> float:
        """The score of an image, higher is more unusual: the mean over noise levels of the evidence of all parts."""
        image = self.prepare(pixels)
        weights = self.arrays["level_weights"]
        per_level = []
        for level, (timestep, abar) in enumerate(self.facts["levels"]):
            columns = self.columns(image, timestep, abar).astype(np.float64)
            parts = enumerate(self.facts["parts"])
            per_level.append(sum(part["weight"] * self.evidence(columns, level, place, part) for place, part in parts))
        return float(np.dot(weights, per_level) / weights.sum())

    def evidence(self, columns: Array, level: int, place: int, part: dict[str, Any]) -> float:
        """-log P(S >= s) of the distance of one part of the columns."""
        fitted = {name: self.arrays[f"{place}/{name}"][level] for name in part["arrays"]}
        own = columns[part["columns"]]
        squared = mahalanobis(own, **fitted) if "factor" in fitted else local(own, **fitted)
        value = math.log(max(squared, self.arrays["least"][level, place]))
        quantiles = self.arrays["quantiles"][:, level, place]
        scale, shape = self.arrays["tails"][0, :, level, place]
        limit = np.interp(1.0 - TAIL, GRID, quantiles)
        if value <= limit:
            return float(-np.log(max(1.0 - np.interp(value, quantiles, GRID), TAIL)))
        excess = (value - limit) / scale
        return float((np.log1p(shape * excess) / shape if shape > 1e-6 else excess) - math.log(TAIL))

    def p_value(self, score: float) -> float:
        """The share of calibration images, and the image itself, that are at least as unusual."""
        scores = self.arrays["calibration_scores"]
        return float((1 + (scores >= score).sum()) / (len(scores) + 1))


def act(element: str, x: Array, back: bool = False) -> Array:
    """A rotation or flip of (C, H, W), or its inverse."""
    if element in FLIPS:
        return np.flip(x, FLIPS[element])
    return np.rot90(x, -TURNS[element] if back else TURNS[element], axes=(-2, -1))


def log(values: Any) -> Array:
    """The logarithm of positive values."""
    return np.asarray(np.log(np.maximum(np.asarray(values, dtype=np.float64), TINY)))


def statistics(layers: Sequence[Array]) -> Array:
    """The mean of every channel of all layers, and the logarithms of their standard deviations."""
    if not layers:
        return np.empty(0)
    means = [layer.mean((1, 2)) for layer in layers]
    deviations = [log(layer.std((1, 2))) for layer in layers]
    return np.concatenate([*means, *deviations])


def relative_gap(here: Array, moved: Array) -> Array:
    """mean (A - P_g^-1 A_g)^2 / mean A^2 of every channel."""
    return np.asarray(((here - moved) ** 2).mean((1, 2)) / np.maximum((here**2).mean((1, 2)), TINY))


def autocorrelation(field: Array, shifts: Sequence[tuple[int, int]]) -> Array:
    """mean f(p) f(p + shift) / mean f^2 over pixels and shifts."""
    power, found = np.square(field).mean(dtype=np.float64), []
    for down, right in shifts:
        height, width, left = field.shape[1] - down, field.shape[2] - abs(right), max(0, -right)
        here = field[:, :height, left : left + width]
        there = field[:, down : down + height, left + right : left + right + width]
        found.append((here * there).mean(dtype=np.float64) / power)
    return np.asarray(np.mean(found))


def mahalanobis(columns: Array, mean: Array, factor: Array) -> float:
    """|L^-1 (f - mean)|^2 with the Cholesky factor L of the covariance."""
    return float((np.linalg.solve(factor, columns - mean) ** 2).sum())


def local(
    columns: Array, mean: Array, scale: Array, axes: Array, samples: Array, energies: Array, radii: Array
) -> float:
    """The squared distance to the fifth nearest calibration image, in units of those of the five nearest."""
    z = (columns - mean) / scale
    components = axes.astype(np.float64) @ z
    squares = np.maximum((z**2).sum() + energies - 2.0 * samples.astype(np.float64) @ components, 0.0)
    nearest = np.argsort(squares)[:NEIGHBOURS]
    return float(squares[nearest[-1]] / np.exp(np.log(radii[nearest]).mean()))


def read(path: Path) -> Array:
    """The pixels of a grey or RGB file of 8 bits, upright."""
    with Image.open(path) as picture:
        if picture.mode not in ("L", "RGB"):
            raise ValueError(f"it is an image of mode {picture.mode}; save it as 8-bit grey or RGB")
        return np.asarray(ImageOps.exif_transpose(picture))


def main() -> int:
    """Score the files that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--alpha", type=float, default=0.05, help="the rate of false alarms")
    given = parser.parse_args()
    detector = Detector(Path(__file__).parent)
    if not 1.0 / (len(detector.arrays["calibration_scores"]) + 1) <= given.alpha < 1.0:
        parser.error(f"the calibration images are too few for a rate of {given.alpha}")
    table = csv.writer(sys.stdout)
    table.writerow(("path", "score", "p_value", "alarm", "error"))
    failures = 0
    for path in given.images:
        try:
            score = detector.score(read(path))
        except (OSError, ValueError) as error:
            failures += 1
            table.writerow((path, "", "", "", getattr(error, "strerror", None) or error))
            continue
        p_value = detector.p_value(score)
        table.writerow((path, repr(score), repr(p_value), "true" if p_value <= given.alpha else "false", ""))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

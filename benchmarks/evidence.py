"""How parts of a score are combined, and whether explanations name the right part.

    python benchmarks/evidence.py --data DATA --out evidence.md

The features of `gepc+ fast` are computed once for every set; rules, sides and weights are arithmetic on them. Rules are
compared on synthetic outliers of ID images that nothing was fitted on. The OOD columns are outcomes: nothing is chosen
by them. 300 ID images are fitted on, 150 are tested, and each kind of outlier is made of 75 others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import skimage.data
import torch

import gepc
from gepc.calibration import Aggregation, create_calibrator
from gepc.calibration.calibrators import Calibrator
from gepc.core.parts import OUTPUT
from gepc.images.formats import read_npz
from gepc.images.noise import generator, image_key
from gepc.images.synthetic import KINDS, synthetic_outlier
from gepc.lab.metrics import auroc
from gepc.methods.base import Batch, Table, extract_table
from gepc.methods.gepc_plus import GepcPlus

Array = npt.NDArray[np.float64]
Images = npt.NDArray[np.float32]
SIDE, FIT, TEST, CHANGED = 32, 300, 150, 75
FILES = {"cifar10": "cifar10", "svhn": "svhn32", "celeba": "celeba32", "tinyimagenet": "tinyimagenet32"}
TEXTURES = ("gravel", "grass", "brick")
OTHERS = {
    "cifar10": ("svhn", "celeba", "cifar100"),
    "svhn": ("cifar10", "celeba", "cifar100"),
    "celeba": ("cifar10", "svhn", "cifar100"),
}
NINE = [(name, other) for name, others in OTHERS.items() for other in others]
DESIGNS = {
    "sum of z-scores (0.2)": "parts",
    "fisher (default)": "evidence",
    "minimum": "evidence:rule=minimum",
    "cauchy": "evidence:rule=cauchy",
    "positive": "evidence:rule=positive",
    "fisher without views": "evidence:view=0",
    "fisher, views .25": "evidence:view=0.25",
    "fisher, output by level_knn": "evidence:narrow=level_knn",
    "fisher, left tail .1": "evidence:left=0.1",
    "fisher, two-sided layers": "evidence:left=0.5",
}
SHIFTS = ("blur", "noise", "colour", "grey", "flip", "brighter", "texture")


def texture(image: Images, rng: np.random.Generator, side: int = 12) -> Images:
    """A stationary texture with the spectrum of a small patch, by random phases."""
    y, x = rng.integers(0, SIDE + 1 - side, 2)
    patch = image[:, y : y + side, x : x + side].astype(np.float64)
    mean = patch.mean((1, 2), keepdims=True)
    kernel = np.zeros((len(image), SIDE, SIDE))
    kernel[:, :side, :side] = patch - mean
    noise = np.fft.rfft2(rng.standard_normal((SIDE, SIDE)))
    return np.asarray(mean + np.fft.irfft2(np.fft.rfft2(kernel) * noise, s=(SIDE, SIDE)) / side, dtype=np.float32)


def quilt(image: Images, rng: np.random.Generator) -> Images:
    """A patch of 8 pixels, repeated."""
    y, x = rng.integers(0, SIDE - 8, 2)
    return np.tile(image[:, y : y + 8, x : x + 8], (1, SIDE // 8, SIDE // 8))


MORE: Mapping[str, Callable[[Images, np.random.Generator], Images]] = {
    "texture": texture,
    "quilt": quilt,
    "grey": lambda image, _: np.repeat(image.mean(0, keepdims=True), 3, axis=0),
    "brighter": lambda image, _: image + np.float32(0.5),
    "flip": lambda image, _: image[:, ::-1],
}


def outlier(image: Images, kind: str) -> Images:
    """The image changed in one way, in [-1, 1]."""
    if kind in KINDS:
        return synthetic_outlier(image, kind)
    changed = MORE[kind](image, generator(0, image_key(image), kind))
    return np.ascontiguousarray(np.clip(changed, -1.0, 1.0))


def some(pixels: npt.NDArray[np.uint8], count: int) -> Images:
    """`count` random images, the same ones every time, (N, C, H, W) in [-1, 1]."""
    drawn = pixels[np.random.default_rng(0).permutation(len(pixels))[:count]]
    return (drawn.astype(np.float32) / 127.5 - 1.0).transpose(0, 3, 1, 2)


def cells(name: str) -> npt.NDArray[np.uint8]:
    """Squares of a photograph of scikit-image without overlap, as RGB."""
    grey = getattr(skimage.data, name)()
    rows, columns = (side // SIDE for side in grey.shape)
    squares = [grey[r * SIDE :, c * SIDE :][:SIDE, :SIDE] for r in range(rows) for c in range(columns)]
    return np.repeat(np.stack(squares)[..., None], 3, axis=3)


def sets(data: Path) -> Iterator[tuple[str, Images]]:
    """Every set by name: to fit on, to test, and changed in every way."""
    for name, file in FILES.items():
        path = data / f"{file}.npz"
        if name == "tinyimagenet":  # has no training images of its own
            both = some(read_npz(path, "test_x"), FIT + 2 * TEST)
            test, fit = both[:TEST], both[TEST:]
        else:
            test, fit = some(read_npz(path, "test_x"), TEST), some(read_npz(path, "train_x"), FIT + TEST)
        yield f"{name}/fit", fit[:FIT]
        yield f"{name}/more", fit[FIT + CHANGED :]
        yield f"{name}/test", test
        for kind in (*KINDS, *MORE):
            yield f"{name}/{kind}", np.stack([outlier(image, kind) for image in fit[FIT : FIT + CHANGED]])
    yield "cifar100/test", some(read_npz(data / "cifar100.npz", "test_x"), TEST)
    for name in TEXTURES:
        yield f"{name}/test", some(cells(name), TEST)


class Features:
    """Columns of `gepc+ fast` by name of the set, and their parts; computed, or read from a file of an earlier run."""

    def __init__(self, data: Path, backbone: str, file: Path) -> None:
        self.backbone, self.method = gepc.load_backbone(backbone), GepcPlus()
        self.parts = self.method.parts(self.table(np.zeros((1, 3, SIDE, SIDE), np.float32)))
        if not file.exists():
            columns = {name: self.compute(images) for name, images in sets(data)}
            np.savez(file, allow_pickle=False, **columns)
        with np.load(file) as stored:
            self.columns: dict[str, Array] = {name: stored[name].astype(np.float64) for name in stored.files}

    def table(self, images: Images) -> Table:
        batch = Batch(images, [image_key(image) for image in images])
        return extract_table(self.method, self.backbone, batch, self.method.timesteps(self.backbone))

    def compute(self, images: Images) -> npt.NDArray[np.float32]:
        parts = [self.method.columns(self.table(images[first : first + 50])) for first in range(0, len(images), 50)]
        return np.concatenate(parts).astype(np.float32)

    def fitted(self, calibration: str, name: str) -> Calibrator:
        return create_calibrator(calibration).fit(self.columns[f"{name}/fit"], self.parts)

    def scores(self, model: Calibrator, name: str) -> Array:
        return model.score(self.columns[name], np.ones(1), Aggregation())


def line(features: Features, calibration: str) -> list[float]:
    """Synthetic outliers on average and on each ID set; outcomes: nine pairs, and Tiny-ImageNet against five sets."""
    synthetic, pairs = {}, {}
    for name in FILES:
        model = features.fitted(calibration, name)
        inside = features.scores(model, f"{name}/test")
        usual = np.concatenate([inside, features.scores(model, f"{name}/more")])
        outside = [features.scores(model, f"{name}/{kind}") for kind in (*KINDS, *MORE)]
        synthetic[name] = float(np.mean([auroc(usual, changed) for changed in outside]))
        for other in (*FILES, "cifar100", *TEXTURES):
            if other != name:
                pairs[name, other] = auroc(inside, features.scores(model, f"{other}/test"))
    tiny = [pairs["tinyimagenet", other] for other in (*TEXTURES, "svhn", "celeba")]
    nine = float(np.mean([pairs[pair] for pair in NINE]))
    return [float(np.mean(list(synthetic.values()))), *synthetic.values(), nine, *tiny]


def confusion(features: Features, name: str, alpha: float = 0.05) -> list[tuple[str, Sequence[float]]]:
    """For each shift: the share of images with a part below `alpha`, and among these the shares of the named parts."""
    model = features.fitted("evidence", name)
    rows = []
    for kind in SHIFTS:
        _, found = model.explained(features.columns[f"{name}/{kind}"], np.ones(1), Aggregation())
        p = np.stack([values for part, values in found.items() if part != OUTPUT], axis=1)
        noticed = p.min(axis=1) <= alpha
        named = np.bincount(p[noticed].argmin(axis=1), minlength=p.shape[1]) / max(1, noticed.sum())
        rows.append((kind, [float(noticed.mean()), *named.tolist()]))
    return rows


def markdown(header: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]], digits: int) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for label, values in rows:
        shown = [f"{value:.{digits}f}".removeprefix("0") for value in values]
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--backbone", default="celeba32-tiny")
    parser.add_argument("--out", type=Path, default=Path("evidence.md"))
    parser.add_argument("--features", type=Path, default=Path("evidence.npz"), help="computed features, kept here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    features = Features(given.data, given.backbone, given.features)
    textures = [f"TinyIN: {name}" for name in TEXTURES]
    header = ["combination", "synthetic", *FILES, "nine pairs", *textures, "SVHN", "CelebA"]
    text = [markdown(header, [(label, line(features, name)) for label, name in DESIGNS.items()], 4)]
    names = [part.name for part in features.parts if part.name != OUTPUT]
    for name in ("celeba", "cifar10"):
        table = markdown(["shift", "noticed", *names], confusion(features, name), 2)
        text.append(f"{name}:\n\n{table}")
    given.out.write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()

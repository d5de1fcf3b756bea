"""How parts of a score are combined, and whether explanations name the right part.

    python benchmarks/evidence.py --data DATA --out evidence.md
    python benchmarks/evidence.py --data DATA --out densities.md --densities
    python benchmarks/evidence.py --data DATA --out methods.md --features methods.npz --methods

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
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans
from sklearn.covariance import ledoit_wolf

import gepc
from gepc.calibration import Aggregation, create_calibrator
from gepc.calibration.calibrators import Calibrator, register
from gepc.calibration.evidence import WIDE, Evidence
from gepc.calibration.joint import LevelPCA
from gepc.core.parts import OUTPUT, Part
from gepc.images.formats import read_npz
from gepc.images.noise import generator, image_key
from gepc.images.synthetic import KINDS, synthetic_outlier
from gepc.lab.metrics import auroc
from gepc.methods.base import Batch, Extractor, Table, extract_table
from gepc.methods.combined import Combined
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
    "fisher, views .5": "evidence:view=0.5",
    "fisher, structure by level_pca": "evidence:wide=level_pca",
    "fisher, views .5, level_pca": "evidence:view=0.5,wide=level_pca",
    "fisher, output by level_knn": "evidence:narrow=level_knn",
    "fisher, left tail .1": "evidence:left=0.1",
    "fisher, two-sided layers": "evidence:left=0.5",
}
METHODS = ("gepc", "scoped", "diffpath", "gepc+")
TOGETHER = (("gepc", "scoped", "diffpath"), ("gepc+", "scoped"), ("gepc+", "diffpath"), METHODS)
FEW_FIT, FEW_TEST = 200, 100  # images for combinations of methods, which need many passes
DENSITIES = {
    "one Gaussian, `level_pca`": "evidence:wide=level_pca",
    "distance to the 5th neighbour": "evidence:wide=candidate:kind=neighbour",
    "four clusters, shared covariance": "evidence:wide=candidate:kind=clusters",
    "ratio of densities": "evidence:wide=candidate:kind=ratio",
    "the same, two-sided": "evidence:wide=candidate:kind=two_sided",
    "ratio, not whitened: `level_lof` (default)": "evidence",
    "`level_pca` and `level_lof`, half each": "halves",
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


def few(data: Path) -> Iterator[tuple[str, Images]]:
    """The sets of the nine pairs, with fewer images."""
    for name in (*OTHERS, "cifar100"):
        path = data / f"{FILES.get(name, name)}.npz"
        yield f"{name}/test", some(read_npz(path, "test_x"), FEW_TEST)
        if name in OTHERS:
            yield f"{name}/fit", some(read_npz(path, "train_x"), FEW_FIT)


@register("candidate")
class Candidate(LevelPCA):
    """Local densities in the whitened principal components of `level_pca`, for one noise level; tried and not kept.

    The squared length of all other directions is added to a squared distance, which is divided by that of the
    neighbours in a ratio.
    """

    def __init__(self, kind: str = "neighbour", neighbours: int = 5) -> None:
        super().__init__()
        self.kind, self.neighbours = kind, neighbours

    def _fit(self, columns: Array) -> None:
        super()._fit(columns)
        white, rest = self.whitened(columns[:, 0])
        if self.kind == "clusters":
            labels = KMeans(4, n_init=4, random_state=0).fit(white[:, :16]).labels_
            self.white = np.stack([white[labels == label].mean(axis=0) for label in range(4)])
            covariance, _ = ledoit_wolf(white - self.white[labels], assume_centered=True)
            self.factor = np.linalg.cholesky(np.linalg.inv(covariance))
            return
        self.white = white
        squares = cdist(white, white, "sqeuclidean")
        np.fill_diagonal(squares, np.inf)
        self.radii = np.sort(squares, axis=1)[:, self.neighbours - 1] + rest

    def whitened(self, vectors: Array) -> tuple[Array, Array]:
        """The components in units of their standard deviations, and the squared length of the rest."""
        components, energies = self.projected(0, vectors)
        rest = np.maximum(energies - (components**2).sum(axis=1), 0.0) / self.variances_[0, -1]
        return components / np.sqrt(self.variances_[0, :-1]), rest

    def distance_at(self, level: int, vectors: Array) -> Array:
        white, rest = self.whitened(vectors)
        if self.kind == "clusters":
            return np.asarray(cdist(white @ self.factor, self.white @ self.factor, "sqeuclidean").min(axis=1) + rest)
        squares = cdist(white, self.white, "sqeuclidean")
        order = np.argsort(squares, axis=1)[:, : self.neighbours]
        radius = np.take_along_axis(squares, order[:, -1:], axis=1)[:, 0] + rest
        if self.kind == "neighbour":
            return np.asarray(radius)
        ratio = np.log(radius) - np.log(self.radii[order]).mean(axis=1)
        return np.asarray(ratio**2 if self.kind == "two_sided" else np.exp(ratio))


@register("halves")
class Halves(Evidence):
    """The structure as two parts with half the weight each, by `level_pca` and by `level_lof`."""

    @property
    def used(self) -> list[Part]:
        wide = [part for part in super().used if len(part.columns) >= WIDE]
        others = [part for part in super().used if len(part.columns) < WIDE]
        return [*others, *(Part(name, part.runs, weight=0.5) for part in wide for name in ("level_pca", "level_lof"))]

    def _new(self, part: Part) -> Calibrator:
        return create_calibrator(part.name if len(part.columns) >= WIDE else self.narrow)


class Features:
    """Columns of a method by name of the set, and their parts; computed, or read from a file of an earlier run."""

    def __init__(self, images: Iterator[tuple[str, Images]], backbone: str, file: Path, method: Extractor) -> None:
        self.backbone, self.method = gepc.load_backbone(backbone), method
        self.parts = self.method.parts(self.table(np.zeros((1, 3, SIDE, SIDE), np.float32)))
        if not file.exists():
            columns = {name: self.compute(several) for name, several in images}
            np.savez(file, allow_pickle=False, sha256=np.array(self.backbone.sha256), **columns)
        with np.load(file) as stored:
            if str(stored["sha256"]) != self.backbone.sha256:
                raise SystemExit(f"{file} has the features of another network; give another file")
            names = [name for name in stored.files if name != "sha256"]
            self.columns: dict[str, Array] = {name: stored[name].astype(np.float64) for name in names}

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
    rows: list[tuple[str, Sequence[float]]] = []
    for kind in SHIFTS:
        _, found = model.explained(features.columns[f"{name}/{kind}"], np.ones(1), Aggregation())
        p = np.stack([values for part, values in found.items() if part != OUTPUT], axis=1)
        noticed = p.min(axis=1) <= alpha
        named = np.bincount(p[noticed].argmin(axis=1), minlength=p.shape[1]) / max(1, noticed.sum())
        rows.append((kind, [float(noticed.mean()), *named.tolist()]))
    return rows


def together(features: Features) -> Iterator[tuple[str, Sequence[float]]]:
    """AUROC of the nine pairs and their mean: methods by themselves, and combined."""
    for names in (*((name,) for name in METHODS), *TOGETHER):
        parts = [part for part in features.parts if part.name in names]
        models = {name: create_calibrator("evidence").fit(features.columns[f"{name}/fit"], parts) for name in OTHERS}
        found = [
            auroc(*(features.scores(models[inside], f"{name}/test") for name in (inside, outside)))
            for inside, outside in NINE
        ]
        yield " + ".join(names), [*found, float(np.mean(found))]


def markdown(header: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]], digits: int) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for label, values in rows:
        shown = [f"{value:.{digits}f}".removeprefix("0") for value in values]
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--backbone", default="celeba32-small")
    parser.add_argument("--out", type=Path, default=Path("evidence.md"))
    parser.add_argument("--features", type=Path, default=Path("evidence.npz"), help="computed features, kept here")
    parser.add_argument("--densities", action="store_true", help="compare local densities of the inner layers instead")
    parser.add_argument("--methods", action="store_true", help="combine methods on the nine pairs instead")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.methods:
        features = Features(few(given.data), given.backbone, given.features, Combined(METHODS))
        header = ["methods", *(f"{inside}: {outside}" for inside, outside in NINE), "average"]
        given.out.write_text(markdown(header, list(together(features)), 3) + "\n")
        return
    features = Features(sets(given.data), given.backbone, given.features, GepcPlus())
    textures = [f"TinyIN: {name}" for name in TEXTURES]
    header = ["combination", "synthetic", *FILES, "nine pairs", *textures, "SVHN", "CelebA"]
    designs = DENSITIES if given.densities else DESIGNS
    text = [markdown(header, [(label, line(features, name)) for label, name in designs.items()], 4)]
    names = [part.name for part in features.parts if part.name != OUTPUT]
    for name in () if given.densities else ("celeba", "cifar10"):
        table = markdown(["shift", "noticed", *names], confusion(features, name), 2)
        text.append(f"{name}:\n\n{table}")
    given.out.write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()

"""gepc+ on data outside its nine pairs: photographs, radar images, rotated and pasted faces, grey images.

    GEPC_DATA=data python benchmarks/fresh.py --out results/fresh [--methods diffpath,msma:knn]

`--data` holds celeba32.npz, cifar10.npz, svhn32.npz, tinyimagenet32.npz and the folders HRSID and SSDD; the photographs
are scikit-image's own. The sets are written to OUT/sets as npz files, the tables to OUT/fresh.md.
There are two blocks of pairs:

* FIRST: the terms and levels of gepc+ were not chosen on it, but after it the transforms were changed (rot90 and flip_x
  instead of rot180) and the column `ac` was added;
* SECOND: listed after all of this was fixed, and evaluated once; after it `level_knn` replaced `level_mahalanobis`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from plus_designs import OUTPUT, Design, PlusBench, collect_plus, fast, full, plain_gepc
from skimage import data as photographs

import gepc
from gepc.core.allocator import keep_freed_memory
from gepc.core.tables import Cell, ResultTable, write_tables
from gepc.images.formats import read_npz
from gepc.lab.bench.baselines import choose_baselines, collect_baselines, method_names
from gepc.lab.bench.evaluate import Benchmark, pair_aurocs
from gepc.lab.bench.protocol import BenchmarkDataset, Pair, Protocol
from gepc.lab.radar.annotations import read_hrsid, read_ssdd
from gepc.methods.extraction import FeatureCache
from gepc.methods.gepc_plus import GepcPlus
from gepc.methods.groups import Group

Pixels = npt.NDArray[np.uint8]
SIDE, TRAIN, TEST = 32, 130, 60

FIRST = {
    "gravel": ("brick", "grass", "moon", "tissue", "coffee", "hrsid"),
    "tissue": ("coffee", "chelsea", "astronaut", "gravel", "celeba", "cifar10"),
    "hrsid": ("ssdd", "moon", "gravel", "brick", "grey celeba"),
    "tinyimagenet": ("celeba", "svhn", "cifar10", "coffee", "gravel"),
    "grey celeba": ("grey cifar10", "grey svhn", "celeba", "gravel", "astronaut"),
    "celeba": ("upside down", "pasted", "grey celeba", "chelsea", "astronaut", "coffee", "tissue", "brick", "hrsid"),
    "cifar10": ("chelsea", "coffee", "astronaut", "tissue", "grass", "ssdd"),
    "svhn": ("brick", "moon", "hrsid", "coffee", "astronaut", "chelsea"),
}
SECOND = {
    "retina": ("hubble", "tissue", "rocket", "celeba", "cifar10"),
    "hubble": ("retina", "moon", "camera", "rocket", "svhn"),
    "grass": ("gravel", "brick", "camera", "cell", "tinyimagenet"),
    "ssdd": ("hrsid", "cell", "camera", "grass", "coins"),
    "brick": ("grass", "coins", "clock", "camera", "grey celeba"),
    "celeba": ("retina", "hubble", "rocket", "camera", "coins", "clock"),
    "cifar10": ("retina", "hubble", "rocket", "camera", "cell", "hrsid"),
    "svhn": ("retina", "hubble", "page", "text", "clock", "ssdd"),
}
FUNCTIONS = {"tissue": "immunohistochemistry", "hubble": "hubble_deep_field"}
PHOTOGRAPHS = (
    *("gravel", "brick", "grass", "moon", "tissue", "coffee", "chelsea", "astronaut"),
    *("retina", "hubble", "rocket", "camera", "cell", "coins", "clock", "page", "text"),
)


# --- the sets ------------------------------------------------------------------------------------------------------


def cells(pixels: Pixels, top: float = 0.0, bottom: float = 1.0) -> Pixels:
    """Squares of 32 without overlap, from some share of the rows, as RGB."""
    pixels = np.atleast_3d(pixels)[..., :3]
    colour = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels
    rows, columns = colour.shape[0] // SIDE, colour.shape[1] // SIDE
    wanted = range(int(rows * top), int(rows * bottom))
    return np.stack([colour[r * SIDE :, c * SIDE :][:SIDE, :SIDE] for r in wanted for c in range(columns)])


def some(pixels: Pixels, count: int) -> Pixels:
    """At most `count` of them, the same ones every time."""
    return pixels[np.random.default_rng(0).permutation(len(pixels))[:count]]


def photograph(name: str) -> tuple[Pixels, Pixels]:
    """Patches of the upper part to fit on, of the lower part to test; of all of it for a set that is only OOD."""
    pixels = np.asarray(getattr(photographs, FUNCTIONS.get(name, name))())
    if name in FIRST or name in SECOND:
        return some(cells(pixels, 0.0, 0.6), TRAIN), some(cells(pixels, 0.66, 1.0), TEST)
    return np.empty((0, SIDE, SIDE, 3), np.uint8), some(cells(pixels), TEST)


def radar(paths: Iterable[Path], count: int) -> Pixels:
    """Two patches of every scene, wherever they fall."""
    parts = []
    for path in paths:
        with Image.open(path) as picture:
            parts.append(some(cells(np.asarray(picture.convert("L"))), 2))
    return some(np.concatenate(parts), count)


def grey(pixels: Pixels) -> Pixels:
    """The mean of the three channels in each of them."""
    return np.repeat(pixels.mean(axis=3, keepdims=True).round().astype(np.uint8), 3, axis=3)


def pasted(faces: Pixels, others: Pixels) -> Pixels:
    """Faces with a square of 12 pixels from another picture."""
    found = faces.copy()
    found[:, 16:28, 4:16] = others[: len(faces), 16:28, 4:16]
    return found


def make_sets(data: Path) -> dict[str, tuple[Pixels, Pixels]]:
    """Name -> images to fit on (none for a set that is only OOD), images to test."""
    found = {name: photograph(name) for name in PHOTOGRAPHS}
    for name, file in (("celeba", "celeba32"), ("cifar10", "cifar10"), ("svhn", "svhn32")):
        path = data / f"{file}.npz"
        found[name] = (some(read_npz(path, "train_x"), TRAIN), some(read_npz(path, "test_x"), TEST))
    tiny = some(read_npz(data / "tinyimagenet32.npz", "test_x"), TRAIN + TEST)
    found["tinyimagenet"] = (tiny[TEST:], tiny[:TEST])
    train, test = ([scene.path for scene in read_hrsid(data / "HRSID", split).scenes] for split in ("train", "test"))
    found["hrsid"] = (radar(train, TRAIN), radar(test, TEST))
    scenes = [scene.path for scene in read_ssdd(data / "SSDD").scenes]
    found["ssdd"] = (radar(scenes[1::2], TRAIN), radar(scenes[::2], TEST))
    none, faces = found["page"][0], some(read_npz(data / "celeba32.npz", "test_x"), 3 * TEST)
    found["upside down"] = (none, faces[TEST : 2 * TEST, ::-1])
    found["pasted"] = (none, pasted(faces[2 * TEST :], found["cifar10"][1]))
    for name in ("celeba", "cifar10", "svhn"):
        found[f"grey {name}"] = (grey(found[name][0]), grey(found[name][1]))
    return found


def write_sets(data: Path, folder: Path) -> None:
    """Each as an npz file with `train_x` and `test_x`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (train, test) in make_sets(data).items():
        np.savez_compressed(folder / f"{name}.npz", train_x=train, test_x=test)


def protocol(backbone: str) -> Protocol:
    """All pairs of both blocks."""
    known = dict.fromkeys((*FIRST, *SECOND))
    pairs = {name: tuple(dict.fromkeys((*FIRST.get(name, ()), *SECOND.get(name, ())))) for name in known}
    names = dict.fromkeys(name for one, others in pairs.items() for name in (one, *others))
    sets = {name: BenchmarkDataset(f"npz:{name}.npz", name) for name in names}
    return Protocol(datasets=sets, pairs=pairs, backbone=backbone, train_images=TRAIN, test_images=TEST)


# --- the table -----------------------------------------------------------------------------------------------------


def shown() -> list[Design]:
    """What is compared: the presets, what they would be without some of their parts, and GEPC."""
    return [
        full("gepc+ full"),
        fast("gepc+ fast"),
        fast("gepc+ single", **GepcPlus.presets["single"].method),
        full("full without inner layers", features=OUTPUT),
        fast("fast without inner layers", features=OUTPUT),
        fast("fast with b", features=(*OUTPUT, "b", "inner", "h")),
        fast("fast without inner", features=(*OUTPUT, "h")),
        fast("fast without h", features=(*OUTPUT, "inner")),
        fast("fast, inner layers alone", features=("inner", "h")),
        fast("fast with rot180", group=Group.of("rot180")),
        fast("s", features=("s",)),
        plain_gepc("GEPC, K=2 of four levels, KDE"),
    ]


@dataclass(frozen=True)
class Line:
    """A detector, its passes per image and its AUROC on every pair."""

    label: str
    passes: str
    values: Mapping[Pair, float]

    def cells(self) -> tuple[Cell, ...]:
        """Average, worst pair and lowest tenth of either block."""
        found: list[Cell] = [self.label, self.passes]
        for block in (FIRST, SECOND):
            kept = [self.values[name, other] for name, others in block.items() for other in others]
            found += [float(np.mean(kept)), float(np.min(kept)), float(np.quantile(kept, 0.1))]
        return tuple(found)


def own_lines(bench: PlusBench) -> list[Line]:
    """gepc+, its variants and GEPC."""
    lines = []
    for design in filter(bench.seeds, shown()):
        passes = design.passes(bench.backbone, SIDE, len(bench.timesteps(design)))
        lines.append(Line(design.label, f"{passes}F+0J", pair_aurocs(bench.all_scores(design)[0])))
    return lines


def baseline_lines(names: str, benchmark: Benchmark) -> list[Line]:
    """Other methods, as `gepc bench --methods` runs them."""
    backbone, lines = benchmark.backbone, []
    baselines = choose_baselines(method_names(names), benchmark.protocol, backbone)
    for found in collect_baselines(baselines, benchmark):
        cost = found.scoring_extractor.cost(backbone, (SIDE, SIDE))
        lines.append(Line(found.label, str(cost), found.aurocs))
    return lines


def tables(lines: Sequence[Line]) -> list[ResultTable]:
    """The two blocks in short, and every pair."""
    counts = [sum(map(len, block.values())) for block in (FIRST, SECOND)]
    heads = [f"{word}, {count} pairs" for count in counts for word in ("average", "worst", "lowest tenth")]
    note = f"At most {TRAIN} images to fit on, {TEST} of each set to test, one noise seed; fitted on ID images alone."
    short = tuple(line.cells() for line in lines)
    every: list[tuple[Cell, ...]] = [
        (f"{pair[0]} : {pair[1]}", *(line.values[pair] for line in lines)) for pair in lines[0].values
    ]
    return [
        ResultTable("fresh", "Data outside the nine pairs", ("design", "passes", *heads), short, note),
        ResultTable("fresh-pairs", "Every pair", ("pair", *(line.label for line in lines)), tuple(every)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("GEPC_DATA", ".")))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backbone", default="celeba32-small")
    parser.add_argument("--methods", help="baselines to compare with, as for gepc bench")
    parser.add_argument("--lean", action="store_true", help="only the transforms of the presets, without GEPC's others")
    parser.add_argument("--cache", type=Path, default=Path(".gepc-cache"))
    options = parser.parse_args()
    keep_freed_memory()

    folder = options.out / "sets"
    write_sets(options.data, folder)
    settings = protocol(options.backbone)
    benchmark = Benchmark.open(settings, gepc.load_backbone(settings.backbone), folder, FeatureCache(options.cache))
    bench = collect_plus(benchmark, lean=options.lean)
    lines = own_lines(bench)
    if options.methods:
        lines += baseline_lines(options.methods, benchmark)
    print(write_tables(options.out, "fresh", tables(lines), {"protocol": asdict(settings)}))


if __name__ == "__main__":
    main()

"""Groups at equal passes on the paper's nine pairs: the paper's, D4, continuous ones, and one chosen from ID images.

    GEPC_DATA=data python benchmarks/groups.py --out results/groups [--train 80] [--test 50]

All images pass the network once under every element of all groups, at one level; a group is then a selection of
columns, with at most six elements other than the identity. `gepc` uses the residual of the output (KDE), `inner` that
of inner layers. `auto` is chosen for each ID set from its images to fit on. The column `synthetic` has the average
AUROC of synthetic outliers made from ID test images; only it may justify another default. Writes groups.md and the
figure of the residual against the rotation angle.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

import gepc
from gepc.calibration.scorer import Scorer
from gepc.core.tables import ResultTable, write_tables
from gepc.images.batches import load_all
from gepc.images.formats import read_npz
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import open_images
from gepc.images.synthetic import KINDS, synthetic_outlier
from gepc.lab.angles import ANGLES, angle_figure, residual_by_angle
from gepc.lab.metrics import auroc
from gepc.lab.report.figures import save
from gepc.methods.base import Batch
from gepc.methods.extraction import ExtractionSpec, FeatureTable, extract_all
from gepc.methods.features import find_feature
from gepc.methods.gepc import GepcExtractor
from gepc.methods.groups import Group
from gepc.methods.symmetries import choose

FILES = {"cifar10": "cifar10.npz", "svhn": "svhn32.npz", "celeba": "celeba32.npz", "cifar100": "cifar100.npz"}
LABELS = {"cifar10": "C10", "svhn": "SVHN", "celeba": "CelebA", "cifar100": "C100"}
INSIDE = ("cifar10", "svhn", "celeba")
SETS = ("celeba", "cifar10", "svhn", "cifar100")  # in the figure; the network was trained on CelebA
SYNTHETIC = "synthetic"
LEVELS = (0.99,)
SHIFTS = Group.translations(2, 6)
GROUPS = {
    "paper": Group.of("paper"),
    "D4 without antitranspose": Group.of([name for name in Group.of("d4").names if name != "antitranspose"]),
    "rotations by any angle": Group.so2(6),
    "sub-pixel shifts up to 2": SHIFTS,
    "flips and sub-pixel shifts": Group.of(["flip_x", "flip_y", "rot180", *SHIFTS.names[1:4]]),
}
CANDIDATES = Group.of([*Group.of("auto").names, "hue(120)"])


def plain(name: str) -> str:
    return name.rpartition("*")[2]


def union() -> Group:
    names = [name for group in (*GROUPS.values(), CANDIDATES) for name in group.names]
    return Group.of(list(dict.fromkeys(names)))


def select(table: FeatureTable, group: Group, feature: str) -> FeatureTable:
    """The table that the method has with this group, from that of all elements."""
    everything = table.spec.extractor
    assert isinstance(everything, GepcExtractor)
    kind = find_feature(feature)
    names, wanted = kind.elements(everything.group), kind.elements(group)
    values = table.table[feature][:, :, [names.index(plain(name)) for name in wanted]]
    if feature == "s":
        values = values * np.array([action.weight for action in group])
    extractor = replace(everything, group=group, features=(feature,))
    return replace(table, spec=replace(table.spec, extractor=extractor), table={feature: values})


def scores(group: Group, feature: str, fit: FeatureTable, tests: list[FeatureTable]) -> list[npt.NDArray[np.float64]]:
    chosen = select(fit, group, feature)
    scorer = Scorer(chosen.spec.extractor.calibration_name, None, "inv_cv", "wmean", "sum").fit(chosen)
    return [scorer.score(select(table, group, feature)) for table in tests]


def aurocs(
    group: Group, feature: str, fit: FeatureTable, inside: FeatureTable, outside: dict[str, FeatureTable]
) -> dict[str, float]:
    """Name -> AUROC; empty if no element of the group acts on what the feature compares."""
    if not set(find_feature(feature).elements(group)) - {"id"}:
        return {}
    own, *far = scores(group, feature, fit, [inside, *outside.values()])
    return {name: auroc(own, values) for name, values in zip(outside, far, strict=True)}


def summary(rows: dict[tuple[str, str], dict[str, float]]) -> ResultTable:
    pairs = [f"{LABELS[a]}:{LABELS[b]}" for a in INSIDE for b in FILES if a != b]
    cells = []
    for (label, feature), row in rows.items():
        known = [row[pair] for pair in pairs if pair in row]
        synthetic = [value for name, value in row.items() if name.endswith(SYNTHETIC)]
        cells.append((label, feature, *(row.get(p) for p in pairs), float(np.mean(known)), float(np.mean(synthetic))))
    heading = ("group", "residual", *pairs, "mean", SYNTHETIC)
    return ResultTable("groups", "AUROC at equal passes", heading, tuple(cells))


def by_angle(curves: dict[str, npt.NDArray[np.float64]]) -> ResultTable:
    """The median residual, and how well it separates CelebA from a set, at quarter turns and at other angles."""
    quarters = np.array(ANGLES) % 90 == 0
    rows = []
    for name, values in curves.items():
        cells: list[float | None] = [float(np.median(values[:, where])) for where in (quarters, ~quarters)]
        for where in (quarters, ~quarters):
            area = auroc(curves["CelebA"][:, where].mean(1), values[:, where].mean(1))
            cells.append(None if name == "CelebA" else max(area, 1.0 - area))
        rows.append((name, *cells))
    heading = ("set", "s, quarter turns", "s, other angles", "AUROC, quarter turns", "AUROC, other angles")
    return ResultTable("angles", "The residual by angle; AUROC either way against CelebA", heading, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("GEPC_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backbone", default="celeba32-tiny")
    parser.add_argument("--train", type=int, default=80)
    parser.add_argument("--test", type=int, default=50)
    parser.add_argument("--angles-only", action="store_true", help="only the figure and its table, two minutes")
    options = parser.parse_args()
    backbone = gepc.load_backbone(options.backbone)
    method = GepcExtractor(levels=gepc.Levels(LEVELS), features=("s", "inner"), group=union())
    spec = ExtractionSpec(method, method.timesteps(backbone))
    preparing = Preprocessing(size=(32, 32), channels=3)

    def images(name: str, split: str, count: int) -> npt.NDArray[np.float32]:
        return load_all(open_images(read_npz(Path(options.data) / FILES[name], f"{split}_x")[:count]), preparing)

    def extracted(pixels: npt.NDArray[np.float32]) -> FeatureTable:
        return extract_all(open_images(pixels), replace(preparing, value_range=(-1.0, 1.0)), backbone, spec)

    def batch(pixels: npt.NDArray[np.float32]) -> Batch:
        return Batch(pixels, [image_key(image) for image in pixels])

    test_images = {name: images(name, "test", options.test) for name in FILES}
    curves = {LABELS[n]: residual_by_angle(method, backbone, batch(test_images[n])) for n in SETS}
    options.out.mkdir(parents=True, exist_ok=True)
    save(angle_figure(curves), options.out / "groups-angles")
    if options.angles_only:
        print(write_tables(options.out, "angles", [by_angle(curves)], {"backbone": options.backbone}))
        return
    tests = {name: extracted(pixels) for name, pixels in test_images.items()}
    rows: dict[tuple[str, str], dict[str, float]] = {}
    choices = []
    for inside in INSIDE:
        train = images(inside, "train", options.train)
        fit = extracted(train)
        changed = [synthetic_outlier(x, KINDS[i % len(KINDS)]) for i, x in enumerate(test_images[inside])]
        outliers = extracted(np.stack(changed))
        auto, evidence = choose(method, backbone, batch(train))
        kept = [f"{item.action} ({item.weight:g})" for item in evidence if item.weight]
        choices.append((LABELS[inside], ", ".join(kept)))
        outside = {f"{LABELS[inside]}:{LABELS[other]}": tests[other] for other in FILES if other != inside}
        outside[f"{LABELS[inside]} {SYNTHETIC}"] = outliers
        for (label, group), feature in product({**GROUPS, "auto": auto}.items(), ("s", "inner")):
            row = rows.setdefault((label, "gepc" if feature == "s" else "inner"), {})
            row |= aurocs(group, feature, fit, tests[inside], outside)
    rows = {name: row for name, row in rows.items() if row}
    chosen = ResultTable("chosen", "What `auto` chose, with weights", ("ID", "elements"), tuple(choices))
    about = {"backbone": options.backbone, "train": options.train, "test": options.test}
    print(write_tables(options.out, "groups", [summary(rows), chosen, by_angle(curves)], about))


if __name__ == "__main__":
    main()

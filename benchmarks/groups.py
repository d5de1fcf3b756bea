"""Groups at equal passes on all suites: the paper's, D4, continuous ones, and one chosen from ID images.

    python benchmarks/suites.py --data data --out suites
    python benchmarks/groups.py --suites suites --out results/groups [--train 80] [--test 50] [--names nine digits]

All images pass the network once under every element of all groups, at one level. A group is then a selection of
columns, with at most six elements other than the identity. `gepc` uses the residual of the output (KDE), `inner` that
of inner layers. `auto` is chosen for each ID set from its images to fit on. The column `synthetic` has the average
AUROC of synthetic outliers made from ID test images; only it may justify another default. Writes groups.md, one table
for each suite, and the figure of the residual against the rotation angle.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml
from matplotlib.figure import Figure

import gepc
from gepc.calibration.scorer import Scorer
from gepc.core.palette import LIGHT, line_style
from gepc.core.tables import ResultTable, write_tables
from gepc.detector.plots import PANEL, drawing, save
from gepc.images.batches import load_all
from gepc.images.formats import read_npz
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import open_images
from gepc.images.synthetic import KINDS, synthetic_outlier
from gepc.lab.metrics import auroc
from gepc.methods.base import Batch
from gepc.methods.extraction import ExtractionSpec, FeatureTable, extract_all
from gepc.methods.features import find_feature
from gepc.methods.gepc import GepcExtractor
from gepc.methods.groups import Group
from gepc.methods.symmetries import choose, residuals

SETS = {"celeba": "CelebA", "cifar10": "C10", "svhn": "SVHN", "cifar100": "C100"}  # in the figure, of the suite `nine`
SYNTHETIC = "synthetic"
Rows = dict[tuple[str, str], dict[str, float]]  # (group, residual) -> pair -> AUROC
LEVELS = (0.99,)
SHIFTS = Group.translations(2, 6)
GROUPS = {
    "paper": Group.of("paper"),
    "D4 without antitranspose": Group.of([name for name in Group.of("d4").names if name != "antitranspose"]),
    "rotations by any angle": Group.so2(6),
    "sub-pixel shifts up to 2": SHIFTS,
    "flips and sub-pixel shifts": Group.of(["flip_x", "flip_y", "rot180", *SHIFTS.names[1:4]]),
}
ANGLES, SHOWN = tuple(range(15, 360, 15)), 32  # of the figure: rotations, and images of each set
COLOUR = "hue(120)"  # a further candidate for networks of three channels


def plain(name: str) -> str:
    return name.rpartition("*")[2]


def union(channels: int) -> Group:
    """Every element of all groups, and the candidates of `auto`."""
    candidates = Group.of("auto").names + ((COLOUR,) if channels == 3 else ())
    names = [name for group in GROUPS.values() for name in group.names]
    return Group.of(list(dict.fromkeys([*names, *candidates])))


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


@dataclass(frozen=True)
class Suite:
    """The images of a suite that benchmarks/suites.py has written, and the network on which its groups are compared."""

    folder: Path
    name: str
    backbone: gepc.Backbone
    preparing: Preprocessing
    pairs: dict[str, list[str]]
    train: int
    test: int

    @classmethod
    def read(cls, folder: Path, name: str, backbone: str | None, train: int, test: int) -> Suite:
        protocol = yaml.safe_load((folder / f"{name}.yaml").read_text())
        side = protocol.get("size", 32)
        network = gepc.load_backbone(backbone or protocol["backbone"])
        preparing = Preprocessing(size=(side, side), channels=network.channels)
        return cls(folder, name, network, preparing, protocol["pairs"], train, test)

    @cached_property
    def method(self) -> GepcExtractor:
        return GepcExtractor(levels=gepc.Levels(LEVELS), features=("s", "inner"), group=union(self.backbone.channels))

    def images(self, name: str, split: str) -> npt.NDArray[np.float32]:
        count = self.train if split == "train" else self.test
        pixels = read_npz(self.folder / self.name / f"{name}.npz", f"{split}_x")[:count]
        return load_all(open_images(pixels), self.preparing)

    def extracted(self, pixels: npt.NDArray[np.float32]) -> FeatureTable:
        spec = ExtractionSpec(self.method, self.method.timesteps(self.backbone))
        return extract_all(open_images(pixels), replace(self.preparing, value_range=(-1.0, 1.0)), self.backbone, spec)

    @cached_property
    def tests(self) -> dict[str, FeatureTable]:
        """The features of the test images of every set."""
        names = dict.fromkeys(name for inside, others in self.pairs.items() for name in (inside, *others))
        return {name: self.extracted(self.images(name, "test")) for name in names}

    def compare(self) -> tuple[Rows, list[tuple[str, str, str]]]:
        """The AUROC of every group and feature on every pair, and what `auto` chose."""
        rows: Rows = {}
        choices = []
        for inside, others in self.pairs.items():
            train, test = self.images(inside, "train"), self.images(inside, "test")
            fit = self.extracted(train)
            changed = [synthetic_outlier(x, KINDS[i % len(KINDS)]) for i, x in enumerate(test)]
            auto, evidence = choose(self.method, self.backbone, batch(train))
            kept = [f"{item.action} ({item.weight:g})" for item in evidence if item.weight]
            choices.append((self.name, inside, ", ".join(kept)))
            outside = {f"{inside}:{other}": self.tests[other] for other in others}
            outside[f"{inside} {SYNTHETIC}"] = self.extracted(np.stack(changed))
            for (label, group), feature in product({**GROUPS, "auto": auto}.items(), ("s", "inner")):
                row = rows.setdefault((label, "gepc" if feature == "s" else "inner"), {})
                row |= aurocs(group, feature, fit, self.tests[inside], outside)
        return {name: row for name, row in rows.items() if row}, choices


def batch(pixels: npt.NDArray[np.float32]) -> Batch:
    return Batch(pixels, [image_key(image) for image in pixels])


def summary(suites: dict[str, Rows]) -> ResultTable:
    """One row for each group and residual: averages over the pairs of each suite, and over all synthetic outliers."""
    names = dict.fromkeys(name for rows in suites.values() for name in rows)
    cells = []
    for name in names:
        found = [rows.get(name, {}) for rows in suites.values()]
        averages = [average([value for pair, value in row.items() if not pair.endswith(SYNTHETIC)]) for row in found]
        synthetic = [value for row in found for pair, value in row.items() if pair.endswith(SYNTHETIC)]
        cells.append((*name, *averages, average(synthetic)))
    heading = ("group", "residual", *(f"{name} ({pair_count(rows)})" for name, rows in suites.items()), SYNTHETIC)
    return ResultTable("groups", "AUROC at equal passes, averages over the pairs of a suite", heading, tuple(cells))


def pair_count(rows: Rows) -> int:
    return sum(not pair.endswith(SYNTHETIC) for pair in next(iter(rows.values())))


def average(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def each_pair(name: str, rows: Rows) -> ResultTable:
    """The AUROC of every group on every pair of a suite."""
    pairs = list(next(iter(rows.values())))
    cells = tuple((*key, *(row.get(pair) for pair in pairs)) for key, row in rows.items())
    return ResultTable(f"groups-{name}", f"AUROC at equal passes: {name}", ("group", "residual", *pairs), cells)


def residual_by_angle(method: GepcExtractor, backbone: gepc.Backbone, images: Batch) -> npt.NDArray[np.float64]:
    """pool(r_g^2)/b of the first images under rotations by `ANGLES`, (at most 32, angles), at the middle level."""
    few = Batch(images.images[:SHOWN], images.keys[:SHOWN], images.seed, images.rows)
    return residuals(method, backbone, few, Group.of([f"rotate({degrees})" for degrees in ANGLES]))


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


def angle_figure(curves: Mapping[str, npt.NDArray[np.float64]]) -> Figure:
    """The median residual of each set against the angle, in the band between its quartiles."""
    with drawing(PANEL) as figure:
        axes = figure.add_subplot()
        for position, (name, values) in enumerate(curves.items()):
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=0)
            style = {"color": LIGHT["inside"]} if position == 0 else line_style(position - 1)
            axes.plot(ANGLES, middle, label=name, **style)
            axes.fill_between(ANGLES, low, high, color=style["color"], alpha=0.15, linewidth=0)
        axes.set(xlabel="rotation in degrees", ylabel="residual s", ylim=(0.0, None), xticks=range(0, 361, 90))
        figure.legend(loc="outside upper center", ncols=4, columnspacing=1.0, handlelength=1.4)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", type=Path, required=True, help="folder of benchmarks/suites.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--names", nargs="+", default=["nine", "fresh", "digits", "tiles", "radar"])
    parser.add_argument("--backbone", help="instead of the network of each suite")
    parser.add_argument("--train", type=int, default=80)
    parser.add_argument("--test", type=int, default=50)
    parser.add_argument("--angles-only", action="store_true", help="only the figure and its table, two minutes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    def read(name: str) -> Suite:
        return Suite.read(options.suites, name, options.backbone, options.train, options.test)

    about = {"train": options.train, "test": options.test, "backbone": options.backbone or "that of each suite"}
    if options.angles_only:
        nine = read("nine")
        curves = {
            label: residual_by_angle(nine.method, nine.backbone, batch(nine.images(name, "test")))
            for name, label in SETS.items()
        }
        save(angle_figure(curves), options.out / "groups-angles")
        print(write_tables(options.out, "angles", [by_angle(curves)], about))
        return
    suites: dict[str, Rows] = {}
    choices: list[tuple[str, str, str]] = []
    for name in options.names:
        suites[name], chosen = read(name).compare()
        choices += chosen
        tables = [summary(suites), *(each_pair(*item) for item in suites.items())]
        tables.append(
            ResultTable("chosen", "What `auto` chose, with weights", ("suite", "ID", "elements"), tuple(choices))
        )
        print(write_tables(options.out, "groups", tables, about))


if __name__ == "__main__":
    main()

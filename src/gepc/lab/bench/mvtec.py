"""Benchmarks of industrial inspection in the form in which they are distributed: MVTec AD, MVTec AD 2 and VisA.

    MVTec AD     CATEGORY/train/good, test/good, test/KIND, ground_truth/KIND/NAME_mask.png
    MVTec AD 2   CATEGORY/train/good, test_public/good, test_public/bad, test_public/ground_truth/bad/NAME_mask.png
    VisA         CATEGORY/Data/Images/Normal and Anomaly, Data/Masks/Anomaly/NAME.png, and split_csv/1cls.csv beside the
                 categories; without this file every tenth normal image is for testing

A detector is fitted for each category on its good training images. Image AUROC, AP (average precision) and F1-max use
the score of each test image. Pixel AUROC and AU-PRO use all pixels of all test images together, at 256x256 pixels.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as PILImage
from sklearn.metrics import precision_recall_curve

from gepc.backbones.base import Backbone
from gepc.core.errors import InputError, raising
from gepc.core.files import read_json, write_json
from gepc.core.options import DEFAULT_BACKBONE
from gepc.core.progress import OnProgress
from gepc.core.tables import Cell, ResultTable
from gepc.detector.fitted import FittedDetector
from gepc.detector.registry import create_detector
from gepc.images.sources import FileImages, image_files
from gepc.lab.bench.masks import Inspected, Mask, inspect
from gepc.lab.metrics import PRO_LIMIT, aupr, auroc, region_overlap
from gepc.maps.drawing import resized
from gepc.methods.pooling import Map

SIDE = 256
METRICS = ("image AUROC", "AP", "F1-max", "pixel AUROC", "AU-PRO")
STRICT_LIMIT = 0.05
"""MVTec AD 2 integrates AU-PRO up to this false-positive rate, the others up to 0.3."""
PUBLISHED = {
    "PatchCore-25 % (Roth et al., CVPR 2022)": (0.991, None, None, 0.981, 0.934),
    "PaDiM (Defard et al., ICPR 2021; as in Roth et al.)": (0.953, None, None, 0.975, 0.921),
}
"""Published means over the 15 categories of MVTec AD, in the order of `METRICS`."""


@dataclass(frozen=True)
class InspectionProtocol:
    """What the benchmark runs on each category."""

    backbone: str = DEFAULT_BACKBONE  # the network; a name or a folder
    method: str = "gepc+"  # and its preset and options: see `gepc.create_detector`
    preset: str | None = "inspect"
    options: dict[str, Any] = field(default_factory=dict)
    fit_images: int | None = None  # at most that many images to fit and calibrate on
    test_images: int | None = None  # at most that many good and that many defective images to test with
    seed: int = 0  # of the choice of images

    def some(self, items: Sequence[Any], limit: int | None) -> list[Any]:
        """At most `limit` items, chosen by the seed."""
        order = np.random.default_rng(self.seed).permutation(len(items))[:limit]
        return [items[place] for place in np.sort(order)]


@dataclass(frozen=True)
class Category:
    """The good images to fit on and to test with, and the defective images with their masks."""

    name: str
    fit: list[Path]
    good: list[Path]
    defective: list[tuple[Path, Path]]

    @property
    def images(self) -> int:
        """The number of images."""
        return len(self.fit) + len(self.good) + len(self.defective)


def read_categories(root: Path) -> tuple[str, list[Category]]:
    """Find out which benchmark `root` holds, and read its categories: (name of the benchmark, categories)."""
    for name, (mark, read) in READERS.items():
        folders = [folder for folder in sorted(root.iterdir()) if (folder / mark).is_dir()]
        if not folders:
            continue
        categories = [read(folder) for folder in folders]
        for category in categories:
            missing = [str(mask) for _, mask in category.defective if not mask.is_file()]
            if missing:
                raise InputError(f"{category.name}: {len(missing)} masks are missing, first {missing[0]}")
            if not (category.fit and category.good and category.defective):
                raise InputError(f"{root / category.name} needs good images to fit on, good and defective ones to test")
        return name, categories
    raise InputError(f"{root} holds no category of {', '.join(READERS)}; see `gepc.lab.bench.mvtec` for their layouts")


def _read_mvtec(folder: Path, test: str = "test", truth: str = "ground_truth") -> Category:
    kinds = [kind for kind in sorted((folder / test).iterdir()) if kind.name not in ("good", "ground_truth")]
    defective = [
        (image, folder / truth / kind.name / f"{image.stem}_mask.png")
        for kind in kinds
        if kind.is_dir()
        for image in sorted(image_files(kind))
    ]
    fit, good = (sorted(image_files(folder / part / "good")) for part in ("train", test))
    return Category(folder.name, fit, good, defective)


def _read_visa(folder: Path) -> Category:
    root, table = folder.parent, folder.parent / "split_csv" / "1cls.csv"
    if not table.is_file():
        normal, anomalous = (sorted(image_files(folder / "Data/Images" / part)) for part in ("Normal", "Anomaly"))
        defective = [(path, folder / "Data/Masks/Anomaly" / f"{path.stem}.png") for path in anomalous]
        return Category(folder.name, [path for path in normal if path not in normal[::10]], normal[::10], defective)
    fit: list[Path] = []
    good: list[Path] = []
    defective = []
    with raising(InputError, f"{table} is not the table of VisA: {{error}}", OSError, KeyError, csv.Error):
        with table.open(newline="", encoding="utf-8") as handle:
            rows = [row for row in csv.DictReader(handle) if row["object"] == folder.name]
        for row in rows:
            image = root / row["image"]
            if row["label"] == "anomaly":
                defective.append((image, root / row["mask"]))
            else:
                (fit if row["split"] == "train" else good).append(image)
    return Category(folder.name, fit, good, defective)


READERS: dict[str, tuple[str, Callable[[Path], Category]]] = {
    "MVTec AD 2": ("test_public", partial(_read_mvtec, test="test_public", truth="test_public/ground_truth")),
    "MVTec AD": ("ground_truth", _read_mvtec),
    "VisA": ("Data/Images", _read_visa),
}
"""Benchmark -> a folder that its categories have, and the reader of a category."""


def measure_category(
    protocol: InspectionProtocol, category: Category, backbone: Backbone, limit: float, on_progress: OnProgress
) -> dict[str, float]:
    """Fit on the good images of a category and measure its test images.

    AU-PRO is integrated up to the false-positive rate `limit`.
    """
    chosen = protocol.some(category.fit, protocol.fit_images)
    detector = create_detector(backbone, protocol.method, protocol.preset, **protocol.options)
    fitted = detector.fit(FileImages(chosen), on_progress=on_progress).fitted
    good = [inspect(fitted, path, None, on_progress) for path in protocol.some(category.good, protocol.test_images)]
    pairs = protocol.some(category.defective, protocol.test_images)
    bad = [inspect(fitted, image, mask, on_progress, labels=True) for image, mask in pairs]
    scores = [[one.score for one in images] for images in (good, bad)]
    fields, masks = zip(*(_compared(fitted, one) for one in (*good, *bad)), strict=True)
    inside, outside = (np.concatenate([f[m == part] for f, m in zip(fields, masks, strict=True)]) for part in (1, 0))
    values = (auroc(*scores), aupr(*scores), f1_max(*scores), auroc(outside, inside))
    counts = {"fit on": len(chosen), "good": len(good), "defective": len(bad)}
    return {**counts, **dict(zip(METRICS, (*values, region_overlap(fields, masks, limit)), strict=True))}


def _compared(fitted: FittedDetector, one: Inspected) -> tuple[Map, Mask]:
    """The map and the mask at the common size; a pixel is defective if any part of it is."""
    shown = resized(one.fields[fitted.map_part], (SIDE, SIDE))
    if one.mask is None:
        return shown, np.zeros((SIDE, SIDE), dtype=bool)
    mask = PILImage.fromarray(one.mask.astype(np.float32)).resize((SIDE, SIDE), PILImage.Resampling.BOX)
    return shown, np.asarray(mask) > 0


def f1_max(id_scores: Sequence[float], ood_scores: Sequence[float]) -> float:
    """The largest F1 = 2 precision recall / (precision + recall) over all thresholds, OOD being the positive class."""
    labels = np.repeat([0, 1], [len(id_scores), len(ood_scores)])
    precision, recall, _ = precision_recall_curve(labels, np.concatenate([id_scores, ood_scores]))
    return float((2 * precision * recall / np.maximum(precision + recall, 1e-12)).max())


def run_categories(
    protocol: InspectionProtocol, backbone: Backbone, data: Path, out: Path, on_progress: OnProgress = lambda _: None
) -> ResultTable:
    """Measure every category of the benchmark in `data`, and put the results in one table.

    The row of a category is written to `out/categories` as soon as it is known; a second run with the same settings
    does not compute it again. `on_progress` is called with numbers of finished images.
    """
    benchmark, categories = read_categories(data)
    limit = STRICT_LIMIT if benchmark == "MVTec AD 2" else PRO_LIMIT
    settings = json.loads(json.dumps(dataclasses.asdict(protocol)))  # as a JSON file gives them back
    identity = {"benchmark": benchmark, "sha256": backbone.sha256, "protocol": settings}
    rows: list[tuple[Cell, ...]] = []
    values: list[list[float]] = []
    for category in categories:
        path = out / "categories" / f"{category.name}.json"
        if path.exists():
            on_progress(category.images)
        else:
            found = measure_category(protocol, category, backbone, limit, on_progress)
            write_json(path, {**identity, "values": found})
        stored = read_json(path)
        if {name: stored.get(name) for name in identity} != identity:
            raise InputError(f"{path} holds a run with other settings; give another folder for the results")
        rows.append((category.name, *stored["values"].values()))
        values.append([stored["values"][metric] for metric in METRICS])
    rows.append(("mean", None, None, None, *np.mean(values, axis=0).tolist()))
    if benchmark == "MVTec AD" and len(categories) == 15:
        rows += [(name, None, None, None, *values) for name, values in PUBLISHED.items()]
    note = (
        f"{protocol.method} on {backbone.source or backbone.family}, a detector for each category. Pixels of all test "
        f"images are compared together, at {SIDE}x{SIDE}. AU-PRO is the mean up to a false-positive rate of {limit:g}."
    )
    header = ("category", "fit on", "good", "defective", *METRICS)
    return ResultTable("categories", benchmark, header, tuple(rows), note)

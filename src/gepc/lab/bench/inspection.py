"""Benchmark of inspection: are defective parts noticed, and do the maps point at the defects?

A protocol names a folder of good images and, for each kind of defect, a folder of images with masks. The mask of
`part.jpg` is `part.png` or `part_mask.png` beside it, or `ground_truth/KIND/part_mask.png` two folders up. Good images
are divided by a seed: some to fit and calibrate on, the others to test with. Defective images are used for testing
alone. A protocol without kinds of defects reads public benchmarks in the form in which they are distributed:

    MVTec AD     CATEGORY/train/good, test/good, test/KIND, ground_truth/KIND/NAME_mask.png
    MVTec AD 2   CATEGORY/train/good, test_public/good, test_public/bad, test_public/ground_truth/bad/NAME_mask.png
    VisA         CATEGORY/Data/Images/Normal and Anomaly, Data/Masks/Anomaly/NAME.png, and split_csv/1cls.csv beside the
                 categories

Image AUROC, AP (average precision) and F1-max use the scores of the test images. Pixel AUROC and AU-PRO use all pixels
of all test images together, at 256x256 pixels. The mean pixel AUROC and the pointing game look at one defective image
at a time, at its own resolution.
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
import numpy.typing as npt
from PIL import Image as PILImage
from sklearn.metrics import precision_recall_curve

from gepc.backbones.base import Backbone
from gepc.conformal.decision import DecisionRule
from gepc.core.errors import InputError, OptionError, TooFewImagesError, raising
from gepc.core.files import digest, read_json, write_json
from gepc.core.options import DEFAULT_BACKBONE, at_least, check_fields
from gepc.core.progress import OnProgress
from gepc.core.tables import Cell, ResultTable, interval_text
from gepc.detector.detector import Detector
from gepc.detector.fitted import FittedDetector
from gepc.detector.registry import create_detector
from gepc.detector.stream import stream
from gepc.images.formats import read_file
from gepc.images.sources import FileImages, image_files
from gepc.lab.metrics import PRO_LIMIT, aupr, auroc, auroc_interval, localisation, region_overlap
from gepc.maps.drawing import resized
from gepc.methods.pooling import Map

Mask = npt.NDArray[np.bool_]
SIDE = 256
COUNTS = ("fit on", "good", "defective")
METRICS = (
    *("image AUROC", "AP", "F1-max", "pixel AUROC", "AU-PRO"),
    *("mean pixel AUROC", "pointing game", "found at 0.05", "found at 0.1"),
)
RATES = (0.05, 0.1)  # false-alarm rates at which the defects that are found are counted
STRICT_LIMIT = 0.05
"""MVTec AD 2 integrates AU-PRO up to this false-positive rate, the others up to 0.3."""
PUBLISHED = {
    "PatchCore-25 % (Roth et al., CVPR 2022)": (0.991, 0.981, 0.934),
    "PaDiM (Defard et al., ICPR 2021; as in Roth et al.)": (0.953, 0.975, 0.921),
}
"""Published means over the 15 categories of MVTec AD: image AUROC, pixel AUROC and AU-PRO."""


@dataclass(frozen=True)
class Part:
    """What one detector is fitted and tested on: good images, and defective images with their masks by name."""

    name: str
    fit: list[Path]
    good: list[Path]
    defective: dict[str, list[tuple[Path, Path]]]

    @property
    def images(self) -> int:
        """The number of images."""
        return len(self.fit) + len(self.good) + sum(map(len, self.defective.values()))

    @property
    def files(self) -> list[Path]:
        """All images and masks."""
        pairs = [pair for pairs in self.defective.values() for pair in pairs]
        return [*self.fit, *self.good, *(path for pair in pairs for path in pair)]


@dataclass(frozen=True)
class InspectionProtocol:
    """What a benchmark of inspection runs on."""

    good: str = ""  # folder of good images, below the folder with the data sets
    # kind of defect -> folder of images with masks; empty for a benchmark that is read as it is distributed
    defects: dict[str, str] = field(default_factory=dict)
    test_good: str | None = None  # folder of good images to test with; by default those of `good` not used to fit
    backbone: str = DEFAULT_BACKBONE  # the network; a name or a folder
    method: str = "gepc+"  # and its preset and options: see `gepc.create_detector`
    preset: str | None = "inspect"
    options: dict[str, Any] = field(default_factory=dict)
    fit_images: int | None = at_least(1, None)  # at most that many good images to fit and calibrate on
    skip_images: int = at_least(0, 0)  # so many good images are left out, the first in the order drawn by `seed`
    test_images: int | None = at_least(1, None)  # at most that many defective images of each row to test with
    test_good_images: int | None = at_least(1, None)  # at most that many good images to test with
    seed: int = 0  # of the division of the good images, and of the choice of test images

    def __post_init__(self) -> None:
        check_fields(self, "protocol: ")
        if not self.defects and (self.good or self.test_good is not None or self.skip_images):
            raise OptionError(
                "protocol: good, test_good and skip_images need `defects`, the folders of defective images"
            )

    def parts(self, data: Path) -> tuple[str, list[Part]]:
        """The name of the benchmark, and what each of its detectors is fitted and tested on."""
        name, parts = ("Defects", [self._own_part(data)]) if self.defects else read_categories(data)
        return name, [self._some_images(part) for part in parts]

    def detector(self, backbone: Backbone) -> Detector:
        """The detector that is fitted for every part."""
        return create_detector(backbone, self.method, self.preset, **self.options)

    def _own_part(self, data: Path) -> Part:
        if not self.good:
            raise InputError("the protocol has no key `good`, the folder of good images; add it")
        paths = self._shuffled(_images(data / self.good))[self.skip_images :]
        fit, rest = paths[: self.fit_images], [] if self.fit_images is None else paths[self.fit_images :]
        good = rest if self.test_good is None else _images(data / self.test_good)
        if not good:
            raise InputError(f"no good image of {data / self.good} is left to test with; set a lower fit_images")
        defective = {kind: _with_masks(data / folder) for kind, folder in self.defects.items()}
        tested = {*good, *(path for pairs in defective.values() for path, _ in pairs)}
        if shared := tested.intersection(fit):
            raise InputError(f"{min(shared)} is in a folder to fit on and in one to test with; correct the protocol")
        return Part("parts", fit, good, defective)

    def _some_images(self, part: Part) -> Part:
        """As many images as the protocol takes, chosen by the seed."""
        fit, good = (self._shuffled(paths) for paths in (part.fit, part.good))
        defective = {name: self._shuffled(pairs)[: self.test_images] for name, pairs in part.defective.items()}
        return Part(part.name, fit[: self.fit_images], good[: self.test_good_images], defective)

    def _shuffled(self, items: Sequence[Any]) -> list[Any]:
        return [items[place] for place in np.random.default_rng(self.seed).permutation(len(items))]


def _images(folder: Path) -> list[Path]:
    """The images of a folder that are not masks of others."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; correct it in the protocol")
    paths = sorted(image_files(folder))
    masks = {_mask_of(path) for path in paths}
    return [path for path in paths if path not in masks]


def _with_masks(folder: Path) -> list[tuple[Path, Path]]:
    pairs = [(path, mask) for path in _images(folder) if (mask := _mask_of(path)) is not None]
    if not pairs:
        raise InputError(
            f"no image in {folder} has a mask; that of part.jpg is part.png or part_mask.png beside it, or "
            f"ground_truth/{folder.name}/part_mask.png two folders up"
        )
    return pairs


def _mask_of(path: Path) -> Path | None:
    """The mask of an image, if there is one."""
    name = f"{path.stem}_mask.png"
    elsewhere = path.parent.parent.parent / "ground_truth" / path.parent.name / name
    for mask in (path.with_suffix(".png"), path.with_name(name), elsewhere):
        if mask != path and mask.is_file():
            return mask
    return None


def read_categories(root: Path) -> tuple[str, list[Part]]:
    """Find out which public benchmark `root` holds, and read its categories: (name of the benchmark, categories)."""
    for name, (mark, read) in READERS.items():
        folders = [folder for folder in sorted(root.iterdir()) if (folder / mark).is_dir()]
        if not folders:
            continue
        parts = [read(folder) for folder in folders]
        for part in parts:
            missing = [path for path in part.files if not path.is_file()]
            if missing:
                raise InputError(f"{part.name} lacks {len(missing)} of its images and masks, first {missing[0]}")
            if not (part.fit and part.good and part.defective[part.name]):
                raise InputError(f"{root / part.name} needs good images to fit on, good and defective ones to test")
        return name, parts
    raise InputError(
        f"{root} holds no category of {', '.join(READERS)}; give the folder with the categories, as it was distributed"
    )


def _read_mvtec(folder: Path, test: str = "test", truth: str = "ground_truth") -> Part:
    kinds = [kind for kind in sorted((folder / test).glob("*")) if kind.name not in ("good", "ground_truth")]
    defective = [
        (image, folder / truth / kind.name / f"{image.stem}_mask.png")
        for kind in kinds
        if kind.is_dir()
        for image in sorted(image_files(kind))
    ]
    fit, good = (sorted(image_files(folder / part / "good")) for part in ("train", test))
    return Part(folder.name, fit, good, {folder.name: defective})


def _read_visa(folder: Path) -> Part:
    root, table = folder.parent, folder.parent / "split_csv" / "1cls.csv"
    found = Part(folder.name, [], [], {folder.name: []})
    with raising(InputError, f"{table} is not the table of VisA: {{error}}", OSError, KeyError, csv.Error):
        with table.open(newline="", encoding="utf-8") as handle:
            rows = [row for row in csv.DictReader(handle) if row["object"] == folder.name]
        for row in rows:
            image = root / row["image"]
            if row["label"] == "anomaly":
                found.defective[folder.name].append((image, root / row["mask"]))
            else:
                (found.fit if row["split"] == "train" else found.good).append(image)
    return found


READERS: dict[str, tuple[str, Callable[[Path], Part]]] = {
    "MVTec AD 2": ("test_public", partial(_read_mvtec, test="test_public", truth="test_public/ground_truth")),
    "MVTec AD": ("ground_truth", _read_mvtec),
    "VisA": ("Data/Images", _read_visa),
}
"""Public benchmark -> a folder that its categories have, and the reader of a category."""


@dataclass(frozen=True)
class Inspected:
    """An image with its score, its p-value, its map (H, W) and its mask (H, W), which is empty for a good image."""

    score: float
    p_value: float
    field: Map
    mask: Mask

    def resized(self) -> tuple[Map, Mask]:
        """The map and the mask at the common size; a pixel is defective if any part of it is."""
        mask = PILImage.fromarray(self.mask.astype(np.float32)).resize((SIDE, SIDE), PILImage.Resampling.BOX)
        return resized(self.field, (SIDE, SIDE)), np.asarray(mask) > 0


def inspect(fitted: FittedDetector, path: Path, mask: Path | None, on_progress: OnProgress) -> Inspected:
    """Score and map one image, in the pixels of its mask if it has one."""
    (scored,) = stream(fitted, FileImages([path]), maps=True, on_error="raise", on_progress=on_progress)
    assert scored.fields is not None
    result, shown = scored.results[0], scored.fields[fitted.map_part][0]
    if mask is None:
        return Inspected(result.score, result.p_value, shown, np.zeros(shown.shape, dtype=bool))
    rows, columns = read_file(path).shape[:2]
    top, left, height, width = fitted.preprocessing.window((rows, columns))
    inside = _read_mask(mask, (rows, columns))[top : top + height, left : left + width]
    return Inspected(result.score, result.p_value, resized(shown, (height, width)), inside)


def _read_mask(path: Path, size: tuple[int, int]) -> Mask:
    """True where the mask is bright; a mask without a bright pixel numbers its defects, as those of VisA do."""
    pixels = read_file(path)
    if pixels.shape[:2] != size:
        raise InputError(f"the mask {path} has {pixels.shape[:2]} pixels, its image {size}")
    flat = pixels if pixels.ndim == 2 else pixels.max(axis=2)
    half = np.iinfo(flat.dtype).max // 2 if flat.dtype.kind == "u" else 0
    return np.asarray(flat > (half if flat.max() > half else 0))


def fit_part(
    protocol: InspectionProtocol, part: Part, backbone: Backbone, on_progress: OnProgress = lambda _: None
) -> FittedDetector:
    """Fit the protocol's detector on the good images of a part."""
    return protocol.detector(backbone).fit(FileImages(part.fit), on_progress=on_progress).fitted


def measure_part(
    fitted: FittedDetector, part: Part, limit: float = PRO_LIMIT, on_progress: OnProgress = lambda _: None
) -> dict[str, dict[str, Cell]]:
    """Test a detector on a part: name of its defective images -> heading -> value.

    AU-PRO is integrated up to the false-positive rate `limit`. Images whose mask covers nothing or everything are left
    out, because a map cannot point at their defect.
    """
    good = [inspect(fitted, path, None, on_progress) for path in part.good]
    found = {}
    for name, pairs in part.defective.items():
        images = [inspect(fitted, path, mask, on_progress) for path, mask in pairs]
        usable = [image for image in images if image.mask.any() and not image.mask.all()]
        if not usable:
            raise InputError(f"{name}: no mask covers a part of its image, so that maps cannot be measured")
        counts = dict(zip(COUNTS, (len(part.fit), len(good), len(usable)), strict=True))
        found[name] = {**counts, **_measures(fitted, good, usable, limit)}
    return found


def _measures(
    fitted: FittedDetector, good: Sequence[Inspected], defective: Sequence[Inspected], limit: float
) -> dict[str, Cell]:
    normal, unusual = ([image.score for image in images] for images in (good, defective))
    fields, masks = zip(*(image.resized() for image in (*good, *defective)), strict=True)
    every = list(zip(fields, masks, strict=True))
    outside, inside = (np.concatenate([field[mask == part] for field, mask in every]) for part in (False, True))
    alone = localisation([image.field for image in defective], [image.mask for image in defective])
    values = (
        *(auroc(normal, unusual), aupr(normal, unusual), f1_max(normal, unusual)),
        *(auroc(outside, inside), region_overlap(fields, masks, limit)),
        *(float(alone.auroc.mean()), float(alone.hit.mean())),
        *(_found(fitted, defective, rate) for rate in RATES),
    )
    false_alarms = {f"false alarms at {rate:g}": _found(fitted, good, rate) for rate in RATES}
    interval = {"95 % interval": interval_text(*auroc_interval(normal, unusual))}
    return {**dict(zip(METRICS, values, strict=True)), **interval, **false_alarms}


def _found(fitted: FittedDetector, images: Sequence[Inspected], rate: float) -> float | None:
    """The share of images that raise an alarm at a false-alarm rate; None if the calibration images are too few."""
    try:
        return float(DecisionRule(rate).alarms([image.p_value for image in images], fitted.reference).mean())
    except TooFewImagesError:
        return None


def f1_max(id_scores: Sequence[float], ood_scores: Sequence[float]) -> float:
    """The largest F1 = 2 precision recall / (precision + recall) over all thresholds, OOD being the positive class."""
    labels = np.repeat([0, 1], [len(id_scores), len(ood_scores)])
    precision, recall, _ = precision_recall_curve(labels, np.concatenate([id_scores, ood_scores]))
    return float((2 * precision * recall / np.maximum(precision + recall, 1e-12)).max())


def run_inspection(
    protocol: InspectionProtocol, backbone: Backbone, data: Path, out: Path, on_progress: OnProgress = lambda _: None
) -> ResultTable:
    """Fit and test a detector for every part of the benchmark in `data`, and put the results in one table.

    The results of a part are written to `out/categories` as soon as they are known; a second run with the same
    settings, network and files does not compute them again. `on_progress` is called with numbers of finished images.
    """
    benchmark, parts = protocol.parts(data)
    limit = STRICT_LIMIT if benchmark == "MVTec AD 2" else PRO_LIMIT
    settings = json.loads(json.dumps(dataclasses.asdict(protocol)))  # as a JSON file gives them back
    network = {"sha256": backbone.sha256, "fingerprint": backbone.fingerprint}
    found: dict[str, dict[str, Cell]] = {}
    for part in parts:
        path = out / "categories" / f"{part.name}.json"
        files = digest([(file.name, file.stat().st_size) for file in part.files])
        identity = {"benchmark": benchmark, **network, "protocol": settings, "files": files}
        if path.exists():
            on_progress(part.images)
        else:
            fitted = fit_part(protocol, part, backbone, on_progress)
            write_json(path, {**identity, "values": measure_part(fitted, part, limit, on_progress)})
        stored = read_json(path)
        if {name: stored.get(name) for name in identity} != identity:
            raise InputError(f"{path} holds a run with other settings or files; give another folder for the results")
        found |= stored["values"]
    means = {metric: _mean([values[metric] for values in found.values()]) for metric in METRICS}
    rows: dict[str, dict[str, Any]] = {**found, "mean": means}
    if benchmark == "MVTec AD" and len(parts) == 15:
        known = ("image AUROC", "pixel AUROC", "AU-PRO")
        rows |= {name: dict(zip(known, values, strict=True)) for name, values in PUBLISHED.items()}
    note = (
        f"{protocol.method} on {backbone.source or backbone.family}. Pixels of all test images are compared together, "
        f"at {SIDE}x{SIDE}; AU-PRO is the mean up to a false-positive rate of {limit:g}. The mean pixel AUROC and the "
        "pointing game compare the pixels of one image at a time. Found: the share of defective images with an alarm "
        "at that false-alarm rate."
    )
    header = (*COUNTS, *METRICS, "95 % interval", *(f"false alarms at {rate:g}" for rate in RATES))
    cells = tuple((name, *(values.get(heading) for heading in header)) for name, values in rows.items())
    return ResultTable("categories", benchmark, ("defects", *header), cells, note)


def _mean(values: Sequence[Any]) -> float | None:
    return None if None in values else float(np.mean(values))

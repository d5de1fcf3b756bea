"""Benchmark on images with masks of their defects: are defective images noticed, and do the maps point at the defects?

A protocol names a folder of good images and, for each kind of defect, a folder of images with masks. The mask of
`part.jpg` is `part.png` or `part_mask.png` beside it, or `ground_truth/KIND/part_mask.png` two folders up (the layout
of MVTec AD). Good images are divided by a seed: some to fit and calibrate on, the others to test with. Defective images
are used for testing alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.conformal.decision import DecisionRule
from gepc.core.errors import InputError, OptionError, TooFewImagesError
from gepc.core.options import DEFAULT_BACKBONE
from gepc.core.progress import OnProgress
from gepc.core.tables import Cell, ResultTable, interval_text, write_each, write_tables
from gepc.detector.detector import Detector
from gepc.detector.fitted import FittedDetector
from gepc.detector.registry import create_detector
from gepc.detector.stream import stream
from gepc.images.formats import read_file
from gepc.images.sources import FileImages, image_files
from gepc.lab.metrics import auroc, auroc_interval, bootstrap_intervals, localisation
from gepc.maps.drawing import resized
from gepc.methods.pooling import Map

Mask = npt.NDArray[np.bool_]
MAIN = (
    *("defect", "images", "image AUROC", "95 % interval", "pixel AUROC", "95 % interval "),
    *("PRO", "pointing game", "area", "found at 0.05", "found at 0.1"),
)
RATES = (0.05, 0.1)  # false-alarm rates at which the defects that are found are counted


@dataclass(frozen=True)
class MaskProtocol:
    """What a benchmark with masks runs on."""

    good: str  # folder of good images, below the folder with the data sets
    defects: dict[str, str]  # kind of defect -> folder of images with masks
    test_good: str | None = None  # folder of good images to test with; by default those of `good` not used to fit
    backbone: str = DEFAULT_BACKBONE  # the network; a name or a folder
    method: str = "gepc+"  # and its preset and options: see `gepc.create_detector`
    preset: str | None = "inspect"
    options: dict[str, Any] = field(default_factory=dict)
    fit_images: int = 120  # good images to fit and calibrate on
    skip_images: int = 0  # the first good images, left out: such as those that the backbone was trained on
    test_images: int | None = None  # at most that many images of each kind to test with
    test_good_images: int | None = None  # at most that many good images to test with
    seed: int = 0  # of the division of the good images, and of the choice of test images

    def __post_init__(self) -> None:
        if not self.defects:
            raise OptionError("protocol: defects must name at least one folder of defective images")

    def divide(self, data: Path) -> tuple[list[Path], list[Path]]:
        """Good images to fit on, and to test with."""
        paths = self._shuffled(_images(data / self.good))[self.skip_images :]
        rest = paths[self.fit_images :] if self.test_good is None else _images(data / self.test_good)
        if not rest:
            raise InputError(f"the {len(paths)} images of {data / self.good} leave none to test with; lower fit_images")
        return paths[: self.fit_images], rest[: self.test_good_images]

    def defective(self, data: Path) -> dict[str, list[tuple[Path, Path]]]:
        """Kind -> images with their masks."""
        found = {}
        for kind, folder in self.defects.items():
            paths = self._shuffled(_images(data / folder))
            pairs = [(path, mask) for path in paths if (mask := _mask_of(path)) is not None]
            if not pairs:
                raise InputError(f"no image in {data / folder} has a mask; see `gepc.lab.bench.masks` for their names")
            found[kind] = pairs[: self.test_images]
        return found

    def _shuffled(self, paths: list[Path]) -> list[Path]:
        return [paths[place] for place in np.random.default_rng(self.seed).permutation(len(paths))]


def _images(folder: Path) -> list[Path]:
    """The images of a folder that are not masks of others."""
    paths = sorted(image_files(folder))
    masks = {mask for path in paths if (mask := _mask_of(path)) is not None}
    return [path for path in paths if path not in masks]


def _mask_of(path: Path) -> Path | None:
    """The mask of an image, if there is one."""
    name = f"{path.stem}_mask.png"
    elsewhere = path.parent.parent.parent / "ground_truth" / path.parent.name / name
    for mask in (path.with_suffix(".png"), path.with_name(name), elsewhere):
        if mask != path and mask.is_file():
            return mask
    return None


@dataclass(frozen=True)
class Inspected:
    """An image with its score and the maps of each part, (H, W), in the pixels of the mask if there is one."""

    score: float
    p_value: float
    fields: dict[str, Map]
    mask: Mask | None = None


@dataclass(frozen=True)
class MaskBenchmark:
    """A finished benchmark: the fitted detector, the good images to test with, and those of each kind of defect."""

    detector: Detector
    good: list[Inspected]
    defective: dict[str, list[Inspected]]

    def tables(self) -> list[ResultTable]:
        """The main table, and what each part of the map achieves alone."""
        rows = [self._row(kind) for kind in self.defective]
        means = [float(np.mean([row[column] for row in rows])) for column in (2, 4, 6, 7, 8, 9, 10)]
        count = sum(map(len, self.defective.values()))
        rows.append(("mean", count, means[0], "", means[1], "", *means[2:]))
        fitted, calibrated = self.detector.fitted.fit_images, len(self.detector.calibration_scores_)
        note = (
            f"{fitted} good images to fit on, {calibrated} to calibrate, {len(self.good)} to test with. Pixel AUROC: "
            "mean over images, with a bootstrap interval. PRO: up to a false-positive rate of 0.3. Area: mean share of "
            "an image inside the mask, the chance level of the pointing game. Found at 0.05: share of defective images "
            f"with an alarm at that rate; of the good ones {self._share(self.good, 0.05):.3f} raised one, and "
            f"{self._share(self.good, 0.1):.3f} at 0.1."
        )
        title = f"{self.detector.extractor.name} on {self.detector.backbone.source or self.detector.backbone.family}"
        kinds = [f"{kind}: {what}" for kind in self.defective for what in ("image", "pixel")]
        header = ("part", *kinds, "mean: image", "mean: pixel")
        parts = tuple(self._part_row(part) for part in self.good[0].fields)
        alone = ResultTable("parts", "AUROC by the largest value, and of the pixels, of each part alone", header, parts)
        return [ResultTable("defects", title, MAIN, tuple(rows), note), alone]

    def _row(self, kind: str) -> tuple[Cell, ...]:
        good, bad = ([one.score for one in images] for images in (self.good, self.defective[kind]))
        maps, masks = _maps(self.defective[kind], self.detector.fitted.map_part)
        found = localisation(maps, masks)
        detected = (auroc(good, bad), interval_text(*auroc_interval(good, bad)))
        alone = [str(place) for place in range(len(maps))]  # images are independent
        (interval,) = bootstrap_intervals(lambda values: [values.mean()], [found.auroc], [alone], draws=1000)
        pointed = (float(found.auroc.mean()), interval_text(*interval), found.pro)
        shares = [self._share(self.defective[kind], rate) for rate in RATES]
        return (kind, len(bad), *detected, *pointed, float(found.hit.mean()), float(found.area.mean()), *shares)

    def _share(self, images: Sequence[Inspected], rate: float) -> float:
        """The share of images that raise an alarm at a false-alarm rate; NaN if the calibration images are too few."""
        p_values = [image.p_value for image in images]
        try:
            return float(DecisionRule(rate).alarms(p_values, self.detector.fitted.reference).mean())
        except TooFewImagesError:
            return float("nan")

    def _part_row(self, part: str) -> tuple[Cell, ...]:
        numbers = []
        for images in self.defective.values():
            good, bad = ([one.fields[part].max() for one in group] for group in (self.good, images))
            pixels = [auroc(field[~mask], field[mask]) for field, mask in zip(*_maps(images, part), strict=True)]
            numbers.append((auroc(good, bad), float(np.mean(pixels))))
        return (part, *(number for pair in numbers for number in pair), *np.mean(numbers, axis=0).tolist())


def _maps(images: Sequence[Inspected], part: str) -> tuple[list[Map], list[Mask]]:
    return [one.fields[part] for one in images], [one.mask for one in images if one.mask is not None]


def inspect(
    fitted: FittedDetector, path: Path, mask: Path | None, on_progress: OnProgress, labels: bool = False
) -> Inspected:
    """Score and map one image. With `labels`, every value of the mask but 0 marks a defect, not only bright ones."""
    (scored,) = stream(fitted, FileImages([path]), maps=True, on_error="raise", on_progress=on_progress)
    result = scored.results[0]
    maps = {name: field[0] for name, field in (scored.fields or {}).items()}
    if mask is None:
        return Inspected(result.score, result.p_value, maps)
    shape = read_file(path).shape
    top, left, height, width = fitted.preprocessing.window((shape[0], shape[1]))
    inside = _read_mask(mask, shape, labels)[top : top + height, left : left + width]
    maps = {name: resized(field, (height, width)) for name, field in maps.items()}
    return Inspected(result.score, result.p_value, maps, inside)


def run_masks(
    protocol: MaskProtocol, backbone: Backbone, data: Path, on_progress: OnProgress = lambda _: None
) -> MaskBenchmark:
    """Fit on good images, then score and map the others."""
    fitting, testing = protocol.divide(data)
    defective = protocol.defective(data)
    detector = create_detector(backbone, protocol.method, protocol.preset, **protocol.options)
    fitted = detector.fit(FileImages(fitting), on_progress=on_progress).fitted

    good = [inspect(fitted, path, None, on_progress) for path in testing]
    found = {kind: [inspect(fitted, *pair, on_progress) for pair in pairs] for kind, pairs in defective.items()}
    # an image without a defect, or that is one, has nothing to point at
    usable = {
        kind: [one for one in images if one.mask is not None and one.mask.any() and not one.mask.all()]
        for kind, images in found.items()
    }
    return MaskBenchmark(detector, good, usable)


def _read_mask(path: Path, shape: tuple[int, ...], labels: bool) -> Mask:
    pixels = read_file(path)
    if pixels.shape[:2] != shape[:2]:
        raise InputError(f"the mask {path} has {pixels.shape[:2]} pixels, its image {shape[:2]}")
    flat = pixels if pixels.ndim == 2 else pixels.max(axis=2)
    least = np.iinfo(flat.dtype).max // 2 if flat.dtype.kind == "u" and not labels else 0
    return np.asarray(flat > least)


def write_masks(found: MaskBenchmark, protocol: MaskProtocol, out: Path, command: str) -> list[ResultTable]:
    """Write `results.md`, `results.json`, and a CSV and a LaTeX file per table; returns the tables."""
    backbone, tables = found.detector.backbone, found.tables()
    about = {"command": command, "backbone": backbone.source or backbone.family, "sha256": backbone.sha256}
    write_each(out / "tables", tables)
    write_tables(out, "results", tables, {**about, "protocol": dataclasses.asdict(protocol)})
    return tables

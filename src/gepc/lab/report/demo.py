"""The demonstration: things lost on a beach, and 32x32 patches of one photograph against patches of others."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw
from scipy.ndimage import zoom

from gepc.backbones.base import Backbone
from gepc.conformal.decision import DecisionRule
from gepc.conformal.p_values import Array, threshold
from gepc.core.palette import DARK
from gepc.core.tables import ResultTable, interval_text
from gepc.detector.detector import Detector
from gepc.detector.plots import histogram, score_limits
from gepc.detector.registry import create_detector
from gepc.detector.storage import versions
from gepc.detector.stream import stream
from gepc.images.sources import open_images
from gepc.lab.metrics import Detection, detection
from gepc.lab.report.beach import THINGS, Lost, beach, lose
from gepc.lab.report.page import Picture, render
from gepc.maps.drawing import overlay, resized
from gepc.maps.regions import MapRegion, in_image

Pixels = npt.NDArray[np.uint8]
OnImages = Callable[[int], None]

ALPHA = 0.05
MARGIN = 8  # pixels between a region and its box


@dataclass(frozen=True)
class Amounts:
    """The side of the beach photographs, and the numbers of photographs and of patches for each purpose."""

    height: int
    width: int
    new_photographs: int
    fit_patches: int
    held_out_patches: int
    other_patches: int
    fit_photographs: int = 8
    calibration_photographs: int = 19  # the fewest that allow a false-alarm rate of 0.05
    calibration_patches: int = 39

    @property
    def images(self) -> tuple[int, int]:
        """How many photographs and how many patches are read once to fit, to calibrate, and to score."""
        photographs = self.fit_photographs + self.calibration_photographs + self.new_photographs + 1
        scored = self.held_out_patches + len(OUTSIDE) * self.other_patches
        return photographs, self.fit_patches + self.calibration_patches + scored


FULL = Amounts(384, 576, 12, 80, 53, 40)
QUICK = Amounts(128, 384, 4, 40, 24, 20)


def _alarms(detector: Detector, scores: Array) -> int:
    """How many images with these scores raise an alarm."""
    reference = detector.fitted.reference
    return int(DecisionRule(ALPHA).alarms(reference.p_values(scores), reference).sum())


# --- the beach -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """What was lost in a photograph of the beach, and what the detector says about it and about usual photographs."""

    detector: Detector
    photograph: Pixels
    lost: tuple[Lost, ...]
    regions: tuple[MapRegion, ...]  # in pixels of the photograph
    field: npt.NDArray[np.float32]
    p_value: float
    usual: int  # new photographs on which nothing was lost
    false_alarms: int
    false_boxes: int

    @property
    def boxed(self) -> Image.Image:
        """The photograph with a numbered box around each region."""
        picture = Image.fromarray(self.photograph)
        pen = ImageDraw.Draw(picture)
        for region in self.regions:
            top, left, bottom, right = region.box
            box = (left - MARGIN, top - MARGIN, right + MARGIN, bottom + MARGIN)
            pen.rectangle(box, outline=DARK["outside"], width=3)
            number = {"text": str(region.number), "fill": DARK["outside"], "font_size": 22, "anchor": "lb"}
            pen.text((max(0, box[0]), max(24, box[1])), **number, stroke_width=2, stroke_fill="black")
        return picture

    @property
    def mapped(self) -> Image.Image:
        """The photograph under its map."""
        field = resized(self.field, self.photograph.shape[:2])
        shown = overlay(self.photograph / 255.0, field, self.detector.map_limit(ALPHA))
        return Image.fromarray((255.0 * shown).round().astype(np.uint8))

    @property
    def found(self) -> int:
        """The number of things with a box."""
        return sum(region is not None for _, region in self.finds)

    @property
    def elsewhere(self) -> int:
        """The number of boxes that touch none of the things."""
        return sum(not any(item.touches(region) for item in self.lost) for region in self.regions)

    @property
    def finds(self) -> list[tuple[Lost, MapRegion | None]]:
        """Every lost thing with the first region whose box touches it, or None if it was missed."""
        return [(item, next(filter(item.touches, self.regions), None)) for item in self.lost]


def search(backbone: Backbone, amounts: Amounts, on_images: OnImages | None = None) -> Search:
    """Fit the preset for small anomalies on photographs of the beach, then look for lost things in new ones."""
    detector = create_detector(backbone, preset="inspect", batch_size=1)
    size = (amounts.height, amounts.width)
    counts = (amounts.fit_photographs, amounts.calibration_photographs, amounts.new_photographs)
    photographs = np.stack([beach(seed, *size) for seed in range(sum(counts))])
    fit, calibration, new = np.split(photographs, np.cumsum(counts)[:-1])
    detector.fit(fit, calibration, on_progress=on_images)
    lost = lose(THINGS, sum(counts), *size)
    photograph = beach(sum(counts), *size, lost)
    images, fitted = open_images(np.concatenate([photograph[None], new])), detector.fitted
    chunks = list(stream(fitted, images, maps=True, on_error="raise", on_progress=on_images))  # one photograph each
    maps = [chunk.fields for chunk in chunks if chunk.fields is not None]
    first, *others = (fitted.regions(fields, 0, ALPHA) for fields in maps)
    result, *usual = (chunk.results[0] for chunk in chunks)
    field = maps[0][fitted.map_part][0]
    found = tuple(in_image(region, (0, 0, *size), field.shape) for region in first)
    false_alarms = _alarms(detector, np.array([result.score for result in usual]))
    false_boxes = sum(map(len, others))
    judged = (result.p_value, len(usual), false_alarms, false_boxes)
    return Search(detector, photograph, tuple(lost), found, field, *judged)


# --- textures --------------------------------------------------------------------------------------------------------

SIDE = 32
FIT_ROWS, TEST_ROWS = slice(0, 8), slice(9, 16)  # of the 16 rows of patches; the row between separates the two


INSIDE = "gravel"
CLOSER, ENLARGED = "closer gravel", 1.1  # the hard one: the same photograph, from a little closer
OUTSIDE = ("brick", "grass", "moon", "page", CLOSER)


def load_photograph(name: str) -> Pixels:
    """The grey pixels (H, W, 1) of a photograph, from scikit-image's own files, without a download."""
    from skimage import data

    if name == CLOSER:
        return np.asarray(zoom(data.gravel(), ENLARGED))[..., None]
    return np.asarray(getattr(data, name)())[..., None]


def patches(photograph: str, rows: slice = slice(None)) -> Pixels:
    """The patches (N, 32, 32, 1) of some rows of a grid without overlap, in random order."""
    pixels = load_photograph(photograph)
    height, width = (side // SIDE for side in pixels.shape[:2])
    grid = pixels[: height * SIDE, : width * SIDE].reshape(height, SIDE, width, SIDE, 1)
    cut = grid.swapaxes(1, 2)[rows].reshape(-1, SIDE, SIDE, 1)
    return cut[np.random.default_rng(0).permutation(len(cut))]


@dataclass(frozen=True)
class Textures:
    """Scores and alarms of held-out patches of `INSIDE` and of patches of `OUTSIDE`, by the photograph's name."""

    detector: Detector
    scores: dict[str, Array]
    alarms: dict[str, int]

    @property
    def detections(self) -> dict[str, Detection]:
        """Other photograph -> metrics of the held-out patches against it."""
        inside = self.scores[INSIDE]
        return {other: detection(inside, self.scores[other]) for other in OUTSIDE}


def compare(backbone: Backbone, amounts: Amounts, on_images: OnImages | None = None) -> Textures:
    """Fit the default detector on patches of one photograph, and score others of it and of other photographs."""
    detector = create_detector(backbone, batch_size=16)  # as fast as a larger one on a CPU
    fit, new = patches(INSIDE, FIT_ROWS)[: amounts.fit_patches], patches(INSIDE, TEST_ROWS)
    calibration, held_out = new[: amounts.calibration_patches], new[amounts.calibration_patches :]
    detector.fit(fit, calibration, on_progress=on_images)
    sets = {INSIDE: held_out[: amounts.held_out_patches]}
    sets |= {other: patches(other)[: amounts.other_patches] for other in OUTSIDE}
    scores = {name: detector.score(images, on_progress=on_images) for name, images in sets.items()}
    return Textures(detector, scores, {name: _alarms(detector, values) for name, values in scores.items()})


# --- the run and its report ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demo:
    """A finished run."""

    search: Search
    textures: Textures
    amounts: Amounts
    passes: int
    seconds: float


def run(backbone: Backbone, amounts: Amounts, on_photographs: OnImages | None, on_patches: OnImages | None) -> Demo:
    """Run both parts; the functions are called with the number of images of every step."""
    begun, before = time.perf_counter(), backbone.forward_count
    lost = search(backbone, amounts, on_photographs)
    textures = compare(backbone, amounts, on_patches)
    return Demo(lost, textures, amounts, backbone.forward_count - before, time.perf_counter() - begun)


def render_demo(demo: Demo, command: str) -> str:
    """The report as HTML, with the command that repeats the run."""
    return render(
        "demo.html",
        demo=demo,
        things=things_table(demo.search),
        table=textures_table(demo.textures),
        scores=_score_figures(demo.textures),
        alpha=ALPHA,
        full=FULL,
        threads=torch.get_num_threads(),
        command=command,
        versions=", ".join(map(" ".join, versions("scikit-image", "matplotlib").items())),
    )


def things_table(search: Search) -> ResultTable:
    """One row for every lost thing."""
    rows = []
    for item, region in search.finds:
        box = region and (f"box {region.number}", f"{region.score:.1f}", f"{region.p_value:.2f}")
        rows.append((item.thing.name, *(box or ("missed", "", ""))))
    note = (
        f"A box is drawn where the map exceeds {search.detector.map_limit(ALPHA):.1f}. On a usual photograph the map "
        f"exceeds it anywhere with a probability of at most {ALPHA:g}."
    )
    return ResultTable("things", "What was lost", ("thing", "result", "map", "p-value"), tuple(rows), note)


def textures_table(textures: Textures) -> ResultTable:
    """One row for every other photograph."""
    rows = []
    for other, metrics in textures.detections.items():
        interval = interval_text(metrics.auroc_low, metrics.auroc_high)
        numbers = (f"{metrics.auroc:.3f}", interval, f"{metrics.aupr:.3f}", f"{metrics.fpr95:.3f}")
        rows.append((other, str(metrics.n_ood), *numbers, f"{textures.alarms[other]} of {metrics.n_ood}"))
    note = (
        f"Out-of-distribution is the positive class. FPR95 is the share of {INSIDE} patches flagged at the threshold "
        f"that flags 95 % of the other patches. The intervals are DeLong's. Alarms are patches with p ≤ {ALPHA:g}."
    )
    title = f"{len(textures.scores[INSIDE])} held-out patches of {INSIDE} against each other photograph"
    header = ("against", "patches", "AUROC", "95 % interval", "AUPR", "FPR95", "alarms")
    return ResultTable("textures", title, header, tuple(rows), note)


def _score_figures(textures: Textures) -> list[Picture]:
    inside, limit = textures.scores[INSIDE], threshold(textures.detector.calibration_scores_, ALPHA)
    limits = score_limits([*textures.scores.values()])
    pictures = []
    for other, metrics in textures.detections.items():
        figure = histogram(inside, textures.scores[other], limit, (INSIDE, other), limits, f"α = {ALPHA:g}")
        alt = f"Histogram of the scores of {INSIDE} and {other}, with an AUROC of {metrics.auroc:.3f}."
        pictures.append(Picture(figure, alt))
    return pictures

"""The demonstration: 32x32 patches of one photograph against patches of others, all of which ship with scikit-image."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from scipy.stats import betabinom

from gepc.backbones.base import Backbone
from gepc.conformal.decision import DecisionRule
from gepc.conformal.p_values import threshold
from gepc.core.errors import GepcError, raising
from gepc.core.tables import ResultTable, interval_text
from gepc.detector.detector import Detector
from gepc.detector.registry import create_detector
from gepc.detector.storage import versions
from gepc.lab.metrics import Detection, detection
from gepc.lab.report import figures
from gepc.lab.report.page import FOLDER, Picture, render

Pixels = npt.NDArray[np.uint8]
Array = npt.NDArray[np.float64]
OnPasses = Callable[[int], None]

ALPHA = 0.05
SIDE = 32
BATCH_SIZE = 16  # as fast as a larger one on a CPU, and the progress bar moves
FIT_ROWS, TEST_ROWS = slice(0, 8), slice(9, 16)  # of the 16 rows of patches; the row between separates the two


@dataclass(frozen=True)
class Photograph:
    """A photograph of scikit-image: its name here, the function of `skimage.data` that returns it, what it shows."""

    name: str
    function: str
    shows: str


INSIDE = Photograph("gravel", "gravel", "pebbles on a path")
OUTSIDE = (
    Photograph("brick", "brick", "a brick wall"),
    Photograph("grass", "grass", "a lawn"),
    Photograph("moon", "moon", "the surface of the Moon"),
    Photograph("page", "page", "a scanned page of text"),
    Photograph("tissue", "immunohistochemistry", "stained tissue under a microscope, in colour"),
)


@dataclass(frozen=True)
class Amounts:
    """Numbers of patches: of the in-distribution photograph for each purpose, and of each other photograph."""

    fit: int
    calibration: int
    held_out: int
    other: int


FULL = Amounts(128, 59, 53, 60)
QUICK = Amounts(40, 39, 24, 20)


@dataclass(frozen=True)
class Patches:
    """Patches (N, 32, 32, C) of one photograph, and the pixel (row, column) of their upper left corners."""

    photograph: Photograph
    pixels: Pixels
    corners: npt.NDArray[np.int64]

    @property
    def name(self) -> str:
        """The photograph's name."""
        return self.photograph.name

    def __len__(self) -> int:
        return len(self.pixels)


@dataclass(frozen=True)
class DemoData:
    """All patches of a run."""

    fit: Patches  # from one part of the in-distribution photograph
    calibration: Patches  # these and `held_out` are drawn at random from another part, so that they are exchangeable
    held_out: Patches
    others: tuple[Patches, ...]

    @property
    def scored(self) -> tuple[Patches, ...]:
        """What is scored: the held-out patches first, then the other photographs."""
        return (self.held_out, *self.others)


def load_photograph(photograph: Photograph) -> Pixels:
    """Its pixels (H, W, C), from scikit-image's own files, without a download."""
    with raising(GepcError, "the demo needs scikit-image; install it with: pip install 'gepc[demo]'", ImportError):
        from skimage import data
    pixels = np.asarray(getattr(data, photograph.function)())
    return pixels if pixels.ndim == 3 else pixels[..., None]


def load_data(amounts: Amounts = FULL) -> DemoData:
    """The patches of a run; the same ones every time."""
    (fit,) = draw(INSIDE, [amounts.fit], FIT_ROWS)
    calibration, held_out = draw(INSIDE, [amounts.calibration, amounts.held_out], TEST_ROWS)
    return DemoData(fit, calibration, held_out, tuple(draw(photograph, [amounts.other])[0] for photograph in OUTSIDE))


def draw(photograph: Photograph, counts: Sequence[int], rows: slice = slice(None)) -> list[Patches]:
    """Draw sets of `counts` patches at random, without replacement, from some rows of a grid without overlap."""
    pixels = load_photograph(photograph)
    grid = np.arange(pixels.shape[0] // SIDE)[rows]
    corners = SIDE * np.array([(row, column) for row in grid for column in range(pixels.shape[1] // SIDE)])
    corners = corners[np.random.default_rng(0).permutation(len(corners))]
    return [
        Patches(photograph, np.stack([pixels[top : top + SIDE, left : left + SIDE] for top, left in part]), part)
        for part in np.split(corners, np.cumsum(counts))[:-1]
    ]


@dataclass(frozen=True)
class ScoredPatches(Patches):
    """Patches with their scores, p-values and alarms, and the maps of those `shown`: low, median and high scores."""

    scores: Array
    p_values: Array
    alarms: int
    shown: tuple[int, ...]
    maps: npt.NDArray[np.float32]


@dataclass(frozen=True)
class AlarmCheck:
    """False alarms on held-out in-distribution patches, with the range that `expected_alarms` gives."""

    alpha: float
    alarms: int
    count: int
    low: int
    high: int

    @property
    def rate(self) -> float:
        """The share of the held-out patches that raised an alarm."""
        return self.alarms / self.count

    @property
    def as_expected(self) -> bool:
        """Whether the count is in the range."""
        return self.low <= self.alarms <= self.high


@dataclass(frozen=True)
class Demo:
    """A finished run: the fitted detector, and the scores of the held-out patches and of the other photographs."""

    detector: Detector
    data: DemoData
    scored: tuple[ScoredPatches, ...]
    passes: int
    seconds: float
    alpha: float = ALPHA

    @property
    def held_out(self) -> ScoredPatches:
        """The held-out patches of the in-distribution photograph."""
        return self.scored[0]

    @property
    def others(self) -> tuple[ScoredPatches, ...]:
        """The other photographs."""
        return self.scored[1:]

    @property
    def threshold(self) -> float:
        """The score above which a patch raises an alarm."""
        return threshold(self.detector.calibration_scores_, self.alpha)

    @cached_property
    def detections(self) -> dict[str, Detection]:
        """Other photograph -> metrics of the held-out patches against it."""
        return {other.name: detection(self.held_out.scores, other.scores) for other in self.others}

    @property
    def mean_auroc(self) -> float:
        """The mean over the other photographs."""
        return float(np.mean([found.auroc for found in self.detections.values()]))

    @property
    def false_alarms(self) -> AlarmCheck:
        """The alarms on held-out patches with their expected range."""
        count = len(self.held_out)
        span = expected_alarms(self.alpha, len(self.detector.calibration_scores_), count)
        return AlarmCheck(self.alpha, self.held_out.alarms, count, *span)

    def as_dict(self) -> dict[str, Any]:
        """Everything but pixels and maps, as plain values."""
        columns = {"corners": "corners", "score": "scores", "p_value": "p_values"}
        scores = {one.name: {key: getattr(one, name).tolist() for key, name in columns.items()} for one in self.scored}
        found = [(other, vars(self.detections[other.name])) for other in self.others]
        return {
            "alpha": self.alpha,
            "threshold": self.threshold,
            "pairs": [{"name": other.name, **metrics, "alarms": other.alarms} for other, metrics in found],
            "false_alarms": vars(self.false_alarms),
            "passes": self.passes,
            "seconds": round(self.seconds, 1),
            "scores": scores,
        }


def expected_alarms(alpha: float, calibration: int, count: int) -> tuple[int, int]:
    """The range that holds the number of false alarms among `count` new patches with probability 0.9 or more.

    For exchangeable patches and scores without ties, n calibration patches and k = floor(alpha (n + 1)), the number
    follows BetaBinomial(count, k, n + 1 - k); these are its 5 % and 95 % quantiles.
    """
    k = int(np.floor(alpha * (calibration + 1) * (1 + 1e-12)))
    low, high = betabinom(count, k, calibration + 1 - k).ppf([0.05, 0.95])
    return int(low), int(high)


def build_detector(backbone: Backbone) -> Detector:
    """The library's defaults: nothing is chosen for these photographs."""
    return create_detector(backbone, batch_size=BATCH_SIZE)


def passes_needed(detector: Detector, data: DemoData) -> int:
    """Network passes that `run` will make with this unfitted detector."""
    scored = len(data.calibration) + sum(len(patches) + len(_low_middle_high(len(patches))) for patches in data.scored)
    again = detector.map_images(len(data.fit), len(data.calibration))
    return detector.fit_cost().forward * len(data.fit) + detector.cost().forward * (scored + again)


def run(detector: Detector, data: DemoData, on_passes: OnPasses = lambda _: None) -> Demo:
    """Fit, score and map; `on_passes` is called with the number of network passes of every step."""
    begun, before = time.perf_counter(), detector.backbone.forward_count
    costs = iter([detector.fit_cost().forward] * len(data.fit) + [detector.cost().forward] * len(data.calibration))
    detector.fit(
        data.fit.pixels, data.calibration.pixels, on_progress=lambda count: on_passes(sum(islice(costs, count)))
    )
    on_passes(detector.map_images(len(data.fit), len(data.calibration)) * detector.cost().forward)
    scored = tuple(_score(detector, patches, on_passes) for patches in data.scored)
    return Demo(detector, data, scored, detector.backbone.forward_count - before, time.perf_counter() - begun)


def _score(detector: Detector, patches: Patches, on_passes: OnPasses) -> ScoredPatches:
    def progress(images: int) -> None:
        on_passes(images * detector.cost().forward)

    results = list(detector.results(patches.pixels, "raise", on_progress=progress))
    scores, p_values = (np.array([getattr(one, name) for one in results]) for name in ("score", "p_value"))
    alarms = int(DecisionRule(ALPHA).alarms(p_values, detector.fitted.reference).sum())
    order = np.argsort(scores, kind="stable")
    shown = tuple(int(order[place]) for place in _low_middle_high(len(scores)))
    maps = detector.score_map(patches.pixels[list(shown)])
    progress(len(shown))
    return ScoredPatches(**vars(patches), scores=scores, p_values=p_values, alarms=alarms, shown=shown, maps=maps)


def _low_middle_high(count: int) -> list[int]:
    """Ranks of the lowest, the middle and the highest of `count` scores; fewer if there are fewer."""
    return sorted({0, count // 2, count - 1})


COLUMNS = ("against", "patches", "AUROC", "95% interval", "AUPR", "FPR95", "alarms")
FACES = "celeba32-tiny"
THUMBNAIL = 128


def render_demo(demo: Demo, command: str) -> str:
    """The report as HTML, with the command that repeats the run."""
    scale, backbone = demo.detector.map_limit(), demo.detector.backbone
    return render(
        FOLDER / "demo.html",
        demo=demo,
        table=_table(demo),
        photographs=_photographs(demo),
        scores=_score_figures(demo),
        maps=[_map_figure(scored, scale) for scored in demo.scored],
        map_scale=scale,
        faces=backbone.source == FACES,
        backbone=backbone,
        threads=torch.get_num_threads(),
        command=command,
        versions=", ".join(map(" ".join, versions("scikit-image", "matplotlib").items())),
        side=SIDE,
        full=FULL,
        fit_rows=FIT_ROWS,
        test_rows=TEST_ROWS,
    )


def result_rows(demo: Demo) -> list[tuple[str, ...]]:
    """One row of text per other photograph, under `COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for other in demo.others:
        found = demo.detections[other.name]
        interval = interval_text(found.auroc_low, found.auroc_high)
        numbers = (f"{found.auroc:.3f}", interval, f"{found.aupr:.3f}", f"{found.fpr95:.3f}")
        rows.append((other.name, str(found.n_ood), *numbers, f"{other.alarms} of {found.n_ood}"))
    return rows


def _table(demo: Demo) -> ResultTable:
    inside = demo.held_out.name
    title = f"{len(demo.held_out)} held-out patches of {inside} against each other photograph"
    note = (
        f"Out-of-distribution is the positive class. FPR95 is the share of {inside} patches flagged at the threshold "
        "that flags 95% of the other patches; lower is better. The interval is DeLong's, for independent patches, and "
        f"a wider, exact one if the separation is perfect. Alarms are patches with p ≤ {demo.alpha:g}."
    )
    return ResultTable("demo", title, COLUMNS, tuple(result_rows(demo)), note)


def _photographs(demo: Demo) -> Picture:
    shown = [scored.photograph for scored in demo.scored]
    whole = [Image.fromarray(np.squeeze(load_photograph(photograph))) for photograph in shown]
    tiles = [np.asarray(ImageOps.fit(picture, (THUMBNAIL, THUMBNAIL))) for picture in whole]
    alt = "The photographs: " + "; ".join(f"{one.name}, {one.shows}" for one in shown) + "."
    return Picture(figures.gallery(tiles, [one.name for one in shown], columns=3), alt)


def _score_figures(demo: Demo) -> list[Picture]:
    inside, threshold = demo.held_out, demo.threshold
    limits = figures.score_limits([scored.scores for scored in demo.scored])
    pictures = []
    for other in demo.others:
        names, label = (inside.name, other.name), f"α = {demo.alpha:g}"
        figure = figures.histogram(inside.scores, other.scores, threshold, names, limits, label)
        medians = " and ".join(f"{short(np.median(one.scores))} for {one.name}" for one in (inside, other))
        pictures.append(Picture(figure, f"Histogram of scores: median {medians}; threshold {short(threshold)}."))
    curves = figures.roc({other.name: (inside.scores, other.scores) for other in demo.others})
    areas = ", ".join(f"{name} {found.auroc:.3f}" for name, found in demo.detections.items())
    return [*pictures, Picture(curves, f"ROC curves with the area under each: {areas}.")]


def _map_figure(scored: ScoredPatches, scale: float) -> Picture:
    places = ("lowest", "median", "highest")[-len(scored.shown) :]
    labels = [f"{place} {short(scored.scores[index])}" for place, index in zip(places, scored.shown, strict=True)]
    images = [scored.pixels[index] for index in scored.shown]
    figure = figures.maps(images, list(scored.maps), labels, scale)
    return Picture(figure, f"Patches of {scored.name} with their maps; scores: {', '.join(labels)}.", scored.name)


def short(score: float) -> str:
    """A score in few characters: one digit after the point below 100, none above."""
    return f"{score:.{1 if abs(score) < 99.95 else 0}f}".replace("-", "−")

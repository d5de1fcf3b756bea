"""The demonstration: 32x32 patches of one photograph against patches of others, all of which ship with scikit-image."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.core.errors import GepcError
from gepc.detector.detector import Detector
from gepc.detector.registry import GEPC
from gepc.features.gepc import GepcExtractor
from gepc.images.batches import OnBadImage
from gepc.scoring.metrics import Detection, detection
from gepc.verdicts import conformal

Pixels = npt.NDArray[np.uint8]
Array = npt.NDArray[np.float64]
OnPasses = Callable[[int], None]

ALPHA = 0.05
SIDE = 32
BATCH_SIZE = 16  # no slower than a larger one on a CPU, and the progress bar moves
FIT_ROWS, TEST_ROWS = slice(0, 8), slice(9, 16)  # of the 16 rows of patches; the one between keeps the parts apart


@dataclass(frozen=True)
class Photograph:
    """A picture of scikit-image: the function of `skimage.data` that gives it, and what one sees in it."""

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
    """How many patches to take: of the in-distribution photograph for each purpose, and of each other photograph."""

    fit: int
    calibration: int
    held_out: int
    other: int


FULL = Amounts(128, 59, 53, 60)
QUICK = Amounts(40, 39, 24, 20)


@dataclass(frozen=True)
class Patches:
    """Patches (N, 32, 32, C) of one photograph and the pixel (row, column) where each begins."""

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
class Data:
    """All patches of a run.

    `fit` comes from one part of the in-distribution photograph. `calibration` and `held_out` come from another part,
    where chance alone decides which patch is which: they are exchangeable, as the guarantee assumes.
    """

    fit: Patches
    calibration: Patches
    held_out: Patches
    others: tuple[Patches, ...]

    @property
    def scored(self) -> tuple[Patches, ...]:
        """What is scored: the held-out patches first, then the other photographs."""
        return (self.held_out, *self.others)


def load_photograph(photograph: Photograph) -> Pixels:
    """Its pixels (H, W, C), from scikit-image's own files: no download."""
    try:
        from skimage import data
    except ImportError as error:
        raise GepcError("the demo needs scikit-image; install it with: pip install 'gepc[demo]'") from error
    pixels = np.asarray(getattr(data, photograph.function)())
    return pixels if pixels.ndim == 3 else pixels[..., None]


def load_data(amounts: Amounts = FULL) -> Data:
    """The patches of a run; the same ones every time."""
    (fit,) = draw(INSIDE, [amounts.fit], FIT_ROWS)
    calibration, held_out = draw(INSIDE, [amounts.calibration, amounts.held_out], TEST_ROWS)
    return Data(fit, calibration, held_out, tuple(draw(photograph, [amounts.other])[0] for photograph in OUTSIDE))


def draw(photograph: Photograph, counts: Sequence[int], rows: slice = slice(None)) -> list[Patches]:
    """Sets of so many patches, drawn at random without replacement from the `rows` of a grid without overlap."""
    pixels = load_photograph(photograph)
    grid = np.arange(pixels.shape[0] // SIDE)[rows]
    cells = np.array([(row, column) for row in grid for column in range(pixels.shape[1] // SIDE)])
    order = np.random.default_rng(0).permutation(len(cells))
    ends = np.cumsum(counts)
    return [_cut(photograph, pixels, cells[order[end - n : end]] * SIDE) for n, end in zip(counts, ends, strict=True)]


def _cut(photograph: Photograph, pixels: Pixels, corners: npt.NDArray[np.int64]) -> Patches:
    patches = [pixels[top : top + SIDE, left : left + SIDE] for top, left in corners]
    return Patches(photograph, np.stack(patches), corners)


@dataclass(frozen=True)
class Scored:
    """Patches with what the detector said of them; `shown` are positions of low, middle and high score."""

    patches: Patches
    scores: Array
    p_values: Array
    shown: tuple[int, ...]
    maps: npt.NDArray[np.float32]

    @property
    def name(self) -> str:
        """The photograph's name."""
        return self.patches.name

    def alarms(self, alpha: float) -> int:
        """How many patches are called out of distribution at that false-alarm rate."""
        return int((self.p_values <= alpha).sum())

    def ranked(self) -> npt.NDArray[np.int64]:
        """Positions from the lowest score to the highest."""
        return np.argsort(self.scores, kind="stable")


@dataclass(frozen=True)
class Pair:
    """The held-out patches against one other photograph."""

    name: str
    detection: Detection
    alarms: int


@dataclass(frozen=True)
class AlarmCheck:
    """False alarms on held-out in-distribution patches, beside the range that `expected_alarms` gives."""

    alpha: float
    alarms: int
    count: int
    low: int
    high: int

    @property
    def rate(self) -> float:
        """Share of the held-out patches that raised an alarm."""
        return self.alarms / self.count

    @property
    def as_expected(self) -> bool:
        """Whether the count lies in the interval."""
        return self.low <= self.alarms <= self.high


@dataclass(frozen=True)
class Demo:
    """A finished run: plain results, and the fitted detector they come from."""

    detector: Detector
    data: Data
    held_out: Scored
    others: tuple[Scored, ...]
    passes: int
    seconds: float
    alpha: float = ALPHA

    @property
    def scored(self) -> tuple[Scored, ...]:
        """The held-out patches first, then the other photographs."""
        return (self.held_out, *self.others)

    @property
    def threshold(self) -> float:
        """The score above which a patch raises an alarm."""
        return conformal.threshold(self.detector.calibration_scores_, self.alpha)

    @property
    def method(self) -> GepcExtractor:
        """GEPC with its parameters."""
        assert isinstance(self.detector.extractor, GepcExtractor)
        return self.detector.extractor

    @property
    def paper_passes_per_patch(self) -> int:
        """Passes to score one patch as the paper counts them, with the identity evaluated."""
        return self.method.paper_cost(len(self.detector.kept_)).forward

    @property
    def paper_passes(self) -> int:
        """Passes of the whole run as the paper counts them."""
        fitting = self.method.paper_cost(len(self.detector.levels_)).forward * len(self.data.fit)
        scored = len(self.data.calibration) + sum(len(scored.scores) + len(scored.shown) for scored in self.scored)
        return fitting + self.paper_passes_per_patch * scored

    def pairs(self) -> list[Pair]:
        """Held-out patches against each other photograph."""
        return [
            Pair(other.name, detection(self.held_out.scores, other.scores), other.alarms(self.alpha))
            for other in self.others
        ]

    def false_alarms(self) -> AlarmCheck:
        """The alarms on held-out patches beside their expected range."""
        calibration, count = len(self.detector.calibration_scores_), len(self.held_out.patches)
        low, high = expected_alarms(self.alpha, calibration, count)
        return AlarmCheck(self.alpha, self.held_out.alarms(self.alpha), count, low, high)

    def as_dict(self) -> dict[str, Any]:
        """Everything but pixels and maps, as plain values."""
        return {
            "alpha": self.alpha,
            "threshold": self.threshold,
            "pairs": [{"name": pair.name, **vars(pair.detection), "alarms": pair.alarms} for pair in self.pairs()],
            "false_alarms": vars(self.false_alarms()),
            "passes": {"counted": self.passes, "paper": self.paper_passes},
            "seconds": round(self.seconds, 1),
            "scores": {
                scored.name: {
                    "corners": scored.patches.corners.tolist(),
                    "score": scored.scores.tolist(),
                    "p_value": scored.p_values.tolist(),
                }
                for scored in self.scored
            },
        }


def expected_alarms(alpha: float, calibration: int, count: int) -> tuple[int, int]:
    """The range that holds the number of false alarms among `count` new patches with probability 0.9 or more.

    It is for patches exchangeable with the `calibration` ones and scores without ties: with k = floor(alpha (n + 1))
    the number follows BetaBinomial(count, k, n + 1 - k), whose 5 % and 95 % quantiles these are.
    """
    from scipy.stats import betabinom

    k = int(np.floor(alpha * (calibration + 1) * (1 + 1e-12)))
    low, high = betabinom(count, k, calibration + 1 - k).ppf([0.05, 0.95])
    return int(low), int(high)


def build_detector(backbone: Backbone) -> GEPC:
    """GEPC with the library's defaults: nothing is chosen for these photographs."""
    return GEPC(backbone, batch_size=BATCH_SIZE)


def passes_needed(detector: Detector, data: Data) -> int:
    """Network passes that `run` will do with this unfitted detector."""
    scoring, fitting = detector.cost().forward, detector.fit_cost().forward
    mapped = sum(len(_low_middle_high(len(patches))) for patches in data.scored)
    return fitting * len(data.fit) + scoring * (len(data.calibration) + sum(map(len, data.scored)) + mapped)


def run(detector: Detector, data: Data, on_passes: OnPasses | None = None) -> Demo:
    """Fit, score and map. `on_passes(count)` is told of network passes as they are done."""
    report = on_passes or (lambda _: None)
    begun, before = time.perf_counter(), detector.backbone.forward_count
    costs = iter([detector.fit_cost().forward] * len(data.fit) + [detector.cost().forward] * len(data.calibration))
    detector.fit(
        data.fit.pixels, data.calibration.pixels, on_progress=lambda images: report(sum(islice(costs, images)))
    )
    held_out, *others = [_score(detector, patches, report) for patches in data.scored]
    passes = detector.backbone.forward_count - before
    return Demo(detector, data, held_out, tuple(others), passes, time.perf_counter() - begun)


def _score(detector: Detector, patches: Patches, report: OnPasses) -> Scored:
    cost = detector.cost().forward
    results = list(
        detector.results(patches.pixels, on_bad_image=OnBadImage.NONE, on_progress=lambda images: report(images * cost))
    )
    scores = np.array([result.score for result in results])
    order = np.argsort(scores, kind="stable")
    shown = tuple(int(order[place]) for place in _low_middle_high(len(scores)))
    maps = detector.score_map(patches.pixels[list(shown)])
    report(len(shown) * cost)
    return Scored(patches, scores, np.array([result.p_value for result in results]), shown, maps)


def _low_middle_high(count: int) -> Sequence[int]:
    """Ranks of the lowest, the middle and the highest of `count` scores; fewer where there are fewer."""
    return sorted({0, count // 2, count - 1})

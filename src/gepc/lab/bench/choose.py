"""Which detector to take, from normal images alone: candidates are compared on synthetic outliers of several kinds.

One half of the images is fitted on; the other half is scored, and so are its synthetic outliers. They are no substitute
for real ones, so the default detector is recommended, and what speaks for another one is said.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import spearmanr

from gepc.backbones.base import Backbone
from gepc.core.errors import InputError
from gepc.detector.detector import Detector
from gepc.detector.fitted import FittedDetector
from gepc.detector.registry import create_detector
from gepc.detector.stream import score_chunk
from gepc.images.batches import OnBadImage, chunks, prepared_chunks
from gepc.images.sources import Image, Images, open_images
from gepc.images.synthetic import KINDS, synthetic_outlier
from gepc.lab.bench.comparison import advantage
from gepc.lab.bench.evaluate import Scores, pair_aurocs
from gepc.lab.bench.protocol import split_name
from gepc.lab.datasets.registry import choose as take
from gepc.methods.base import Cost

Array = npt.NDArray[np.float64]
LEAST_IMAGES = 40
LEAST_SIDE = 32
LEAST_LEAD, LARGEST_P = 0.01, 0.01
"""A candidate leads clearly if its average AUROC is higher than the default's by this much, with this p-value."""


@dataclass(frozen=True)
class Candidate:
    """A detector to compare: `method` or `method:preset`, with options."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def detector(self, backbone: Backbone, **common: Any) -> Detector:
        """An unfitted detector."""
        name, preset = split_name(self.method)
        return create_detector(backbone, name, preset, **{**common, **self.options})

    def __str__(self) -> str:
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def arguments(self) -> str:
        """The options of `gepc fit` that make this detector."""
        name, preset = split_name(self.method)
        words = [f"--method {name}", *([] if preset is None else [f"--preset {preset}"])]
        return " ".join([*words, *(f"--set {name}={value}" for name, value in self.options.items())])


DEFAULT = Candidate("gepc+:fast")
CANDIDATES = (
    DEFAULT,
    Candidate("gepc+:single"),
    Candidate("gepc+:full"),
    Candidate("gepc+:fast", {"group": "flip_x"}),
    Candidate("gepc+:fast", {"group": "rot180"}),
    Candidate("gepc:inner"),
    Candidate("gepc"),
    Candidate("cfs"),
    Candidate("msma:knn"),
    Candidate("diffpath"),
    Candidate("pixel_stats"),
)


@dataclass(frozen=True)
class Trial:
    """A candidate, its cost per image, scores of held-out images and of their outliers by kind, and its stability."""

    candidate: Candidate
    cost: Cost
    scores: Scores
    stability: float  # Spearman's correlation of the held-out images' scores under two noise seeds

    @property
    def aurocs(self) -> dict[str, float]:
        """Kind of outlier -> AUROC."""
        return {kind: value for (_, kind), value in pair_aurocs({"": self.scores}).items()}

    @property
    def average(self) -> float:
        """Mean AUROC over the kinds."""
        return float(np.mean(list(self.aurocs.values())))


def compare(
    backbone: Backbone,
    images: Any,
    candidates: Sequence[Candidate] | None = None,
    count: int = 200,
    size: int | None = None,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> list[Trial]:
    """Try every candidate; the best average AUROC comes first.

    At most `count` of the images, drawn with `seed`, are used. `size` is the side of the images that the network sees,
    by default the backbone's. Without `candidates`, those of `candidates_for` are tried. `on_progress` is called with
    the number of finished candidates, one by one.
    """
    opened = open_images(images)
    if candidates is None:
        candidates = candidates_for(opened, backbone, size)
    chosen = np.random.default_rng(seed).permutation(len(opened))[:count]
    if len(chosen) < LEAST_IMAGES:
        raise InputError(f"a comparison needs at least {LEAST_IMAGES} images; there are {len(chosen)}")
    halves = [take(opened, [int(index) for index in np.sort(half)]) for half in (chosen[::2], chosen[1::2])]
    trials = []
    for candidate in candidates:
        trials.append(_trial(candidate, backbone, halves, size, seed))
        if on_progress is not None:
            on_progress(1)
    return sorted(trials, key=lambda trial: -trial.average)


def candidates_for(images: Any, backbone: Backbone, size: int | None = None) -> list[Candidate]:
    """`CANDIDATES`, and the default on images of half and of twice the side where the network takes any size.

    A side is at least 32 pixels and at most that of the first readable image, so that nothing is enlarged. With twice
    the side a pass takes four times as long.
    """
    if backbone.image_size is not None:
        return list(CANDIDATES)
    readable = (record.pixels_for(backbone.channels) for record in open_images(images) if record.pixels is not None)
    first = next(readable, None)
    if first is None:
        return list(CANDIDATES)
    shortest, step = min(first.shape[:2]), backbone.size_multiple
    side = shortest if size is None else size
    sides = [other // step * step for other in (side // 2, side * 2)]
    return [*CANDIDATES, *(Candidate(DEFAULT.method, {"size": x}) for x in sides if LEAST_SIDE <= x <= shortest)]


def _trial(candidate: Candidate, backbone: Backbone, halves: Sequence[Images], size: int | None, seed: int) -> Trial:
    detector = candidate.detector(backbone, seed=seed, size=size, maps="raw").fit(halves[0])
    read = chunks(halves[1], detector.fitted.preprocessing, detector.batch_size, OnBadImage.UNREADABLE)
    held_out = [image for chunk in read for image in chunk.images]
    fitted = detector.fitted
    inside = _scores(fitted, held_out)
    outside = {kind: _scores(fitted, [synthetic_outlier(image, kind, seed) for image in held_out]) for kind in KINDS}
    again = _scores(replace(fitted, seed=seed + 1), held_out)
    stability = float(spearmanr(inside, again).statistic) if np.ptp(inside) and np.ptp(again) else 1.0
    return Trial(candidate, detector.cost(), Scores(inside, outside, (), detector.fitted.scorer.selection_), stability)


def _scores(fitted: FittedDetector, images: Sequence[Image]) -> Array:
    """The scores of preprocessed images."""
    scored = (score_chunk(fitted, part, on_error="raise") for part in prepared_chunks(images, fitted.batch_size))
    return np.array([result.score for chunk in scored for result in chunk.results])


def clear_leader(trials: Sequence[Trial]) -> tuple[Trial, float, float] | None:
    """The best trial, its lead over the default and the p-value (one-sided DeLong test), if it leads clearly."""
    best, default = trials[0], _default(trials)
    if default is None or best is default:
        return None
    lead, p = advantage([{"": best.scores}], [{"": default.scores}])
    return (best, lead, p) if p is not None and lead >= LEAST_LEAD and p <= LARGEST_P else None


def recommend(trials: Sequence[Trial]) -> tuple[Trial, str]:
    """The trial to follow and the reason: the default, even if another one leads on synthetic outliers.

    Measured on 20 ID sets with real OOD sets (`benchmarks/choose.py`), clear leaders were worse than the default.
    """
    best, default, leader = trials[0], _default(trials), clear_leader(trials)
    if default is None:
        return best, f"{best.candidate} has the highest average; the default was not among the candidates"
    if best is default:
        return default, "take the default: it has the highest average"
    if leader is None:
        return default, f"take the default: no candidate is clearly better ({best.candidate} is first)"
    _, lead, p = leader
    usual = default.aurocs
    kinds = [kind for kind, value in best.aurocs.items() if value >= usual[kind] + LEAST_LEAD]
    return default, (
        f"take the default: {best.candidate} leads by {lead:.3f} on synthetic outliers (p = {p:.1g}), but such leads "
        f"did not carry over to real outliers. Take it only if you expect outliers like these kinds: {', '.join(kinds)}"
    )


def _default(trials: Sequence[Trial]) -> Trial | None:
    return next((trial for trial in trials if trial.candidate == DEFAULT), None)

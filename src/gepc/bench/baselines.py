"""Other methods on the same backbone, the same images and the same noise rule: chosen, estimated, extracted, scored.

A method's features are extracted once for each split of each data set and kept in the cache; every pair is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.bench import published
from gepc.bench.collect import Collection, Keys, Sizes, SplitExtractor, asked_for, needed, open_split
from gepc.bench.evaluate import Scores, Scoring, all_detections
from gepc.bench.protocol import MethodChoice, Protocol, split_name
from gepc.core.errors import OptionError, check_names
from gepc.detector.detector import Detector
from gepc.detector.registry import create_detector, extractor_options
from gepc.features.base import Cost, Extractor, as_scored, find_method, for_fitting, methods, parts_of
from gepc.features.extraction import FeatureCache, plain_options
from gepc.features.gepc import GepcExtractor
from gepc.scoring import Aggregation
from gepc.scoring.metrics import Detection

Array = npt.NDArray[np.float64]
SCORING_OPTIONS = ("calibration", "keep", "weights", "aggregate", "fuse")


@dataclass(frozen=True)
class Baseline:
    """A method as it is compared: the detector (never fitted; its parts are used), the preset and how many images."""

    detector: Detector
    preset: str | None
    train_images: int
    test_images: int

    @property
    def extractor(self) -> Extractor:
        """The method."""
        return self.detector.extractor

    @property
    def label(self) -> str:
        """The method's name in tables, with its preset where that is not the usual one."""
        return self.extractor.label if self.preset in (None, "light") else f"{self.extractor.label} {self.preset}"

    @property
    def distance(self) -> str | None:
        """What images are compared by, where the method compares images."""
        options = self.extractor.options()
        names = options.get("distances", options.get("distance"))
        return "+".join(names) if isinstance(names, tuple) else names

    @property
    def scoring(self) -> Scoring:
        """How its columns become a score."""
        detector = self.detector
        aggregation = Aggregation(detector.fuse, detector.aggregate)
        base = self.extractor.base_column
        return Scoring(detector.keep, detector.weights, detector.calibration_name, aggregation, base)

    def images(self, split: str) -> int:
        """At most so many of a split."""
        return self.train_images if split == "train" else self.test_images


def method_names(text: str) -> list[str]:
    """`all`, `training-free`, names and `name:preset`, with commas between. GEPC is not among them: it is there anyway.

    Training-free are all registered methods but those whose originals need a model for each ID set: the upper block
    of the paper's main table. Of a method without a preset `light`, all presets are taken.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise OptionError("--methods takes all, training-free, or names with commas between")
    names = [name for word in words for name in _meant(word)]
    free = [name for name in dict.fromkeys(names) if split_name(name)[0] != GepcExtractor.name]
    return sorted(free, key=lambda name: (split_name(name)[0] in published.ID_TRAINED, name))


def _meant(word: str) -> list[str]:
    """The methods that one word of the list stands for."""
    if word not in ("all", "training-free"):
        split_name(word)
        return [word]
    wanted = [name for name in methods() if word == "all" or name not in published.ID_TRAINED]
    return [one for name in wanted for one in _usual_presets(name)]


def _usual_presets(name: str) -> list[str]:
    presets = find_method(name).presets
    return [name] if "light" in presets or not presets else [f"{name}:{preset}" for preset in presets]


def choose_baselines(names: Iterable[str], protocol: Protocol, backbone: Backbone) -> list[Baseline]:
    """The methods with the presets, options and numbers of images that the protocol gives them; none twice."""
    found: dict[tuple[str, str | None], Baseline] = {}
    for name in names:
        baseline = _baseline(name, protocol, backbone)
        found.setdefault((baseline.extractor.name, baseline.preset), baseline)
    return list(found.values())


def _baseline(full_name: str, protocol: Protocol, backbone: Backbone) -> Baseline:
    """What the protocol says of `method:preset`, else what it says of the method."""
    name, preset = split_name(full_name)
    choice = protocol.methods.get(full_name, protocol.methods.get(name, MethodChoice()))
    method = find_method(name)
    preset = preset or choice.preset or ("light" if "light" in method.presets else None)
    check_names(f"protocol: methods.{name}.options", choice.options, [*extractor_options(method), *SCORING_OPTIONS])
    detector = create_detector(name, backbone, preset, size=protocol.size, **choice.options)
    train, test = choice.train_images or protocol.train_images, choice.test_images or protocol.test_images
    return Baseline(detector, preset, min(train, protocol.train_images), min(test, protocol.test_images))


@dataclass(frozen=True)
class CostEstimate:
    """The passes a method will make: per image while fitting, and in all with an empty cache."""

    baseline: Baseline
    per_image: Cost
    own: Cost
    images: int

    @property
    def shared(self) -> bool:
        """Whether some of the passes are another method's."""
        return self.own != self.per_image

    @property
    def total(self) -> Cost:
        """Its own passes for all images and seeds."""
        return Cost(self.own.forward * self.images, self.own.jvp * self.images)


def estimate_cost(
    baselines: Sequence[Baseline],
    protocol: Protocol,
    backbone: Backbone,
    cached: bool = True,
    sizes: Sizes | None = None,
) -> list[CostEstimate]:
    """What each method costs; with a cache, tables that were extracted before for as many images cost nothing more."""
    size = (protocol.size, protocol.size)
    sizes = asked_for(protocol, backbone) if sizes is None else sizes
    found: list[CostEstimate] = []
    known: set[tuple[str, int, int]] = set()
    for baseline in extraction_order(baselines):
        method = for_fitting(baseline.extractor)
        own = Cost()
        for part in parts_of(method) or (method,):
            what = repr((part.name, plain_options(part.options())))
            if not (cached and _is_known(known, what, baseline)):
                cost = part.cost(backbone, size)
                own = Cost(own.forward + cost.forward, own.jvp + cost.jvp)
            known.add((what, baseline.train_images, baseline.test_images))
        images = sum(min(count, baseline.images(split)) for (_, split), count in sizes.items()) * len(protocol.seeds)
        found.append(CostEstimate(baseline, method.cost(backbone, size), own, images))
    return found


def _is_known(known: set[tuple[str, int, int]], what: str, baseline: Baseline) -> bool:
    """Whether a table was extracted for at least as many images: a smaller subset is the beginning of a larger one.

    But for its last chunk, where the numbers are no multiples of the batch size: that one is looked at again.
    """
    return any(
        what == other and train >= baseline.train_images and test >= baseline.test_images
        for other, train, test in known
    )


def extraction_order(baselines: Sequence[Baseline]) -> list[Baseline]:
    """Methods that build on another one's table after the others."""
    return sorted(baselines, key=lambda baseline: len(parts_of(baseline.extractor)))


class BaselineBench:
    """A method and its features on every split."""

    def __init__(self, baseline: Baseline, protocol: Protocol, backbone: Backbone, collection: Collection) -> None:
        self.baseline, self.protocol, self.backbone, self.collection = baseline, protocol, backbone, collection
        self._known: dict[tuple[str, int], Scores] = {}

    def on_images(self, keys: Keys) -> BaselineBench:
        """The same method on some of its images alone, given by their keys for every part."""
        if keys == self.collection.keys:
            return self
        return BaselineBench(self.baseline, self.protocol, self.backbone, self.collection.of(keys))

    def scores(self, name: str, seed: int) -> Scores:
        """Fit on ID-train alone, score ID-test and every OOD-test set, as `Detector` does; once for each seed."""
        if (name, seed) not in self._known:
            self._known[name, seed] = self._scores(name, seed)
        return self._known[name, seed]

    def _scores(self, name: str, seed: int) -> Scores:
        extractor, parts = self.baseline.extractor, self.collection.parts
        picked, scored = self.baseline.scoring.fit(extractor.columns(parts[name, "train", seed].table))
        kept = list(picked.kept)

        def score(other: str) -> Array:
            part = parts[other, "test", seed]
            return scored(as_scored(extractor, extractor.columns(part.table)[:, kept], part.keys, seed))

        outside = {other: score(other) for other in self.protocol.pairs[name]}
        levels = extractor.timesteps(self.backbone)
        return Scores(score(name), outside, tuple(levels[position] for position in kept), picked)

    @cached_property
    def detections(self) -> dict[int, dict[tuple[str, str], Detection]]:
        """seed -> pair -> all metrics."""
        return {seed: all_detections(self.protocol, self.scores, seed) for seed in self.protocol.seeds}

    @property
    def aurocs(self) -> dict[tuple[str, str], float]:
        """AUROC of every pair, averaged over seeds."""
        runs = self.detections.values()
        return {pair: float(np.mean([run[pair].auroc for run in runs])) for pair in self.protocol.pair_list}


def collect_baselines(
    baselines: Sequence[Baseline],
    protocol: Protocol,
    backbone: Backbone,
    data: Path,
    cache: FeatureCache,
    on_progress: Callable[[int], None] | None = None,
) -> list[BaselineBench]:
    """Features of every method on every split that the pairs need; in the order given."""
    found = {
        id(baseline): _collect(baseline, protocol, backbone, data, cache, on_progress)
        for baseline in extraction_order(baselines)
    }
    return [BaselineBench(baseline, protocol, backbone, found[id(baseline)]) for baseline in baselines]


def _collect(
    baseline: Baseline,
    protocol: Protocol,
    backbone: Backbone,
    data: Path,
    cache: FeatureCache,
    on_progress: Callable[[int], None] | None,
) -> Collection:
    found = Collection()
    before, hits, misses = backbone.forward_count + backbone.jvp_count, cache.hits, cache.misses
    extractor = for_fitting(baseline.extractor)
    looking = SplitExtractor(protocol, backbone, extractor, cache, found.skipped, on_progress)
    timesteps = extractor.timesteps(backbone)
    for name, split in needed(protocol, backbone):
        images = open_split(protocol, data, name, split, baseline.images(split))
        for seed in protocol.seeds:
            found.parts[name, split, seed] = looking.at(name, split, images, timesteps, seed)
    found.passes = backbone.forward_count + backbone.jvp_count - before
    found.cached_levels, found.computed_levels = cache.hits - hits, cache.misses - misses
    return found

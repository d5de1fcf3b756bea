"""From feature tables to scores and metrics: every variant of the detector is arithmetic on the same tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.bench.collect import Collection, Keys
from gepc.bench.protocol import Protocol
from gepc.features.base import Table
from gepc.features.gepc import GepcExtractor
from gepc.features.residuals import PER_ELEMENT
from gepc.scoring import Aggregation, create_calibrator
from gepc.scoring.metrics import Detection, auroc, detection
from gepc.scoring.scorer import Selection, select

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Variant:
    """One way to put a table's numbers together. None means: as many, or all."""

    features: tuple[str, ...] = ("s",)
    keep: int | None = 2
    weights: str = "inv_cv"
    calibration: str = "kde"
    fuse: str = "mean"
    elements: tuple[str, ...] | None = None
    timesteps: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Scores:
    """What a variant says of ID-test and of each OOD-test set, and which timesteps it kept with which weights."""

    inside: Array
    outside: dict[str, Array]
    kept: tuple[int, ...]
    selection: Selection


@dataclass(frozen=True)
class Scoring:
    """How columns become a score: the part of a detector that sees numbers alone."""

    keep: int | None
    weights: str
    calibration: str
    aggregation: Aggregation
    base: int = 0

    def fit(self, train: Array) -> tuple[Selection, Callable[[Array], Array]]:
        """From ID-train columns (N, levels, features): the kept levels, and the score of columns at those levels."""
        keep = None if self.keep is None else min(self.keep, train.shape[1])
        picked = select(train[:, :, self.base], keep, self.weights)
        calibrator = create_calibrator(self.calibration).fit(train[:, list(picked.kept)])
        return picked, lambda columns: calibrator.score(columns, picked.weights, self.aggregation)


def over_seeds(values: Sequence[float] | Array) -> float | None:
    """Standard deviation of one number per noise seed; None with one seed."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


ScoresOf = Callable[[str, int], Scores]


def all_detections(protocol: Protocol, scores_of: ScoresOf, seed: int) -> dict[tuple[str, str], Detection]:
    """All metrics of every pair, from a function of the ID set and the seed."""
    found = {}
    for name, others in protocol.pairs.items():
        scores = scores_of(name, seed)
        found.update({(name, other): detection(scores.inside, scores.outside[other]) for other in others})
    return found


class Bench:
    """A protocol, its backbone and the collected tables."""

    def __init__(self, protocol: Protocol, backbone: Backbone, collection: Collection) -> None:
        self.protocol, self.backbone, self.collection = protocol, backbone, collection
        self.extractor: GepcExtractor = protocol.extractor()
        self._known: dict[tuple[str, Variant, int], Scores] = {}

    @property
    def main(self) -> Variant:
        """The protocol's own detector."""
        protocol = self.protocol
        return Variant(("s",), protocol.keep, protocol.weights, protocol.calibration)

    @property
    def main_extractor(self) -> GepcExtractor:
        """The main detector's passes alone: the one pass of the benchmark has the features of the ablations too."""
        return replace(self.extractor, features=("s",))

    def candidates(self, name: str) -> tuple[int, ...]:
        """Candidate timesteps when `name` is in-distribution."""
        return self.protocol.levels_for(name).timesteps(self.backbone.alphas_cumprod)

    def columns(self, name: str, split: str, seed: int, variant: Variant, timesteps: Sequence[int]) -> Array:
        """(N, levels, features) of one split under a variant."""
        table = self.collection.parts[name, split, seed].at(timesteps)
        return np.stack([self._feature(table, feature, variant.elements) for feature in variant.features], axis=2)

    def _feature(self, table: Table, feature: str, elements: Iterable[str] | None) -> Array:
        values = table[feature]
        if elements is not None and feature in PER_ELEMENT:
            names = self.extractor.group.names
            values = values[:, :, [0, *(names.index(element) for element in elements)]]
        return self.extractor.reduce(feature, values)

    def scores(self, name: str, variant: Variant, seed: int) -> Scores:
        """Fit on ID-train alone, score ID-test and every OOD-test set; once for each variant."""
        asked = (name, variant, seed)
        if asked not in self._known:
            self._known[asked] = self._scores(*asked)
        return self._known[asked]

    def _scores(self, name: str, variant: Variant, seed: int) -> Scores:
        timesteps = variant.timesteps or self.candidates(name)
        train = self.columns(name, "train", seed, variant, timesteps)
        base = variant.features.index("s") if "s" in variant.features else 0
        aggregation = Aggregation(over_features=variant.fuse)
        picked, scored = Scoring(variant.keep, variant.weights, variant.calibration, aggregation, base).fit(train)
        kept = list(picked.kept)

        def score(other: str) -> Array:
            return scored(self.columns(other, "test", seed, variant, timesteps)[:, kept])

        outside = {other: score(other) for other in self.protocol.pairs[name]}
        return Scores(score(name), outside, tuple(timesteps[position] for position in kept), picked)

    def detections(self, variant: Variant, seed: int) -> dict[tuple[str, str], Detection]:
        """All metrics of every pair."""
        return all_detections(self.protocol, lambda name, seed: self.scores(name, variant, seed), seed)

    def on_images(self, keys: Keys) -> Bench:
        """The same benchmark on some of its images alone, given by their keys for every part."""
        if keys == self.collection.keys:
            return self
        return Bench(self.protocol, self.backbone, self.collection.of(keys))

    def aurocs(
        self, variant: Variant, symmetric: bool = False, only: str | None = None
    ) -> dict[tuple[str, str], float]:
        """AUROC of every pair (of one ID set), averaged over seeds; `symmetric` takes max(a, 1 - a) of each seed."""
        pairs = self.protocol.pairs if only is None else {only: self.protocol.pairs[only]}
        runs = []
        for seed in self.protocol.seeds:
            run = {}
            for name, others in pairs.items():
                scores = self.scores(name, variant, seed)
                run.update({(name, other): auroc(scores.inside, scores.outside[other]) for other in others})
            runs.append({pair: max(value, 1 - value) if symmetric else value for pair, value in run.items()})
        return {pair: float(np.mean([run[pair] for run in runs])) for pair in runs[0]}

    def raw(self, elements: tuple[str, ...] | None = None, timesteps: tuple[int, ...] | None = None) -> Variant:
        """The raw transported gap: no calibration, the levels the main detector keeps or those given."""
        return replace(self.main, calibration="raw", elements=elements, timesteps=timesteps, weights="uniform")

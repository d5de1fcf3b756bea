"""Features of every split, extracted once; the scores and metrics of every detector are arithmetic on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.calibration import create_calibrator
from gepc.calibration.scorer import Scorer, Selection
from gepc.core.errors import InputError, OptionError, raising
from gepc.images.batches import OnBadImage, chunks
from gepc.images.sources import Images
from gepc.lab.bench.protocol import Pair, Place, Protocol
from gepc.lab.metrics import Detection, auroc, detection
from gepc.methods.base import Batch, Extractor
from gepc.methods.extraction import ExtractionSpec, FeatureCache, FeatureTable, OnProgress, extract_all
from gepc.methods.features import find_feature
from gepc.methods.gepc import GepcExtractor

Array = npt.NDArray[np.float64]
Sizes = Mapping[Place, int]  # (set, split) -> number of images


@dataclass(frozen=True)
class Benchmark:
    """A protocol with its network and its images."""

    protocol: Protocol  # what to run
    backbone: Backbone  # the network
    splits: Mapping[Place, Images]  # (set, split) -> images
    cache: FeatureCache  # where known features are read and new ones are written

    @classmethod
    def open(cls, protocol: Protocol, backbone: Backbone, data: Path, cache: FeatureCache) -> Benchmark:
        """Open every split that the pairs need, below the folder `data`.

        A wrong image size or level and a missing data set are raised here, before the first network pass.
        """
        backbone.check_size(protocol.size, protocol.size)
        for name in protocol.pairs:
            distinct = len(protocol.levels_for(name).timesteps(backbone.alphas_cumprod))
            if distinct < protocol.keep:
                levels = f"{distinct} distinct levels with this backbone"
                raise OptionError(f"protocol: keep is {protocol.keep}, but {name} has {levels}")
        splits = {place: protocol.open(data, place) for place in protocol.timesteps(backbone)}
        return cls(protocol, backbone, splits, cache)

    @property
    def sizes(self) -> Sizes:
        """The number of images of each split: as many as the protocol requests, or fewer."""
        return {place: len(images) for place, images in self.splits.items()}

    def collect(
        self, extractor: Extractor | None = None, limits: Sizes | None = None, on_progress: OnProgress | None = None
    ) -> Collection:
        """Extract the features of one method on every split, with every noise seed.

        The method has its own timesteps; the protocol's GEPC, by default, those of each split. `limits` is the largest
        number of images of each split. `on_progress` is called with the number of network passes of every finished
        chunk.
        """
        alike = self.protocol.pooled_alike()
        if extractor is None and len(alike) > 1:
            parts = [replace(self, protocol=part).collect(on_progress=on_progress) for part in alike]
            by_set = {name: found for part, found in zip(alike, parts, strict=True) for name in part.pairs}
            return Collection.joined(by_set)
        protocol, backbone, cache = self.protocol, self.backbone, self.cache
        before, hits = backbone.forward_count + backbone.jvp_count, cache.hits
        method = extractor or protocol.extractor()
        tables = {}
        for place, levels in protocol.timesteps(backbone).items():
            images, timesteps = self.splits[place], levels if extractor is None else extractor.timesteps(backbone)
            if limits is not None and limits[place] < len(images):
                images = images.take(range(limits[place]))
            for seed in protocol.seeds:
                spec = ExtractionSpec(method, timesteps, seed, protocol.batch_size)
                tables[(*place, seed)] = self._extract(place, images, spec, on_progress)
        passes = backbone.forward_count + backbone.jvp_count - before
        return Collection(tables, passes, cache.hits - hits)

    def _extract(
        self, place: Place, images: Images, spec: ExtractionSpec, on_progress: OnProgress | None
    ) -> FeatureTable:
        name, split = place
        cost = spec.extractor.cost(self.backbone, (self.protocol.size, self.protocol.size), len(spec.timesteps))
        with raising(InputError, f"{name}, {split} split: {{error}}", InputError):
            return extract_all(
                images,
                self.protocol.preprocessing(name, self.backbone),
                self.backbone,
                spec,
                cache=self.cache,
                on_progress=on_progress and (lambda count: on_progress(count * (cost.forward + cost.jvp))),
                on_bad_image=OnBadImage.ALL,
            )


@dataclass(frozen=True)
class Collection:
    """(set, split, noise seed) -> features of one method; passes made for them, and cache files read."""

    tables: dict[tuple[str, str, int], FeatureTable]
    passes: int = 0
    cached: int = 0
    by_set: Mapping[str, Collection] = field(default_factory=dict)  # ID set -> features, where sets differ in them

    @classmethod
    def joined(cls, by_set: Mapping[str, Collection]) -> Collection:
        """All features together; for a split that several ID sets look at, those of the first."""
        parts = list({id(part): part for part in by_set.values()}.values())
        tables = {place: table for part in reversed(parts) for place, table in part.tables.items()}
        passes, cached = sum(part.passes for part in parts), sum(part.cached for part in parts)
        return cls(tables, passes, cached, by_set)

    @property
    def skipped(self) -> dict[str, str]:
        """Images that could not be read, with their set and split -> the reason."""
        return {
            f"{name}, {split}: {image}": reason
            for (name, split, _), table in self.tables.items()
            for image, reason in table.skipped.items()
        }

    @property
    def sizes(self) -> Sizes:
        """The number of images of each split."""
        return {(name, split): len(table) for (name, split, _), table in self.tables.items()}

    @property
    def images(self) -> tuple[int, int]:
        """The largest number of train and of test images of a set."""
        train, test = (max(n for (_, kind), n in self.sizes.items() if kind == split) for split in ("train", "test"))
        return train, test


@dataclass(frozen=True)
class Scores:
    """Scores of ID-test and of each OOD-test set, and the kept timesteps with their weights."""

    inside: Array
    outside: dict[str, Array]
    kept: tuple[int, ...]
    selection: Selection


SeedScores = Mapping[str, Scores]  # ID set -> scores, with one noise seed


def pair_aurocs(scores: SeedScores) -> dict[Pair, float]:
    """AUROC of every pair."""
    return {
        (name, other): auroc(found.inside, outside)
        for name, found in scores.items()
        for other, outside in found.outside.items()
    }


def mean_over_seeds(runs: Sequence[Mapping[Pair, float]]) -> dict[Pair, float]:
    """The mean over noise seeds, pair by pair."""
    return {pair: float(np.mean([run[pair] for run in runs])) for pair in runs[0]}


def std_over_seeds(values: Sequence[float] | Array) -> float | None:
    """Standard deviation of one number per noise seed; None with one seed."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


class MethodBench(ABC):
    """The features of one method on every split, and the scores and metrics computed from them.

    `label` is its name in tables, `scoring_extractor` the extractor of the features that scores need, and of no others.
    """

    name: str
    label: str
    preset: str | None = None
    calibration: str
    scoring_extractor: Extractor

    def __init__(self, benchmark: Benchmark, collection: Collection) -> None:
        self.benchmark, self.collection = benchmark, collection
        self.protocol, self.backbone = benchmark.protocol, benchmark.backbone
        self.pairs = benchmark.protocol.pair_list
        self._known: dict[tuple[str, int, Variant | None], Scores] = {}

    def scores(self, name: str, seed: int, variant: Variant | None = None) -> Scores:
        """Fit on ID-train alone, then score ID-test and every OOD-test set, as a detector does; only GEPC has variants.

        They are computed once.
        """
        asked = (name, seed, variant)
        if asked not in self._known:
            self._known[asked] = self._fit_and_score(*asked)
        return self._known[asked]

    @abstractmethod
    def _fit_and_score(self, name: str, seed: int, variant: Variant | None) -> Scores: ...

    def _score_tests(
        self, name: str, scorer: Scorer, candidates: Sequence[int], columns: Callable[[str, list[int]], Array]
    ) -> Scores:
        """Score every test set of an ID set; `columns` gives a test set's columns at the kept of the candidates."""
        kept = list(scorer.selection_.kept)
        inside, *outside = (scorer.score_kept(columns(one, kept)) for one in (name, *self.protocol.pairs[name]))
        timesteps = tuple(candidates[place] for place in kept)
        return Scores(inside, dict(zip(self.protocol.pairs[name], outside, strict=True)), timesteps, scorer.selection_)

    def read_rows(self, place: Place, rows: Iterable[int]) -> Batch:
        """Read the images of some rows of a split's table again; rows that it does not have are left out."""
        table = self.collection.tables[(*place, self.protocol.seeds[0])]
        picked = self.benchmark.splits[place].take([int(table.indices[row]) for row in rows if row < len(table)])
        (chunk,) = chunks(picked, table.preprocessing, len(picked), OnBadImage.NONE)
        return table.spec.batch(chunk)

    def all_scores(self) -> list[SeedScores]:
        """For every noise seed: ID set -> scores."""
        return [{name: self.scores(name, seed) for name in self.protocol.pairs} for seed in self.protocol.seeds]

    def detections(self) -> list[dict[Pair, Detection]]:
        """For every noise seed: pair -> all metrics."""
        return [
            {(name, other): detection(run[name].inside, run[name].outside[other]) for name, other in self.pairs}
            for run in self.all_scores()
        ]

    @property
    def aurocs(self) -> dict[Pair, float]:
        """AUROC of every pair, averaged over noise seeds."""
        return mean_over_seeds([pair_aurocs(run) for run in self.all_scores()])

    @property
    def average(self) -> float:
        """Mean AUROC over pairs and noise seeds."""
        return float(np.mean(list(self.aurocs.values())))


@dataclass(frozen=True)
class Variant:
    """One detector that can be computed from the features of GEPC, which are fused by their mean."""

    features: tuple[str, ...] = ("s",)
    keep: int | None = 2  # None: all levels
    weights: str = "inv_cv"
    calibration: str = "kde"
    elements: tuple[str, ...] | None = None  # None: all transforms
    timesteps: tuple[int, ...] | None = None  # None: the candidates of the ID set

    def fit(self, columns: Array) -> Scorer:
        """A scorer that is fitted on ID-train; the feature `s`, or else the first one, selects levels."""
        fused = len(self.features) > 1 and create_calibrator(self.calibration).uses_fuse
        base = self.features.index("s") if "s" in self.features else 0
        scorer = Scorer(self.calibration, self.keep, self.weights, fuse="mean" if fused else "sum")
        return scorer.fit(columns, columns[:, :, base])


class GepcBench(MethodBench):
    """GEPC as the protocol sets it, `main`, and every variant of it."""

    name, label = GepcExtractor.name, "GEPC"

    def __init__(self, benchmark: Benchmark, collection: Collection) -> None:
        super().__init__(benchmark, collection)
        protocol, first = benchmark.protocol, self.pairs[0][0]
        self.main = Variant(protocol.main_features_for(first), protocol.keep, protocol.weights, protocol.calibration)
        self.calibration, self.extractor = protocol.calibration, protocol.extractor()
        self.scoring_extractor = replace(self.extractor, features=self.main.features)

    def main_for(self, name: str) -> Variant:
        """The main detector when `name` is in-distribution."""
        return replace(self.main, features=self.protocol.main_features_for(name))

    def candidates(self, name: str) -> tuple[int, ...]:
        """Candidate timesteps when `name` is in-distribution."""
        return self.protocol.levels_for(name).timesteps(self.backbone.alphas_cumprod)

    def columns(
        self, name: str, split: str, seed: int, variant: Variant, timesteps: Sequence[int], id_set: str | None = None
    ) -> Array:
        """(N, levels, features) of one split under a variant, for the detector of `id_set` (by default `name`)."""
        collection = self.collection.by_set.get(id_set or name, self.collection)
        table, names = collection.tables[name, split, seed].at(timesteps).table, self.extractor.group.names
        found = []
        for feature in map(find_feature, variant.features):
            values = table[feature.name]
            if variant.elements is not None and feature.by_element:
                values = values[:, :, [0, *(names.index(element) for element in variant.elements)]]
            found.append(feature.average(values))
        return np.stack(found, axis=2)

    def _fit_and_score(self, name: str, seed: int, variant: Variant | None) -> Scores:
        variant = variant or self.main_for(name)
        timesteps = variant.timesteps or self.candidates(name)
        scorer = variant.fit(self.columns(name, "train", seed, variant, timesteps))

        def columns(other: str, kept: list[int]) -> Array:
            return self.columns(other, "test", seed, variant, timesteps, id_set=name)[:, kept]

        return self._score_tests(name, scorer, timesteps, columns)

    def variant_aurocs(self, variant: Variant, symmetric: bool = False, only: str | None = None) -> dict[Pair, float]:
        """AUROC of every pair (or of those of the ID set `only`), averaged over noise seeds.

        With `symmetric`, max(a, 1 - a) of each AUROC a.
        """
        names = self.protocol.pairs if only is None else (only,)
        runs = [pair_aurocs({name: self.scores(name, seed, variant) for name in names}) for seed in self.protocol.seeds]
        if symmetric:
            runs = [{pair: max(value, 1 - value) for pair, value in run.items()} for run in runs]
        return mean_over_seeds(runs)

    def raw(self, elements: tuple[str, ...] | None, timesteps: tuple[int, ...] | None) -> Variant:
        """The raw transported gap at all of some timesteps: no calibration, uniform weights."""
        return Variant(("s",), None, "uniform", "raw", elements, timesteps)

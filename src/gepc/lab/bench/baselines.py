"""Other methods on the same backbone, images and noise: chosen by name, extracted, scored.

A method's features are extracted once for each split of each data set and kept in the cache; every pair is arithmetic.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gepc.backbones.base import Backbone
from gepc.calibration.scorer import Scorer
from gepc.core.errors import OptionError, check_names
from gepc.core.tables import Cell, ResultTable
from gepc.detector.detector import Detector
from gepc.detector.parameters import extractor_options
from gepc.detector.registry import create_detector
from gepc.lab.bench import published
from gepc.lab.bench.evaluate import Array, Benchmark, Collection, GepcBench, MethodBench, Scores, Sizes, Variant
from gepc.lab.bench.protocol import MethodChoice, Protocol, split_name
from gepc.methods.base import Batch, Cost, Extractor, extract_table, find_method, methods
from gepc.methods.combined import Combined
from gepc.methods.extraction import OnProgress
from gepc.methods.gepc import GepcExtractor

FOR_ONE_KIND = ("radar", "inspect")
"""Presets for one kind of images, which `all` leaves out."""
SCORING_OPTIONS = ("calibration", "keep", "weights", "aggregate", "fuse")


@dataclass(frozen=True)
class Baseline:
    """A method to compare with: an unfitted detector, its preset, and the number of images that it takes of a split."""

    detector: Detector
    preset: str | None
    images: dict[str, int]  # split -> the largest number of its images

    @property
    def extractor(self) -> Extractor:
        """The method."""
        return self.detector.extractor

    @property
    def label(self) -> str:
        """The method's name in tables, with its preset if that is not the usual one."""
        return self.extractor.label if self.preset in (None, "light") else f"{self.extractor.label} {self.preset}"


def method_names(text: str) -> list[str]:
    """Names of methods to compare with GEPC, which is always included and not returned.

    `text` has `all`, `training-free`, `method` and `method:preset`, separated by commas. `all` leaves out methods that
    need another kind of network, `training-free` also those whose originals need a model for each ID set. Of a method
    without a preset `light`, all presets are taken.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise OptionError("methods must be all, training-free, or names separated by commas")
    names = [name for word in words for name in _names_of(word)]
    others = [name for name in dict.fromkeys(names) if split_name(name)[0] != GepcExtractor.name]
    return sorted(others, key=lambda name: (split_name(name)[0] in published.ID_TRAINED, name))


def _names_of(word: str) -> list[str]:
    if word not in ("all", "training-free"):
        split_name(word)
        return [word]
    found: list[str] = []
    for name in methods():
        if name == Combined.name:  # its methods are in the table already
            continue
        method = find_method(name)
        if method.needs in (None, Backbone.gives) and (word == "all" or name not in published.ID_TRAINED):
            presets = method.presets
            usual = [f"{name}:{preset}" for preset in presets if preset not in FOR_ONE_KIND]
            found += [name] if "light" in presets or not presets else usual
    return found


def choose_baselines(
    names: Iterable[str], protocol: Protocol, backbone: Backbone, usual: str = "light"
) -> list[Baseline]:
    """The methods with the presets, options and numbers of images that the protocol gives them; none twice.

    A method without a preset of its own, here or in the protocol, gets the preset `usual`, or `light` if it has none.
    """
    found: dict[tuple[str, str | None], Baseline] = {}
    for name in names:
        baseline = _baseline(name, protocol, backbone, usual)
        found.setdefault((baseline.extractor.name, baseline.preset), baseline)
    return list(found.values())


def _baseline(full_name: str, protocol: Protocol, backbone: Backbone, usual: str) -> Baseline:
    """The protocol's entry for `method:preset`, or else for the method."""
    name, preset = split_name(full_name)
    choice = protocol.methods.get(full_name, protocol.methods.get(name, MethodChoice()))
    method = find_method(name)
    default = next((one for one in (usual, "light") if one in method.presets), None)
    preset = preset or choice.preset or default
    check_names(f"protocol: methods.{name}.options", choice.options, [*extractor_options(method), *SCORING_OPTIONS])
    detector = create_detector(backbone, name, preset, size=protocol.size, **choice.options)
    wanted = {"train": choice.train_images, "test": choice.test_images}
    most = {split: min(count or protocol.images(split), protocol.images(split)) for split, count in wanted.items()}
    return Baseline(detector, preset, most)


class BaselineBench(MethodBench):
    """A baseline with its features on every split."""

    def __init__(self, baseline: Baseline, benchmark: Benchmark, collection: Collection) -> None:
        super().__init__(benchmark, collection)
        self.baseline, self.scoring_extractor = baseline, baseline.extractor
        self.name, self.label, self.preset = baseline.extractor.name, baseline.label, baseline.preset
        self.calibration = baseline.detector.calibration_name

    def _fit_and_score(self, name: str, seed: int, variant: Variant | None) -> Scores:
        extractor, tables = self.baseline.extractor, self.collection.tables
        scorer = self.baseline.detector.scorer().fit(tables[name, "train", seed])

        def columns(other: str, kept: list[int]) -> Array:
            found = tables[other, "test", seed]
            return extractor.as_scored(extractor.columns(found.table)[:, kept], found.keys, seed)

        return self._score_tests(name, scorer, extractor.timesteps(self.backbone), columns)


def collect_baselines(
    baselines: Sequence[Baseline], benchmark: Benchmark, on_progress: OnProgress | None = None
) -> list[BaselineBench]:
    """Extract the features of every method on every split; the results come in the given order.

    `on_progress` is called with the number of network passes of every finished chunk.
    """
    found = {}
    # methods that build on another method's table come after the others
    for baseline in sorted(baselines, key=lambda baseline: len(baseline.extractor.builds_on())):
        limits = {place: baseline.images[place[1]] for place in benchmark.splits}
        found[id(baseline)] = benchmark.collect(baseline.extractor.for_fitting(), limits, on_progress)
    return [BaselineBench(baseline, benchmark, found[id(baseline)]) for baseline in baselines]


REPEATS = 3


@dataclass(frozen=True)
class CostEstimate:
    """A method, the cost of one of its images, and the number of images over all splits and noise seeds."""

    label: str
    per_image: Cost
    images: int

    @property
    def passes(self) -> int:
        """F + J of all images."""
        return self.images * (self.per_image.forward + self.per_image.jvp)


def estimate_cost(
    protocol: Protocol, backbone: Backbone, baselines: Sequence[Baseline], sizes: Sizes | None = None
) -> list[CostEstimate]:
    """Estimate the network passes of GEPC and of each baseline with an empty cache.

    `sizes` are the numbers of images of the splits; by default, those that the protocol asks for. Methods that share
    passes, such as `nll_vlb` and `ic`, need fewer together when the features are cached.
    """
    size = (protocol.size, protocol.size)
    if sizes is None:
        sizes = {place: protocol.images(place[1]) for place in protocol.timesteps(backbone)}
    # splits have different numbers of levels, so that GEPC is counted in images at one level
    parts = [part.timesteps(backbone) for part in protocol.pooled_alike()]
    levels = sum(sizes[place] * len(timesteps) for part in parts for place, timesteps in part.items())
    per_level = protocol.extractor().cost(backbone, size, levels=1)
    estimates = [CostEstimate("GEPC, each level", per_level, levels * len(protocol.seeds))]
    for baseline in baselines:
        images = len(protocol.seeds) * sum(min(count, baseline.images[split]) for (_, split), count in sizes.items())
        estimates.append(CostEstimate(baseline.label, baseline.extractor.for_fitting().cost(backbone, size), images))
    return estimates


def count_passes(backbone: Backbone, extractor: Extractor, batch: Batch, timesteps: Sequence[int]) -> Cost:
    """Run a method on a batch at some timesteps, and read the counters of the backbone: F and J of one image."""
    forward, jvp = backbone.forward_count, backbone.jvp_count
    extract_table(extractor, backbone, batch, timesteps)
    images = len(batch)
    return Cost((backbone.forward_count - forward) // images, (backbone.jvp_count - jvp) // images)


def runtime_table(bench: GepcBench) -> ResultTable:
    """AUROC and milliseconds per ID and OOD image of the main detector with each calibration, as in the paper's table.

    The pair is the paper's, SVHN against CIFAR-100, if the protocol has it.
    """
    pair = bench.protocol.representative
    name = pair[0]
    seed, backbone, method = bench.protocol.seeds[0], bench.backbone, bench.scoring_extractor
    kept = bench.scores(name, seed).kept
    passes = method.cost(backbone, (bench.protocol.size, bench.protocol.size), len(kept)).forward
    train = bench.columns(name, "train", seed, bench.main, kept)
    batches = [bench.read_rows((place, "test"), range(bench.protocol.batch_size)) for place in pair]
    bare = _seconds(lambda: backbone.one_pass(batches[0].clean(backbone))) / len(batches[0])
    extraction = [_seconds(partial(extract_table, method, backbone, batch, kept)) for batch in batches]
    columns = [method.columns(extract_table(method, backbone, batch, kept)) for batch in batches]
    rows: list[tuple[Cell, ...]] = []
    for calibration in bench.protocol.calibrations:
        scorer, known = Scorer(calibration, weights="uniform").fit(train), calibration.partition(":")[0]
        scoring = [_seconds(partial(scorer.score, values)) for values in columns]
        times = [(a + b) / len(batch) for a, b, batch in zip(extraction, scoring, batches, strict=True)]
        auroc = bench.variant_aurocs(replace(bench.main, calibration=calibration), only=name)[pair]
        paper = (published.RUNTIME_AUROC.get(known), *published.RUNTIME_MS.get(known, (None, None)))
        row = (auroc, *(1000.0 * seconds for seconds in times), times[0] / bare / passes, *paper)
        rows.append((f"GEPC_s + {calibration}", passes, *row))
    measured = ("AUROC", "ms per image (ID)", "ms per image (OOD)", "overhead over F bare passes")
    header = ("variant", "F", *measured, "paper: AUROC", "paper: ms (ID)", "paper: ms (OOD)")
    note = (
        f"{bench.protocol.label(*pair)}. One bare pass takes {1000.0 * bare:.2f} ms per image in this run (median of "
        f"{REPEATS}, batches of {len(batches[0])}). The paper's values are for SVHN:C100, another network, 16 F and an "
        "RTX 4060 laptop GPU."
    )
    return ResultTable("runtime", "Runtime and passes", header, tuple(rows), note)


def _seconds(work: Callable[[], object]) -> float:
    """Median time of a call, after one call to warm up."""
    times = []
    work()
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)

"""What a benchmark costs: network passes estimated before it runs, passes and time of an image measured after."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gepc.backbones.base import Backbone
from gepc.calibration.scorer import Scorer
from gepc.core.tables import Cell, ResultTable
from gepc.images.noise import image_key
from gepc.lab.bench import published
from gepc.lab.bench.baselines import Baseline, extraction_order
from gepc.lab.bench.detector_tables import CALIBRATIONS
from gepc.lab.bench.evaluate import Benchmark, GepcBench, Sizes
from gepc.lab.bench.protocol import Protocol
from gepc.methods.base import Batch, Cost, Extractor, extract_table
from gepc.methods.extraction import plain_options

REPEATS = 3
TRIAL_IMAGES = 2
LEAST_PASSES = 30  # per image and method: cheaper methods are timed repeatedly


def passes_needed(protocol: Protocol, backbone: Backbone, sizes: Sizes) -> int:
    """Network passes of GEPC's features with an empty cache."""
    per_level = protocol.extractor().cost(backbone, (protocol.size, protocol.size), levels=1).forward
    levels = sum(sizes[place] * len(timesteps) for place, timesteps in protocol.timesteps(backbone).items())
    return levels * per_level * len(protocol.seeds)


@dataclass(frozen=True)
class CostEstimate:
    """A baseline, its passes per image in fitting, those that no other method makes too, and its number of images."""

    baseline: Baseline
    per_image: Cost
    own: Cost
    images: int

    @property
    def shared(self) -> bool:
        """Whether another method makes some of the passes."""
        return self.own != self.per_image

    @property
    def total(self) -> Cost:
        """Its own passes for all images and noise seeds."""
        return Cost(self.own.forward * self.images, self.own.jvp * self.images)


def estimate_cost(baselines: Sequence[Baseline], benchmark: Benchmark) -> list[CostEstimate]:
    """Estimate the network passes of each method; with a cache, methods share those they have in common."""
    protocol, backbone, cached = benchmark.protocol, benchmark.backbone, benchmark.cache.folder is not None
    size = (protocol.size, protocol.size)
    found: list[CostEstimate] = []
    known: set[tuple[str, int, int]] = set()
    for baseline in extraction_order(baselines):
        method = baseline.extractor.for_fitting()
        own = Cost()
        for part in method.builds_on() or (method,):
            what = repr((part.name, plain_options(part.options())))
            # a larger subset begins with a smaller one; if no multiple of the batch size, its last chunk differs
            reused = cached and any(
                what == other and train >= baseline.train_images and test >= baseline.test_images
                for other, train, test in known
            )
            if not reused:
                cost = part.cost(backbone, size)
                own = Cost(own.forward + cost.forward, own.jvp + cost.jvp)
            known.add((what, baseline.train_images, baseline.test_images))
        images = baseline.all_images(benchmark.sizes, len(protocol.seeds))
        found.append(CostEstimate(baseline, method.cost(backbone, size), own, images))
    return found


@dataclass(frozen=True)
class MeasuredCost:
    """The cost of one image: F and J as the backbone counts them, and the time in bare network passes."""

    forward: float
    jvp: float
    in_passes: float

    @property
    def passes(self) -> float:
        """F + J."""
        return self.forward + self.jvp

    def __str__(self) -> str:
        return f"{self.forward:g}F+{self.jvp:g}J"


def measure(backbone: Backbone, extractor: Extractor, batch: Batch, timesteps: Sequence[int]) -> MeasuredCost:
    """Run a method on a batch at some timesteps, and read the counters and the clock.

    Bare passes are timed before and after. On a CPU the clock is processor time, which other programs do not disturb.
    """
    clock = time.process_time if backbone.device.type == "cpu" else time.perf_counter
    estimated = extractor.cost(backbone, batch.size, len(timesteps))
    repeats = max(1, round(LEAST_PASSES / max(1, estimated.forward + estimated.jvp)))
    bare, times = [_bare_seconds(backbone, batch, clock)], []
    forward, jvp = backbone.forward_count, backbone.jvp_count
    for _ in range(repeats):
        begun = clock()
        extract_table(extractor, backbone, batch, timesteps)
        times.append(clock() - begun)
    images = repeats * len(batch)
    counted = (backbone.forward_count - forward) / images, (backbone.jvp_count - jvp) / images
    bare.append(_bare_seconds(backbone, batch, clock))
    return MeasuredCost(*counted, statistics.median(times) / statistics.mean(bare))


def trial_table(protocol: Protocol, backbone: Backbone, baselines: Sequence[Baseline]) -> ResultTable:
    """Run every method on two random images, which needs no data, and estimate the whole protocol from it.

    Every split is taken to have as many images as requested.
    """
    shape = (TRIAL_IMAGES, backbone.channels, protocol.size, protocol.size)
    pixels = np.random.default_rng(0).uniform(-1.0, 1.0, shape).astype(np.float32)
    batch = Batch(pixels, [image_key(image) for image in pixels])
    bare = _bare_seconds(backbone, batch) / len(batch)
    sizes = {place: protocol.images(place[1]) for place in protocol.timesteps(backbone)}
    candidates = protocol.levels_for(next(iter(protocol.pairs))).timesteps(backbone.alphas_cumprod)
    cost = measure(backbone, protocol.extractor(), batch, candidates)
    hours = passes_needed(protocol, backbone, sizes) * cost.in_passes / cost.passes * bare / 3600
    rows: list[tuple[Cell, ...]] = [("GEPC, all features and levels", str(cost), cost.in_passes, hours)]
    for baseline in baselines:
        method = baseline.extractor.for_fitting()
        cost = measure(backbone, method, batch, method.timesteps(backbone))
        images = baseline.all_images(sizes, len(protocol.seeds))
        rows.append((baseline.label, str(cost), cost.in_passes, images * cost.in_passes * bare / 3600))
    header = ("method", "F+J", "time in bare passes", "hours")
    note = (
        f"Measured on {TRIAL_IMAGES} images; a bare pass takes {1000 * bare:.3g} ms per image at that batch size, and "
        "less at larger ones on a GPU. Hours are for an empty cache; methods that share passes need less."
    )
    return ResultTable("trial", "Every stage on two images", header, tuple(rows), note)


def runtime_table(bench: GepcBench) -> ResultTable:
    """Milliseconds per image of the main detector with each calibration, and the ratio to one bare pass."""
    name, seed, backbone = next(iter(bench.protocol.pairs)), bench.protocol.seeds[0], bench.backbone
    method, kept = bench.scoring_extractor, bench.scores(name, seed).kept
    batch = bench.read_rows((name, "test"), range(bench.protocol.batch_size))
    bare = _bare_seconds(backbone, batch) / len(batch)
    extraction = _seconds(lambda: extract_table(method, backbone, batch, kept)) / len(batch)
    columns = method.columns(extract_table(method, backbone, batch, kept))
    passes = method.cost(backbone, batch.size, len(kept)).forward
    train = bench.columns(name, "train", seed, bench.main, kept)
    rows: list[tuple[Cell, ...]] = []
    for calibration in CALIBRATIONS:
        scorer = Scorer(calibration, weights="uniform").fit(train)
        total = extraction + _seconds(partial(scorer.score, columns)) / len(batch)
        paper, _ = published.RUNTIME_MS[calibration]
        rows.append((f"GEPC_s + {calibration}", passes, 1000.0 * total, total / bare, total / bare / passes, paper))
    header = ("variant", "F", "ms per image", "in bare passes", "overhead over F bare passes", "paper, ms (16 F, GPU)")
    note = (
        f"One bare pass takes {1000.0 * bare:.2f} ms per image in this run (median of {REPEATS}, batches of "
        f"{len(batch)}). The paper's values are for another network on an RTX 4060 laptop GPU."
    )
    return ResultTable("runtime", "Runtime and passes", header, tuple(rows), note)


def _bare_seconds(backbone: Backbone, batch: Batch, clock: Callable[[], float] = time.perf_counter) -> float:
    return _seconds(lambda: backbone.one_pass(batch.clean(backbone)), clock)


def _seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Median time of a call, after one call to warm up."""
    times = []
    work()
    for _ in range(REPEATS):
        start = clock()
        work()
        times.append(clock() - start)
    return statistics.median(times)

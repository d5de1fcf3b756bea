"""What a benchmark costs: network passes estimated before it runs and counted after, and the paper's runtime table."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gepc.backbones.base import Backbone
from gepc.calibration.scorer import Scorer
from gepc.core.tables import Cell, ResultTable
from gepc.lab.bench import published
from gepc.lab.bench.baselines import Baseline
from gepc.lab.bench.evaluate import GepcBench, Sizes
from gepc.lab.bench.protocol import Protocol
from gepc.methods.base import Batch, Cost, Extractor, extract_table

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
        images = baseline.all_images(sizes, len(protocol.seeds))
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

"""The main table with every compared method: AUROC, cost by the counters, and the paper's figure below ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gepc.bench import published
from gepc.bench.ablations import Pair, elsewhere, pair_names, paper_rows
from gepc.bench.baselines import BaselineBench
from gepc.bench.evaluate import Bench, over_seeds
from gepc.bench.rows import read_rows
from gepc.bench.runtime import TIMED_IMAGES, Spent, measure
from gepc.core.tables import Cell, ResultTable
from gepc.features.base import Batch
from gepc.scoring.metrics import Detection

HEAD = ("method", "source", "preset", "distance", "calibration", "train / test images")
TAIL = ("average", "std over seeds", "worst", "worst pair", "GEPC on the same images", "F+J", "time in bare passes")
NOTE = (
    "Every measured row: the same backbone, the same noise rule, fitted on ID-train alone; one-sided scores may fall "
    "below 0.5 and are not turned round. Where a row used fewer images, GEPC's average on those very images stands "
    "beside it. F (forward passes) and J (Jacobian-vector products) per image are read from the backbone's counters; "
    "time (the processor's, on a processor) is per image, in bare passes timed in the same run. "
    "Words in brackets name what a figure depends on: LMD "
    "with another distance than LPIPS is another method. NLL, IC, MSMA, DDPM-OOD and LMD were very likely published "
    "with a model for each ID set; LMD's \"104F\" is most probably 10^4 F, and DiffPath's row presumably its 6-D form. "
)


@dataclass(frozen=True)
class Entry:
    """One method's results: what it is, AUROC per pair (mean over seeds), all metrics per seed, and what it costs."""

    name: str
    label: str
    preset: str | None
    distance: str | None
    calibration: str
    images: tuple[int, int]
    aurocs: Mapping[Pair, float]
    detections: Mapping[int, Mapping[Pair, Detection]]
    same_images: float
    spent: Spent

    @property
    def average(self) -> float:
        """Mean AUROC over the pairs."""
        return float(np.mean(list(self.aurocs.values())))

    @property
    def spread(self) -> float | None:
        """Standard deviation of the average over noise seeds; None with one seed."""
        return over_seeds([float(np.mean([one.auroc for one in run.values()])) for run in self.detections.values()])


def entries(bench: Bench, baselines: Sequence[BaselineBench], data: Path) -> list[Entry]:
    """GEPC, then every method; each is timed on the same few images."""
    first = next(iter(bench.protocol.pairs))
    batch = read_rows(bench, data, first, "test", range(TIMED_IMAGES))
    kept = bench.scores(first, bench.main, _seed(bench)).kept
    own = _gepc(bench, measure(bench, bench.main_extractor, batch, kept))
    return [own, *(_entry(bench, one, own, _measure(bench, one, first, batch)) for one in baselines)]


def _seed(bench: Bench) -> int:
    return bench.protocol.seeds[0]


def _gepc(bench: Bench, spent: Spent) -> Entry:
    aurocs = bench.aurocs(bench.main)
    return Entry(
        name=bench.extractor.name,
        label="GEPC",
        preset=None,
        distance=None,
        calibration=bench.main.calibration,
        images=(bench.collection.count("train"), bench.collection.count("test")),
        aurocs=aurocs,
        detections={seed: bench.detections(bench.main, seed) for seed in bench.protocol.seeds},
        same_images=float(np.mean(list(aurocs.values()))),
        spent=spent,
    )


def _entry(bench: Bench, found: BaselineBench, own: Entry, spent: Spent) -> Entry:
    baseline = found.baseline
    images = (found.collection.count("train"), found.collection.count("test"))
    same = own.same_images
    if images != own.images:
        same = float(np.mean(list(bench.on_images(found.collection.keys).aurocs(bench.main).values())))
    return Entry(
        name=baseline.extractor.name,
        label=baseline.label,
        preset=baseline.preset,
        distance=baseline.distance,
        calibration=baseline.detector.calibration_name,
        images=images,
        aurocs=found.aurocs,
        detections=found.detections,
        same_images=same,
        spent=spent,
    )


def _measure(bench: Bench, found: BaselineBench, name: str, batch: Batch) -> Spent:
    return measure(bench, found.baseline.extractor, batch, found.scores(name, _seed(bench)).kept)


def comparison_table(bench: Bench, found: Sequence[Entry]) -> ResultTable:
    """The main table: GEPC first, each method's published row below its measured one, the other published rows last."""
    rows: list[tuple[Cell, ...]] = []
    left = dict(published.MAIN)
    for entry in found:
        rows.append(_measured_row(bench, entry))
        row = published.MAIN_ROW.get(entry.name)
        if row in left:
            rows += _published_rows(bench, row, *left.pop(row))
    for row, values in left.items():
        rows += _published_rows(bench, row, *values)
    title = "AUROC on all pairs, every method on the same backbone"
    return ResultTable("main", title, (*HEAD, *pair_names(bench), *TAIL), tuple(rows), NOTE + elsewhere(bench))


def _measured_row(bench: Bench, entry: Entry) -> tuple[Cell, ...]:
    train, test = entry.images
    worst = min(bench.protocol.pair_list, key=lambda pair: entry.aurocs[pair])
    names = dict(zip(bench.protocol.pair_list, pair_names(bench), strict=True))
    head = (entry.label, "measured", entry.preset, entry.distance, entry.calibration, f"{train} / {test}")
    values = [entry.aurocs[pair] for pair in bench.protocol.pair_list]
    tail = (entry.average, entry.spread, entry.aurocs[worst], names[worst], entry.same_images)
    return (*head, *values, *tail, str(entry.spent), entry.spent.in_passes)


def _published_rows(bench: Bench, name: str, values: tuple[float | None, ...], passes: str) -> list[tuple[Cell, ...]]:
    source = "published"
    if name in published.OTHER_BACKBONE or "ID-trained" in name:
        source = "published, a model for each ID set"
    found = paper_rows(bench, (name, source, None, None, None, None), values)
    return [_with_worst(bench, row, passes) for row in found]


def _with_worst(bench: Bench, found: tuple[Cell, ...], passes: str) -> tuple[Cell, ...]:
    *row, average = found
    figures = [value for value in row[len(HEAD) :] if isinstance(value, float)]
    worst = min(figures) if len(figures) == len(bench.protocol.pair_list) else None
    where = None if worst is None else pair_names(bench)[row[len(HEAD) :].index(worst)]
    return (*row, average, None, worst, where, None, passes, None)


def methods_table(bench: Bench, found: Sequence[Entry]) -> ResultTable:
    """Every method and pair: AUROC with DeLong's interval, AUPR and FPR95 for the first seed, spread over seeds."""
    rows: list[tuple[Cell, ...]] = []
    for entry in found:
        runs = list(entry.detections.values())
        for pair, name in zip(bench.protocol.pair_list, pair_names(bench), strict=True):
            first = runs[0][pair]
            spread = over_seeds([run[pair].auroc for run in runs])
            interval = (first.auroc, first.auroc_low, first.auroc_high)
            rows.append(
                (entry.label, name, *interval, spread, first.aupr, first.fpr95, f"{first.n_id} / {first.n_ood}")
            )
    header = ("method", "pair", "AUROC", "low", "high", "std over seeds", "AUPR", "FPR95", "ID / OOD images")
    note = (
        "Low and high are the ends of the 95 % interval, for the scatter of the test images. OOD is the positive class."
    )
    return ResultTable("methods", "All metrics of every method", header, tuple(rows), note)

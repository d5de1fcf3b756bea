"""Tables of every compared method: AUROC and cost with the published values, and all metrics."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gepc.core.tables import ResultTable
from gepc.lab.bench import published
from gepc.lab.bench.baselines import count_passes
from gepc.lab.bench.detector_tables import Row, published_note, published_rows
from gepc.lab.bench.evaluate import GepcBench, MethodBench, pair_aurocs, std_over_seeds
from gepc.lab.bench.protocol import Protocol
from gepc.methods.base import Cost

COUNTED_IMAGES = 2  # on which the passes of a method are counted
HEAD = ("method", "source", "preset", "calibration", "train / test images")
TAIL = ("average", "std over seeds", "worst", "worst pair", "F+J")
METRICS = ("method", "pair", "AUROC", "low", "high", "std over seeds", "AUPR", "FPR95", "ID / OOD images")
NOTE = (
    "All measured rows use the same backbone and the same noise, and are fitted on ID-train alone. One-sided scores "
    "may have an AUROC below 0.5, because their sign is not changed. The backbone counts F (forward passes) and J "
    "(Jacobian-vector products) per image. Words in brackets are options that change the method. For example, LMD with "
    "a distance other than LPIPS is another method. The published NLL, IC, MSMA, DDPM-OOD and LMD very likely used one "
    "model per ID set. LMD's \"104F\" is most probably 10^4 F. DiffPath's row is presumably its 6-D form. "
)


def comparison_table(bench: GepcBench, baselines: Sequence[MethodBench]) -> ResultTable:
    """The main table: GEPC first, each method's published row below its measured one, the other published rows last."""
    protocol = bench.protocol
    rows: list[Row] = []
    left = dict(published.MAIN)
    for method in (bench, *baselines):
        rows.append(_measured_row(protocol, method, _counted_cost(bench, method)))
        row = published.MAIN_ROW.get(method.name)
        if row in left:
            rows += _published_rows(protocol, row, *left.pop(row))
    for row, values in left.items():
        rows += _published_rows(protocol, row, *values)
    title = "AUROC on all pairs, every method on the same backbone"
    header = (*HEAD, *protocol.pair_labels, *TAIL)
    counted = f"Counted as in the paper, with the identity, GEPC needs {bench.extractor.paper_cost(protocol.keep)}. "
    return ResultTable("main", title, header, tuple(rows), NOTE + counted + published_note(protocol))


def _counted_cost(bench: GepcBench, method: MethodBench) -> Cost:
    """The passes of one image, counted on the same few images for every method."""
    first, seed = next(iter(bench.protocol.pairs)), bench.protocol.seeds[0]
    batch = bench.read_rows((first, "test"), range(COUNTED_IMAGES))
    return count_passes(bench.backbone, method.scoring_extractor, batch, method.scores(first, seed).kept)


def _measured_row(protocol: Protocol, method: MethodBench, cost: Cost) -> Row:
    train, test = method.collection.images
    values = list(method.aurocs.values())
    averages = [float(np.mean(list(pair_aurocs(run).values()))) for run in method.all_scores()]
    worst = int(np.argmin(values))
    head = (method.label, "measured", method.preset, method.calibration, f"{train} / {test}")
    tail = (method.average, std_over_seeds(averages), values[worst], protocol.pair_labels[worst])
    return (*head, *values, *tail, str(cost))


def _published_rows(protocol: Protocol, name: str, values: tuple[float | None, ...], passes: str) -> list[Row]:
    per_set = name in published.OTHER_BACKBONE or "ID-trained" in name
    source = "published, a model for each ID set" if per_set else "published"
    rows = published_rows(protocol, (name, source, None, None, None), values)
    return [(*row, None, None, None, passes) for row in rows]


def readings_table(protocol: Protocol, readings: Mapping[str, GepcBench]) -> ResultTable:
    """The AUROC of GEPC under each reading of the paper, the published row, and the reading that comes closer to it."""
    rows: list[Row] = [(name, *bench.aurocs.values(), bench.average) for name, bench in readings.items()]
    measured = [row[1:] for row in rows]
    for row in published_rows(protocol, ("published",), published.MAIN["GEPC"][0]):
        closer = [_closest(readings, values, target) for *values, target in zip(*measured, row[1:], strict=True)]
        rows += [row, ("closer", *closer)]
    note = (
        "`paper` is what the text says. `released` is what the authors' code does: it asks the network for 4 t, pools "
        "37 % of the pixels with SVHN as ID, sums three features with CelebA as ID and takes the first images of each "
        "set. "
    )
    title = "GEPC under two readings of the paper"
    return ResultTable("readings", title, ("reading", *protocol.pair_labels, "average"), tuple(rows), note)


def _closest(names: Iterable[str], values: Sequence[Any], target: Any) -> str | None:
    """The name whose value is closest to the target; None without a target."""
    return None if target is None else min(zip(names, values, strict=True), key=lambda one: abs(one[1] - target))[0]


def methods_table(protocol: Protocol, methods: Sequence[MethodBench]) -> ResultTable:
    """Every method and pair: AUROC with DeLong's interval, AUPR and FPR95 for the first seed, spread over seeds."""
    rows: list[Row] = []
    for method in methods:
        runs = method.detections()
        for pair, label in zip(protocol.pair_list, protocol.pair_labels, strict=True):
            first, spread = runs[0][pair], std_over_seeds([run[pair].auroc for run in runs])
            interval, images = (first.auroc, first.auroc_low, first.auroc_high), f"{first.n_id} / {first.n_ood}"
            rows.append((method.label, label, *interval, spread, first.aupr, first.fpr95, images))
    note = (
        "Low and high are the ends of the 95 % confidence interval over test images. OOD is the positive class. "
        "FPR95 is the share of ID images flagged at the threshold that flags 95 % of the OOD images."
    )
    return ResultTable("methods", "All metrics of every method", METRICS, tuple(rows), note)

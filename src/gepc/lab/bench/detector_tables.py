"""Tables of every compared method, of GEPC and its variants with the published values, and one of false alarms."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.conformal.decision import DecisionRule
from gepc.conformal.p_values import CalibrationScores, realised_range
from gepc.core.tables import Cell, ResultTable, interval_text
from gepc.lab.bench import published
from gepc.lab.bench.baselines import count_passes
from gepc.lab.bench.evaluate import Array, GepcBench, MethodBench, Variant, pair_aurocs, std_over_seeds
from gepc.lab.bench.protocol import Pair, Protocol
from gepc.methods.base import Cost

Row = tuple[Cell, ...]
KEEPS = (1, 2, 3, 4)
WEIGHTINGS = ("uniform", "inv_cv")
ALPHAS = (0.01, 0.05, 0.1, 0.2)
KEPT_IN_THE_PAPER = ("candidates in the paper", "kept in the paper (weight)")
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
PUBLISHED_NOTE = "Published values were measured with the paper's own, much larger CelebA-32 backbone."


def _row(bench: GepcBench, head: Row, values: Mapping[Pair, float]) -> Row:
    found = [values[pair] for pair in bench.pairs]
    return (*head, *found, float(np.mean(found)))


def published_rows(protocol: Protocol, head: Row, values: tuple[float | None, ...]) -> list[Row]:
    """One row: `head`, the published value of every pair, and their average if all are known; none if none is."""
    found = published_values(protocol, values)
    known = [value for value in found if value is not None]
    average = float(np.mean(known)) if known and len(known) == len(found) else None
    return [(*head, *found, average)] if known else []


def published_values(protocol: Protocol, values: tuple[float | None, ...]) -> list[float | None]:
    """The published value of every pair of the protocol; None for a pair that has none."""
    known = dict(zip(published.PAIRS, values, strict=True))
    return [known.get((protocol.label(name), protocol.label(other))) for name, other in protocol.pair_list]


def published_note(protocol: Protocol) -> str:
    """What published values were measured on; empty if the pairs have none."""
    values, _ = published.MAIN["GEPC"]
    return PUBLISHED_NOTE if any(value is not None for value in published_values(protocol, values)) else ""


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
    """Every method and pair: AUROC with DeLong's interval, AUPR and FPR95, averaged over noise seeds."""
    rows: list[Row] = []
    for method in methods:
        runs = method.detections()
        for pair, label in zip(protocol.pair_list, protocol.pair_labels, strict=True):
            found = [run[pair] for run in runs]
            spread, images = std_over_seeds([one.auroc for one in found]), f"{found[0].n_id} / {found[0].n_ood}"
            each = [(one.auroc, one.auroc_low, one.auroc_high, one.aupr, one.fpr95) for one in found]
            auroc, low, high, aupr, fpr95 = np.mean(each, axis=0).tolist()
            rows.append((method.label, label, auroc, low, high, spread, aupr, fpr95, images))
    note = (
        "Low and high are the ends of the 95 % confidence interval over test images. OOD is the positive class. "
        "FPR95 is the share of ID images flagged at the threshold that flags 95 % of the OOD images. "
        "With several noise seeds, values are means over them, and the standard deviation is that of the AUROC."
    )
    return ResultTable("methods", "All metrics of every method", METRICS, tuple(rows), note)


def kept_table(bench: GepcBench) -> ResultTable:
    """Candidate and kept timesteps with CV and weights, and those the paper kept."""
    rows = []
    for name in bench.protocol.pairs:
        scores, label = bench.scores(name, bench.protocol.seeds[0]), bench.protocol.label(name)
        candidates = _with_values(bench.candidates(name), scores.selection.cv)
        kept = _with_values(scores.kept, scores.selection.weights)
        rows.append((label, candidates, kept, *_published_timesteps(label)))
    header = ("ID set", "candidate timesteps (CV)", "kept (weight)", *KEPT_IN_THE_PAPER)
    title = "Timesteps: candidates, kept ones and weights"
    return ResultTable("kept", title, header, tuple(rows), published_note(bench.protocol))


def _published_timesteps(label: str) -> tuple[str | None, str | None]:
    """The paper's candidates for an ID set, and its kept timesteps with the weights for each OOD set that differ."""
    paper = published.KEPT.get(label)
    if paper is None:
        return None, None
    pairs: dict[str, list[str]] = {}
    for other, weights in paper["weights"].items():
        pairs.setdefault(_with_values(paper["timesteps"], weights), []).append(other)
    kept = "; ".join(f"{text} against {', '.join(others)}" for text, others in pairs.items())
    return ", ".join(map(str, paper["candidates"])), kept


def _with_values(timesteps: tuple[int, ...], values: npt.ArrayLike) -> str:
    return ", ".join(f"{t} ({value:.3f})" for t, value in zip(timesteps, np.asarray(values), strict=True))


def sweep_table(bench: GepcBench) -> ResultTable:
    """AUROC over K and weighting."""
    rows: list[Row] = []
    protocol = bench.protocol
    most = min(len(bench.candidates(name)) for name in protocol.pairs)
    for weights in WEIGHTINGS:
        for keep in (keep for keep in KEEPS if keep <= most):
            values = bench.variant_aurocs(replace(bench.main, keep=keep, weights=weights))
            passes = bench.extractor.cost(bench.backbone, (protocol.size, protocol.size), keep).forward
            rows.append(_row(bench, (keep, weights, "measured", passes), values))
            rows += published_rows(protocol, (keep, weights, "paper", 8 * keep), published.SWEEP[keep, weights])
    header = ("K", "weights", "source", "F", *protocol.pair_labels, "average")
    title = "Number of kept timesteps and weighting"
    return ResultTable("sweep", title, header, tuple(rows), published_note(protocol))


def _ablation(
    bench: GepcBench, name: str, title: str, column: str, values: Mapping[str, Mapping[Pair, float]], note: str = ""
) -> ResultTable:
    """One measured row for each entry of `values`, with the paper's row below it if the paper has one."""
    rows: list[Row] = []
    for variant, found in values.items():
        rows.append(_row(bench, (variant, "measured"), found))
        known = published.ABLATIONS[name].get(variant.partition(":")[0])  # without the options of a calibrator
        if known is not None:
            rows += published_rows(bench.protocol, (variant, "paper"), known)
    header = (column, "source", *bench.protocol.pair_labels, "average")
    return ResultTable(name, title, header, tuple(rows), note + published_note(bench.protocol))


def transform_table(bench: GepcBench) -> ResultTable:
    """Each group element alone, raw and sign-invariant, over the levels the main detector keeps."""
    names = [name for name in bench.extractor.group.names if name != "id"]
    values = {name: kept_raw(bench, (name,)) for name in names} | {"mean over g": kept_raw(bench, None)}
    note = (
        "The values are max(AUROC, 1 - AUROC) of the raw gap. They are a diagnostic and not a detector, because the "
        "sign was chosen with OOD data (oracle). "
    )
    return _ablation(bench, "transforms", "Each transform by itself", "element", values, note)


def kept_raw(bench: GepcBench, elements: tuple[str, ...] | None, only: str | None = None) -> dict[Pair, float]:
    """Sign-invariant AUROC of the raw gap of some elements, over the levels that the main detector keeps."""
    found: dict[Pair, float] = {}
    for name in bench.protocol.pairs if only is None else (only,):
        kept = bench.scores(name, bench.protocol.seeds[0]).kept
        found |= bench.variant_aurocs(bench.raw(elements, kept), symmetric=True, only=name)
    return found


def calibration_table(bench: GepcBench) -> ResultTable:
    """KDE, z-score, raw and MVN on the feature s."""
    names = bench.protocol.calibrations
    values = {name: bench.variant_aurocs(replace(bench.main, calibration=name)) for name in names}
    return _ablation(bench, "calibration", "Calibration of the feature s", "calibration", values)


def feature_variants(bench: GepcBench) -> dict[str, Variant]:
    """Every extracted feature alone, and the fusion of those that the paper fuses."""
    features: dict[str, tuple[str, ...]] = {name: (name,) for name in bench.protocol.features}
    features["fusion"] = tuple(name for name in features if name in published.ABLATIONS["features"])
    return {name: replace(bench.main, features=found) for name, found in features.items()}


def feature_table(bench: GepcBench) -> ResultTable:
    """Single features and their fusion by the mean."""
    variants = feature_variants(bench)
    values = {name: bench.variant_aurocs(variant) for name, variant in variants.items()}
    note = f"Fusion is the mean over {', '.join(variants['fusion'].features)}. "
    return _ablation(bench, "features", "Single features and fusion", "feature", values, note)


def timestep_table(bench: GepcBench) -> ResultTable:
    """The final score and the raw gap on each candidate timestep alone."""
    rows: list[Row] = []
    for name in bench.protocol.pairs:
        for t in bench.candidates(name):
            single = replace(bench.main, keep=None, weights="uniform", timesteps=(t,))
            calibrated = bench.variant_aurocs(single, only=name)
            raw = bench.variant_aurocs(replace(single, calibration="raw"), symmetric=True, only=name)
            rows += [(bench.protocol.label(*pair), t, value, raw[pair]) for pair, value in calibrated.items()]
    header = ("pair", "t", "AUROC, calibrated", "AUROC, raw (sign-invariant)")
    note = "Choosing the best row would use OOD data (oracle). The detector selects levels by their CV on ID-train."
    return ResultTable("timesteps", "One timestep at a time", header, tuple(rows), note)


def _id_p_values(bench: GepcBench, name: str, seed: int, reference: str) -> tuple[Array, CalibrationScores]:
    """p-values of one half of ID-test, against the other half (`test`) or a third of ID-train (`train`)."""
    variant, timesteps = bench.main_for(name), bench.candidates(name)
    train, test = (bench.columns(name, split, seed, variant, timesteps) for split in ("train", "test"))
    rng = np.random.default_rng(seed)
    train, test = train[rng.permutation(len(train))], test[rng.permutation(len(test))]
    fitting, rest = np.split(train, [2 * len(train) // 3])
    half, evaluated = np.split(test, [len(test) // 2])
    scorer = variant.fit(fitting)
    calibration = CalibrationScores.of(scorer.score(half if reference == "test" else rest), None)
    return calibration.p_values(scorer.score(evaluated), None, None), calibration


def false_alarm_table(bench: GepcBench) -> ResultTable:
    """The rate of alarms on held-out ID images at several alpha, averaged over noise seeds."""
    rows: list[Row] = []
    for name in bench.protocol.pairs:
        for reference in ("test", "train"):
            runs = [_id_p_values(bench, name, seed, reference) for seed in bench.protocol.seeds]
            count = len(runs[0][1].scores)
            for alpha in (alpha for alpha in ALPHAS if alpha * (count + 1) >= 1):
                rate = float(np.mean([DecisionRule(alpha).alarms(p, calibration).mean() for p, calibration in runs]))
                low, high = realised_range(alpha, count)
                source, span = f"{count} of ID-{reference}", interval_text(low, high)
                rows.append((bench.protocol.label(name), source, alpha, rate, span, len(runs[0][0])))
    header = ("ID set", "calibration images", "alpha", "alarms on held-out ID", "90 % range", "held-out images")
    note = (
        "Averaged over calibration sets, the false-alarm rate is at most alpha. For one calibration set it lies in the "
        "given range with probability 0.9. The finite number of held-out images adds its own variation. Both "
        "statements require calibration images and new images to be exchangeable. Images that the backbone was trained "
        "on are not exchangeable with new images."
    )
    return ResultTable("false_alarms", "False alarms on in-distribution images", header, tuple(rows), note)


ABLATIONS = (sweep_table, transform_table, calibration_table, feature_table, timestep_table)
"""What `gepc ablate` measures."""

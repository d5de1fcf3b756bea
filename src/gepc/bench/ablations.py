"""The paper's tables from collected features, the paper's own figure beside ours where it has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gepc.bench import published
from gepc.bench.evaluate import Bench, Variant, over_seeds
from gepc.core.tables import Cell, ResultTable

Pair = tuple[str, str]
KEEPS = (1, 2, 3, 4)
WEIGHTINGS = ("uniform", "inv_cv")
CALIBRATIONS = ("kde", "zscore", "raw", "mvn")
ELSEWHERE = (
    "Published figures are for the paper's own, much larger CelebA-32 backbone; where we have Tiny-ImageNet, "
    "the paper has CIFAR-100."
)


def pair_names(bench: Bench) -> tuple[str, ...]:
    """Headings: `ID:OOD` for every pair."""
    label = bench.protocol.label
    return tuple(f"{label(name)}:{label(other)}" for name, other in bench.protocol.pair_list)


def _row(bench: Bench, head: tuple[Cell, ...], values: Mapping[Pair, float]) -> tuple[Cell, ...]:
    found = [values[pair] for pair in bench.protocol.pair_list]
    return (*head, *found, float(np.mean(found)))


def paper_rows(bench: Bench, head: tuple[Cell, ...], values: tuple[float | None, ...]) -> list[tuple[Cell, ...]]:
    """`head`, the published figure of every pair, and their average where all are known; no row where none is."""
    found = _beside(bench, values)
    known = [value for value in found if value is not None]
    average = float(np.mean(known)) if known and len(known) == len(found) else None
    return [(*head, *found, average)] if known else []


def _beside(bench: Bench, values: tuple[float | None, ...]) -> list[float | None]:
    label = bench.protocol.label
    return [published.beside(values, (label(name), label(other))) for name, other in bench.protocol.pair_list]


def elsewhere(bench: Bench) -> str:
    """What published figures were measured on; nothing where the pairs have none."""
    values, _ = published.MAIN["GEPC"]
    return ELSEWHERE if any(value is not None for value in _beside(bench, values)) else ""


def main_table(bench: Bench) -> ResultTable:
    """AUROC of every pair, the average, and F+J; published rows below ours, marked."""
    extractor, keep = bench.extractor, bench.protocol.keep
    cost = extractor.cost(bench.backbone, (bench.protocol.size,) * 2, keep)
    rows = [(*_row(bench, ("GEPC, measured",), bench.aurocs(bench.main)), str(cost))]
    for name, (values, passes) in published.MAIN.items():
        rows += [(*row, passes) for row in paper_rows(bench, (f"{name}, published",), values)]
    note = f"Ours counts {cost}; the paper's way of counting gives {extractor.paper_cost(keep)}. {elsewhere(bench)}"
    return ResultTable(
        "main", "AUROC on all pairs", ("method", *pair_names(bench), "average", "F+J"), tuple(rows), note
    )


def detail_table(bench: Bench) -> ResultTable:
    """AUROC with DeLong's 95 % interval, AUPR and FPR95 for the first noise seed; spread of the AUROC over seeds."""
    first = bench.detections(bench.main, bench.protocol.seeds[0])
    others = [bench.detections(bench.main, seed) for seed in bench.protocol.seeds]
    label = bench.protocol.label
    rows = []
    for (name, other), found in first.items():
        spread = over_seeds([run[name, other].auroc for run in others])
        interval = f"{found.auroc_low:.3f} to {found.auroc_high:.3f}"
        sizes = f"{found.n_id} / {found.n_ood}"
        pair = f"{label(name)}:{label(other)}"
        rows.append((pair, found.auroc, interval, spread, found.aupr, found.fpr95, sizes))
    header = ("pair", "AUROC", "95 % interval", "std over seeds", "AUPR", "FPR95", "ID / OOD images")
    note = "OOD is the positive class. FPR95 is the share of ID images flagged when 95 % of the OOD images are."
    return ResultTable("detail", "All metrics of the main detector", header, tuple(rows), note)


def seed_table(bench: Bench) -> ResultTable:
    """The main detector's AUROC and kept timesteps with every noise seed."""
    seeds, label = bench.protocol.seeds, bench.protocol.label
    runs = [bench.detections(bench.main, seed) for seed in seeds]
    values = {
        name: [run[pair].auroc for run in runs]
        for pair, name in zip(bench.protocol.pair_list, pair_names(bench), strict=True)
    }
    values["average"] = [float(np.mean([one.auroc for one in run.values()])) for run in runs]
    rows: list[tuple[Cell, ...]] = [
        (what, *numbers, float(np.mean(numbers)), over_seeds(numbers)) for what, numbers in values.items()
    ]
    for name in bench.protocol.pairs:
        kept = [", ".join(map(str, bench.scores(name, bench.main, seed).kept)) for seed in seeds]
        rows.append((f"kept, ID {label(name)}", *kept, None, None))
    header = ("pair", *(f"seed {seed}" for seed in seeds), "mean", "std over seeds")
    return ResultTable("seeds", "Noise seeds", header, tuple(rows), "The same images with other noise.")


def kept_table(bench: Bench) -> ResultTable:
    """Candidate and kept timesteps with CV and weights, and what the paper kept."""
    rows = []
    for name in bench.protocol.pairs:
        scores = bench.scores(name, bench.main, bench.protocol.seeds[0])
        label = bench.protocol.label(name)
        candidates, cv = bench.candidates(name), scores.selection.cv
        _, paper_kept, paper_weights = published.KEPT.get(label, ((), (), ()))
        rows.append(
            (
                label,
                ", ".join(f"{t} ({value:.3f})" for t, value in zip(candidates, cv, strict=True)),
                ", ".join(f"{t} ({w:.3f})" for t, w in zip(scores.kept, scores.selection.weights, strict=True)),
                ", ".join(f"{t} ({w:.3f})" for t, w in zip(paper_kept, paper_weights, strict=True)) or None,
            )
        )
    header = ("ID set", "candidate timesteps (CV)", "kept (weight)", "the paper kept (weight)")
    return ResultTable("kept", "Timesteps: candidates, kept ones and weights", header, tuple(rows), elsewhere(bench))


def sweep_table(bench: Bench) -> ResultTable:
    """AUROC over K and weighting."""
    rows: list[tuple[Cell, ...]] = []
    most = min(len(bench.candidates(name)) for name in bench.protocol.pairs)
    for weights in WEIGHTINGS:
        for keep in (keep for keep in KEEPS if keep <= most):
            variant = replace(bench.main, keep=keep, weights=weights)
            passes = bench.extractor.cost(bench.backbone, (bench.protocol.size,) * 2, keep).forward
            rows.append(_row(bench, (keep, weights, "measured", passes), bench.aurocs(variant)))
            rows += paper_rows(bench, (keep, weights, "paper", 8 * keep), published.SWEEP[keep, weights])
    header = ("K", "weights", "source", "F", *pair_names(bench), "average")
    return ResultTable("sweep", "Number of kept timesteps and weighting", header, tuple(rows), elsewhere(bench))


def transform_table(bench: Bench) -> ResultTable:
    """Each group element alone, raw and sign-invariant, over the levels the main detector keeps."""
    rows = [
        _row(bench, (name, "measured"), kept_raw(bench, (name,)))
        for name in bench.extractor.group.names
        if name != "id"
    ]
    rows.append(_row(bench, ("mean over g", "measured"), kept_raw(bench, None)))
    rows += paper_rows(bench, ("mean over g", "paper"), published.PER_TRANSFORM_MEAN)
    note = "max(AUROC, 1 - AUROC) of the raw gap: a diagnostic, whose sign was looked up with OOD data (oracle). "
    header = ("element", "source", *pair_names(bench), "average")
    return ResultTable("transforms", "Each transform by itself", header, tuple(rows), note + elsewhere(bench))


def kept_raw(bench: Bench, elements: tuple[str, ...] | None, only: str | None = None) -> dict[Pair, float]:
    """Sign-invariant AUROC of the raw gap of some elements, over the levels that the main detector keeps."""
    found: dict[Pair, float] = {}
    for name, others in bench.protocol.pairs.items():
        if only not in (None, name):
            continue
        kept = bench.scores(name, bench.main, bench.protocol.seeds[0]).kept
        values = bench.aurocs(replace(bench.raw(elements, kept), keep=None), symmetric=True, only=name)
        found.update({(name, other): values[name, other] for other in others})
    return found


def calibration_table(bench: Bench) -> ResultTable:
    """KDE, z-score, raw and MVN on the feature s."""
    rows: list[tuple[Cell, ...]] = []
    for calibration in CALIBRATIONS:
        values = bench.aurocs(replace(bench.main, calibration=calibration))
        rows.append(_row(bench, (calibration, "measured"), values))
        rows += paper_rows(bench, (calibration, "paper"), published.CALIBRATION[calibration])
    header = ("calibration", "source", *pair_names(bench), "average")
    return ResultTable("calibration", "Calibration of the feature s", header, tuple(rows), elsewhere(bench))


def feature_variants(bench: Bench) -> dict[str, tuple[str, ...]]:
    """Every feature that was computed alone, and the fusion of those that the paper fuses."""
    known = [name for name in ("s", "cos", "pair", "cycle", "x0") if name in bench.protocol.features]
    fused = tuple(name for name in known if name in published.FEATURES)
    return {**{name: (name,) for name in known}, "fusion": fused}


def feature_table(bench: Bench) -> ResultTable:
    """Single features and their fusion by the mean."""
    rows: list[tuple[Cell, ...]] = []
    variants = feature_variants(bench)
    for name, features in variants.items():
        rows.append(_row(bench, (name, "measured"), bench.aurocs(replace(bench.main, features=features))))
        if name in published.FEATURES:
            rows += paper_rows(bench, (name, "paper"), published.FEATURES[name])
    header = ("feature", "source", *pair_names(bench), "average")
    note = f"Fusion is the mean over {', '.join(variants['fusion'])}. {elsewhere(bench)}"
    return ResultTable("features", "Single features and fusion", header, tuple(rows), note)


def timestep_table(bench: Bench) -> ResultTable:
    """The final score and the raw gap on each candidate timestep alone."""
    rows: list[tuple[Cell, ...]] = []
    label = bench.protocol.label
    for name, others in bench.protocol.pairs.items():
        for t in bench.candidates(name):
            single = Variant(keep=None, weights="uniform", calibration=bench.main.calibration, timesteps=(t,))
            calibrated = bench.aurocs(single, only=name)
            raw = bench.aurocs(replace(single, calibration="raw"), symmetric=True, only=name)
            rows += [
                (f"{label(name)}:{label(other)}", t, calibrated[name, other], raw[name, other]) for other in others
            ]
    header = ("pair", "t", "AUROC, calibrated", "AUROC, raw (sign-invariant)")
    note = "Picking the best row of this table would use OOD data (oracle); the detector picks by CV on ID-train."
    return ResultTable("timesteps", "One timestep at a time", header, tuple(rows), note)


def ablation_tables(bench: Bench) -> list[ResultTable]:
    """The main table and every ablation of the paper."""
    builders = (main_table, sweep_table, transform_table, calibration_table, feature_table, timestep_table)
    return [build(bench) for build in builders]


def all_tables(bench: Bench) -> list[ResultTable]:
    """Every table that needs no further pass, in the paper's order."""
    main, *ablations = ablation_tables(bench)
    several = [seed_table(bench)] if len(bench.protocol.seeds) > 1 else []
    return [main, detail_table(bench), *several, kept_table(bench), *ablations]

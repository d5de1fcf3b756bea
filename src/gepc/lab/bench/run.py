"""A benchmark from its protocol to files: features, tables, figures and one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gepc.core.files import write_text
from gepc.core.palette import LIGHT, line_style
from gepc.core.tables import ResultTable, write_each, write_tables
from gepc.detector.plots import PANEL, drawing, histogram, save
from gepc.lab.bench import detector_tables
from gepc.lab.bench.baselines import Baseline, BaselineBench, collect_baselines, runtime_table
from gepc.lab.bench.evaluate import Benchmark, GepcBench
from gepc.lab.report.page import Picture, render
from gepc.methods.base import extract_table
from gepc.methods.extraction import OnProgress, plain_options
from gepc.methods.features import find_feature

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HISTOGRAM_IMAGES = 256  # of each set
DOTTED, DASHED = (0, (1, 2)), (0, (4, 3))


@dataclass(frozen=True)
class BenchmarkResult:
    """GEPC and the other methods on every pair, the tables, and what they measured."""

    bench: GepcBench
    baselines: list[BaselineBench]
    tables: list[ResultTable]
    about: dict[str, Any]
    passes: int  # made for features in this run, F and J
    cached: int  # number of cache files read
    skipped: dict[str, str]  # images that could not be read -> the reasons


def run(
    benchmark: Benchmark,
    command: str = "",
    baselines: Sequence[Baseline] = (),
    only_ablations: bool = False,
    on_progress: OnProgress | None = None,
) -> BenchmarkResult:
    """Extract the features of GEPC and of every baseline, then compute all tables, or the ablations alone, from them.

    `command` is what repeats the run; `on_progress` is called with numbers of network passes.
    """
    protocol, backbone = benchmark.protocol, benchmark.backbone
    bench = GepcBench(benchmark, benchmark.collect(on_progress=on_progress))
    found, collection = collect_baselines(baselines, benchmark, on_progress), bench.collection
    tables = [detector_tables.comparison_table(bench, found), *(build(bench) for build in detector_tables.ABLATIONS)]
    if not only_ablations:
        others = (detector_tables.kept_table, detector_tables.false_alarm_table, runtime_table)
        tables += [detector_tables.methods_table(protocol, [bench, *found]), *(build(bench) for build in others)]
    about = {
        "command": command,
        "backbone": backbone.source or backbone.family,
        "sha256": backbone.sha256,
        "passes": collection.passes,
        "images": {f"{name}, {split}": count for (name, split), count in collection.sizes.items()},
        "skipped": collection.skipped,
        "protocol": asdict(protocol),
        "methods": [
            {
                "method": one.name,
                "label": one.label,
                "preset": one.preset,
                "options": plain_options(one.baseline.extractor.options()),
                "images": dict(zip(("train", "test"), one.collection.images, strict=True)),
                "passes": one.collection.passes,
            }
            for one in found
        ],
    }
    collections = [collection, *(one.collection for one in found)]
    passes, cached = sum(one.passes for one in collections), sum(one.cached for one in collections)
    skipped = {image: reason for one in collections for image, reason in one.skipped.items()}
    return BenchmarkResult(bench, found, tables, about, passes, cached, skipped)


def write(result: BenchmarkResult, out: Path, formats: Sequence[str] = ("png", "svg")) -> None:
    """Write `results.md`, `results.json`, CSV and LaTeX files of the tables, the figures, and all in `report.html`."""
    write_tables(out, "results", result.tables, result.about)
    write_each(out / "tables", result.tables)
    figures = draw_all(result.bench)
    for name, figure in figures.items():
        save(figure, out / "figures" / name, formats)
    pictures = [Picture(figure, name.replace("-", ": ")) for name, figure in figures.items()]
    page = render("benchmark.html", about=result.about, tables=result.tables, pictures=pictures)
    write_text(out / "report.html", page)


def draw_all(bench: GepcBench) -> dict[str, Figure]:
    """Name of its files -> figure."""
    pair = bench.pairs[0]
    variants, first = detector_tables.feature_variants(bench).items(), pair[0]
    found = {"features": bars({name: bench.variant_aurocs(one, only=first)[pair] for name, one in variants})}
    elements = [name for name in bench.extractor.group.names if name != "id"]
    alone = {name: detector_tables.kept_raw(bench, (name,), only=first)[pair] for name in elements}
    found["transforms"] = bars(alone, detector_tables.kept_raw(bench, None, only=first)[pair])
    for name in bench.protocol.pairs:
        found[f"timesteps-{name}"] = timestep_curve(bench, name)
    return found | three_histograms(bench)


def bars(values: Mapping[str, float], mean: float | None = None) -> Figure:
    """AUROC bars, with a dotted line for chance and a dashed one for the mean over the group."""
    with drawing(PANEL) as figure:
        axes = figure.add_subplot()
        places = np.arange(len(values))
        axes.bar(places, list(values.values()), width=0.7, color=LIGHT["inside"])
        axes.axhline(0.5, color=LIGHT["muted"], linewidth=0.8, linestyle=DOTTED)
        if mean is not None:
            axes.axhline(mean, color=LIGHT["outside"], linewidth=1.2, linestyle=DASHED, label="mean over g")
            figure.legend(loc="outside upper center")
        axes.set_xticks(places, list(values), rotation=30, ha="right", fontsize=8)
        axes.set(ylim=(0.0, 1.0), ylabel="AUROC")
    return figure


def timestep_curve(bench: GepcBench, name: str) -> Figure:
    """AUROC of the raw gap (sign-invariant) against the timestep, one line per OOD set.

    Dashed lines are the AUROC of the gap averaged over the kept timesteps, which have filled markers.
    """
    candidates, kept = bench.candidates(name), bench.scores(name, bench.protocol.seeds[0]).kept
    means = detector_tables.kept_raw(bench, None, only=name)
    alone = [bench.variant_aurocs(bench.raw(None, (t,)), symmetric=True, only=name) for t in candidates]
    with drawing(PANEL) as figure:
        axes = figure.add_subplot()
        for position, other in enumerate(bench.protocol.pairs[name]):
            values, style = [found[name, other] for found in alone], line_style(position)
            axes.plot(candidates, values, label=bench.protocol.label(other), **style)
            for t, value in zip(candidates, values, strict=True):
                face = style["color"] if t in kept else "white"
                axes.plot(t, value, marker="o", markersize=4, color=style["color"], markerfacecolor=face)
            axes.axhline(means[name, other], color=style["color"], linewidth=0.9, linestyle=DASHED)
        axes.set_xscale("symlog" if 0 in candidates else "log")  # timestep 0 has no logarithm
        axes.set_xticks(candidates, [str(t) for t in candidates])
        axes.set_xticks([], minor=True)
        axes.set(ylim=(0.4, 1.02), xlabel="timestep (filled: kept; dashed: their mean)", ylabel="AUROC")
        figure.legend(loc="outside upper center", ncols=3)
    return figure


def three_histograms(bench: GepcBench) -> dict[str, Figure]:
    """Name of its files -> histogram for ID and OOD images of the paper's representative pair.

    They show |s(x_t, t)|^2 and R_t(x_t, g) = |P_g^-1 s(P_g x_t) - s(x_t)|^2, for every element but the identity, at the
    first kept timestep, and the definition sum_t w_t E_g R_t: sums over all pixels, neither pooled nor calibrated.
    """
    name, other = pair = bench.protocol.representative
    scores = bench.scores(name, bench.protocol.seeds[0])
    whole = replace(bench.extractor, features=("b", "residual"), pool="mean")
    energies, residuals, definition = [], [], []
    for place in pair:
        batch = bench.read_rows((place, "test"), range(HISTOGRAM_IMAGES))
        table, pixels = extract_table(whole, bench.backbone, batch, scores.kept), batch.images[0].size
        energies.append(np.log10(pixels * table["b"][:, 0]))
        residuals.append(np.log10(pixels * table["residual"][:, 0, 1:].ravel()))
        averages = find_feature("residual").average(table["residual"])
        definition.append(np.log10(pixels * averages @ scores.selection.weights))
    names = (bench.protocol.label(name), bench.protocol.label(other))
    shown = {
        "energy": (energies, "|s|^2"),
        "residual": (residuals, "R_t"),
        "definition": (definition, "sum_t w_t E[R_t]"),
    }
    return {
        f"histogram-{quantity}": histogram(inside, outside, names=names, label=f"log10 {label}")
        for quantity, ((inside, outside), label) in shown.items()
    }

"""The paper's figures from collected features, as matplotlib `Figure` objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gepc.bench.ablations import Pair, feature_variants, kept_raw
from gepc.bench.evaluate import Bench, Variant
from gepc.bench.false_alarms import id_p_values
from gepc.bench.published import MAIN
from gepc.core.palette import LIGHT, line_style
from gepc.report import figures
from gepc.report.figures import PANEL, drawing
from gepc.report.labels import place_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gepc.bench.comparison import Entry
    from gepc.core.tables import ResultTable


def bars(values: Mapping[str, float], mean: float | None = None, mean_name: str = "") -> Figure:
    """AUROC bars from 0.5 (chance), with a dashed line for a mean."""
    with drawing(PANEL) as figure:
        axes = figure.add_subplot()
        places = np.arange(len(values))
        axes.bar(places, list(values.values()), width=0.7, color=LIGHT["inside"])
        axes.axhline(0.5, color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (1, 2)))
        if mean is not None:
            axes.axhline(mean, color=LIGHT["outside"], linewidth=1.2, linestyle=(0, (4, 3)), label=mean_name)
            figure.legend(loc="outside upper center")
        axes.set_xticks(places, list(values), rotation=30, ha="right", fontsize=8)
        axes.set(ylim=(0.0, 1.0), ylabel="AUROC")
    return figure


def feature_bars(bench: Bench, pair: Pair) -> Figure:
    """Single features and their fusion on one pair."""
    values = {
        name: bench.aurocs(replace(bench.main, features=features), only=pair[0])[pair]
        for name, features in feature_variants(bench).items()
    }
    return bars(values)


def transform_bars(bench: Bench, pair: Pair) -> Figure:
    """The raw gap of each transform alone, sign-invariant, with the mean over the group as a line."""
    names = [name for name in bench.extractor.group.names if name != "id"]
    values = {name: kept_raw(bench, (name,), only=pair[0])[pair] for name in names}
    return bars(values, kept_raw(bench, None, only=pair[0])[pair], "mean over g")


def timestep_curve(bench: Bench, name: str) -> Figure:
    """AUROC of the raw gap (sign-invariant) against the timestep, one line per OOD set; kept timesteps are marked."""
    candidates = bench.candidates(name)
    kept = bench.scores(name, bench.main, bench.protocol.seeds[0]).kept
    lines: dict[str, list[float]] = {other: [] for other in bench.protocol.pairs[name]}
    for t in candidates:
        single = Variant(keep=None, weights="uniform", calibration="raw", timesteps=(t,))
        for (_, other), value in bench.aurocs(single, symmetric=True, only=name).items():
            lines[other].append(value)
    with drawing(PANEL) as figure:
        axes = figure.add_subplot()
        for position, (other, values) in enumerate(lines.items()):
            label = bench.protocol.label(other)
            axes.plot(candidates, values, marker="o", markersize=4, label=label, **line_style(position))
        for t in kept:
            axes.axvline(t, color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xscale("log")
        axes.set_xticks(candidates, [str(t) for t in candidates])
        axes.set_xticks([], minor=True)
        axes.set(ylim=(0.4, 1.02), xlabel="timestep (dashed: kept)", ylabel="AUROC")
        figure.legend(loc="outside upper center", ncols=3)
    return figure


def three_histograms(bench: Bench, pair: Pair) -> list[Figure]:
    """Score magnitude b, the residual energy of one step, and the final score, for ID and OOD."""
    seed, (name, other) = bench.protocol.seeds[0], pair
    scores = bench.scores(name, bench.main, seed)
    names = (bench.protocol.label(name), bench.protocol.label(other))
    drawn = []
    if "b" in bench.protocol.features:
        magnitude = Variant(features=("b",), timesteps=scores.kept[:1])
        inside, outside = (bench.columns(one, "test", seed, magnitude, scores.kept[:1]).ravel() for one in pair)
        drawn.append(figures.histogram(np.log10(inside), np.log10(outside), names=names, label="log10 b"))
    residual = Variant(features=("s",), timesteps=scores.kept[:1])
    inside, outside = (bench.columns(one, "test", seed, residual, scores.kept[:1]).ravel() for one in pair)
    drawn.append(figures.histogram(inside, outside, names=names, label="s at one timestep"))
    drawn.append(figures.histogram(scores.inside, scores.outside[other], names=names))
    return drawn


def roc_curves(bench: Bench, name: str) -> Figure:
    """One ROC curve per OOD set."""
    scores = bench.scores(name, bench.main, bench.protocol.seeds[0])
    return figures.roc({bench.protocol.label(other): (scores.inside, found) for other, found in scores.outside.items()})


def calibration_curve(bench: Bench) -> Figure:
    """False-alarm rate wanted against rate seen on held-out ID images, one line per ID set."""
    wanted = np.linspace(0.005, 0.5, 100)
    with drawing(PANEL) as figure:
        axes = figure.add_subplot()
        axes.plot([0, 0.5], [0, 0.5], color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (1, 2)))
        for position, name in enumerate(bench.protocol.pairs):
            p, _ = id_p_values(bench, name, bench.protocol.seeds[0])
            seen = [(p <= alpha).mean() for alpha in wanted]
            axes.plot(wanted, seen, linewidth=1.4, label=bench.protocol.label(name), **line_style(position))
        axes.set(xlim=(0, 0.5), ylim=(0, 0.6), xlabel="alpha wanted", ylabel="alarms seen")
        figure.legend(loc="outside upper center", ncols=3)
    return figure


def p_value_histogram(bench: Bench, name: str) -> Figure:
    """p-values of held-out ID images: flat where the guarantee holds."""
    p, _ = id_p_values(bench, name, bench.protocol.seeds[0])
    with drawing(PANEL) as figure:
        axes = figure.add_subplot()
        share, edges = np.histogram(p, bins=10, range=(0.0, 1.0))
        axes.stairs(share / len(p), edges, fill=True, color=LIGHT["inside"], alpha=0.6)
        axes.axhline(0.1, color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set(xlim=(0, 1), xlabel=f"p-value of {bench.protocol.label(name)} test images", ylabel="share of images")
    return figure


def auroc_over_cost(compared: Sequence[Entry]) -> Figure:
    """Average AUROC of every method against F+J per image on a log axis; the first, GEPC, stands out."""
    with drawing(1.5 * PANEL) as figure:
        axes = figure.add_subplot()
        x, y = [one.spent.passes for one in compared], [one.average for one in compared]
        axes.scatter(x[1:], y[1:], s=14, color=LIGHT["inside"], zorder=3)
        axes.scatter(x[:1], y[:1], s=30, color=LIGHT["outside"], marker="D", zorder=3)
        axes.axhline(0.5, color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_xscale("log")
        low, high = min(*y, 0.5), max(y)
        axes.set(xlim=(min(x) / 2.0, max(x) * 7.0), ylim=(low - 0.06, min(1.02, high + 0.08)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="F+J per image, log axis", ylabel="average AUROC")
        place_labels(axes, x, y, [one.label for one in compared])
    return figure


def auroc_over_passes(table: ResultTable) -> Figure:
    """The table of `gepc.bench.passes`: AUROC against mean passes per image, and the paper's detector among them.

    Filled points look at every level, open ones stop when a verdict is clear.
    """
    names, y = [str(row[0]) for row in table.rows], table.numbers("average")
    both = (table.numbers(f"passes, {kind} images") for kind in ("ID", "OOD"))
    x = [(inside + outside) / 2 for inside, outside in zip(*both, strict=True)]
    with drawing(1.5 * PANEL) as figure:
        axes = figure.add_subplot()
        for place, name in enumerate(names):
            colour = LIGHT["outside" if name.startswith("gepc+") else "inside"]
            face = "none" if name.endswith("sequential") else colour
            axes.scatter(x[place], y[place], s=18, facecolors=face, edgecolors=colour, zorder=3)
        for label, face in (("all levels", LIGHT["ink"]), ("sequential", "none")):
            axes.scatter([], [], s=18, facecolors=face, edgecolors=LIGHT["ink"], label=label)
        published = [value for value in MAIN["GEPC"][0] if value is not None]
        x, y, names = [*x, 16.0], [*y, float(np.mean(published))], [*names, "published, 16F"]
        axes.scatter(x[-1], y[-1], s=26, color=LIGHT["muted"], marker="D", zorder=3)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlim=(min(x) / 1.7, max(x) * 2.2), ylim=(min(y) - 0.03, min(1.0, max(y) + 0.03)))
        axes.set_xticks([2, 4, 8, 16, 32])
        axes.minorticks_off()
        axes.set(xlabel="mean passes per image, log axis", ylabel="average AUROC")
        figure.legend(loc="outside upper center", ncols=2)
        place_labels(axes, x, y, [name.removesuffix(", sequential").removeprefix("GEPC, ") for name in names])
    return figure


def martingale_paths(bench: Bench, name: str) -> Figure:
    """log10 capital of the drift monitor on an unmoved stream, and on one that turns to an OOD set half-way."""
    from gepc.verdicts.monitor import Monitor

    seed = bench.protocol.seeds[0]
    scores = bench.scores(name, bench.main, seed)
    half = len(scores.inside) // 2
    calibration, stream = scores.inside[:half], scores.inside[half:]
    delta = 0.01
    with drawing(PANEL) as figure:
        axes = figure.add_subplot()
        axes.axhline(-np.log10(delta), color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (4, 3)), label="alarm")
        paths: dict[str, Sequence[float]] = {"unmoved": stream.tolist()}
        for other, found in scores.outside.items():
            paths[f"then {bench.protocol.label(other)}"] = [*stream[: len(stream) // 2], *found[: len(stream) // 2]]
        for position, (label, values) in enumerate(paths.items()):
            monitor = Monitor(calibration, delta=delta)
            log10 = [verdict.log10_capital for verdict in monitor.update_all(values)]
            axes.plot(np.clip(log10, -3, 10), linewidth=1.3, label=label, **line_style(position))
        axes.set(xlabel="images seen", ylabel="log10 capital (cut at 10)")
        figure.legend(loc="outside upper center", ncols=2)
    return figure

"""The benchmark's report: what was run, on what, the tables, the figures, the honest limits. One HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gepc._version import __version__
from gepc.bench import figures as drawn
from gepc.bench.comparison import Entry
from gepc.bench.evaluate import Bench
from gepc.bench.rows import read_rows
from gepc.core.tables import ResultTable, show
from gepc.features.maps import MapSample, combine
from gepc.report import figures
from gepc.report.page import Block, Bullets, Code, Facts, Page, Picture, Pictures, Prose, Section, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 4
POOL = 16


@dataclass(frozen=True)
class Drawn:
    """A figure with the name of its files, a title and what it shows."""

    name: str
    title: str
    alt: str
    figure: Figure


def draw_all(bench: Bench, data: Path, compared: Sequence[Entry] = ()) -> list[Drawn]:
    """Every figure of the report; `compared` are GEPC and the methods it stands beside."""
    pair = bench.protocol.pair_list[0]
    label = bench.protocol.label
    named = f"{label(pair[0])}:{label(pair[1])}"
    found = []
    if compared:
        title, alt = "Average AUROC against passes per image", "Points of AUROC against F+J, one for each method"
        found.append(Drawn("cost", title, alt, drawn.auroc_over_cost(compared)))
    found += [
        Drawn(
            "features", f"Single features, {named}", "Bars of AUROC for each feature", drawn.feature_bars(bench, pair)
        ),
        Drawn(
            "transforms",
            f"Each transform, {named}",
            "Bars of AUROC for each transform",
            drawn.transform_bars(bench, pair),
        ),
    ]
    for name in bench.protocol.pairs:
        alt = "Lines of AUROC against the timestep"
        found.append(
            Drawn(f"timesteps-{name}", f"AUROC against t, ID {label(name)}", alt, drawn.timestep_curve(bench, name))
        )
    titles = ("log10 of the score energy b", "Residual of one step", "Final score")
    histograms = drawn.three_histograms(bench, pair)
    for title, figure in zip(titles[-len(histograms) :], histograms, strict=True):
        stem = "histogram-" + title.split()[0].lower()
        found.append(Drawn(stem, f"{title}, {named}", f"Histograms of {title} for ID and OOD images", figure))
    found += [
        Drawn(f"roc-{name}", f"ROC, ID {label(name)}", "ROC curves", drawn.roc_curves(bench, name))
        for name in bench.protocol.pairs
    ]
    first = pair[0]
    found += [
        Drawn(
            "calibration",
            "Alarms wanted and seen",
            "Lines of seen against wanted rates",
            drawn.calibration_curve(bench),
        ),
        Drawn("p-values", "p-values of ID images", "Histogram of p-values", drawn.p_value_histogram(bench, first)),
        Drawn(
            "martingale", f"Drift monitor, ID {label(first)}", "Lines of capital", drawn.martingale_paths(bench, first)
        ),
    ]
    return found + _maps(bench, data, first)


def _maps(bench: Bench, data: Path, name: str) -> list[Drawn]:
    """The least and most typical test images of an ID set and of its OOD sets, with their maps on one scale."""
    scores = bench.scores(name, bench.main, bench.protocol.seeds[0])
    weights, kept = scores.selection.weights, scores.kept
    pool = MapSample()
    reference = read_rows(bench, data, name, "train", range(POOL))
    for key, field in zip(reference.keys, bench.extractor.maps(bench.backbone, reference, kept)[1], strict=True):
        pool.add(key, field)
    scale = pool.v_global(tuple(range(len(kept))), weights)
    found = []
    for other, values in {name: scores.inside, **scores.outside}.items():
        order = np.argsort(values)
        half = SHOWN // 2
        picked = [*order[:half], *order[-half:]]
        batch = read_rows(bench, data, other, "test", picked)
        fields = combine(bench.extractor.maps(bench.backbone, batch, kept)[1], weights)
        images = [np.rint((image.transpose(1, 2, 0) + 1.0) * 127.5).astype(np.uint8) for image in batch.images]
        labels = [f"{values[index]:.1f}" for index in picked]
        label = bench.protocol.label(other)
        found.append(
            Drawn(
                f"maps-{other}",
                f"{label}: the least and the most unusual, score above",
                f"Images of {label} with their maps",
                figures.maps(images, list(fields), labels, scale),
            )
        )
    return found


def build_page(bench: Bench, tables: Sequence[ResultTable], pictures: Sequence[Drawn], about: dict[str, Any]) -> Page:
    """The whole report."""
    main = tables[0]
    measured = dict(zip(main.header, main.rows[0], strict=True))
    lead = (
        f"GEPC on {len(bench.protocol.pair_list)} pairs of data sets with the backbone {about['backbone']}: mean AUROC "
        f"{show(measured['average'])} at {measured['F+J']} per image."
    )
    if about["backbone"] == "celeba32-tiny":
        lead += " That backbone is small and was trained on a CPU; the paper's, whose figures stand beside, is not."
    sections = [
        Section("What was run", [Facts(_facts(bench, about))]),
        *_table_sections(tables),
        Section("Figures", [Pictures([Picture(one.figure, one.alt, one.title) for one in pictures])]),
        Section("Limits", [Bullets(_limits(bench))]),
        Section("Repeat it", [Prose(["The same images and backbone give the same numbers."]), Code(about["command"])]),
    ]
    footer = f"Made by gepc {__version__}. This page is one file and asks the network for nothing."
    return Page("GEPC benchmark", lead, sections, footer)


def _table_sections(tables: Sequence[ResultTable]) -> list[Section]:
    groups = {
        "Results": ("main", "paired", "methods", "detail", "seeds", "kept"),
        "Ablations": ("sweep", "transforms", "calibration", "features", "timesteps"),
        "False alarms and cost": ("false_alarms", "runtime"),
    }
    placed = {name for names in groups.values() for name in names}
    groups["More"] = tuple(table.name for table in tables if table.name not in placed)
    sections = []
    for title, names in groups.items():
        blocks: list[Block] = [
            Table(table.title, table.header, table.shown(), table.note) for table in tables if table.name in names
        ]
        if blocks:
            sections.append(Section(title, blocks))
    return sections


def _facts(bench: Bench, about: dict[str, Any]) -> list[tuple[str, str]]:
    protocol = bench.protocol
    sets = ", ".join(f"{protocol.label(name)} ({source.dataset})" for name, source in protocol.datasets.items())
    facts = [
        ("backbone", f"{about['backbone']}, sha256 {str(about['sha256'])[:12]}"),
        ("data sets", sets),
        ("images", _images(bench)),
        ("noise seeds", ", ".join(map(str, protocol.seeds))),
        ("detector", f"top-k {protocol.topk:g}, K = {protocol.keep}, {protocol.weights}, {protocol.calibration}"),
        ("passes used", f"{about['passes']:,} in this run; {about['passes_one']:,} with an empty cache"),
        ("passes the naive way", f"{about['passes_naive']:,}: pair by pair, identity evaluated, main table alone"),
        ("skipped images", str(len(bench.collection.skipped))),
    ]
    compared = about.get("methods", [])
    if compared:
        passes = sum(one["passes"] for one in compared)
        names = ", ".join(one["label"] for one in compared)
        facts.append(("compared methods", f"{names}; {passes:,} passes in this run"))
    return facts


def _images(bench: Bench) -> str:
    """How many of each split were evaluated, which may be fewer than the protocol asks for."""
    protocol = bench.protocol
    fewer = [
        f"{protocol.label(name)} {split}: {count}"
        for (name, split), count in bench.collection.sizes.items()
        if count < protocol.images(split)
    ]
    text = f"{protocol.train_images} ID-train, {protocol.test_images} of each test set"
    return f"{text}; fewer of {', '.join(fewer)}" if fewer else text


def _limits(bench: Bench) -> list[str]:
    limits = [
        "Levels, weights and densities come from ID-train alone. Rows and figures marked sign-invariant, and any "
        "choice of a best timestep or transform, would use OOD data: they are diagnostics, not detectors.",
        "The published rows for NLL, IC, MSMA, DDPM-OOD and LMD very likely come from other backbones than the "
        "paper's; LMD's \"104F\" is most probably 10^4 F.",
        "Intervals are DeLong's and cover the scatter of the test images, not that of the backbone's training.",
    ]
    if any(bench.protocol.label(name) == "TinyIN" for name in bench.protocol.datasets):
        limits.append("Tiny-ImageNet stands where the paper has CIFAR-100; the two are not the same task.")
    return limits

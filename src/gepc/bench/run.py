"""A benchmark from its protocol to files: features, tables, figures, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gepc.backbones.base import Backbone
from gepc.bench import ablations
from gepc.bench.baselines import Baseline, BaselineBench, collect_baselines
from gepc.bench.collect import Collection, collect, naive_passes, passes_needed
from gepc.bench.comparison import Entry, comparison_table, entries, methods_table
from gepc.bench.evaluate import Bench
from gepc.bench.false_alarms import false_alarm_table
from gepc.bench.paired import paired_table
from gepc.bench.protocol import Protocol
from gepc.bench.runtime import runtime_table
from gepc.core.files import replacing
from gepc.core.tables import ResultTable, write_each, write_tables
from gepc.features.extraction import FeatureCache, plain_options


@dataclass(frozen=True)
class Outcome:
    """The tables of a run and what they were measured on."""

    bench: Bench
    tables: list[ResultTable]
    about: dict[str, Any]
    entries: list[Entry] = field(default_factory=list)
    baselines: list[BaselineBench] = field(default_factory=list)

    @property
    def passes(self) -> int:
        """Network passes made for features in this run, F and J."""
        return sum(collection.passes for collection in self._collections)

    @property
    def cached(self) -> int:
        """Tables that came from the cache."""
        return sum(collection.cached_levels for collection in self._collections)

    @property
    def skipped(self) -> dict[str, str]:
        """Images that could not be read, with the reasons."""
        return {image: reason for collection in self._collections for image, reason in collection.skipped.items()}

    @property
    def _collections(self) -> list[Collection]:
        return [self.bench.collection, *(found.collection for found in self.baselines)]


def run(
    protocol: Protocol,
    backbone: Backbone,
    data: Path,
    cache: FeatureCache,
    command: str,
    only_ablations: bool = False,
    on_progress: Callable[[int], None] | None = None,
    baselines: Sequence[Baseline] = (),
) -> Outcome:
    """One pass over each data set, one more for each compared method, then arithmetic."""
    bench = Bench(protocol, backbone, collect(protocol, backbone, data, cache, on_progress))
    tables = ablations.ablation_tables(bench) if only_ablations else ablations.all_tables(bench)
    if not only_ablations:
        tables += [false_alarm_table(bench), runtime_table(bench, data)]
    found = collect_baselines(baselines, protocol, backbone, data, cache, on_progress)
    compared = entries(bench, found, data) if found else []
    if compared:
        tables[:1] = [comparison_table(bench, compared), paired_table(bench, found), methods_table(bench, compared)]
    about = {
        "command": command,
        "backbone": backbone.source or backbone.family,
        "sha256": backbone.sha256,
        "passes": bench.collection.passes,
        "passes_one": passes_needed(protocol, backbone, bench.collection.sizes),
        "passes_naive": naive_passes(protocol, backbone, bench.collection.sizes),
        "skipped": bench.collection.skipped,
        "protocol": protocol.as_dict(),
        "methods": [_about_baseline(one) for one in found],
    }
    return Outcome(bench, tables, about, compared, found)


def _about_baseline(found: BaselineBench) -> dict[str, Any]:
    """Everything that a method's row depends on."""
    extractor = found.baseline.extractor
    return {
        "method": extractor.name,
        "label": found.baseline.label,
        "preset": found.baseline.preset,
        "options": plain_options(extractor.options()),
        "images": {split: found.collection.count(split) for split in ("train", "test")},
        "passes": found.collection.passes,
    }


def write(outcome: Outcome, out: Path, data: Path, formats: Sequence[str] = ("png", "svg")) -> None:
    """`results.md`, `results.json`, one CSV and LaTeX file per table, the figures and `report.html`."""
    from gepc.bench.page import build_page, draw_all
    from gepc.report.page import write_page

    write_tables(out, "results", outcome.tables, outcome.about)
    write_each(out / "tables", outcome.tables)
    pictures = draw_all(outcome.bench, data, outcome.entries)
    for picture in pictures:
        for kind in formats:
            with replacing(out / "figures" / f"{picture.name}.{kind}") as draft:
                picture.figure.savefig(draft, format=kind, dpi=200)
    write_page(out / "report.html", build_page(outcome.bench, outcome.tables, pictures, outcome.about))

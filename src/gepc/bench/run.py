"""A benchmark from its protocol to files: features, tables, figures, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gepc.backbones.base import Backbone
from gepc.bench import ablations
from gepc.bench.collect import collect, naive_passes, passes_needed
from gepc.bench.evaluate import Bench
from gepc.bench.false_alarms import false_alarm_table
from gepc.bench.protocol import Protocol
from gepc.bench.runtime import runtime_table
from gepc.bench.tables import ResultTable, as_json
from gepc.cache import FeatureCache
from gepc.files import replacing, write_text


@dataclass(frozen=True)
class Outcome:
    """The tables of a run and what they were measured on."""

    bench: Bench
    tables: list[ResultTable]
    about: dict[str, Any]


def run(
    protocol: Protocol,
    backbone: Backbone,
    data: Path,
    cache: FeatureCache,
    command: str,
    only_ablations: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Outcome:
    """One pass over each data set, then arithmetic."""
    bench = Bench(protocol, backbone, collect(protocol, backbone, data, cache, on_progress))
    tables = ablations.ablation_tables(bench) if only_ablations else ablations.all_tables(bench)
    if not only_ablations:
        tables += [false_alarm_table(bench), runtime_table(bench, data)]
    about = {
        "command": command,
        "backbone": backbone.source or backbone.family,
        "sha256": backbone.sha256,
        "passes": bench.collection.passes,
        "passes_one": passes_needed(protocol, backbone),
        "passes_naive": naive_passes(protocol, backbone),
        "skipped": bench.collection.skipped,
        "protocol": protocol.as_dict(),
    }
    return Outcome(bench, tables, about)


def write(outcome: Outcome, out: Path, data: Path, formats: Sequence[str] = ("png", "svg")) -> None:
    """`results.md`, `results.json`, one CSV and LaTeX file per table, the figures and `report.html`."""
    from gepc.bench.page import build_page, draw_all
    from gepc.report.page import write_page

    write_text(out / "results.md", "\n".join(table.markdown() for table in outcome.tables))
    write_text(out / "results.json", as_json(outcome.tables, outcome.about))
    for table in outcome.tables:
        write_text(out / "tables" / f"{table.name}.csv", table.csv())
        write_text(out / "tables" / f"{table.name}.tex", table.latex())
    pictures = draw_all(outcome.bench, data)
    for picture in pictures:
        for kind in formats:
            with replacing(out / "figures" / f"{picture.name}.{kind}") as draft:
                picture.figure.savefig(draft, format=kind, dpi=200)
    write_page(out / "report.html", build_page(outcome.bench, outcome.tables, pictures, outcome.about))

"""A benchmark from its protocol to files: features, tables, figures and one HTML page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gepc.core.files import write_text
from gepc.core.tables import ResultTable, write_each, write_tables
from gepc.detector.plots import save
from gepc.lab.bench import detector_tables
from gepc.lab.bench.baselines import Baseline, BaselineBench, collect_baselines, estimate_cost, runtime_table
from gepc.lab.bench.comparison import comparison_table, methods_table
from gepc.lab.bench.evaluate import Benchmark, GepcBench
from gepc.lab.report.page import Picture, render
from gepc.methods.extraction import OnProgress, plain_options


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
    tables = [comparison_table(bench, found), *detector_tables.ablation_tables(bench)]
    if not only_ablations:
        others = (detector_tables.kept_table, detector_tables.false_alarm_table, runtime_table)
        tables += [methods_table(protocol, [bench, *found]), *(build(bench) for build in others)]
    about = {
        "command": command,
        "backbone": backbone.source or backbone.family,
        "sha256": backbone.sha256,
        "passes": collection.passes,
        "passes_one": estimate_cost(protocol, backbone, (), collection.sizes)[0].passes,
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
    from gepc.lab.bench.plots import draw_all

    write_tables(out, "results", result.tables, result.about)
    write_each(out / "tables", result.tables)
    figures = draw_all(result.bench)
    for name, figure in figures.items():
        save(figure, out / "figures" / name, formats)
    pictures = [Picture(figure, name.replace("-", ": ")) for name, figure in figures.items()]
    page = render("benchmark.html", about=result.about, tables=result.tables, pictures=pictures)
    write_text(out / "report.html", page)

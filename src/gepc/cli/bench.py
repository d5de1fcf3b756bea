"""`gepc bench` and `gepc ablate`: the paper's tables and figures on any backbone and any data."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gepc.cli.app import app, note, parse_settings, progress, say
from gepc.cli.backbones import seconds_per_pass
from gepc.cli.detect import ActorsOption, AddressOption, CpusOption, EngineOption, GpusOption, feature_engine
from gepc.core.errors import InputError, OptionError
from gepc.core.files import check_free

if TYPE_CHECKING:
    from gepc.backbones.base import Backbone
    from gepc.bench.baselines import Baseline
    from gepc.bench.collect import Sizes
    from gepc.bench.protocol import Protocol
    from gepc.bench.run import Outcome
    from gepc.features.extraction import Engine

DEFAULT_CACHE = Path(".gepc-cache")
SHOWN_REASONS = 5

ConfigArgument = Annotated[str, typer.Argument(help="A protocol: a YAML file, or a name (paper32, small32, quick).")]
DataOption = Annotated[
    Path | None, typer.Option(help="The folder of the data sets; the variable GEPC_DATA without it.")
]
OutOption = Annotated[Path, typer.Option(help="A folder for tables, figures and report.html.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the protocol, e.g. seeds=[0,1,2].")
]
CacheOption = Annotated[Path, typer.Option(help="Where features are kept between runs.")]
NoCacheOption = Annotated[bool, typer.Option("--no-cache", help="Compute everything anew and keep nothing.")]


MethodsOption = Annotated[
    str | None,
    typer.Option(
        help="Methods to compare GEPC with: all, training-free, names such as msma,scoped, with presets: gepc+:fast."
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(min=0.0, help="Do not start if more minutes are estimated, with an empty cache; 0 only foretells."),
]


@dataclass(frozen=True)
class Request:
    """What both commands are asked."""

    config: str
    out: Path
    data: Path | None
    settings: list[str] | None
    cache: Path | None
    methods: str | None = None
    budget: float | None = None
    engine: Engine | None = None
    only_ablations: bool = False


@app.command()
def bench(
    config: ConfigArgument,
    out: OutOption,
    data: DataOption = None,
    settings: SetOption = None,
    methods: MethodsOption = None,
    budget_minutes: BudgetOption = None,
    cache: CacheOption = DEFAULT_CACHE,
    no_cache: NoCacheOption = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    actors: ActorsOption = None,
    cpus_per_actor: CpusOption = 1.0,
    gpus_per_actor: GpusOption = 0.0,
) -> None:
    """Repeat the paper's evaluation: every table and figure from one pass over each data set.

    An interrupted run goes on where it was; a second run costs no network pass. With `--methods` other detectors are
    fitted and evaluated on the same backbone and images; the protocol's key `methods` gives each a preset and, for
    costly ones, fewer images.

    Example: `gepc bench quick --data data/ --out results`

    All methods, but only what it would cost: `gepc bench small32 --out results --methods all --budget-minutes 0`
    """
    elsewhere = feature_engine(engine, address, actors, cpus_per_actor, gpus_per_actor)
    _run(Request(config, out, data, settings, None if no_cache else cache, methods, budget_minutes, elsewhere))


@app.command()
def ablate(
    config: ConfigArgument,
    out: OutOption,
    data: DataOption = None,
    settings: SetOption = None,
    cache: CacheOption = DEFAULT_CACHE,
    no_cache: NoCacheOption = False,
) -> None:
    """The ablations alone: number of timesteps, weights, transforms, calibrations, features, single timesteps.

    Example: `gepc ablate quick --data data/ --out ablations`
    """
    _run(Request(config, out, data, settings, None if no_cache else cache, only_ablations=True))


def _run(request: Request) -> None:
    import gepc
    from gepc.bench.baselines import choose_baselines, method_names
    from gepc.bench.collect import check_ready
    from gepc.bench.protocol import load_protocol
    from gepc.bench.run import run, write
    from gepc.features.extraction import FeatureCache

    folder, out = _data_folder(request.data), request.out
    check_free(out, "results.json", "benchmark")
    protocol = load_protocol(request.config, parse_settings(request.settings or []))
    names = method_names(request.methods) if request.methods is not None else []
    backbone = gepc.load_backbone(protocol.backbone)
    baselines = choose_baselines(names, protocol, backbone)
    sizes = check_ready(protocol, backbone, folder)
    passes, minutes = _foretell(protocol, backbone, baselines, sizes, cached=request.cache is not None)
    if request.budget is not None and minutes > request.budget:
        raise OptionError(
            f"about {minutes:.0f} minutes are estimated, --budget-minutes allows {request.budget:g}; raise it, name "
            "fewer methods, or give costly ones fewer images with the protocol's key methods"
        )
    with progress("features", passes) as advance:
        command = shlex.join(["gepc", *sys.argv[1:]])
        cache = FeatureCache(request.cache, request.engine)
        outcome = run(protocol, backbone, folder, cache, command, request.only_ablations, advance, baselines)
    write(outcome, out, folder)
    _tell(outcome, out)


def _foretell(
    protocol: Protocol, backbone: Backbone, baselines: Sequence[Baseline], sizes: Sizes, cached: bool
) -> tuple[int, float]:
    """Print what the run will cost with an empty cache; passes to show progress by, and minutes."""
    from gepc.bench.baselines import estimate_cost
    from gepc.bench.collect import naive_passes, passes_needed

    size = (protocol.size, protocol.size)
    pass_seconds = seconds_per_pass(backbone, size)
    passes = passes_needed(protocol, backbone, sizes)
    minutes = passes * pass_seconds / 60
    naive = naive_passes(protocol, backbone, sizes)
    note(f"{passes:,} network passes with an empty cache, about {minutes:.1f} minutes; naively {naive:,}")
    estimated = estimate_cost(baselines, protocol, backbone, cached, sizes)
    jvp_seconds = _seconds_per_jvp(backbone, size) if any(one.per_image.jvp for one in estimated) else 0.0
    for one in estimated:
        total = one.total
        # a product comes with the forward pass that it is counted with
        own = ((total.forward - total.jvp) * pass_seconds + total.jvp * jvp_seconds) / 60
        minutes += own
        images = f"{one.baseline.train_images:>5} / {one.baseline.test_images:<5} images"
        shared = ", shared with another method" if one.shared else ""
        note(
            f"  {one.baseline.label:<20} {images} {one.per_image!s:>8} each "
            f"{total.forward + total.jvp:>12,} passes {own:8.1f} min{shared}"
        )
        # progress is told for every method, shared or not
        passes += (one.per_image.forward + one.per_image.jvp) * one.images
    if baselines:
        note(f"about {minutes:.0f} minutes in all with an empty cache")
    return passes, minutes


def _seconds_per_jvp(backbone: Backbone, size: tuple[int, int], count: int = 8) -> float:
    """Seconds per image of a Jacobian-vector product together with its forward pass."""
    import time

    import torch

    x = torch.rand((count, backbone.channels, *size), generator=torch.Generator().manual_seed(0))
    x = x.to(dtype=backbone.dtype, device=backbone.device)
    counts = backbone.forward_count, backbone.jvp_count
    for _ in range(2):  # the first one warms up
        begun = time.perf_counter()
        backbone.jvp(x, 0, x)
        seconds = (time.perf_counter() - begun) / count
    backbone.forward_count, backbone.jvp_count = counts
    return seconds


def _tell(outcome: Outcome, out: Path) -> None:
    note(f"{outcome.passes:,} passes made, {outcome.cached} tables from the cache")
    if outcome.skipped:
        note(f"{len(outcome.skipped)} images could not be read and are left out; the first:")
    for image, reason in list(outcome.skipped.items())[:SHOWN_REASONS]:
        note(f"  {image}: {reason}")
    peak = _peak_memory()
    if peak is not None:
        note(f"at most {peak / 2**20:,.0f} MiB of memory in use")
    say(outcome.tables[0].markdown())
    say(f"tables, figures and report: {out / 'report.html'}")


def _peak_memory() -> int | None:
    """The process' largest resident size in bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, others KiB


def _data_folder(data: Path | None) -> Path:
    if data is None:
        if "GEPC_DATA" not in os.environ:
            raise InputError("where are the data sets? give --data FOLDER or set the variable GEPC_DATA")
        data = Path(os.environ["GEPC_DATA"])
    if not data.is_dir():
        raise InputError(f"{data} is not a folder")
    return data

"""`gepc bench` and `gepc ablate`: the paper's tables and figures on any backbone and any data."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from gepc.cli.app import app, note, parse_settings, progress, say
from gepc.cli.backbones import seconds_per_pass
from gepc.errors import InputError

DEFAULT_CACHE = Path(".gepc-cache")

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


@app.command()
def bench(
    config: ConfigArgument,
    out: OutOption,
    data: DataOption = None,
    settings: SetOption = None,
    cache: CacheOption = DEFAULT_CACHE,
    no_cache: NoCacheOption = False,
) -> None:
    """Repeat the paper's evaluation: every table and figure from one pass over each data set.

    An interrupted run goes on where it was; a second run costs no network pass.

    Example: `gepc bench quick --data data/ --out results`
    """
    _run(config, out, data, settings, None if no_cache else cache, only_ablations=False)


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
    _run(config, out, data, settings, None if no_cache else cache, only_ablations=True)


def _run(
    config: str, out: Path, data: Path | None, settings: list[str] | None, cache: Path | None, only_ablations: bool
) -> None:
    import gepc
    from gepc.bench.collect import naive_passes, needed, passes_needed
    from gepc.bench.protocol import load_protocol
    from gepc.bench.run import run, write
    from gepc.cache import FeatureCache

    folder = _data_folder(data)
    if out.exists() and any(out.iterdir()) and not (out / "results.json").exists():
        raise InputError(f"{out} is not empty and holds no benchmark; give another --out folder")
    protocol = load_protocol(config, parse_settings(settings or []))
    backbone = gepc.load_backbone(protocol.backbone)
    passes = passes_needed(protocol, backbone)
    seconds = passes * seconds_per_pass(backbone, (protocol.size, protocol.size))
    naive = naive_passes(protocol, backbone)
    note(f"{passes:,} network passes with an empty cache, about {seconds / 60:.1f} minutes; naively {naive:,}")
    images = {"train": protocol.train_images, "test": protocol.test_images}
    total = sum(images[split] * len(steps) for (_, split), steps in needed(protocol, backbone).items())
    with progress("features", total * len(protocol.seeds)) as advance:
        command = shlex.join(["gepc", *sys.argv[1:]])
        outcome = run(protocol, backbone, folder, FeatureCache(cache), command, only_ablations, advance)
    write(outcome, out, folder)
    collection = outcome.bench.collection
    note(f"{collection.passes:,} passes made, {collection.cached_levels} tables from the cache")
    for reason in collection.skipped[:5]:
        note(f"skipped: {reason}")
    say(outcome.tables[0].markdown())
    say(f"tables, figures and report: {out / 'report.html'}")


def _data_folder(data: Path | None) -> Path:
    if data is None:
        if "GEPC_DATA" not in os.environ:
            raise InputError("where are the data sets? give --data FOLDER or set the variable GEPC_DATA")
        data = Path(os.environ["GEPC_DATA"])
    if not data.is_dir():
        raise InputError(f"{data} is not a folder")
    return data

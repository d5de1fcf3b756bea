"""`gepc demo`, `selfcheck`, `bench`, `ablate`, `reproduce`, `symmetries` and `data`: what the detectors achieve."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer import Argument, Option

from gepc.cli import options as opt
from gepc.cli.app import new_app, note, progress, say, several, text_table, typed_command
from gepc.cli.detect import estimate_fit
from gepc.cli.options import check_packages, duration, memory_of, seconds_per_jvp, seconds_per_pass
from gepc.core.errors import InputError, OptionError
from gepc.core.files import check_free, replacing, write_json, write_text
from gepc.core.options import DEFAULT_BACKBONE
from gepc.lab.cli.setup import DEFAULT_SETUP, Setup

if TYPE_CHECKING:
    from gepc.backbones.base import Backbone
    from gepc.core.tables import ResultTable
    from gepc.lab.bench.baselines import Baseline
    from gepc.lab.bench.evaluate import Sizes
    from gepc.lab.bench.inspection import InspectionProtocol
    from gepc.lab.bench.protocol import Protocol
    from gepc.lab.bench.run import BenchmarkResult
    from gepc.lab.report.demo import Demo

data = new_app(name="data", help="Download the data sets of the paper from their owners.")
ENERGY_MINUTES, LIGHT_MINUTES = 60.0, 6.0  # of training for an energy network

MEANING = """
holds: whether the images are compatible with this symmetry. A test that does not reject proves nothing. Where the
symmetry does not hold, the residual also measures the orientation of the data, not only the errors of the network.
operator_error: how much the transform and its inverse change the noisy image, without the network.
power: AUROC of synthetic outliers by the residual alone; 0.5 is chance.

To fit with the chosen transforms and weights, add --set group=auto to `gepc fit`, or
"""

ProtocolArgument = Annotated[
    str,
    Argument(metavar="PROTOCOL", help="A YAML file, or a name: paper32, small32, tinyimagenet32, quick, tiles, mvtec."),
]
DataFolder = Annotated[Path | None, Option(envvar="GEPC_DATA", help="Folder with the data sets.")]
ResultsOut = Annotated[Path, Option(help="Folder for tables and figures.")]
Reading = Annotated[str, Option(help="Reading of the paper: paper (its text) or released (the authors' code).")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the estimated cost and exit; only parts need their images.")]


@opt.with_groups
def demo(
    out: Annotated[Path, Option(help="Folder for the report; an earlier demo in it is overwritten.")] = Path("demo"),
    quick: Annotated[bool, Option("--quick", help="Use smaller photographs and fewer patches.")] = False,
    backbone: opt.NewBackbone = DEFAULT_BACKBONE,
    loading: opt.Loading = opt.DEFAULT_LOADING,
) -> None:
    """Look for things that were lost on a beach, tell a texture from others, and write a report.

    Nothing is downloaded: the photographs of the beach are computed, and those of the textures ship with scikit-image.
    The report, `report.html`, is a single file. The beach with its boxes is also in `boxes.png`, and the tables are in
    `demo.json` and `demo.md`.

    Example: `gepc demo --out demo --quick`
    """
    check_packages("the demo", "demo", "jinja2", "matplotlib", "skimage")
    check_free(out, "demo.json", "earlier demo")
    from gepc.core.tables import write_tables
    from gepc.lab.report import demo as demonstration

    net = loading.load(backbone)
    amounts = demonstration.QUICK if quick else demonstration.FULL
    photographs, patches = amounts.images
    note(
        f"look for lost things on a beach ({photographs} photographs of {amounts.width}x{amounts.height} pixels), "
        f"then compare textures ({patches} patches); about a minute of processor time, less with --quick"
    )
    with progress("photographs", photographs) as on_photographs, progress("patches", patches) as on_patches:
        result = demonstration.run(net, amounts, on_photographs, on_patches)
    note("drawing the report")
    command = _demo_command(out, quick, backbone)
    html = demonstration.render_demo(result, command)
    tables = [demonstration.things_table(result.search), demonstration.textures_table(result.textures)]
    write_tables(out, "demo", tables, {"command": command})  # marks the folder
    with replacing(out / "boxes.png") as draft:
        result.search.boxed.save(draft, "PNG")
    write_text(out / "report.html", html)
    say(_demo_results(result, tables))
    say(f"report: {out / 'report.html'}")


def _demo_command(out: Path, quick: bool, backbone: str) -> str:
    """The command that repeats the run, with the name of the folder and without its path."""
    words = ["gepc", "demo", "--out", out.name or "demo", *(["--quick"] if quick else [])]
    return shlex.join(words if backbone == DEFAULT_BACKBONE else [*words, "--backbone", backbone])


def _demo_results(result: Demo, tables: Sequence[ResultTable]) -> str:
    from gepc.lab.report.demo import ALPHA

    lost, (things, textures) = result.search, tables
    return (
        f"{text_table(things.rows, things.header)}\n\n"
        f"{lost.found} of {len(lost.lost)} lost things found; boxes elsewhere: {lost.elsewhere}; "
        f"photograph: p = {lost.p_value:.2f}\n"
        f"{lost.usual} new photographs of the beach without lost things: {lost.false_alarms} false alarms, "
        f"{lost.false_boxes} false boxes\n"
        f"guarantee: {lost.detector.guarantee(ALPHA)}\n\n"
        f"{text_table(textures.rows, textures.header)}\n\n"
        f"{result.passes:,} network passes in {result.seconds:.0f} s"
    )


def selfcheck(as_json: opt.AsJson = False) -> None:
    """Check the installed library against closed forms of the theory and print pass or fail.

    Example: `gepc selfcheck`
    """
    from gepc.lab.selfcheck import run_checks

    checks = run_checks()
    failed = sum(not check.passed for check in checks)
    if as_json:
        say(json.dumps([{**dataclasses.asdict(check), "passed": check.passed} for check in checks], indent=2))
    else:
        for check in checks:
            verdict = "pass" if check.passed else "FAIL"
            say(f"{verdict}  {check.name}: {check.found:.12g}, expected {check.expected:.12g}")
        say(f"{len(checks) - failed} passed, {failed} failed")
    if failed:
        raise typer.Exit(1)


@opt.with_groups
def bench(
    config: ProtocolArgument,
    out: ResultsOut,
    data: DataFolder = None,
    setup: Setup = DEFAULT_SETUP,
    methods: Annotated[
        str | None,
        Option(
            help="Methods to compare with GEPC: all, training-free, or names such as msma,scoped,gepc+:fast "
            "(method:preset; `gepc info --methods` lists them). The preset is light where none is named."
        ),
    ] = None,
    reading: Reading = "paper",
    dry_run: DryRun = False,
    loading: opt.Loading = opt.DEFAULT_LOADING,
) -> None:
    """Repeat the paper's evaluation: every table and figure from one pass over each data set.

    An interrupted run resumes from the cache, and a second run does not need a network pass. With `--methods`, other
    detectors are fitted and evaluated on the same backbone and images. The key `methods` of a protocol sets a preset
    for each of them and, for expensive ones, a smaller number of images.

    The protocol `mvtec` evaluates MVTec AD, MVTec AD 2 or VisA, whichever `--data` contains in its original layout. It
    fits one detector for each category and writes one table of image AUROC, AP, F1-max, pixel AUROC and AU-PRO.

    Example: `gepc bench quick --data data/ --out results`

    Cost of all methods, without running them: `gepc bench small32 --out results --methods all --dry-run`
    """
    from gepc.lab.bench.protocol import load_inspection

    if (inspection := load_inspection(config, setup.overrides())) is not None:
        released = reading != "paper"
        given = {"--methods": methods, "--reading": released, "--cache": setup.cache, "--no-cache": setup.no_cache}
        for option, value in given.items():
            if value:
                raise OptionError(f"{option} does not go with a benchmark of inspection; --set changes its protocol")
        _inspect(inspection, setup.load(loading, inspection.backbone), _checked(data), out, dry_run)
        return
    plan = _plan(config, setup, loading, methods, reading=reading)
    if dry_run:
        say(_estimate(plan)[0])
    else:
        _run(plan, out, data, setup)


@opt.with_groups
def ablate(
    config: ProtocolArgument,
    out: ResultsOut,
    data: DataFolder = None,
    setup: Setup = DEFAULT_SETUP,
    loading: opt.Loading = opt.DEFAULT_LOADING,
) -> None:
    """Run only the ablations: number of timesteps, weights, transforms, calibrations, features, single timesteps.

    Example: `gepc ablate quick --data data/ --out ablations`
    """
    _run(_plan(config, setup, loading), out, data, setup, only_ablations=True)


@opt.with_groups
def reproduce(
    out: ResultsOut,
    data: Annotated[Path, Option(help="Folder with the data sets; missing ones are downloaded into it.")],
    config: ProtocolArgument = "paper32",
    setup: Setup = DEFAULT_SETUP,
    methods: Annotated[str, Option(help="Methods to compare with GEPC, as for `gepc bench`.")] = "all",
    light: Annotated[
        bool, Option("--light", help="Run other methods with their preset light, instead of that of their paper.")
    ] = False,
    mirror: Annotated[str | None, Option(help="Address of the data sets, instead of their owners' addresses.")] = None,
    energy_minutes: Annotated[
        float | None,
        Option(min=0.0, help="Minutes to train each energy network: by default 60, or 6 with --light; 0 for none."),
    ] = None,
    dry_run: DryRun = False,
    loading: opt.Loading = opt.DEFAULT_LOADING,
) -> None:
    """Repeat the paper's whole evaluation: data sets, all methods, ablations and figures, beside the paper's values.

    The command runs GEPC twice: as the paper's text says, together with the other methods, and as the authors' released
    code does (folder `released`). `readings.md` compares both with the published row. Then the command trains the
    energy models of the paper's table on each ID set (`energy.md`).

    Existing files are not downloaded or computed again, so the same command resumes an interrupted run. Other methods
    run with the settings of their own papers, which takes long. `--light` is much faster.

    The protocol `radar` is the paper's radar experiment on ships of HRSID and SSDD. Both must be in `--data`.

    Example: `gepc reproduce paper32 --data data --out results --backbone celeba_ema.pt --architecture
    diffpath-celeba32`

    To estimate the time on this machine: `gepc reproduce paper32 --data data --out results --dry-run`
    """
    from gepc.core.tables import write_tables
    from gepc.lab.bench.detector_tables import readings_table
    from gepc.lab.bench.energy import ROWS, energy_table
    from gepc.lab.cli.radar import reproduce_radar
    from gepc.lab.datasets.download import FILES, MANUAL, missing_files

    if config == "radar":
        if methods != "all" or light or mirror or energy_minutes is not None:
            raise OptionError("--methods, --light, --mirror and --energy-minutes do not go with the protocol radar")
        reproduce_radar(data, out, dry_run, setup, loading)
        return
    paper = _plan(config, setup, loading, methods, "light" if light else "paper")
    released = _plan(config, setup, loading, reading="released")
    minutes = (LIGHT_MINUTES if light else ENERGY_MINUTES) if energy_minutes is None else energy_minutes
    protocol = paper.protocol
    wanted = [one.dataset for one in protocol.datasets.values() if one.dataset in (*FILES, *MANUAL)]
    networks = len(ROWS) * len(protocol.pairs) if minutes else 0
    if networks:  # what would fail after hours of other work
        check_packages("energy networks", "train", "accelerate")
    check_free(out, "results.json", "benchmark")
    check_free(out / "released", "results.json", "benchmark")
    note(f"{networks} energy networks, {minutes:g} minutes of training each")
    if dry_run:
        size = sum(one.size for name in wanted for one in missing_files(name, data))
        say(f"to download: {size / 1e9:.1f} GB")
        for name, plan in (("paper", paper), ("released", released)):
            say(f"{name}:\n{_estimate(plan)[0]}")
        return
    fetch_all(wanted, data, mirror)
    readings = {
        "paper": _run(paper, out, data, setup).bench,
        "released": _run(released, out / "released", data, setup).bench,
    }
    about = {"command": typed_command()}
    say(write_tables(out, "readings", [readings_table(protocol, readings)], about))
    if networks:
        with progress("energy networks", networks) as advance:
            table = energy_table(protocol, data, out / "energy", minutes, advance)
        say(write_tables(out, "energy", [table], about))


@opt.with_groups
def symmetries(
    images: Annotated[str, Argument(help="Normal images: a folder, or an array: data.npz:train_x.")],
    out: Annotated[Path | None, Option(help="Folder for symmetries.json.")] = None,
    backbone: opt.NewBackbone = DEFAULT_BACKBONE,
    count: Annotated[int, Option(min=16, help="Number of images to use, at most.")] = 400,
    size: Annotated[int | None, Option(help="Side of the images that the network sees; its own by default.")] = None,
    loading: opt.Loading = opt.DEFAULT_LOADING,
    as_json: opt.AsJson = False,
) -> None:
    """Test which transforms leave the distribution of your normal images unchanged, and which a detector should use.

    A two-sample test compares the images with transformed ones, at a family-wise error rate of 0.05 (Holm's procedure).
    The residual of the network is measured on at most 64 images. Out-of-distribution images are not needed.

    Example: `gepc symmetries photos/normal --out symmetries`
    """
    from gepc.detector.registry import GEPC
    from gepc.images.sources import open_images
    from gepc.methods.gepc import GepcExtractor
    from gepc.methods.symmetries import choose, read_batch

    if out is not None:
        check_free(out, "symmetries.json", "test of symmetries")
    detector = GEPC(loading.load(backbone), size=size)
    method = detector.extractor
    assert isinstance(method, GepcExtractor)
    batch = read_batch(open_images(images), detector.preprocessing(), detector.seed, detector.batch_size, most=count)
    group, evidence = choose(method, detector.backbone, batch)
    chosen, transforms = list(group.names[1:]), [item.as_dict() for item in evidence]
    facts = {"images": len(batch), "group": chosen, "transforms": transforms}
    if as_json:
        say(json.dumps(facts, indent=2))
    else:
        say(text_table([tuple(row.values()) for row in transforms], list(transforms[0])))
        say(f"{MEANING}--set 'group={json.dumps(chosen)}'")
    if out is not None:
        write_json(out / "symmetries.json", facts)
        note(f"wrote {out / 'symmetries.json'}")


@data.command()
def get(
    names: Annotated[list[str], Argument(metavar="NAME...", help="Data sets: cifar10, cifar100, svhn, celeba.")],
    to: Annotated[Path, Option(help="Folder for the data sets; `gepc bench --data` takes it.")],
    mirror: Annotated[str | None, Option(help="Address with the same files, instead of the owners' addresses.")] = None,
) -> None:
    """Download data sets, check them, and put them where `gepc bench` looks for them.

    An interrupted download continues when the command is run again. CelebA has to be downloaded by hand; the command
    says from where.

    Example: `gepc data get cifar10 cifar100 svhn --to data`
    """
    for name, counts in fetch_all(names, to, mirror).items():
        say(f"{name}: {counts['train']:,} training and {counts['test']:,} test images in {to}")


def fetch_all(names: Sequence[str], to: Path, mirror: str | None) -> dict[str, dict[str, int]]:
    """Download what is missing: name -> number of images of each split."""
    from gepc.lab.datasets.download import MANUAL, fetch, missing_files

    sizes = {name: sum(one.size for one in missing_files(name, to)) for name in names}
    found = {}
    for name, size in sorted(sizes.items(), key=lambda item: item[0] not in MANUAL):  # those to get by hand first
        with progress(f"{name}, bytes", size) as advance:
            found[name] = fetch(name, to, mirror, advance)
    return found


class _Plan(NamedTuple):
    """A benchmark to run: the protocol, its network, and the methods to compare with GEPC."""

    protocol: Protocol
    backbone: Backbone
    baselines: Sequence[Baseline]


def _plan(
    config: str,
    setup: Setup,
    loading: opt.Loading,
    methods: str | None = None,
    usual: str = "light",
    reading: str = "paper",
) -> _Plan:
    """Read the protocol, load its network and choose the methods."""
    from gepc.lab.bench.baselines import choose_baselines, method_names
    from gepc.lab.bench.protocol import load_inspection, load_protocol

    if load_inspection(config) is not None:
        raise OptionError(f"{config} is a benchmark of inspection; run it with `gepc bench`")
    names = [] if methods is None else method_names(methods)
    protocol = load_protocol(config, setup.overrides(), reading)
    scale = protocol.time_scale * loading.time_scale
    backbone = setup.load(dataclasses.replace(loading, time_scale=scale), protocol.backbone)
    baselines = choose_baselines(names, protocol, backbone, usual)
    chosen = {one.extractor.name: one.preset for one in baselines if one.preset is not None}
    unnamed = [f"{name}:{chosen[name]}" for name in names if name in chosen]
    if unnamed:
        note(f"presets that were not named: {', '.join(unnamed)}")
    return _Plan(protocol, backbone, baselines)


def _checked(data: Path | None) -> Path:
    """The folder with data sets."""
    if data is None:
        raise InputError("no folder with data sets: give --data FOLDER or set the environment variable GEPC_DATA")
    if not data.is_dir():
        raise InputError(f"{data} is not a folder; --data takes the folder with the data sets")
    return data


def _run(plan: _Plan, out: Path, data: Path | None, setup: Setup, only_ablations: bool = False) -> BenchmarkResult:
    """Run the benchmark and write its results."""
    from gepc.lab.bench.evaluate import Benchmark
    from gepc.lab.bench.run import run, write
    from gepc.methods.extraction import FeatureCache

    check_packages("the report", "report", "jinja2", "matplotlib")
    check_free(out, "results.json", "benchmark")
    cache = FeatureCache(setup.cache_folder())
    benchmark = Benchmark.open(plan.protocol, plan.backbone, _checked(data), cache)
    text, passes = _estimate(plan, benchmark.sizes)
    note(text)
    with progress("features", passes) as advance:
        result = run(benchmark, typed_command(), plan.baselines, only_ablations, advance)
    write(result, out)
    place = "" if cache.folder is None else f" in {cache.folder}"
    note(f"{result.passes:,} passes made, {result.cached} tables from the cache{place}")
    if result.skipped:
        image, reason = next(iter(result.skipped.items()))
        note(f"left out because unreadable: {several(len(result.skipped), 'image')}; the first: {image}: {reason}")
    say(result.tables[0].markdown())
    say(f"tables: {out / 'results.md'}; figures: {out / 'figures'}")
    return result


def _inspect(protocol: InspectionProtocol, backbone: Backbone, data: Path, out: Path, dry_run: bool) -> None:
    """Run a benchmark of inspection and write its table, or state its cost alone."""
    from gepc.core.tables import write_each, write_tables
    from gepc.images.sources import FileImages
    from gepc.lab.bench.inspection import run_inspection

    check_free(out, "categories", "benchmark")
    _, parts = protocol.parts(data)
    fitting, testing = sum(len(part.fit) for part in parts), sum(len(part.good) for part in parts)
    total = sum(part.images for part in parts)
    note(f"{fitting} good images to fit on, {testing} to test with, {total - fitting - testing} with defects")
    detector, images = protocol.detector(backbone), FileImages([path for part in parts for path in part.fit])
    estimate_fit(detector, images)
    size, memory = detector.network_size(images), detector.extractor.memory
    opt.estimate(backbone, size, total - fitting, detector.cost(), "for tests {:,} images", memory)
    if dry_run:
        return
    with progress("images", total) as advance:
        table = run_inspection(protocol, backbone, data, out, advance)
    write_each(out / "tables", [table])
    about = {"command": typed_command(), "backbone": backbone.source, "sha256": backbone.sha256}
    say(write_tables(out, "results", [table], about))


def _estimate(plan: _Plan, sizes: Sizes | None = None) -> tuple[str, int]:
    """What every method takes with an empty cache, as text, and the number of network passes."""
    from gepc.lab.bench.baselines import estimate_cost

    protocol, backbone = plan.protocol, plan.backbone
    size = (protocol.size, protocol.size)
    estimates = estimate_cost(protocol, backbone, plan.baselines, sizes)
    pass_seconds = seconds_per_pass(backbone, size)
    jvp_seconds = seconds_per_jvp(backbone, size) if any(one.per_image.jvp for one in estimates) else 0.0
    rows, passes, seconds = [], 0, 0.0
    for one in estimates:
        cost = one.per_image
        # the time of a Jacobian-vector product includes its forward pass
        own = one.images * ((cost.forward - cost.jvp) * pass_seconds + cost.jvp * jvp_seconds)
        rows.append((one.label, f"{one.images:,}", cost, f"{one.passes:,}", duration(own)))
        passes, seconds = passes + one.passes, seconds + own
    gigabytes = memory_of(size, protocol.batch_size) / 1e9
    memory = f" and {gigabytes:.1f} GB of memory" if backbone.device.type == "cpu" else ""
    table = text_table(rows, ("method", "images", "per image", "passes", "time"))
    return f"{table}\n{passes:,} network passes with an empty cache, about {duration(seconds)}{memory}", passes

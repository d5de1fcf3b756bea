"""`gepc sar`: radar patches from annotated scenes, and how well ships in sea clutter are detected."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from gepc.cli import options as opt
from gepc.cli.app import new_app, note, progress, say, several, typed_command
from gepc.cli.detect import estimate_fit
from gepc.cli.options import check_packages, duration, seconds_per_pass
from gepc.core.errors import InputError, OptionError
from gepc.core.files import check_free, write_text
from gepc.core.options import build
from gepc.lab.cli.setup import DEFAULT_SETUP, Setup

if TYPE_CHECKING:
    from gepc.backbones.base import Backbone
    from gepc.lab.radar.bench import SarProtocol

METHODS = "gepc+:radar,ca_cfar,os_cfar,rx"
ADDRESSES = {
    "HRSID": "https://github.com/chaozhong2010/HRSID",
    "SSDD": "https://github.com/TianwenZhang0825/Official-SSDD",
}

sar = new_app(name="sar", help="Radar images: detect ships and wakes in sea clutter.")

DataArgument = Annotated[
    Path, Argument(help="HRSID or SSDD in its original layout, or a folder of images with or without boxes.csv.")
]
Size = Annotated[int, Option(help="Side length of a patch in pixels.")]
Stride = Annotated[int | None, Option(help="Distance between patches in pixels; the patch size by default.")]
ShipShare = Annotated[float, Option(help="Smallest share of a ship that makes a patch out-of-distribution.")]
White = Annotated[float | None, Option(help="Magnitude that maps to white, for floating-point and complex images.")]
Normalise = Annotated[str, Option(help="Brightness scale: fixed (one for all patches) or patch (each its own).")]
TargetPixels = Annotated[float, Option(help="Number of pixels that a target covers.")]


def _value_range(white: float | None) -> tuple[float, float] | None:
    """The magnitudes of black and white; None takes white from the pixels."""
    if white is None:
        return None
    if not 0.0 < white < math.inf:
        raise OptionError(f"--white must be a positive magnitude, got {white:g}")
    return (0.0, white)


@sar.command()
def patches(
    data: DataArgument,
    out: Annotated[Path, Option(help="New .npz file.")],
    size: Size = 256,
    stride: Stride = None,
    ship_share: ShipShare = 0.5,
    split: Annotated[str | None, Option(help="Split to cut: train or test; all splits by default.")] = None,
    hold_out: Annotated[float | None, Option(help="Share of training images to leave out, to fit with later.")] = None,
    log: Annotated[bool, Option("--log", help="Write log-magnitude on a fixed scale, with 16 bits.")] = False,
    white: White = None,
    limit: Annotated[int | None, Option(min=1, help="Maximum number of patches of each class.")] = None,
    seed: Annotated[int, Option(help="Random seed for the selection of patches with --limit.")] = 0,
) -> None:
    """Cut annotated radar images into patches: sea clutter, and ships.

    The command writes the arrays `train_x` and `test_x` (no ship), `train_ship_x` and `test_ship_x`, each with its
    sources. Only HRSID has training images. For other data the command writes `test_x` and `test_ship_x`
    alone. Training and test patches never share an image, nor an area of the ground if the file names show it.

    Example: `gepc sar patches data/HRSID --out patches.npz --size 64 --split train --hold-out 0.35 --log`
    """
    from gepc.lab.radar.annotations import SPLITS, detect_layout, divide, open_scenes
    from gepc.lab.radar.patches import ARRAYS, PatchRules, cut, sample, stack, write_npz

    how = PatchRules(size, stride, ship_share)
    value_range = _value_range(white)
    if out.suffix != ".npz":
        raise OptionError(f"--out must be a file that ends in .npz, got {out}")
    names = list(SPLITS) if detect_layout(data) == "hrsid" else ["test"]
    wanted = names if split is None else [split]
    if hold_out is not None and "train" not in wanted:
        raise OptionError("--hold-out leaves training images out, but none are cut; of the layouts, HRSID has some")
    opened = {name: open_scenes(data, name) for name in {*names, *wanted}}
    arrays, sources = {}, {}
    for name in wanted:
        scenes = opened[name]
        apart = [scene for other in opened if other != name for scene in opened[other].scenes]
        if hold_out is not None and name == "train":
            scenes, _ = divide(scenes, hold_out)
        with progress(f"cutting {name}", len(scenes.scenes)) as advance:
            found = cut(scenes, how, apart, value_range, advance)
        counts = f"patches of clutter: {len(found.clutter)}, of ships: {len(found.ships)}"
        say(f"{name}: {several(len(scenes.scenes), 'image')}; {counts}")
        for reason, count in sorted(found.left_out.items()):
            say(f"  left out, {reason}: {count}")
        for array, chosen in zip(ARRAYS[name], (found.clutter, found.ships), strict=True):
            kept = sample(chosen, limit, seed)
            arrays[array], sources[array] = stack(kept, log, value_range), [patch.name for patch in kept]
    if not any(map(len, arrays.values())):
        raise InputError(f"{data} gives no patch of {size}x{size}; nothing was written")
    write_npz(out, arrays, sources)
    note(f"{out}: " + ", ".join(f"{name} {len(array)}" for name, array in arrays.items()))


@sar.command()
@opt.with_groups
def fit(
    patches: Annotated[str, Argument(help="Sea clutter: a folder of patches, or an array: patches.npz:train_x.")],
    out: opt.DetectorOut,
    backbone: opt.NewBackbone = "sar-small",
    target_pixels: TargetPixels = 200,
    method: Annotated[
        str, Option(help="gepc+:radar, ca_cfar, os_cfar, rx or gepc:paper (the paper's detector).")
    ] = "gepc+:radar",
    normalise: Normalise = "fixed",
    white: White = None,
    settings: opt.MethodSettings = None,
    loading: opt.Loading = opt.DEFAULT_LOADING,
) -> None:
    """Fit a radar detector on patches without targets, with options derived from the size of a target.

    Example: `gepc sar fit patches.npz:train_x --out det --target-pixels 200`
    """
    from gepc.images.sources import open_images
    from gepc.lab.radar.bench import CFARS, PAPER, TARGET_PIXELS, radar_detector

    if method == PAPER and target_pixels != TARGET_PIXELS:
        raise OptionError(f"--target-pixels does not go with {PAPER}, which pools the largest 30 % of the pixels")
    if method in CFARS and normalise != "fixed":
        raise OptionError(f"--normalise {normalise} does not go with {method}, which needs the intensity")
    check_free(out, "detector.json", "detector")
    collection = open_images(patches)
    first = next((record.pixels for record in collection if record.pixels is not None), None)
    if first is None:
        raise InputError(f"{patches} contains no readable image")
    options = {"value_range": _value_range(white), **opt.parse_settings(settings)}
    size = min(first.shape[:2])
    detector = radar_detector(loading.load(backbone), method, target_pixels, size, normalise, **options)
    estimate_fit(detector, collection)
    with progress("fitting", len(collection)) as advance:
        detector.fit(collection, on_progress=advance)
    detector.save(out)
    count = len(detector.calibration_scores_)
    say(f"{out}: fitted on {detector.fitted.fit_images} patches, calibrated on {count}")
    say(f"smallest false-alarm rate: {1 / (count + 1):.2g} per patch; for 0.001, calibrate on 999 patches")


@sar.command()
@opt.with_groups
def bench(
    data: DataArgument,
    out: Annotated[Path, Option(help="Folder for radar.md, radar.json, a CSV file for each table, and figures.")],
    ood: Annotated[list[Path] | None, Option(help="Further data with ships: SSDD, or a folder with boxes.csv.")] = None,
    methods: Annotated[str, Option(help="Methods to compare, separated by commas.")] = METHODS,
    limit: Annotated[int | None, Option(min=2, help="Maximum number of patches per test set.")] = None,
    fit_limit: Annotated[int | None, Option(min=12, help="Maximum number of patches to fit on.")] = None,
    normalise: Normalise = "fixed",
    dry_run: Annotated[bool, Option("--dry-run", help="Cut the patches, print the estimated time, and exit.")] = False,
    setup: Setup = DEFAULT_SETUP,
    loading: opt.Loading = opt.DEFAULT_LOADING,
) -> None:
    """Measure how well detectors distinguish ships from sea clutter, and where their maps point.

    Detectors are fitted on clutter from the training images that `gepc sar patches --hold-out` left out when the
    backbone was trained. A data set without a training split is divided by image. Further
    options are set with `--set`: size, stride and ship_share of the patches, hold_out, target_pixels, draws, seed.

    Example: `gepc sar bench data/HRSID --ood data/SSDD --backbone sar-small --out radar --limit 100`
    """
    from gepc.lab.radar.bench import SarProtocol

    check_free(out, "radar.json", "benchmark")
    names = tuple(word.strip() for word in methods.split(","))
    given = {"limit": limit, "fit_limit": fit_limit, "normalise": normalise, "methods": names}
    _check_settings(setup, given, "is an option of this command; give it without --set")
    protocol = build(SarProtocol, {**given, **setup.values()}, "radar benchmark")
    backbone = setup.load(loading, setup.backbone or "sar-small")
    _measure([(protocol, backbone)], data, ood or [], out, setup, dry_run)


def reproduce_radar(data: Path, out: Path, dry_run: bool, setup: Setup, loading: opt.Loading) -> None:
    """The paper's radar experiment, and beside it the detectors for practice (gepc+, CFAR, RX).

    The paper's detector runs on the network of `setup`, or on `photos-small`, a network of natural images as in the
    paper, and on `sar-small`. `data` is the folder that holds HRSID and SSDD in their original layouts.
    """
    from gepc.lab.radar.bench import PAPER, SarProtocol

    check_free(out, "radar.json", "benchmark")
    places = [data / name for name in ADDRESSES]
    for place in places:
        if not place.is_dir():
            raise InputError(f"{place} is not there: get {place.name} from {ADDRESSES[place.name]} and unpack it there")
    as_stated = {"methods": (PAPER,), "normalise": "patch", "localise": False}
    _check_settings(setup, as_stated, "does not go with the protocol radar, which fixes it")
    paper, practice = (build(SarProtocol, {**setup.values(), **own}, "radar") for own in (as_stated, {}))
    sources = ("photos-small", "sar-small") if setup.backbone is None else (setup.backbone,)
    networks = [setup.load(loading, source) for source in sources]
    runs = [*((paper, network) for network in networks), (practice, networks[-1])]
    _measure(runs, places[0], places[1:], out, setup, dry_run)


def _check_settings(setup: Setup, fixed: Collection[str], reason: str) -> None:
    """Refuse fields of the protocol in `--set` that something else decides."""
    for name in setup.values():
        if name in fixed:
            raise OptionError(f"--set {name}: {name} {reason}")


def _measure(
    runs: Sequence[tuple[SarProtocol, Backbone]], data: Path, ood: list[Path], out: Path, setup: Setup, dry_run: bool
) -> None:
    """Cut the patches, say how long it takes, measure every protocol, and write tables and figures."""
    from gepc.core.tables import write_tables
    from gepc.lab.radar.bench import PAPER, fit_and_score, gather, radar_table, write_figures
    from gepc.methods.extraction import FeatureCache

    size = runs[0][0].size
    for protocol, backbone in runs:
        backbone.check_size(size, size, "patches")
        if PAPER in protocol.methods:
            check_packages("a figure", "report", "matplotlib")
    sets = gather(runs[0][0], data, ood)
    for name, found in sets.cuts.items():
        left_out = ", ".join(f"{reason} {count}" for reason, count in sorted(found.left_out.items()))
        note(f"{name}: {len(found.clutter)} clutter, {len(found.ships)} ship patches; left out: {left_out or 'none'}")
    for protocol, backbone in runs:
        detectors = [protocol.detector(method, backbone) for method in protocol.methods]
        fitting = sum(detector.fit_cost((size, size)).forward for detector in detectors) * len(sets.fit)
        passes = fitting + sum(detector.cost().forward for detector in detectors) * (sets.total - len(sets.fit))
        took = duration(passes * seconds_per_pass(backbone, (size, size)))
        note(f"{backbone.source}: {sets.total} patches, at most {passes:,} network passes, about {took}")
    if dry_run:
        return
    tables, cache = [], FeatureCache(setup.cache_folder())
    for protocol, backbone in runs:
        with progress("measuring", sets.total * len(protocol.methods)) as advance:
            measured = [fit_and_score(protocol, name, sets, backbone, cache, advance) for name in protocol.methods]
        tables.append(radar_table(protocol, sets, measured))
        write_text(out / f"{tables[-1].name}.csv", tables[-1].csv())
        for item in measured:
            if item.method == PAPER:
                write_figures(out, tables[-1].name, item, sets)
    networks = {str(backbone.source): backbone.sha256 for _, backbone in runs}
    say(write_tables(out, "radar", tables, {"command": typed_command(), "networks": networks}))
    say(f"tables: {out}")

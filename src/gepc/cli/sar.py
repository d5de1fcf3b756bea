"""`gepc sar`: radar patches from annotated scenes, simulated sea clutter, and how well ships in it are found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gepc.cli.app import app, note, progress, say
from gepc.core.errors import InputError, OptionError
from gepc.core.files import check_free

sar = typer.Typer(
    name="sar",
    help="Radar: ships and wakes in sea clutter.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(sar)

DataArgument = Annotated[
    Path, typer.Argument(help="HRSID or SSDD in its own layout, or a folder of images with or without boxes.csv.")
]
SizeOption = Annotated[int, typer.Option(help="Pixels a side of a patch.")]
StrideOption = Annotated[int | None, typer.Option(help="Pixels from one patch to the next; side by side without it.")]
ShareOption = Annotated[float, typer.Option(help="A patch with this share of a ship or more is OOD.")]
LandOption = Annotated[bool, typer.Option("--no-land", help="Leave land out, by the rule of `gepc.sar.rules`.")]


@sar.command()
def patches(
    data: DataArgument,
    out: Annotated[Path, typer.Option(help="An .npz file, or a folder of image files.")],
    size: SizeOption = 256,
    stride: StrideOption = None,
    ship_share: ShareOption = 0.5,
    split: Annotated[
        str | None, typer.Option(help="train or test alone; all that the data set has without it.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="hrsid, ssdd or folder; told by the folders without it.")] = None,
    boxes: Annotated[Path | None, typer.Option(help="For a plain folder: a CSV file,x,y,width,height.")] = None,
    hold_out: Annotated[
        float | None, typer.Option(help="Leave out this share of the training images, to fit detectors on later.")
    ] = None,
    land: LandOption = False,
    log: Annotated[
        bool, typer.Option("--log", help="Write log-magnitude on the fixed scale, in 16-bit steps.")
    ] = False,
    white: Annotated[float | None, typer.Option(help="The magnitude that means white, for float and complex.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many patches of each class.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the patches of --limit.")] = 0,
) -> None:
    """Cut annotated radar images into patches: sea clutter, and ships.

    Writes `train_x` and `test_x` (no ship) and `train_ship_x`, `test_ship_x`, each with its sources. Train and test
    patches never share an image, nor ground where the file names tell it.

    Example: `gepc sar patches data/HRSID --out patches.npz --size 64 --split train --hold-out 0.35 --log`
    """
    from gepc.sar.load import SPLITS, detect_layout, divide, open_scenes
    from gepc.sar.patches import PatchRules, cut, sample
    from gepc.sar.storage import ARRAYS, stack, write_folder, write_npz

    how = PatchRules(size, stride, ship_share, land)
    value_range = None if white is None else (0.0, white)
    if out.suffix not in ("", ".npz"):
        raise OptionError(f"--out is an .npz file or a folder, got {out}")
    known = detect_layout(data) if layout is None else layout
    names = list(SPLITS) if known == "hrsid" else ["test"]
    opened = {name: open_scenes(data, name, known, boxes) for name in (names if split is None else {*names, split})}
    arrays, sources = {}, {}
    for name in names if split is None else [split]:
        scenes = opened[name]
        apart = [scene for other in opened if other != name for scene in opened[other].scenes]
        if hold_out is not None and name == "train":
            scenes, _ = divide(scenes, hold_out)
        with progress(f"cutting {name}", len(scenes.scenes)) as advance:
            found = cut(scenes, how, apart, value_range, advance)
        say(f"{name}: {found.scenes} images, {len(found.clutter)} clutter and {len(found.ships)} ship patches")
        say(f"  boxes clipped to their image: {scenes.clipped_boxes}, wholly outside: {scenes.dropped_boxes}")
        for reason, count in sorted(found.left_out.items()):
            say(f"  left out, {reason}: {count}")
        for array, chosen in zip(ARRAYS[name], (found.clutter, found.ships), strict=True):
            kept = sample(chosen, limit, seed)
            arrays[array], sources[array] = stack(kept, log, value_range), [patch.name for patch in kept]
    if not any(map(len, arrays.values())):
        raise InputError(f"no patch of {size}x{size} is left of {data}; nothing was written")
    (write_npz if out.suffix == ".npz" else write_folder)(out, arrays, sources)
    note(f"{out}: " + ", ".join(f"{name} {len(array)}" for name, array in arrays.items()))


@sar.command()
def simulate(
    out: Annotated[Path, typer.Option(help="A new folder: 8-bit PNG scenes and boxes.csv.")],
    count: Annotated[int, typer.Option(min=1, help="Scenes.")] = 8,
    size: Annotated[int, typer.Option(min=64, help="Pixels a side.")] = 512,
    ships: Annotated[int, typer.Option(min=0, help="Ships in each scene; 0 is open sea.")] = 2,
    nu: Annotated[float, typer.Option(help="Shape of the texture: small is spiky.")] = 4.0,
    looks: Annotated[float, typer.Option(help="Looks of the speckle.")] = 2.0,
    correlation: Annotated[float, typer.Option(help="Correlation length of the texture, in pixels.")] = 6.0,
    seed: Annotated[int, typer.Option(help="Scene k of a seed is always the same.")] = 0,
) -> None:
    """Simulate K-distributed sea clutter with ships and wakes; the result can be read by all `gepc sar` commands.

    Example: `gepc sar simulate --out sea --count 4 --ships 2`
    """
    from gepc.sar.simulate import Sea
    from gepc.sar.storage import write_simulation

    sea = Sea(nu, looks, correlation)
    with progress("simulating", count) as advance:
        boxes = write_simulation(out, sea, count, size, ships, seed, advance)
    say(f"{out}: {count} scenes of {size}x{size}, {boxes} ships in boxes.csv")


@sar.command()
def fit(
    patches: Annotated[str, typer.Argument(help="Sea clutter: a folder of patches, or an array: patches.npz:train_x.")],
    out: Annotated[Path, typer.Option(help="Where the detector goes (a folder).")],
    backbone: Annotated[str, typer.Option(help="An embedded name or a diffusers folder.")] = "sar-tiny",
    target_pixels: Annotated[float, typer.Option(help="How many pixels a target covers.")] = 200,
    sides: Annotated[str, typer.Option(help="one: only larger residuals alarm; two: smaller ones too.")] = "one",
    normalise: Annotated[str, typer.Option(help="fixed keeps levels comparable; patch takes them out.")] = "fixed",
    white: Annotated[float | None, typer.Option(help="The magnitude that means white, for float and complex.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any option of the detector.")
    ] = None,
) -> None:
    """Fit a radar detector on patches without targets, with options from the size of the target.

    Example: `gepc sar fit patches.npz:train_x --out det --target-pixels 200`
    """
    import gepc
    from gepc.cli.app import parse_settings
    from gepc.images.sources import open_images
    from gepc.sar.preset import sar_options

    collection = open_images(patches)
    first = next(
        (record for record in map(collection.__getitem__, range(len(collection))) if record.pixels is not None), None
    )
    if first is None or first.pixels is None:
        raise InputError(f"{patches} holds no image that can be read")
    options = sar_options(target_pixels, min(first.pixels.shape[:2]), sides, normalise)
    options["value_range"] = None if white is None else (0.0, white)
    detector = gepc.create_detector(
        "gepc", gepc.load_backbone(backbone), **{**options, **parse_settings(settings or [])}
    )
    with progress("fitting", len(collection)) as advance:
        detector.fit(collection, on_progress=advance)
    detector.save(out)
    say(f"{out}: fitted on {detector.n_fit_} patches, {len(detector.calibration_scores_)} held out for p-values")


@sar.command()
def bench(
    data: Annotated[Path, typer.Argument(help="HRSID in its own layout.")],
    out: Annotated[Path, typer.Option(help="A folder for tables and the figure.")],
    backbone: Annotated[str, typer.Option(help="An embedded name, a diffusers folder, an OpenAI .pt.")] = "sar-tiny",
    ood: Annotated[list[Path] | None, typer.Option(help="Further ships: SSDD, or a folder with boxes.csv.")] = None,
    size: SizeOption = 256,
    stride: StrideOption = None,
    ship_share: ShareOption = 0.5,
    land: LandOption = False,
    limit: Annotated[int, typer.Option(min=2, help="Patches of each test set, at most.")] = 200,
    fit_limit: Annotated[int, typer.Option(min=8, help="Patches to fit on, at most.")] = 200,
    hold_out: Annotated[float, typer.Option(help="Share of the training images to fit on.")] = 0.35,
    levels: Annotated[str, typer.Option(help="Noise levels, sqrt(abar).")] = "0.99",
    keep: Annotated[int | None, typer.Option(help="Keep so many levels, the most stable on clutter.")] = None,
    group: Annotated[str, typer.Option(help="Elements besides the identity.")] = "rot180",
    target_pixels: Annotated[float, typer.Option(help="How many pixels a target covers.")] = 200,
    normalise: Annotated[str, typer.Option(help="fixed, patch, or both with a comma.")] = "fixed,patch",
    draws: Annotated[int, typer.Option(min=10, help="Draws of source images behind each interval.")] = 300,
    cache: Annotated[Path, typer.Option(help="Where residuals are kept between runs.")] = Path(".gepc-cache"),
    seed: Annotated[int, typer.Option(help="Noise, and which patches.")] = 0,
) -> None:
    """Measure how well ships are told from sea clutter, and where the maps point.

    Detectors are fitted on clutter of training images that `gepc sar patches --hold-out` kept from the backbone. A
    stopped run goes on where it was.

    Example: `gepc sar bench data/HRSID --ood data/SSDD --backbone sar-tiny --out radar --limit 100`
    """
    import gepc
    from gepc.cli.backbones import seconds_per_pass
    from gepc.sar.bench import measure, tables
    from gepc.sar.figure import draw
    from gepc.sar.patches import PatchRules
    from gepc.sar.protocol import SarProtocol, gather
    from gepc.sar.storage import write_bench

    check_free(out, "results.json", "benchmark")
    protocol = SarProtocol(
        rules=PatchRules(size, stride, ship_share, land),
        hold_out=hold_out,
        fit_limit=fit_limit,
        limit=limit,
        levels=levels,
        keep=keep,
        group=("id", *group.split(",")),
        target_pixels=target_pixels,
        normalisations=tuple(normalise.split(",")),
        draws=draws,
        seed=seed,
    )
    loaded = gepc.load_backbone(backbone)
    sets = gather(protocol, data, ood or [])
    extractor = next(iter(protocol.extractors().values()))
    total = sets.total * len(protocol.normalisations)
    passes = total * extractor.cost(loaded, (size, size)).forward
    seconds = passes * seconds_per_pass(loaded, (size, size))
    note(f"{total} patches, {passes:,} network passes with an empty cache, about {seconds / 60:.1f} minutes")
    with progress("measuring", total) as advance:
        measured = measure(protocol, sets, loaded, cache, advance)
    found = tables(measured)
    write_bench(out, found, draw(measured), measured, _command())
    for table in found:
        say(table.markdown())
    say(f"tables and figure: {out}")


def _command() -> str:
    import shlex
    import sys

    return shlex.join(["gepc", *sys.argv[1:]])

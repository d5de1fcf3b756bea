"""`gepc scene`: a detector applied to an image of any size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gepc.cli.app import app, note, progress, say
from gepc.cli.backbones import seconds_per_pass
from gepc.cli.detect import BackboneOption, BatchSizeOption, DetectorArgument
from gepc.core.errors import OptionError

if TYPE_CHECKING:
    from gepc.detector.detector import Detector
    from gepc.scenes import Plan

QUICK = 2000  # network passes that need no estimate


@app.command()
def scene(
    detector: DetectorArgument,
    image: Annotated[Path, typer.Argument(metavar="SCENE", help="An image of any size: TIFF, GeoTIFF, PNG, .npy ...")],
    out: Annotated[Path, typer.Option(help="A folder for the results; an interrupted run there goes on.")],
    tile: Annotated[str | None, typer.Option(help="Tile size, 64 or 64x96; by default the detector's.")] = None,
    stride: Annotated[str | None, typer.Option(help="Pixels from one tile to the next, 16 or 16x24.")] = None,
    overlap: Annotated[float | None, typer.Option(help="Instead of --stride: the shared part of a tile [0.5].")] = None,
    bands: Annotated[str | None, typer.Option(help="Bands to use, counted from 1, such as 4,3,2.")] = None,
    nodata: Annotated[float | None, typer.Option(help="A pixel value that means no-data.")] = None,
    max_missing: Annotated[float, typer.Option(help="Leave out tiles with more no-data than this share.")] = 0.1,
    control: Annotated[
        str,
        typer.Option(
            help="bh or by: rate of false flags among the flags; holm or bonferroni: probability of any false flag "
            "in the scene; tile: rate for each tile by itself."
        ),
    ] = "bh",
    alpha: Annotated[float, typer.Option(help="The rate that --control holds.")] = 0.05,
    group: Annotated[str | None, typer.Option(help="Compare with this group of a detector fitted with groups.")] = None,
    map_format: Annotated[str, typer.Option(help="tif, npy, or auto: TIFF where rasterio is installed.")] = "auto",
    backbone: BackboneOption = None,
    batch_size: BatchSizeOption = None,
) -> None:
    """Score an image of any size: overlapping tiles, one seamless map, flagged regions, a promise for the scene.

    Writes tiles.csv, map.tif, regions.csv, regions.geojson, overview.png and scene.json. Run the same command again
    after an interruption: no tile is lost or scored twice.

    Example: `gepc scene det harbour.tif --out harbour --overlap 0.5 --control holm --alpha 0.05`
    """
    import gepc
    from gepc.scenes import plan_scan, scan

    loaded = gepc.load_detector(detector, backbone)
    if batch_size is not None:
        loaded.batch_size = batch_size
    options: dict[str, Any] = {
        "tile": _pixels("--tile", tile),
        "stride": _pixels("--stride", stride),
        "overlap": overlap,
        "bands": None if bands is None else _numbers("--bands", bands, ","),
        "nodata": nodata,
        "max_missing": max_missing,
        "control": control,
        "alpha": alpha,
        "group": group,
        "map_format": map_format,
    }
    plan = plan_scan(loaded, image, out, **options)
    _estimate(loaded, plan)
    with progress("tiles", plan.tiles) as advance:
        report = scan(loaded, image, out, on_progress=advance, **options)
    counts = report.counts
    if report.resumed:
        note(f"{report.resumed} of {plan.tiles} tiles were done by an earlier run")
    say(
        f"{out}: {counts['scored']} tiles scored, {counts['left_out']} left out for no-data, "
        f"{counts['failed']} failed; {counts['flagged']} flagged in {counts['regions']} regions"
    )
    for region in report.regions[:10]:
        box = region["pixel_box"]
        say(
            f"{region['region']:>4}  score {region['score']:.4g}  p = {region['p_value']:.3g}  "
            f"lines {box['top']}-{box['bottom']}, columns {box['left']}-{box['right']}"
        )
    if counts["regions"] > 10:
        say(f"      and {counts['regions'] - 10} more in {out / 'regions.csv'}")
    note(f"guarantee: {report.guarantee}")


def _estimate(detector: Detector, plan: Plan) -> None:
    """Before many passes, how many there are at most and how long they take on this machine."""
    tiles = plan.tiles - plan.done
    passes = tiles * (plan.cost.forward + 2 * plan.cost.jvp)
    if passes < QUICK:
        return
    seconds = passes * seconds_per_pass(detector.backbone, detector.input_size)
    duration = f"{seconds / 60:.1f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
    each = plan.cost.forward + plan.cost.jvp
    note(f"at most {tiles:,} tiles x {each} passes = {tiles * each:,} network passes, about {duration}")


def _pixels(option: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    sides = _numbers(option, text.lower(), "x")
    if len(sides) > 2:
        raise OptionError(f"{option} takes 64 or 64x96 (height x width), got {text!r}")
    return sides[0], sides[-1]


def _numbers(option: str, text: str, separator: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(separator))
    except ValueError as error:
        raise OptionError(f"{option} takes whole numbers, got {text!r}") from error

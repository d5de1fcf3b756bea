"""`gepc fit`, `gepc score`, `gepc map`: a detector from images, verdicts and pictures from a detector."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gepc.cli.app import app, note, parse_settings, progress, say
from gepc.cli.backbones import seconds_per_pass
from gepc.errors import InputError, OptionError
from gepc.files import replacing, write_json

if TYPE_CHECKING:
    from gepc.detector import Detector, Result
    from gepc.images import Images

COLUMNS = ("path", "score", "p_value", "alarm", "error")

ImagesArgument = Annotated[str, typer.Argument(help="A folder, an image file, or an array: data.npz:test_x.")]
DetectorArgument = Annotated[Path, typer.Argument(help="A detector folder written by `gepc fit`.")]
BackboneOption = Annotated[
    str | None, typer.Option(help="Use this backbone instead of the one the detector was fitted with.")
]
BatchSizeOption = Annotated[int | None, typer.Option(min=1, help="Images handed to the network at once.")]


@app.command()
def fit(
    images: Annotated[str, typer.Argument(help="In-distribution images: a folder, or an array: data.npz:train_x.")],
    out: Annotated[Path, typer.Option(help="Where the detector goes (a folder).")],
    backbone: Annotated[
        str, typer.Option(help="An embedded name, a diffusers folder, an OpenAI .pt.")
    ] = "celeba32-tiny",
    method: Annotated[str, typer.Option(help="The detection method.")] = "gepc",
    preset: Annotated[str | None, typer.Option(help="A named set of the method's options.")] = None,
    calibration_images: Annotated[str | None, typer.Option(help="Images for the p-values, besides the others.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any option of the method or detector.")
    ] = None,
) -> None:
    """Fit a detector on in-distribution images and save it.

    Example: `gepc fit photos/normal --out det --set size=32 --set keep=2`
    """
    import gepc
    from gepc.images import open_images

    detector = gepc.create_detector(method, gepc.load_backbone(backbone), preset, **parse_settings(settings or []))
    collection = open_images(images)
    reference = None if calibration_images is None else open_images(calibration_images)
    total = len(collection) + (len(reference) if reference is not None else 0)
    _estimate(detector, total, detector.fit_cost().forward, detector.fit_cost().jvp)
    with progress("fitting", total) as advance:
        detector.fit(collection, reference, on_progress=advance)
    detector.save(out)
    kept = ", ".join(f"{t} ({weight:.3f})" for t, weight in zip(detector.kept_, detector.weights_, strict=True))
    say(
        f"{out}: {method} fitted on {detector.n_fit_} images, {len(detector.calibration_scores_)} held out for p-values"
    )
    say(f"kept timesteps (weight): {kept} of {', '.join(map(str, detector.levels_))}; {detector.cost()} per image")
    _say_guarantee(detector)


@app.command()
def score(
    detector: DetectorArgument,
    images: ImagesArgument,
    out: Annotated[Path | None, typer.Option(help="A CSV file; standard output without it.")] = None,
    alpha: Annotated[float, typer.Option(help="False-alarm rate of the verdict.")] = 0.05,
    backbone: BackboneOption = None,
    batch_size: BatchSizeOption = None,
) -> None:
    """Score images: one row each with score, p-value, alarm, and the reason where a file could not be scored.

    Example: `gepc score det photos/new --out scores.csv --alpha 0.01`
    """
    loaded, collection = _open(detector, images, backbone, batch_size)
    guarantee = loaded.guarantee(alpha)
    cost = loaded.cost()
    _estimate(loaded, len(collection), cost.forward, cost.jvp)
    with progress("scoring", len(collection)) as advance:
        results = loaded.results(collection, on_progress=advance)
        if out is None:
            rows = [_row(result, alpha) for result in results]
            say(",".join(COLUMNS))
            for row in rows:
                say(",".join(_quote(value) for value in row))
        else:
            rows = _write_csv(out, results, alpha)
    alarms = sum(row[3] == "true" for row in rows)
    failures = sum(bool(row[4]) for row in rows)
    note(f"{len(rows)} images, {alarms} alarms at alpha {alpha:g}, {failures} could not be scored" + _place(out))
    note(f"guarantee: {guarantee}")


@app.command(name="map")
def map_(
    detector: DetectorArgument,
    images: ImagesArgument,
    out: Annotated[Path, typer.Option(help="A folder for pictures, arrays and metadata.json.")],
    backbone: BackboneOption = None,
    batch_size: BatchSizeOption = None,
) -> None:
    """Write equivariance-breaking maps: per image an overlay (PNG) and the raw map (NPY), all on one common scale.

    Example: `gepc map det photos/new --out maps`
    """
    from gepc.maps import write_maps

    loaded, collection = _open(detector, images, backbone, batch_size)
    if out.exists() and not (out / "metadata.json").exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty and holds no maps; give another folder")
    cost = loaded.cost()
    _estimate(loaded, len(collection), cost.forward, cost.jvp)
    with progress("mapping", len(collection)) as advance:
        entries = write_maps(loaded, collection, out, on_progress=advance)
    write_json(out / "metadata.json", {"scale": loaded.map_scale_, "detector": str(detector), "images": entries})
    failures = sum(entry["error"] is not None for entry in entries)
    say(f"{len(entries) - failures} maps in {out}, {failures} failures; common scale {loaded.map_scale_:.4g}")


def _open(folder: Path, images: str, backbone: str | None, batch_size: int | None) -> tuple[Detector, Images]:
    import gepc
    from gepc.images import open_images

    detector = gepc.load_detector(folder, backbone)
    if batch_size is not None:
        detector.batch_size = batch_size
    return detector, open_images(images)


def _say_guarantee(detector: Detector) -> None:
    try:
        say(f"guarantee: {detector.guarantee()}")
    except OptionError as error:
        say(f"no verdict at alpha 0.05 yet: {error}")


def _estimate(detector: Detector, images: int, forward: int, jvp: int, quick: int = 2000) -> None:
    """Before work of many passes, say how many and how long they take on this machine."""
    passes = images * (forward + 2 * jvp)
    if passes < quick:
        return
    seconds = passes * seconds_per_pass(detector.backbone, detector.input_size)
    duration = f"{seconds / 60:.1f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
    note(f"{images} images x {forward + jvp} passes = {images * (forward + jvp):,} network passes, about {duration}")


def _row(result: Result, alpha: float) -> tuple[str, ...]:
    if result.error is not None:
        return (result.name, "", "", "", result.error)
    alarm = "true" if result.p_value <= alpha else "false"
    return (result.name, f"{result.score:.9g}", f"{result.p_value:.9g}", alarm, "")


def _write_csv(out: Path, results: Any, alpha: float) -> list[tuple[str, ...]]:
    rows = []
    with replacing(out) as draft, open(draft, "w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(COLUMNS)
        for result in results:
            rows.append(_row(result, alpha))
            writer.writerow(rows[-1])
    return rows


def _quote(value: str) -> str:
    return '"' + value.replace('"', '""') + '"' if any(mark in value for mark in ',"\n') else value


def _place(out: Path | None) -> str:
    return "" if out is None else f"; {out}"

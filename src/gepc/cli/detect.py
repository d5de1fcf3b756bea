"""`gepc fit`, `gepc score`, `gepc map`: a detector from images, verdicts and pictures from a detector."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
GroupsOption = Annotated[
    str | None, typer.Option(help="Calibrate within groups: `folder`, or a file with one label per image.")
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
    groups: GroupsOption = None,
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
        labels = _read_groups(groups, reference if reference is not None else collection)
        detector.fit(collection, reference, labels, on_progress=advance)
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
    confidence: Annotated[
        float | None, typer.Option(help="Hold the rate for these calibration images with this probability.")
    ] = None,
    fdr: Annotated[float | None, typer.Option(help="Flag so that this share of the flags is false, at most.")] = None,
    procedure: Annotated[str, typer.Option(help="With --fdr: bh or storey.")] = "bh",
    groups: GroupsOption = None,
    backbone: BackboneOption = None,
    batch_size: BatchSizeOption = None,
) -> None:
    """Score images: one row each with score, p-value, alarm, and the reason where a file could not be scored.

    The alarm is p <= alpha for each image by itself; with `--fdr` it is a flag among all images of the run.

    Example: `gepc score det photos/new --out scores.csv --alpha 0.01`
    """
    loaded, collection = _open(detector, images, backbone, batch_size)
    labels = _read_groups(groups, collection)
    rule = _Rule(loaded, alpha, confidence, fdr, procedure)
    cost = loaded.cost()
    _estimate(loaded, len(collection), cost.forward, cost.jvp)
    with progress("scoring", len(collection)) as advance:
        results = list(loaded.results(collection, groups=labels, on_progress=advance))
    alarms = rule.alarms(results, labels)
    rows = [_row(result, alarm) for result, alarm in zip(results, alarms, strict=True)]
    if out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows([COLUMNS, *rows])
    else:
        with replacing(out) as draft, open(draft, "w", newline="", encoding="utf-8") as handle:
            csv.writer(handle).writerows([COLUMNS, *rows])
    failures = sum(result.error is not None for result in results)
    place = "" if out is None else f"; {out}"
    note(f"{len(rows)} images, {sum(alarms)} alarms, {failures} could not be scored{place}")
    note(f"guarantee: {rule.statement()}")


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


class _Rule:
    """Which rows alarm, and what may be said of the alarms."""

    def __init__(
        self, detector: Detector, alpha: float, confidence: float | None, fdr: float | None, procedure: str
    ) -> None:
        from gepc.discovery import discoveries

        self.detector, self.alpha, self.confidence = detector, alpha, confidence
        self.fdr, self.procedure = fdr, procedure
        if fdr is not None:
            discoveries([0.5], fdr, procedure)  # refuses a bad rate before any work
        elif not detector.reference_.grouped:
            detector.reference_.limits(alpha, confidence, None)

    def alarms(self, results: list[Result], labels: Sequence[str] | str | None) -> list[bool]:
        import numpy as np

        from gepc.conformal import group_labels
        from gepc.discovery import discoveries
        from gepc.images import FileImages

        scored = np.array([result.error is None for result in results], dtype=bool)
        p = np.array([result.p_value for result in results])
        flags = np.zeros(len(results), dtype=bool)
        if self.fdr is not None:
            flags[scored] = discoveries(p[scored], self.fdr, self.procedure)
        else:
            names = FileImages([Path(result.name) for result in results])
            own = group_labels(labels, names, np.arange(len(results)))
            limits = self.detector.reference_.limits(self.alpha, self.confidence, own)
            flags[scored] = (p <= limits)[scored]
        return [bool(flag) for flag in flags]

    def statement(self) -> str:
        if self.fdr is not None:
            return f"on average at most {self.fdr:g} of the flags are false ({self.procedure})"
        if self.confidence is not None:
            return (
                f"with probability {self.confidence:g} over calibration sets, at most {self.alpha:g} "
                "of in-distribution images raise an alarm"
            )
        return str(self.detector.guarantee(self.alpha))


def _read_groups(groups: str | None, images: Images) -> list[str] | str | None:
    """`folder`, or a text file with one label per image in the order of the images."""
    if groups is None or groups == "folder":
        return groups
    try:
        labels = Path(groups).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--groups is 'folder' or a text file with one label per line; {groups}: {error}") from error
    if len(labels) != len(images):
        raise InputError(f"{groups} has {len(labels)} labels for {len(images)} images")
    return labels


def _row(result: Result, alarm: bool) -> tuple[str, ...]:
    if result.error is not None:
        return (result.name, "", "", "", result.error)
    return (result.name, f"{result.score:.9g}", f"{result.p_value:.9g}", str(alarm).lower(), "")

"""`gepc fit` and `gepc map`: a detector from images, and pictures from a detector; `gepc score` has its own file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gepc.cli.app import app, note, parse_settings, progress, say
from gepc.cli.backbones import seconds_per_pass
from gepc.core.errors import InputError, OptionError, check_choice
from gepc.core.files import check_free, write_json

if TYPE_CHECKING:
    from gepc.detector.detector import Detector
    from gepc.features.extraction import Engine
    from gepc.images.sources import Images

ImagesArgument = Annotated[str, typer.Argument(help="A folder, an image file, or an array: data.npz:test_x.")]
DetectorArgument = Annotated[Path, typer.Argument(help="A detector folder written by `gepc fit`.")]
BackboneOption = Annotated[
    str | None, typer.Option(help="Use this backbone instead of the one the detector was fitted with.")
]
GroupsOption = Annotated[
    str | None, typer.Option(help="Calibrate within groups: `folder`, or a file with one label per image.")
]
BatchSizeOption = Annotated[int | None, typer.Option(min=1, help="Images handed to the network at once.")]
ENGINES = ("local", "ray")
EngineOption = Annotated[str, typer.Option(help="local or ray (a cluster).")]
AddressOption = Annotated[str | None, typer.Option(help="With ray: the cluster; a new one on this machine else.")]
ActorsOption = Annotated[int | None, typer.Option(min=1, help="With ray: the most processes that work at once.")]
CpusOption = Annotated[float, typer.Option(min=0.1, help="With ray: processors of each actor.")]
GpusOption = Annotated[float, typer.Option(min=0.0, help="With ray: GPUs of each actor.")]


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
    budget: Annotated[
        int | None, typer.Option(min=2, help="With gepc and gepc+: at most this many network passes per image.")
    ] = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    actors: ActorsOption = None,
    cpus_per_actor: CpusOption = 1.0,
    gpus_per_actor: GpusOption = 0.0,
) -> None:
    """Fit a detector on in-distribution images and save it.

    Example: `gepc fit photos/normal --out det --set size=32 --set keep=2`
    """
    import gepc
    from gepc.images.sources import open_images

    detector = gepc.create_detector(method, gepc.load_backbone(backbone), preset, **parse_settings(settings or []))
    collection = open_images(images)
    reference = None if calibration_images is None else open_images(calibration_images)
    if budget is not None:
        detector = _plan(detector, collection, budget)
    total = len(collection) + (len(reference) if reference is not None else 0)
    estimate(detector, total, detector.fit_cost().forward, detector.fit_cost().jvp)
    with progress("fitting", total) as advance:
        labels = read_groups(groups, reference if reference is not None else collection)
        cluster = feature_engine(engine, address, actors, cpus_per_actor, gpus_per_actor)
        detector.fit(collection, reference, labels, advance, cluster)
    detector.save(out)
    kept = ", ".join(f"{t} ({weight:.3f})" for t, weight in zip(detector.kept_, detector.weights_, strict=True))
    say(
        f"{out}: {method} fitted on {detector.n_fit_} images, {len(detector.calibration_scores_)} held out for p-values"
    )
    say(f"kept timesteps (weight): {kept} of {', '.join(map(str, detector.levels_))}; {detector.cost()} per image")
    if detector.sequential is not None:
        share = detector.mean_levels_ / len(detector.kept_)
        say(f"sequential: an in-distribution image needs {share:.0%} of these passes on average")
    _say_guarantee(detector)


@app.command(name="map")
def map_(
    detector: DetectorArgument,
    images: ImagesArgument,
    out: Annotated[Path, typer.Option(help="A folder for pictures, arrays and metadata.json.")],
    scale: Annotated[
        str, typer.Option(help="global: one scale for all; image: each its own, which shows structure anywhere.")
    ] = "global",
    part: Annotated[
        str | None, typer.Option(help="With gepc+: sum, residual or error; as fitted without it, on the same scale.")
    ] = None,
    backbone: BackboneOption = None,
    batch_size: BatchSizeOption = None,
) -> None:
    """Write equivariance-breaking maps: per image an overlay with a colour bar (PNG) and the raw map (NPY).

    Example: `gepc map det photos/new --out maps`
    """
    from gepc.detector.maps import with_map_part, write_maps

    loaded, collection = open_both(detector, images, backbone, batch_size)
    if part is not None:
        loaded = with_map_part(loaded, part)
    check_free(out, "metadata.json", "maps")
    cost = loaded.cost()
    estimate(loaded, len(collection), cost.forward, cost.jvp)
    with progress("mapping", len(collection)) as advance:
        entries = write_maps(loaded, collection, out, scale, advance)
    shown = {"scale": loaded.map_scale_, "part": getattr(loaded.extractor, "map_part", None)}
    write_json(out / "metadata.json", {**shown, "detector": str(detector), "images": entries})
    failures = sum(entry["error"] is not None for entry in entries)
    say(f"{len(entries) - failures} maps in {out}, {failures} failures; common scale {loaded.map_scale_:.4g}")


def open_both(folder: Path, images: str, backbone: str | None, batch_size: int | None) -> tuple[Detector, Images]:
    """The detector, with that batch size if one is given, and the images."""
    import gepc
    from gepc.images.sources import open_images

    detector = gepc.load_detector(folder, backbone)
    if batch_size is not None:
        detector.batch_size = batch_size
    return detector, open_images(images)


def _plan(detector: Detector, images: Images, passes: int) -> Detector:
    from gepc.detector.planning import within_budget

    plan = within_budget(detector, images, passes)
    levels = ", ".join(map(str, (plan.timesteps or ())))
    note(
        f"{passes} passes: timesteps {levels} under {', '.join(plan.elements)}; finding out took {plan.passes:,} passes"
    )
    return plan.apply(detector)


def feature_engine(
    engine: str, address: str | None, actors: int | None, cpus_per_actor: float, gpus_per_actor: float
) -> Engine | None:
    """What makes the passes of fitting and benchmarks elsewhere; None is this process."""
    check_choice("engine", engine, ENGINES)
    if engine == "local":
        return None
    from gepc.runs.cluster import Cluster
    from gepc.runs.features import FeaturesOnCluster

    return FeaturesOnCluster(Cluster(address, actors, cpus_per_actor, gpus_per_actor))


def _say_guarantee(detector: Detector) -> None:
    try:
        say(f"guarantee: {detector.guarantee()}")
    except OptionError as error:
        say(f"no verdict at alpha 0.05 yet: {error}")


def estimate(detector: Detector, images: int, forward: int, jvp: int, quick: int = 2000) -> None:
    """Before work of many passes, say how many and how long they take on this machine."""
    passes = images * (forward + 2 * jvp)
    if passes < quick:
        return
    seconds = passes * seconds_per_pass(detector.backbone, detector.input_size)
    duration = f"{seconds / 60:.1f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
    note(f"{images} images x {forward + jvp} passes = {images * (forward + jvp):,} network passes, about {duration}")


def read_groups(groups: str | None, images: Images) -> list[str] | str | None:
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

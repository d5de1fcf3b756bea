"""The commands fit, map, scene, watch and serve: make a detector and apply it."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from gepc.cli import options as opt
from gepc.cli.app import note, progress, say, several, text_table
from gepc.core.errors import GepcError, OptionError, raising
from gepc.core.files import check_free, check_name, only_writer, write_json
from gepc.core.options import DEFAULT_BACKBONE
from gepc.core.run_folder import storage_errors

if TYPE_CHECKING:
    from gepc.detector.detector import Detector
    from gepc.detector.fitted import FittedDetector
    from gepc.images.sources import Images
    from gepc.runs.watch import Watch
    from gepc.scenes import SceneReport

SHOWN = 10  # detections and regions of a scene
SHOWN_COLUMNS = {
    "detections": ("detection", "score", "p_value", "line", "column", "area", "x", "y"),
    "regions": ("region", "score", "p_value", "top", "left", "bottom", "right"),
}
ShownBands = Annotated[str | None, Option(help="Band shown as grey, or red, green and blue (from 1): 4,3,2.")]
SCALE_HELP = "Colour scale: readable (structure stays visible), global (one for all maps) or image (one each)."
CONTROL_HELP = "Error rate: bh or by (false discoveries), holm (any false alarm in a scene) or tile (of each tile)."
MEGAPIXELS_HELP = "Maximum size of an image as the network sees it; a megapixel takes up to 4.3 GB of memory."
METHOD_HELP = "Detection method: gepc+, gepc (the paper's), or another one that `gepc info --methods` lists."
PRESET_HELP = (
    "Preset of the method. gepc+: fast (2 passes, the default), full (12 passes, a little more accurate), single (1 "
    "pass, no transform), radar (targets that are small in their image), inspect (parts in their own size)."
)


@opt.with_groups
def fit(
    images: Annotated[str, Argument(help="In-distribution images: a folder, or an array: data.npz:train_x.")],
    out: opt.DetectorOut,
    backbone: opt.NewBackbone = DEFAULT_BACKBONE,
    method: Annotated[str, Option(help=METHOD_HELP)] = "gepc+",
    preset: Annotated[str | None, Option(help=PRESET_HELP)] = None,
    calibration_images: Annotated[str | None, Option(help="In-distribution images for calibration only.")] = None,
    ignore: Annotated[Path | None, Option(help="Mask as large as the images; only its black pixels count.")] = None,
    groups: opt.Groups = None,
    settings: opt.MethodSettings = None,
    loading: opt.Loading = opt.DEFAULT_LOADING,
    as_json: opt.AsJson = False,
) -> None:
    """Fit a detector on in-distribution images and save it.

    Example: `gepc fit photos/normal --out det --set size=128`
    """
    import gepc
    from gepc.images.sources import open_images

    check_name(out)
    check_free(out, "detector.json", "detector")
    parameters = opt.parse_settings(settings)
    if ignore is not None:
        parameters["ignore"] = ignore
    loading.refuse(parameters)
    detector = gepc.create_detector(loading.load(backbone), method, preset, **parameters)
    collection = open_images(images)
    calibration = None if calibration_images is None else open_images(calibration_images)
    total = len(collection) + (0 if calibration is None else len(calibration))
    labels = opt.read_groups(groups, collection if calibration is None else calibration)
    estimate_fit(detector, collection, total - len(collection))
    with progress("fitting", total) as advance:
        detector.fit(collection, calibration, labels, advance)
    detector.save(out)
    if as_json:
        say((out / "detector.json").read_text(encoding="utf-8"))
        return
    fitted, calibrated = detector.fitted, len(detector.calibration_scores_)
    seen = opt.size_text(fitted.preprocessing.resize, fitted.input_size)
    used = f"fitted on {several(fitted.fit_images, 'image')}, calibrated on {calibrated}"
    say(f"{out}: {fitted.method.name} {used}, {seen}")
    if detector.levels_.any():  # a method without noise levels has the one entry 0
        kept = ", ".join(f"{t} ({weight:.3f})" for t, weight in zip(detector.kept_, detector.weights_, strict=True))
        say(f"kept timesteps (weight): {kept} of {', '.join(map(str, detector.levels_))}")
    say(f"cost: {opt.cost_per_image(detector.cost())}")
    try:
        say(f"guarantee: {detector.guarantee()}")
    except OptionError as error:
        say(f"no guarantee at alpha 0.05: {error}")
    say(_rates_text(fitted, separate=calibration is not None))


def _rates_text(fitted: FittedDetector, separate: bool) -> str:
    """The smallest false-alarm rate of a fitted detector, and how many images usual rates need."""
    from gepc.conformal.p_values import images_needed

    needs = []
    for alpha in (0.05, 0.01):
        images = images_needed(alpha)
        in_all = "" if separate else f" ({opt.images_for(fitted, images)} images in all)"
        needs.append(f"alpha {alpha:g} needs {images} calibration images{in_all}")
    group = " in every group" if fitted.reference.grouped else ""
    return f"the smallest alpha is {1 / (fitted.reference.smallest + 1):.2g}; {' and '.join(needs)}{group}"


def estimate_fit(detector: Detector, images: Images, separate: int = 0) -> None:
    """Print what fitting on the images costs, with a number of separate calibration images, if it takes long."""
    size, total, memory = detector.network_size(images), len(images) + separate, detector.extractor.memory
    opt.estimate(detector.backbone, size, total, detector.fit_cost(size), memory=memory)
    calibrating = separate or round(detector.calibration_share * total)
    again = detector.map_images(total - calibrating, calibrating)
    opt.estimate(detector.backbone, size, again, detector.cost(), "for maps about {:,} images", memory)


def map_(
    detector: opt.DetectorArgument,
    images: opt.ImagesArgument,
    out: Annotated[Path, Option(help="Folder for pictures, arrays and metadata.json.")],
    scale: Annotated[str, Option(help=SCALE_HELP)] = "readable",
    part: Annotated[str | None, Option(help="Part of gepc+'s map: sum, residual, inner, error, activations.")] = None,
    raw: Annotated[bool, Option("--raw", help="Write maps before calibration, on the scale v_global.")] = False,
    alpha: opt.Alpha = 0.05,
    show_bands: ShownBands = None,
    backbone: opt.OtherBackbone = None,
    device: opt.Device = "auto",
    batch_size: opt.BatchSize = None,
) -> None:
    """Write a heat map per image: an overlay with boxes and a colour bar (PNG) and the map (NPY).

    A box marks a region of the map above its limit. At most a share alpha of in-distribution images has such a region.
    The regions are also listed in regions.csv and, for labelling tools, in regions.json (COCO).

    Example: `gepc map det photos/new --out maps`
    """
    from gepc.conformal.p_values import images_needed
    from gepc.images.sources import open_images
    from gepc.runs.maps import MapOptions, write_maps

    fitted, collection = opt.open_detector(detector, backbone, batch_size, device).fitted, open_images(images)
    if part is not None:
        fitted = fitted.showing(part)
    check_free(out, "metadata.json", "maps")
    options = MapOptions(scale, raw, alpha, _bands("--show-bands", show_bands))
    opt.estimate(fitted.backbone, fitted.input_size, len(collection), fitted.cost(), memory=fitted.method.memory)
    # an interrupted run leaves this mark, so that the same command may write over what it left
    write_json(out / "metadata.json", {"finished": False, "images": []})
    with progress("mapping", len(collection)) as advance:
        entries = write_maps(fitted, collection, out, options, advance)
    raw = raw or fitted.maps is None
    limit = fitted.map_limit(alpha, raw)
    shown = {"scale": limit, "part": getattr(fitted.method, "map_part", None), "raw": raw, "alpha": alpha}
    write_json(out / "metadata.json", {**shown, "detector": str(detector), "images": entries})
    failures = sum(entry["error"] is not None for entry in entries)
    found = sum(entry.get("regions", 0) for entry in entries)
    counts = (several(len(entries) - failures, "map"), several(failures, "failure"), several(found, "region"))
    say(f"{counts[0]} in {out}, {counts[1]}, {counts[2]}; common scale {limit:.4g}")
    if fitted.maps is not None and not raw and not fitted.maps.allows(alpha):
        count = fitted.maps.maxima.shape[1]
        note(f"no regions: alpha {alpha:g} needs at least {images_needed(alpha)} calibration maps, there are {count}")
    if fitted.maps is None:
        note("the detector has no statistics of maps, so these are raw; fit it again for maps in standard deviations")
    opt.fail_if_all(failures, len(entries), f"{out / 'metadata.json'} has the reasons")


def scene(
    detector: opt.DetectorArgument,
    image: Annotated[Path, Argument(metavar="SCENE", help="Image of any size: TIFF, GeoTIFF, PNG, .npy ...")],
    out: Annotated[Path, Option(help="Folder for the results; an interrupted run in it is resumed.")],
    tile: Annotated[
        str | None, Option(help="Tile size, 64 or 64x96 (down x right); the detector's by default.")
    ] = None,
    stride: Annotated[str | None, Option(help="Distance between tiles in pixels, 16 or 16x24 (down x right).")] = None,
    overlap: Annotated[float | None, Option(help="Share of overlap, instead of --stride; 0.5 by default.")] = None,
    bands: Annotated[str | None, Option(help="Bands to use, counted from 1, for example 4,3,2.")] = None,
    nodata: Annotated[float | None, Option(help="Pixel value that marks missing data.")] = None,
    max_missing: Annotated[float, Option(help="Largest share of missing data in a tile that is scored.")] = 0.1,
    control: Annotated[str, Option(help=CONTROL_HELP)] = "bh",
    alpha: Annotated[float, Option(help="Level of the error rate chosen with --control.")] = 0.05,
    group: Annotated[str | None, Option(help="Calibration group, if the detector was fitted with groups.")] = None,
    backbone: opt.OtherBackbone = None,
    device: opt.Device = "auto",
    batch_size: opt.BatchSize = None,
) -> None:
    """Score an image of any size: tiles, one seamless map, detections, flagged regions and an error rate for the scene.

    The command writes tiles.csv, map.npy, detections and regions (CSV and GeoJSON), overview.png and scene.json. A
    detection is a group of connected pixels of the map above its limit, with the coordinates of its peak. A region is
    a group of flagged tiles. To resume an interrupted scan, run the same command again. No tile is lost or scored
    twice.

    Example: `gepc scene det harbour.tif --out harbour --overlap 0.5 --control bh --alpha 0.1`
    """
    from gepc.scenes import plan_scan, scan

    loaded = opt.open_detector(detector, backbone, batch_size, device)
    options: dict[str, Any] = {
        "tile": _pixels("--tile", tile),
        "stride": _pixels("--stride", stride),
        "overlap": overlap,
        "bands": _bands("--bands", bands),
        "nodata": nodata,
        "max_missing": max_missing,
        "control": control,
        "alpha": alpha,
        "group": group,
    }
    plan = plan_scan(loaded, image, out, **options)
    left, memory = plan.tiles - plan.done, loaded.extractor.memory
    opt.estimate(loaded.backbone, loaded.input_size, left, plan.cost, "at most {:,} tiles", memory)
    with progress("tiles", plan.tiles) as advance:
        report = scan(loaded, image, out, on_progress=advance, **options)
    if report.resumed:
        note(f"done by an earlier run: {report.resumed} of {several(plan.tiles, 'tile')}")
    _say_results(report, out)
    note(f"guarantee: {report.guarantee}")
    if report.summary["detection_guarantee"] is not None:
        note(f"detections: {report.summary['detection_guarantee']}")


def _say_results(report: SceneReport, out: Path) -> None:
    counts = report.counts
    say(
        f"{out}: {several(counts['scored'], 'tile')} scored, {counts['left_out']} left out for no-data, "
        f"{counts['failed']} failed; {counts['flagged']} flagged in {several(counts['regions'], 'region')}; "
        f"{several(counts['detections'], 'detection')}"
    )
    for name, columns in SHOWN_COLUMNS.items():
        items = getattr(report, name)[:SHOWN]
        if items:
            say(text_table([[_number(column, item[column]) for column in columns] for item in items], columns))
        if counts[name] > SHOWN:
            say(f"and {counts[name] - SHOWN} more in {out / name}.csv")


def _number(column: str, value: Any) -> str:
    digits = 4 if column in ("score", "p_value") else 10
    return "" if value is None else f"{value:.{digits}g}"


def _pixels(option: str, text: str | None) -> tuple[int, int] | None:
    sides = _numbers(option, text.lower(), "x") if text is not None else None
    opt.refuse_if(len(sides or ()) > 2, f"{option} takes 64 or 64x96 (height x width), got {text!r}")
    return None if sides is None else (sides[0], sides[-1])


def _bands(option: str, text: str | None) -> tuple[int, ...] | None:
    return None if text is None else _numbers(option, text, ",")


def _numbers(option: str, text: str, separator: str) -> tuple[int, ...]:
    with raising(OptionError, f"{option} takes whole numbers, got {text!r}", ValueError):
        return tuple(int(part) for part in text.split(separator))


def watch(
    detector: opt.DetectorArgument,
    folder: Annotated[Path, Argument(help="Folder to watch, including its subfolders.")],
    out: Annotated[Path, Option(help="CSV file to append to; files already listed in it are not scored again.")],
    alpha: opt.Alpha = 0.05,
    delta: Annotated[float, Option(help="Probability of ever reporting drift when there is none.")] = 0.01,
    window: Annotated[int, Option(min=1, help="Number of recent images in the rolling alarm rate.")] = 200,
    adapt: Annotated[float | None, Option(help="Step by which alpha follows a slow drift, such as 0.005.")] = None,
    interval: Annotated[float | None, Option(min=0.05, help="Seconds between two scans; 2 by default.")] = None,
    once: Annotated[bool, Option("--once", help="Score the files that are there and exit.")] = False,
    backbone: opt.OtherBackbone = None,
    device: opt.Device = "auto",
) -> None:
    """Score files as they appear in a folder; report every alarm and the moment the stream drifts.

    Stop with Ctrl-C, and continue with the same command. No file is lost or scored twice. To pause, create a file with
    the name of the log followed by `.pause`: `touch log.csv.pause`. Nothing is scored until you remove it, even after a
    restart.

    For several cameras, fit with `--groups folder`, and give each camera a folder of that name below the watched one.
    Each camera then has its own false-alarm guarantee and its own drift.

    Example: `gepc watch det incoming/ --out log.csv --alpha 0.01`
    """
    from gepc.conformal.monitor import Monitor
    from gepc.runs.watch import Watch

    opt.refuse_if(once and interval is not None, "--interval has no effect with --once; give one of them")
    every = None if once else interval or 2.0
    loaded = opt.open_detector(detector, backbone, device=device)
    loaded.guarantee(alpha)
    monitor = partial(Monitor, loaded, alpha, delta, window, seed=0, adapt=adapt)
    monitors = {group: monitor(group=group or None) for group in loaded.fitted.reference.by_group}
    with storage_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(out.parent, out.name):
        watcher = Watch(folder, loaded.fitted, monitors, out, *((0.0, 0.0) if once else (1.0, 10.0)))
        resumed = f", resuming after {several(len(watcher.done), 'file')}" if watcher.done else ""
        note(f"watching {folder}, rows to {out}{resumed}; alarms at alpha {alpha:g}, drift at delta {delta:g}")
        if every is not None:
            note(f"looking for new files every {every:g} s; stop with Ctrl-C, pause while {watcher.pause} exists")
        try:
            _follow(watcher, delta, every)
        finally:
            note(f"{several(len(watcher.done), 'file')} in {out}")


def _follow(watcher: Watch, delta: float, interval: float | None) -> None:
    """Print the alarms and drifts of a watched folder: until it is interrupted, or once where there is no interval."""
    drifted, paused = {group for group, monitor in watcher.monitors.items() if monitor.drifted}, False
    while True:
        if paused != watcher.pause.exists():
            paused = not paused
            note("paused" if paused else "resumed")
        for row in watcher.step():
            if row.verdict is None:
                note(f"{row.result.name}: {row.result.error}")
                continue
            if row.verdict.alarm:
                say(f"alarm  {row.result.name}  p = {row.verdict.p_value:.4g}")
            group = watcher.group(row.result.name)
            if row.verdict.drifted and group not in drifted:
                drifted.add(group)
                place = f" of {group}" if group else ""
                say(
                    f"drift  after {several(row.verdict.seen, 'image')} the stream{place} no longer "
                    f"looks like the calibration images (false-alarm probability at most {delta:g})"
                )
        if interval is None:
            break
        time.sleep(interval)


def serve(
    detector: opt.DetectorArgument,
    host: Annotated[str, Option(help="Address to bind; non-loopback addresses require --token.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to bind; 0 picks a free one.")] = 8000,
    token: Annotated[str | None, Option(envvar="GEPC_TOKEN", help="Bearer token that clients must send.")] = None,
    open_metrics: Annotated[bool, Option("--open-metrics", help="Answer /metrics without the token.")] = False,
    backbone: opt.OtherBackbone = None,
    device: opt.Device = "auto",
    max_megabytes: Annotated[float, Option(help="Maximum size of a request in megabytes.")] = 32,
    max_megapixels: Annotated[float, Option(help="Maximum size of an image in megapixels.")] = 16,
    max_network_megapixels: Annotated[float, Option(help=MEGAPIXELS_HELP)] = 0.262144,
    max_images: Annotated[int, Option(min=1, help="Maximum number of images per request.")] = 64,
    queue: Annotated[int, Option(min=1, help="Maximum number of images in progress; then status 503.")] = 256,
    max_batch: Annotated[int, Option(min=1, help="Maximum number of images per network call.")] = 32,
    timeout: Annotated[float, Option(help="Seconds after which a request is given up.")] = 60,
    show_bands: ShownBands = None,
) -> None:
    """Serve a detector over HTTP: a web page for uploading images, and an API.

    The page is at `/` and the API documentation at `/docs`. By default only this machine can connect. On Ctrl-C the
    service completes the accepted requests and exits. To use a detector that was fitted again, restart the service. A
    service is one process. For more requests per second, start replicas behind a load balancer.

    Example: `gepc serve det --port 8000`
    """
    with raising(GepcError, "serving needs more packages; install with: pip install 'gepc[serve]'", ImportError):
        from gepc.serve import Settings, create_app, listen, run
        from gepc.serve.server import LOOPBACK_NAMES, address, is_loopback

    if not is_loopback(host) and token is None:
        raise OptionError(f"--host {host} lets other machines connect: give --token, or set GEPC_TOKEN")
    settings = Settings(
        token=token,
        open_metrics=open_metrics,
        hosts=(*LOOPBACK_NAMES, host) if is_loopback(host) else None,
        max_bytes=round(max_megabytes * 1e6),
        max_pixels=round(max_megapixels * 1e6),
        max_network_pixels=round(max_network_megapixels * 1e6),
        max_images=max_images,
        queue=queue,
        max_batch=max_batch,
        timeout=timeout,
        device=device,
        bands=_bands("--show-bands", show_bands),
    )
    # listen first, so that a port in use is reported before the weights are loaded
    with contextlib.closing(listen(host, port)) as listener:
        service = create_app(detector, settings, backbone)
        url = address(listener)
        say(f"serving {detector.name} at {url} (API: {url}docs); stop with Ctrl-C")
        run(service, listener)
    note("stopped; all accepted requests were answered")

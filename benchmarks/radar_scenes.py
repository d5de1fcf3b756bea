"""Ships found and false alarms per megapixel in whole radar scenes: free-response curves (FROC) of radar detectors.

    python benchmarks/radar_scenes.py DATA/HRSID --out scenes
    python benchmarks/radar_scenes.py DATA/HRSID --out scenes --scenes 30     # a sample, which a larger one contains

Every detector is fitted on sea clutter as in `gepc sar bench` and scans the test scenes as `gepc scene` does. A
detection is a pixel whose map value is the largest within the side of a target. It is a hit if it lies in the box of a
ship grown by `--margin` pixels, otherwise a false alarm; further hits of a ship do not count. Maps are raw and under
the box filter of the score, as in `gepc sar bench`. Intervals resample panoramas, since their scenes are not
independent.

Writes `froc.csv`, `froc.png` and `scenes.md`. An interrupted run resumes; finished scenes are not scanned again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import torch
from scipy.ndimage import label, maximum_filter, maximum_position

import gepc
from gepc.core.files import read_json, write_json
from gepc.core.tables import Cell, ResultTable, interval_text
from gepc.lab.radar.annotations import AnnotatedScene, Box, box_mask, name_rank, open_scenes
from gepc.lab.radar.bench import SarProtocol, gather
from gepc.lab.radar.patches import PatchImages
from gepc.methods.pooling import box_filter
from gepc.scenes import scan

mpl.use("Agg")
import matplotlib.pyplot as plt

Array = npt.NDArray[np.float64]
METHODS = ("gepc+:radar", "os_cfar", "ca_cfar")
COLOURS = ("#d62728", "#1f77b4", "#7f7f7f")
RATES = (0.1, 1.0, 10.0)  # false alarms per megapixel
GRID = np.geomspace(0.03, 100.0, 141)
OVERLAP = 0.0  # tiles start at multiples of 8, as JPEG blocks do: the network sees another grid as structure
DRAWS = 1000


@dataclass(frozen=True)
class Findings:
    """What a detector found in one scene."""

    source: str  # the panorama
    pixels: int
    ships: Array  # the highest detection in the box of each ship, -inf if there is none
    false: Array  # detections outside of all boxes
    caught: npt.NDArray[np.bool_]  # for each ship, whether a tile with the centre of its box raised an alarm
    alarms: npt.NDArray[np.bool_]  # for each tile without any part of a ship, whether it raised an alarm


def peaks(field: Array, radius: int) -> tuple[Array, npt.NDArray[np.int64]]:
    """Values and positions (line, column) of the largest pixels within `radius` pixels, one for each plateau."""
    filled = np.where(np.isnan(field), -np.inf, field)
    highest = (filled == maximum_filter(filled, 2 * radius + 1, mode="nearest")) & np.isfinite(filled)
    labels, count = label(highest, structure=np.ones((3, 3)))
    places = np.array(maximum_position(filled, labels, range(1, count + 1)), dtype=np.int64).reshape(-1, 2)
    return filled[places[:, 0], places[:, 1]], places


def grown(box: Box, margin: float) -> Box:
    """The box with `margin` pixels more on each side."""
    return Box(box.x - margin, box.y - margin, box.width + 2 * margin, box.height + 2 * margin)


def match(values: Array, places: npt.NDArray[np.int64], ships: Sequence[Box], margin: float) -> tuple[Array, Array]:
    """The highest detection of each ship, -inf without one, and the detections outside of all grown boxes.

    A detection in several grown boxes belongs to the ship with the nearest centre.
    """
    best, outside = np.full(len(ships), -np.inf), []
    for value, (line, column) in zip(values, places, strict=True):
        nearest, found = math.inf, None
        for index, ship in enumerate(ships):
            box, x, y = grown(ship, margin), column + 0.5, line + 0.5
            if box.x <= x <= box.x + box.width and box.y <= y <= box.y + box.height:
                distance = math.hypot(x - ship.x - ship.width / 2, y - ship.y - ship.height / 2)
                if distance < nearest:
                    nearest, found = distance, index
        if found is None:
            outside.append(value)
        else:
            best[found] = max(best[found], value)
    return best, np.array(outside, dtype=np.float64)


def detection_rates(ships: Array, false: Array, megapixels: float, rates: Sequence[float]) -> Array:
    """Share of ships above the lowest threshold with at most that many false alarms per megapixel, for each rate."""
    ranked = np.append(np.sort(false)[::-1], -np.inf)
    allowed = np.floor(np.asarray(rates) * megapixels + 1e-9).astype(np.int64)
    limits = ranked[np.minimum(allowed, len(false))]
    return np.asarray((ships > limits[:, None]).mean(1))


def find(scene: AnnotatedScene, folder: Path, window: int, arguments: argparse.Namespace) -> Findings:
    """Detections and alarms of a finished scan, on its map under the box filter that scores are pooled from."""
    field = box_filter(torch.from_numpy(np.load(folder / "map.npy"))[None], window)[0].numpy().astype(np.float64)
    ships, false = match(*peaks(field, arguments.radius), scene.ships, arguments.margin)
    occupied, size = box_mask(scene.ships, scene.height, scene.width), arguments.size
    centres = [(ship.y + ship.height / 2, ship.x + ship.width / 2) for ship in scene.ships]
    caught, alarms = np.zeros(len(scene.ships), dtype=bool), []
    with open(folder / "tiles.csv", newline="") as handle:
        for row in csv.DictReader(handle):
            top, left, alarm = int(row["top"]), int(row["left"]), float(row["p_value"]) <= arguments.alpha + 1e-12
            if not occupied[top : top + size, left : left + size].any():
                alarms.append(alarm)
            caught |= [alarm and top <= y < top + size and left <= x < left + size for y, x in centres]
    return Findings(scene.source, field.size, ships, false, caught, np.array(alarms, bool))


def fitted(method: str, protocol: SarProtocol, arguments: argparse.Namespace) -> gepc.Detector:
    """The detector of a method, fitted on the clutter of held-out training images, or as it was saved."""
    folder = arguments.out / method.replace(":", "-") / "detector"
    if not (folder / "detector.json").exists():
        clutter = gather(protocol, arguments.data, []).fit
        backbone = gepc.load_backbone(arguments.backbone)
        detector = protocol.detector(method, backbone)
        started = time.process_time()
        detector.fit(PatchImages(clutter))
        detector.save(folder)
        print(f"{method}: fitted on {len(clutter)} patches, {time.process_time() - started:.0f} s CPU", flush=True)
    return gepc.load_detector(folder)


def scan_scene(method: str, detector: gepc.Detector, scene: AnnotatedScene, arguments: argparse.Namespace) -> float:
    """Scan a scene unless that is finished, and note the processor time; returns it."""
    folder, started = arguments.out / method.replace(":", "-"), time.process_time()
    options = {"overlap": OVERLAP, "control": "tile", "alpha": arguments.alpha}
    report = scan(detector, scene.path, folder / scene.path.stem, **options)
    seconds = time.process_time() - started
    if report.resumed == 0:  # otherwise the time is that of a part
        (folder / f"{scene.path.stem}.json").write_text(json.dumps({"seconds": seconds}))
    return seconds


def resampled(
    findings: Sequence[Findings], measure: Callable[[list[Findings]], list[float]]
) -> tuple[Array, Array, Array]:
    """Values of a measure and the ends of their 95 % intervals over resampled panoramas."""
    by_source: dict[str, list[Findings]] = {}
    for one in findings:
        by_source.setdefault(one.source, []).append(one)
    sources, rng = list(by_source.values()), np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        chosen = [one for index in rng.integers(len(sources), size=len(sources)) for one in sources[index]]
        draws.append(measure(chosen))
    low, high = np.nanquantile(np.array(draws), [0.025, 0.975], axis=0)
    return np.array(measure(list(findings))), low, high


def rates_of(findings: Sequence[Findings], rates: Sequence[float]) -> list[float]:
    """Detection rate at each number of false alarms per megapixel."""
    ships, false = (np.concatenate([getattr(one, name) for one in findings]) for name in ("ships", "false"))
    return detection_rates(ships, false, sum(one.pixels for one in findings) / 1e6, rates).tolist()


def at_limit(findings: Sequence[Findings]) -> list[float]:
    """Ships in tiles with an alarm, ship-free tiles with an alarm, and their number per megapixel."""
    caught, alarms = (np.concatenate([getattr(one, name) for one in findings]) for name in ("caught", "alarms"))
    megapixels = sum(one.pixels for one in findings) / 1e6
    return [float(caught.mean()), float(alarms.mean()) if len(alarms) else math.nan, alarms.sum() / megapixels]


def bare_pass(detector: gepc.Detector, size: int) -> float:
    """Processor seconds of one pass of the network over one tile, median of 5."""
    backbone = detector.backbone
    images = torch.zeros(1, backbone.channels, size, size)
    times = []
    for _ in range(6):
        started = time.process_time()
        backbone.eps(images, backbone.n_steps // 4)
        times.append(time.process_time() - started)
    return float(np.median(times[1:]))


def speed(folder: Path, scenes: Sequence[AnnotatedScene], detector: gepc.Detector, size: int) -> list[Cell]:
    """Scenes with a known time, megapixels per second, network passes, and the time divided by that of bare passes."""
    known = [scene for scene in scenes if (folder / f"{scene.path.stem}.json").is_file()]
    if not known:
        return [0, None, None, None]
    seconds = sum(json.loads((folder / f"{scene.path.stem}.json").read_text())["seconds"] for scene in known)
    summaries = [json.loads((folder / scene.path.stem / "scene.json").read_text()) for scene in known]
    forward = sum(summary["network_passes"]["forward"] for summary in summaries)
    megapixels = sum(scene.width * scene.height for scene in known) / 1e6
    overhead = f"{seconds / (forward * bare_pass(detector, size)):.2f}" if forward else None
    return [len(known), f"{megapixels / seconds:.3g}", forward, overhead]


def with_interval(values: Array, low: Array, high: Array) -> list[Cell]:
    """Each value with its interval in one cell."""
    spans = zip(values, low, high, strict=True)
    return [f"{value:.3g} ({interval_text(float(down), float(up))})" for value, down, up in spans]


def draw(curves: dict[str, tuple[Array, Array, Array]], path: Path) -> None:
    """FROC with intervals."""
    figure, axes = plt.subplots(figsize=(6.6, 4.2))
    for (method, (values, low, high)), colour in zip(curves.items(), COLOURS, strict=False):
        axes.fill_between(GRID, low, high, color=colour, alpha=0.12, lw=0, step="post")
        axes.step(GRID, values, where="post", color=colour, label=method)
    axes.set_xscale("log")
    axes.set_xlim(GRID[0], GRID[-1])
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel("false alarms per megapixel")
    axes.set_ylabel("share of ships found")
    axes.grid(color="0.9", lw=0.6)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def summarise(
    detectors: dict[str, gepc.Detector], scenes: Sequence[AnnotatedScene], arguments: argparse.Namespace
) -> None:
    """Write the table, the curves and the figure from the finished scans."""
    curves: dict[str, tuple[Array, Array, Array]] = {}
    found_rows, own_rows, speed_rows, tiles = [], [], [], 0
    for method, detector in detectors.items():
        folder, window = arguments.out / method.replace(":", "-"), getattr(detector.extractor, "window", 1)
        findings = [find(scene, folder / scene.path.stem, window, arguments) for scene in scenes]
        curves[method] = resampled(findings, lambda some: rates_of(some, GRID))
        found_rows.append((method, *with_interval(*resampled(findings, lambda some: rates_of(some, RATES)))))
        own_rows.append((method, *with_interval(*resampled(findings, at_limit))))
        speed_rows.append((method, *speed(folder, scenes, detector, arguments.size)))
        tiles = sum(len(one.alarms) for one in findings)
    ships, count = sum(len(scene.ships) for scene in scenes), len(scenes)
    first = next(iter(detectors.values()))
    about = (
        f"{count} scenes of {len({scene.source for scene in scenes})} panoramas, {ships} ships, "
        f"{sum(scene.width * scene.height for scene in scenes) / 1e6:.1f} megapixels; backbone "
        f"{arguments.backbone} (sha256 {str(first.backbone.sha256)[:12]}); "
        f"fitted on {first.fitted.fit_images} patches, "
        f"calibrated on {len(first.calibration_scores_)}. 95 % intervals resample panoramas."
    )
    tables = [
        ResultTable(
            "froc",
            "Share of ships found at a number of false alarms per megapixel",
            ("method", *(f"at {rate:g} per megapixel" for rate in RATES)),
            tuple(found_rows),
            about,
        ),
        ResultTable(
            "limit",
            f"Alarms of tiles at the detector's own limit, alpha = {arguments.alpha:g} per tile",
            ("method", "ships in a tile with an alarm", "ship-free tiles with an alarm", "the same per megapixel"),
            tuple(own_rows),
            f"{tiles} ship-free tiles.",
        ),
        ResultTable(
            "speed",
            "Speed of the scans, processor time, one thread",
            ("method", "scenes", "megapixels per second", "passes", "time / bare passes"),
            tuple(speed_rows),
            "",
        ),
    ]
    text = "\n\n".join(table.markdown() for table in tables)
    (arguments.out / "scenes.md").write_text(text + "\n")
    print(text)
    with open(arguments.out / "froc.csv", "w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(("method", "false_alarms_per_megapixel", "ships_found", "low", "high"))
        for method, (values, low, high) in curves.items():
            writer.writerows((method, *numbers) for numbers in zip(GRID, values, low, high, strict=True))
    draw(curves, arguments.out / "froc.png")


def main() -> None:
    """Fit, scan and summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="HRSID in its original layout")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--backbone", default="sar-small")
    parser.add_argument("--scenes", type=int, default=None, help="number of test scenes, selected by a hash of names")
    parser.add_argument("--size", type=int, default=256, help="side of a tile in pixels")
    parser.add_argument("--target-pixels", type=float, default=200)
    parser.add_argument("--hold-out", type=float, default=0.35, help="share of the training images to fit on")
    parser.add_argument("--fit-limit", type=int, default=None, help="largest number of patches to fit on")
    parser.add_argument("--alpha", type=float, default=0.05, help="false-alarm rate of a tile")
    parser.add_argument("--margin", type=float, default=4.0, help="pixels that a box is grown by; half the box filter")
    arguments = parser.parse_args()
    arguments.radius = round(math.sqrt(arguments.target_pixels))
    torch.set_num_threads(1)
    names = ("size", "hold_out", "fit_limit", "target_pixels")
    protocol = SarProtocol(**{name: getattr(arguments, name) for name in names})
    run = {name: str(getattr(arguments, name)) for name in (*names, "backbone", "data")}
    mark = arguments.out / "run.json"
    if mark.exists() and read_json(mark) != run:
        parser.error(f"{arguments.out} has results of other options; give another folder")
    write_json(mark, run)
    scenes = sorted(open_scenes(arguments.data, "test").scenes, key=lambda scene: name_rank(scene.path.name, 0))
    scenes = scenes[: arguments.scenes]
    detectors = {method: fitted(method, protocol, arguments) for method in arguments.methods.split(",")}
    for number, scene in enumerate(scenes, start=1):  # all methods of a scene, so that a stopped run compares them
        seconds = [scan_scene(method, detector, scene, arguments) for method, detector in detectors.items()]
        print(f"scene {number} of {len(scenes)}:", *(f"{each:.1f} s" for each in seconds), flush=True)
    summarise(detectors, scenes, arguments)


if __name__ == "__main__":
    main()

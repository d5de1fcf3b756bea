"""The cost of scoring many files with `gepc score`, as ratios measured in one run; prints Markdown tables.

    GEPC_DATA=data python benchmarks/pipeline.py [--images 10000] [--detector gepc] [--repeats 5]

1. the whole pipeline (decode PNG, noise, network, features, write shards, merge) over the same number of bare network
   passes at the best batch size (target 1.08);
2. one process against two, one thread each, on the same files;
3. cost against the number of images (a straight line is fitted), the group, the levels and the image size, each over
   bare passes of the same shape;
4. the machine's peak by a plain matrix product, and the share of it that bare passes and the pipeline reach.

Compared times are measured directly after one another, `repeats` times; medians with their range are printed, so that
variations of the machine's speed are visible. The images are real ones, written as PNG files: `--data` names an .npz
with `test_x`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from overhead import bare_passes, best_rows, spread
from overhead import seconds as wall_seconds
from PIL import Image

import gepc
from gepc.conformal.decision import DecisionRule
from gepc.core.allocator import keep_freed_memory
from gepc.images.formats import read_npz
from gepc.images.sources import FileImages
from gepc.lab.bench.protocol import split_name
from gepc.runs.shards import Identity, ScoreRun, merge, open_run, result_table, score_shards

LEVELS = (0.9979, 0.99)
MORE_LEVELS = (0.999, 0.9979, 0.99, 0.97, 0.95)
GROUPS = (("flip_x",), ("flip_x", "flip_y"), ("flip_x", "flip_y", "rot90", "rot180"), "paper")
SIZES = (16, 32, 64)


clock = time.perf_counter


def seconds(work: Callable[[], object]) -> float:
    """Seconds of one call, by the chosen clock."""
    start = clock()
    work()
    return clock() - start


def write_files(pixels: np.ndarray, folder: Path) -> list[Path]:
    """One PNG file for each image, a thousand per folder."""
    paths = []
    for index, picture in enumerate(pixels):
        path = folder / f"{index // 1000:03d}" / f"{index:07d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
        paths.append(path)
    return paths


def pipeline(detector: gepc.Detector, paths: list[Path], place: Path, workers: int = 0) -> ScoreRun:
    """Everything that `gepc score` does between the list of files and the table."""
    images = FileImages(paths)
    run = open_run(place / "run", Identity.of(detector.fitted, images), restart=True)
    score_shards(run, run.pending(), detector.fitted, images, workers=workers)
    with result_table(place / "scores.csv") as append:
        merge(run, partial(DecisionRule(0.05).decide, detector.fitted.reference, None), append)
    run.remove()
    return run


def over_bare(detector: gepc.Detector, paths: list[Path], place: Path, options: Any, size: int = 32) -> list[float]:
    """Time of the pipeline over that of the same number of bare passes directly before it."""
    passes = detector.cost().forward * len(paths)
    rows = min(options.rows, passes)
    made = passes // rows * rows
    ratios = []
    for _ in range(options.repeats):
        bare = seconds(lambda: bare_passes(detector.backbone, made, rows, size)) / made
        whole = seconds(lambda: pipeline(detector, paths, place, options.workers)) / passes
        ratios.append(whole / bare)
    return ratios


def main_detector(options: Any, reference: np.ndarray) -> gepc.Detector:
    """The detector of all tables except the sweeps."""
    if options.detector == "gepc":
        return fitted(options, reference)
    method, preset = split_name(options.detector)
    return gepc.create_detector(gepc.load_backbone(options.backbone), method, preset, size=32).fit(reference)


def fitted(options: Any, reference: np.ndarray, **changes: Any) -> gepc.Detector:
    """GEPC with two levels and the paper's group, except for the changes; fitting is not timed."""
    backbone = gepc.load_backbone(options.backbone)
    settings = {"levels": LEVELS, "keep": len(changes.get("levels", LEVELS)), "size": 32, **changes}
    return gepc.GEPC(backbone, **settings).fit(reference)


# --- the tables ----------------------------------------------------------------------------------------------------


def overhead_table(options: Any, detector: gepc.Detector, paths: list[Path], place: Path) -> None:
    """The list in `repeats` parts, each timed against bare passes."""
    share = len(paths) // options.repeats
    parts = [paths[index * share : (index + 1) * share] for index in range(options.repeats)]
    once = argparse.Namespace(**{**vars(options), "repeats": 1})
    ratios = [over_bare(detector, part, place, once)[0] for part in parts]
    print("\n## Whole pipeline over bare passes\n")
    print(f"{share * options.repeats} PNG files of 32x32, {detector.cost()} each\n")
    print("| pipeline / bare passes, median (range) | target |\n| --- | --- |")
    print(f"| {spread(ratios).strip()} | 1.08 |")


def growth_table(options: Any, detector: gepc.Detector, paths: list[Path], place: Path) -> None:
    """Seconds against the number of images, and the line through them."""
    counts = sorted({max(1, len(paths) // part) for part in (16, 8, 4, 2)})
    found = []
    for count in counts:
        times = [seconds(lambda count=count: pipeline(detector, paths[:count], place, options.workers))]
        times += [seconds(lambda count=count: pipeline(detector, paths[:count], place, options.workers))]
        found.append(min(times))
    slope, start = np.polyfit(counts, found, 1)
    fit = np.corrcoef(counts, found)[0, 1] ** 2
    print("\n## Number of images\n\n| images | seconds | ms per image |\n| --- | --- | --- |")
    for count, spent in zip(counts, found, strict=True):
        print(f"| {count} | {spent:.2f} | {1000 * spent / count:.2f} |")
    print(f"\nLine: {1000 * slope:.2f} ms per image + {start:.2f} s, R^2 = {fit:.4f}")


def sweep_tables(options: Any, reference: np.ndarray, paths: list[Path], place: Path) -> None:
    """Cost against group, levels and image size."""
    few = paths[: options.sweep_images]
    cases: dict[str, list[tuple[str, dict[str, Any], int]]] = {
        "Group size": [(f"{1 + len(g) if g != 'paper' else 7}", {"group": g}, 32) for g in GROUPS],
        "Levels": [(str(count), {"levels": MORE_LEVELS[:count]}, 32) for count in (1, 2, 3, 5)],
        "Image size": [(f"{size}x{size}", {"size": size}, size) for size in SIZES],
    }
    for title, rows in cases.items():
        print(
            f"\n## {title}\n\n| {title.lower()} | passes per image | pipeline / bare passes | ms per image and pass |"
        )
        print("| --- | --- | --- | --- |")
        for name, changes, size in rows:
            try:
                detector = fitted(options, reference, **changes)
            except gepc.GepcError as error:
                print(f"| {name} | - | {error} | - |")
                continue
            ratios = over_bare(detector, few, place, options, size)
            passes = detector.cost().forward
            each = seconds(lambda detector=detector: pipeline(detector, few, place)) / len(few) / passes
            print(f"| {name} | {passes} | {spread(ratios).strip()} | {1000 * each:.2f} |")


def _member(rank: int, size: int, folder: str, names: list[str], place: str, barrier: Any, times: Any) -> None:
    keep_freed_memory()
    torch.set_num_threads(1)
    detector = gepc.load_detector(folder)
    images = FileImages(names)
    run = ScoreRun(Path(place), len(images), max(1, len(images) // 16), "csv")  # every process gets as many shards
    shards = run.shards[rank::size]
    list(detector.results(FileImages(names[:2])))  # the first call of a network is slower than the others
    barrier.wait()
    times[rank] = wall_seconds(lambda: score_shards(run, shards, detector.fitted, images))


def scaling_table(options: Any, detector: gepc.Detector, paths: list[Path], place: Path) -> None:
    """The same files with one process and with two, one thread each, measured after everything is loaded."""
    detector.save(place / "det")
    context = multiprocessing.get_context("spawn")
    names = [str(path) for path in paths[: options.sweep_images * 4]]
    ratios = []
    for repeat in range(options.repeats):
        spent = {}
        for size in (1, 2):
            barrier, times = context.Barrier(size), context.Array("d", size)
            where = str(place / f"scaling-{repeat}-{size}")
            Path(where).mkdir()
            members = [
                context.Process(target=_member, args=(rank, size, str(place / "det"), names, where, barrier, times))
                for rank in range(size)
            ]
            for member in members:
                member.start()
            for member in members:
                member.join()
                if member.exitcode:
                    raise SystemExit("a process failed; its error is above")
            spent[size] = max(times)
        ratios.append(spent[1] / spent[2])
    print(f"\n## One process and two, one thread each\n\n{len(names)} files, {os.cpu_count()} processors\n")
    print("| speed-up, median (range) | ideal |\n| --- | --- |")
    print(f"| {spread(ratios).strip()} | 2 |")


def limit_table(options: Any, detector: gepc.Detector, paths: list[Path], place: Path) -> None:
    """FLOP/s of a plain matrix product, of bare passes and of the pipeline."""
    from torch.utils.flop_counter import FlopCounterMode

    backbone, n = detector.backbone, 2048
    a, b = torch.randn(n, n), torch.randn(n, n)
    torch.mm(a, b)
    with FlopCounterMode(display=False) as counter:
        backbone.eps(torch.randn(1, backbone.channels, 32, 32), 10)
    per_pass = counter.get_total_flops()
    few = paths[: options.sweep_images]
    passes = detector.cost().forward * len(few)
    rows = min(options.rows, passes)
    made = passes // rows * rows
    found: dict[str, list[float]] = {"matrix product": [], "bare passes": [], "pipeline": []}
    for _ in range(options.repeats):
        found["matrix product"].append(2 * n**3 / min(seconds(lambda: torch.mm(a, b)) for _ in range(5)))
        found["bare passes"].append(made * per_pass / seconds(lambda: bare_passes(backbone, made, rows)))
        found["pipeline"].append(passes * per_pass / seconds(lambda: pipeline(detector, few, place, options.workers)))
    peak = statistics.median(found["matrix product"])
    print(f"\n## Operations per second\n\n{per_pass / 1e9:.3f} GFLOP per image and pass (32x32)\n")
    print("| | GFLOP/s, median (range) | share of the matrix product |\n| --- | --- | --- |")
    for name, values in found.items():
        middle = statistics.median(values)
        range_ = f"{min(values) / 1e9:.1f} to {max(values) / 1e9:.1f}"
        print(f"| {name} | {middle / 1e9:.1f} ({range_}) | {middle / peak:.2f} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("GEPC_DATA", ".")) / "celeba32.npz")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--sweep-images", type=int, default=256, help="images of each sweep's points")
    parser.add_argument("--backbone", default="celeba32-small")
    parser.add_argument("--detector", default="gepc", help="gepc (14 passes), or METHOD:PRESET such as gepc+:fast")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, for a machine with other work"
    )
    parser.add_argument("--only", default="overhead,growth,sweeps,scaling,limit", help="which tables, by commas")
    options = parser.parse_args()
    keep_freed_memory()
    global clock
    clock = time.process_time if options.clock == "cpu" else time.perf_counter

    pixels = read_npz(options.data, "test_x")
    pixels = np.concatenate([pixels] * -(-options.images // len(pixels)))[: options.images]
    reference = read_npz(options.data, "train_x")[:64]
    detector = main_detector(options, reference)
    options.rows = best_rows(detector.backbone)
    machine = f"{platform.machine()}, {os.cpu_count()} processors, {processor()}, {platform.system()}"
    threads = f"torch {torch.__version__} with {torch.get_num_threads()} threads"
    print(f"{machine}; {threads}; bare batch {options.rows}; {options.clock} time; {options.detector}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        paths = write_files(pixels, place / "files")
        tables = {
            "overhead": lambda: overhead_table(options, detector, paths, place),
            "growth": lambda: growth_table(options, detector, paths, place),
            "sweeps": lambda: sweep_tables(options, reference, paths, place),
            "scaling": lambda: scaling_table(options, detector, paths, place),
            "limit": lambda: limit_table(options, detector, paths, place),
        }
        for name in options.only.split(","):
            tables[name]()


def processor() -> str:
    """The processor's name, if the system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()

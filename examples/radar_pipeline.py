"""Radar from end to end on simulated data alone: simulate, cut, fit, compare with CFAR, scan a scene.

Run it with `python examples/radar_pipeline.py`. After the simulation, each step is a command of `gepc`, printed before
it runs; replace the folders by your own scenes. The results stay in the folder `radar-pipeline`, or in the one given as
an argument.
"""

import csv
import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from gepc.cli.app import run
from gepc.core.tables import write_rows
from gepc.lab.radar.annotations import BOX_COLUMNS
from gepc.lab.radar.simulate import Sea, Target, simulate

SMALL = os.environ.get("GEPC_EXAMPLE_SIZE") == "small"


def ship(rng: np.random.Generator, side: int) -> Target:
    """A ship somewhere in the scene, with or without a wake."""
    x, y = rng.uniform(0.15, 0.85, 2) * side
    length, heading, brightness = rng.uniform(20.0, 60.0), rng.uniform(0.0, 2.0 * np.pi), rng.uniform(30.0, 150.0)
    return Target(x, y, length, length / 4.0, heading, brightness, wake=rng.choice([0.0, 2.0 * length]))


def write_scenes(folder: Path, count: int, side: int, ships: int, seed: int) -> None:
    """Simulated scenes as PNG files, and their ships in the file boxes.csv, which `gepc sar` reads."""
    folder.mkdir(parents=True)
    rows = []
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        targets = [ship(rng, side) for _ in range(ships)]
        amplitude, boxes = simulate(side, side, Sea(), targets, seed=int(rng.integers(2**31)))
        Image.fromarray(np.rint(255.0 * amplitude.clip(0.0, 1.0)).astype(np.uint8)).save(folder / f"{index:04d}.png")
        rows += [(f"{index:04d}.png", box.x, box.y, box.width, box.height) for box in boxes]
    write_rows(folder / "boxes.csv", BOX_COLUMNS, rows)


def step(*arguments: object) -> None:
    """Run one command and stop if it fails."""
    command = [str(argument) for argument in arguments]
    print("$ gepc", *command, flush=True)
    if run(command) != 0:
        raise SystemExit(f"gepc {command[0]} failed")


def main(out: Path, scenes: int = 6 if SMALL else 24, side: int = 192 if SMALL else 512) -> dict[str, float]:
    """All steps; the AUROC of each method on simulated ships, and the number of alarms in a scene with two ships."""
    patch, methods = 64, "gepc+:radar,ca_cfar"
    write_scenes(out / "sea", scenes, side, ships=0, seed=0)
    write_scenes(out / "ships", scenes, side, ships=2, seed=1)
    step("sar", "patches", out / "sea", "--out", out / "patches.npz", "--size", patch)
    step("sar", "fit", f"{out / 'patches.npz'}:test_x", "--out", out / "detector", "--target-pixels", 100)
    cutting = [f"--set={option}" for option in (f"size={patch}", "target_pixels=100", "draws=50", "hold_out=0.5")]
    step("sar", "bench", out / "sea", "--ood", out / "ships", "--out", out / "bench", "--methods", methods, *cutting)
    decision = ("--control", "tile", "--alpha", 0.1)
    step("scene", out / "detector", out / "ships" / "0000.png", "--out", out / "scene", *decision)
    with open(out / "bench" / "radar-sar-small-fixed.csv", newline="") as handle:
        found = {row["method"]: float(row["AUROC"]) for row in csv.DictReader(handle)}
    with open(out / "scene" / "tiles.csv", newline="") as handle:
        found["alarms"] = float(sum(row["alarm"] == "true" for row in csv.DictReader(handle)))
    return found


if __name__ == "__main__":
    print(main(Path(sys.argv[1] if len(sys.argv) > 1 else "radar-pipeline")))

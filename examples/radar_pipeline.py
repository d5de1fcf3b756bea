"""Radar from end to end on simulated data alone: simulate, cut, fit, compare with CFAR, scan a scene.

Run it with `python examples/radar_pipeline.py`. Each step is a command of `gepc`, printed before it runs; replace the
folders by your own scenes. The results stay in the folder `radar-pipeline`, or in the one given as an argument.
"""

import csv
import os
import sys
from pathlib import Path

from gepc.cli.app import run

SMALL = os.environ.get("GEPC_EXAMPLE_SIZE") == "small"


def step(*arguments: object) -> None:
    """Run one command and stop if it fails."""
    command = [str(argument) for argument in arguments]
    print("$ gepc", *command, flush=True)
    if run(command) != 0:
        raise SystemExit(f"gepc {command[0]} failed")


def main(out: Path, scenes: int = 6 if SMALL else 24, side: int = 192 if SMALL else 512) -> dict[str, float]:
    """All steps; the AUROC of each method on simulated ships, and the number of alarms in a scene with two ships."""
    patch, methods = 64, "gepc+:radar,ca_cfar"
    step("sar", "simulate", "--out", out / "sea", "--count", scenes, "--size", side, "--ships", 0)
    step("sar", "simulate", "--out", out / "ships", "--count", scenes, "--size", side, "--ships", 2, "--seed", 1)
    step("sar", "patches", out / "sea", "--out", out / "patches.npz", "--size", patch)
    step("sar", "fit", f"{out / 'patches.npz'}:test_x", "--out", out / "detector", "--target-pixels", 100)
    cutting = [f"--set={option}" for option in (f"size={patch}", "target_pixels=100", "draws=50", "hold_out=0.5")]
    step("sar", "bench", out / "sea", "--ood", out / "ships", "--out", out / "bench", "--methods", methods, *cutting)
    decision = ("--control", "tile", "--alpha", 0.1)
    step("scene", out / "detector", out / "ships" / "0000.png", "--out", out / "scene", *decision)
    with open(out / "bench" / "radar-sar-tiny-fixed.csv", newline="") as handle:
        found = {row["method"]: float(row["AUROC"]) for row in csv.DictReader(handle)}
    with open(out / "scene" / "tiles.csv", newline="") as handle:
        found["alarms"] = float(sum(row["alarm"] == "true" for row in csv.DictReader(handle)))
    return found


if __name__ == "__main__":
    print(main(Path(sys.argv[1] if len(sys.argv) > 1 else "radar-pipeline")))

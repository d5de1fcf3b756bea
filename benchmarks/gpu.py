"""Speed of a detector on your GPU, in every precision: one table to paste into docs/performance.md.

    python benchmarks/gpu.py [--backbone celeba32-small] [--images 2048] [--device cuda]

For each precision the table gives bare network passes and images scored by the default detector, both per second, the
share of the time that the passes take, and how scores differ from those in float32: the largest difference in units of
the scores' standard deviation. Every row is the median of three runs in one process. It also runs on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import gepc
from gepc.backbones.base import Backbone
from gepc.core.errors import GepcError
from gepc.core.tables import ResultTable

PRECISIONS = ("float32", "mixed_bfloat16", "bfloat16", "mixed_float16", "float16")
REPEATS = 3


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of three, after one that is not timed."""
    found = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])


def row(backbone: Backbone, images: np.ndarray, batch: int) -> tuple[float, float, float, np.ndarray]:
    """Bare passes per second, images per second, the passes' share of the time, and the scores."""
    side = images.shape[1]
    x = torch.randn(batch, *backbone.network_shape((side, side)), device=backbone.device)
    count = max(1, len(images) // batch)
    passes = count * batch / seconds(lambda: [backbone.eps(x, 100) for _ in range(count)], backbone.device)
    detector = gepc.create_detector(backbone, size=side, batch_size=batch, maps="raw").fit(images[: len(images) // 2])
    rate = len(images) / seconds(lambda: detector.score(images), backbone.device)
    return passes, rate, detector.cost().forward * rate / passes, detector.score(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="celeba32-small")
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="processors emulate most of them, slowly")
    options = parser.parse_args()
    channels = gepc.load_backbone(options.backbone, device="cpu").channels
    shape = (options.images, options.size, options.size, channels)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    rows, exact, device = [], None, torch.device("cpu")
    for precision in options.precisions.split(","):
        try:
            backbone = gepc.load_backbone(options.backbone, device=options.device, dtype=precision)
            passes, rate, share, scores = row(backbone, images, options.batch)
        except (GepcError, RuntimeError) as error:
            print(f"{precision}: {str(error).splitlines()[0]}")
            continue
        device = backbone.device
        exact = scores if exact is None else exact
        gap = float(np.abs(scores - exact).max() / exact.std())
        rows.append((precision, passes, rate, share, gap))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    header = ("precision", "passes per second", "images per second", "passes' share of the time", "scores differ by")
    size = f"{options.size}x{options.size}"
    note = f"{where}, torch {torch.__version__}, {options.backbone} at {size}, batches of {options.batch}"
    print(ResultTable("gpu", "Speed by precision (contributed)", header, tuple(rows), note).markdown())


if __name__ == "__main__":
    main()

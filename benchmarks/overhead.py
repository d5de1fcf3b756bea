"""The overhead of scoring over bare network passes, as ratios measured in one run.

    python benchmarks/overhead.py [--backbone celeba32-tiny] [--images 64] [--repeats 9]

1. time of `score` over the time of the same number of bare network passes at the best batch size (target 1.05), and
   the time that `score` spends outside the network over the time inside it;
2. speed-up of `score` over a literal reading of the paper, (1 + |G|) passes with the identity evaluated (target 8/7).

Compared times are measured directly after one another, `repeats` times; the median of the ratios and their range are
printed, so that variations of the machine's speed are visible.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import gepc
from gepc.core.allocator import keep_freed_memory


def bare_passes(backbone: gepc.Backbone, passes: int, rows: int, size: int = 32) -> None:
    """Network passes of random images, `rows` at a time, and nothing else."""
    x = torch.randn(rows, backbone.channels, size, size)
    for _ in range(passes // rows):
        backbone.eps(x, 10)


def literal_score(detector: gepc.GEPC, images: np.ndarray, rows: int) -> None:
    """The same feature as the paper writes it: a reference pass and one pass for each of the |G| elements."""
    backbone, group = detector.backbone, detector.extractor.group
    x0 = torch.from_numpy(images.astype(np.float32) / 127.5 - 1.0).permute(0, 3, 1, 2)
    for chunk in x0.split(rows):
        for t in detector.kept_:
            abar = backbone.alphas_cumprod[t]
            x_t = abar**0.5 * chunk + (1 - abar) ** 0.5 * torch.randn(chunk.shape)
            score = backbone.score(x_t, int(t))
            residuals = []
            for element in group:
                residual = element.inverse(backbone.score(element.apply(x_t), int(t))) - score
                residuals.append(
                    detector.extractor.pooling(residual.square()) / detector.extractor.pooling(score.square())
                )
            torch.stack(residuals).mean(0)


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def best_rows(backbone: gepc.Backbone) -> int:
    """The batch size with the least time per image."""
    sizes = (16, 32, 64, 128)
    bare_passes(backbone, 64, 64)
    return min(
        sizes, key=lambda rows: min(seconds(lambda rows=rows: bare_passes(backbone, 256, rows)) for _ in range(2))
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", default="celeba32-tiny")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    keep_freed_memory()

    backbone = gepc.load_backbone(options.backbone)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (options.images, 32, 32, 3), dtype=np.uint8)
    detector = gepc.GEPC(backbone, levels=(0.9979, 0.99), keep=2).fit(images[:48])
    passes = detector.cost().forward * options.images
    rows = best_rows(backbone)

    clock = NetworkClock(backbone)
    bare_ratios, literal_ratios, shares = [], [], []
    for _ in range(options.repeats):
        bare = seconds(lambda: bare_passes(backbone, passes, rows))
        clock.spent = 0.0
        score = seconds(lambda: detector.score(images))
        shares.append((score - clock.spent) / clock.spent)
        literal = seconds(lambda: literal_score(detector, images, 64))
        bare_ratios.append(score / bare)
        literal_ratios.append(literal / score)

    print(f"{torch.get_num_threads()} threads, {options.images} images of 32x32, {passes} passes, bare batch {rows}")
    print(f"last bare pass       {1000 * bare / passes:8.2f} ms per image")
    print(f"outside the network  {100 * statistics.median(shares):8.2f} % of the time inside it")
    print(f"score / bare         {spread(bare_ratios)}   (target at most 1.05)")
    print(f"literal / score      {spread(literal_ratios)}   (target at least {8 / 7:.3f})")


class NetworkClock:
    """Adds up the time that a backbone spends inside its network."""

    def __init__(self, backbone: gepc.Backbone) -> None:
        self.spent = 0.0
        predict = backbone._predict

        def timed(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            start = time.perf_counter()
            answer = predict(x, t)
            self.spent += time.perf_counter() - start
            return answer

        backbone._predict = timed


def spread(ratios: list[float]) -> str:
    """Median and range; on a shared machine the range shows how reliable the median is."""
    return f"{statistics.median(ratios):8.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()

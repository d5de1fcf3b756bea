"""The overhead of scoring over bare network passes, and gepc+ beside a literal reading of the paper, in one run.

    python benchmarks/overhead.py [--backbone celeba32-small] [--images 64] [--repeats 9] [--data DATA]

1. time of `score` over the time of the same number of bare network passes at the best batch size, for GEPC (target
   1.05) and for `gepc+ fast` (target 1.08: hooks, pooling and distances included);
2. speed-up over a literal reading of the paper, which evaluates the identity too: eight passes at each of two levels;
3. with `--data` (celeba32.npz, cifar10.npz, svhn32.npz, cifar100.npz), the AUROC of both on the same images: 300 to fit
   on, 200 of each set to test.

Compared times are processor time, measured directly after one another, `repeats` times; the median of the ratios and
their range are printed, so that variations of the machine's speed are visible.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import gepc
from gepc.core.allocator import keep_freed_memory
from gepc.lab.metrics import auroc
from gepc.methods.gepc import GepcExtractor

TRAIN, TEST = 300, 200
SETS = {"C10": "cifar10", "SVHN": "svhn32", "CelebA": "celeba32", "C100": "cifar100"}


def bare_passes(backbone: gepc.Backbone, passes: int, rows: int, size: int = 32) -> None:
    """Network passes of random images, at most `rows` at a time, and nothing else."""
    x = torch.randn(rows, backbone.channels, size, size)
    for start in range(0, passes, rows):
        backbone.eps(x[: passes - start], 10)


def literal_score(detector: gepc.Detector, images: np.ndarray, rows: int) -> None:
    """The same feature as the paper writes it: a reference pass and one pass for each of the |G| elements."""
    backbone, method = detector.backbone, detector.extractor
    assert isinstance(method, GepcExtractor)
    x0 = torch.from_numpy(images.astype(np.float32) / 127.5 - 1.0).permute(0, 3, 1, 2)
    for chunk in x0.split(rows):
        for t in detector.kept_:
            abar = backbone.alphas_cumprod[t]
            x_t = abar**0.5 * chunk + (1 - abar) ** 0.5 * torch.randn(chunk.shape)
            score = backbone.score(x_t, int(t))
            residuals = []
            for element in method.group:
                residual = element.inverse(backbone.score(element.apply(x_t), int(t))) - score
                residuals.append(method.pooling(residual.square()) / method.pooling(score.square()))
            torch.stack(residuals).mean(0)


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def best_rows(backbone: gepc.Backbone) -> int:
    """The batch size with the least time per image."""
    sizes = (16, 32, 64, 128)
    bare_passes(backbone, 64, 64)
    return min(
        sizes, key=lambda rows: min(seconds(lambda rows=rows: bare_passes(backbone, 256, rows)) for _ in range(2))
    )


def ratios(detectors: dict[str, gepc.Detector], images: np.ndarray, repeats: int) -> dict[str, list[float]]:
    """Name of a ratio -> its values, one for each repetition."""
    backbone = detectors["GEPC"].backbone
    rows = best_rows(backbone)
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        literal = seconds(lambda: literal_score(detectors["GEPC"], images, rows))
        for name, detector in detectors.items():
            passes = detector.cost().forward * len(images)
            bare = seconds(lambda passes=passes: bare_passes(backbone, passes, rows))
            score = seconds(lambda detector=detector: detector.score(images))
            found.setdefault(f"{name}: score / bare passes", []).append(score / bare)
            found.setdefault(f"literal reading / {name}", []).append(literal / score)
    return found


def fitted(backbone: gepc.Backbone, images: np.ndarray) -> dict[str, gepc.Detector]:
    """The paper's detector with its levels, which the literal reading scores alike, and the default."""
    detectors = {
        "GEPC": gepc.create_detector(backbone, "gepc", "paper"),
        "gepc+ fast": gepc.create_detector(backbone, "gepc+", "fast"),
    }
    return {name: detector.fit(images) for name, detector in detectors.items()}


def side_by_side(backbone: gepc.Backbone, data: Path) -> None:
    """AUROC of both detectors on the nine pairs."""
    splits = {name: np.load(data / f"{file}.npz") for name, file in SETS.items()}
    found: dict[str, list[float]] = {}
    for name in ("C10", "SVHN", "CelebA"):
        detectors = fitted(backbone, splits[name]["train_x"][:TRAIN])
        for label, detector in detectors.items():
            scores = {other: detector.score(split["test_x"][:TEST]) for other, split in splits.items()}
            for other in splits:
                if other != name:
                    found.setdefault(label, []).append(auroc(scores[name], scores[other]))
    for label, values in found.items():
        print(f"{label:12} {' '.join(f'{value:.3f}' for value in values)}   average {np.mean(values):.3f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backbone", default="celeba32-small")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--data", type=Path, help="also compare the AUROC on the data sets in this folder")
    options = parser.parse_args()
    keep_freed_memory()

    backbone = gepc.load_backbone(options.backbone)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (options.images, 32, 32, 3), dtype=np.uint8)
    print(f"{torch.get_num_threads()} threads, {options.images} images of 32x32")
    for name, values in ratios(fitted(backbone, images), images, options.repeats).items():
        print(f"{name:36} {spread(values)}")
    if options.data:
        side_by_side(backbone, options.data)


def spread(values: list[float]) -> str:
    """Median and range; on a shared machine the range shows how reliable the median is."""
    return f"{statistics.median(values):8.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()

"""bfloat16 on a processor: AUROC, validity of p-values and time against float32, on the same images in one run.

    GEPC_DATA=FOLDER python benchmarks/bfloat16.py [--images 400] [--backbone celeba32-small]

The folder holds celeba32.npz, cifar10.npz and svhn32.npz. For each precision a detector `gepc+`, preset `fast`, is
fitted on 2 x `--images` training images of an ID set and scores `--images` test images of it and of each OOD set. The
table gives the AUROC of each pair, the share of in-distribution test images with a p-value of at most 0.05 and 0.1
(its expectation is at most that rate), the rank correlation of the scores with those in float32, and the processor time
for each image.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

import gepc
from gepc.backbones.devices import profits_from_bfloat16
from gepc.core.tables import ResultTable
from gepc.images.formats import read_npz
from gepc.lab.metrics import auroc

PAIRS = {"celeba32": ("cifar10", "svhn32"), "cifar10": ("svhn32",)}
PRECISIONS = ("float32", "bfloat16", "mixed_bfloat16")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--backbone", default="celeba32-small")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    options = parser.parse_args()
    data, count = Path(os.environ["GEPC_DATA"]), options.images
    rows, exact = [], {}
    for precision in options.precisions.split(","):
        backbone = gepc.load_backbone(options.backbone, device="cpu", dtype=precision)
        for inside, others in PAIRS.items():
            detector = gepc.create_detector(backbone, "gepc+", "fast", size=32, maps="raw")
            detector.fit(read_npz(data / f"{inside}.npz", "train_x")[: 2 * count])
            begun = time.process_time()
            scores = {
                name: detector.score(read_npz(data / f"{name}.npz", "test_x")[:count]) for name in (inside, *others)
            }
            seconds = (time.process_time() - begun) / (count * len(scores))
            exact.setdefault(inside, scores)
            calibration = np.sort(detector.calibration_scores_)
            above = len(calibration) - np.searchsorted(calibration, scores[inside], side="left")
            p_values = (1 + above) / (len(calibration) + 1)
            ranks = [spearmanr(scores[name], exact[inside][name]).statistic for name in scores]
            shares = [float(np.mean(p_values <= alpha)) for alpha in (0.05, 0.1)]
            for other in others:
                area = auroc(scores[inside], scores[other])
                rows.append((precision, f"{inside}:{other}", area, *shares, float(min(ranks)), 1e3 * seconds))
    header = ("precision", "pair", "AUROC", "p <= 0.05", "p <= 0.1", "rank correlation", "ms per image")
    has = "has" if profits_from_bfloat16() else "lacks"
    note = f"{options.backbone}, {count} test images of each set; the processor {has} instructions for bfloat16"
    print(ResultTable("bfloat16", "bfloat16 against float32", header, tuple(rows), note).markdown())


if __name__ == "__main__":
    main()

"""Which reading of SCOPED's description has the properties that it states, on in-distribution images alone.

    python benchmarks/scoped.py --data data/ --images 24

For noised images and for images without noise, at both levels: the mean of T, which is 1 for the exact score of the
distribution that the images come from; the interquartile range of T among images, beside that of the noise alone for a
Gaussian, 1.35 sqrt(2/D); and the rank correlation of T between two noise seeds, which says how much of T belongs to the
image. No out-of-distribution image is read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

import gepc
from gepc.core.tables import markdown_table
from gepc.images.noise import image_key
from gepc.lab.baselines.score import SCOPED
from gepc.methods.base import Batch

FILES = {"CelebA": "celeba32", "C10": "cifar10", "SVHN": "svhn32"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--backbone", default="celeba32-tiny")
    parser.add_argument("--images", type=int, default=24)
    options = parser.parse_args()
    backbone, rows = gepc.load_backbone(options.backbone), []
    for name, file in FILES.items():
        pixels = np.load(options.data / f"{file}.npz")["train_x"][: options.images]
        images = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2) / 127.5 - 1.0, dtype=np.float32)
        keys = [image_key(image) for image in images]
        for noised in (True, False):
            method = SCOPED(sign="none", noised=noised)
            steps = method.timesteps(backbone)
            tables = [method.extract(backbone, Batch(images, keys, seed), steps)["scoped"] for seed in (0, 1)]
            for place, t in enumerate(steps):
                values = np.stack([table[:, place] for table in tables])
                spread = np.subtract(*np.percentile(values, [75, 25]))
                same = spearmanr(*values).statistic
                kind = "noised" if noised else "clean"
                rows.append((name, kind, str(t), f"{values.mean():.3f}", f"{spread:.3f}", f"{same:.2f}"))
    print(markdown_table(("ID set", "input", "timestep", "mean T", "IQR of T", "rank correlation"), rows))
    print(f"\nIQR of the noise alone: {1.35 * np.sqrt(2 / images[0].size):.3f}")


if __name__ == "__main__":
    main()

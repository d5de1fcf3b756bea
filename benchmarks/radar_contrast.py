"""Detection probability at a false-alarm rate per patch against the contrast of a target.

    python benchmarks/radar_contrast.py --out contrast                                    # simulated K-distributed sea
    python benchmarks/radar_contrast.py --out contrast --hrsid DATA/HRSID --alpha 0.01    # clutter of HRSID

The targets are those of `radar_targets.py`. Every detector is fitted on clutter and calibrated on 999 other clutter
patches, so that its false-alarm rate is at most alpha, 1e-3 by default, whatever it computes. Writes
`contrast.csv` and `contrast.png`.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import torch
from radar_targets import KINDS

import gepc
from gepc.lab.radar.annotations import divide, open_scenes
from gepc.lab.radar.bench import radar_detector
from gepc.lab.radar.patches import PatchRules, cut, sample, stack
from gepc.lab.radar.simulate import Sea

mpl.use("Agg")
import matplotlib.pyplot as plt

Array = npt.NDArray[np.float64]
DECIBELS = (-6.0, -3.0, 0.0, 3.0, 6.0, 9.0, 15.0)
METHODS = {
    "gepc+:radar (all together)": ("gepc+:radar", {}),
    "its denoising error alone": ("gepc+:radar", {"features": ("d",)}),
    "OS-CFAR": ("os_cfar", {}),
    "CA-CFAR": ("ca_cfar", {}),
    "RX": ("rx", {}),
}
COLOURS = ("#d62728", "#ff9896", "#1f77b4", "#17becf", "#7f7f7f")


def clutter_patches(hrsid: Path | None, count: int, size: int) -> Array:
    """Intensities (N, H, W), where white is 1."""
    if hrsid is None:
        rng, sea = np.random.default_rng(0), Sea()
        return np.stack([sea.intensity(size, size, rng) for _ in range(count)])
    train, test = open_scenes(hrsid, "train"), open_scenes(hrsid, "test")
    _, held_out = divide(train, 0.35)
    found = sample(cut(held_out, PatchRules(size), test.scenes).clutter, count)
    if len(found) < count:
        raise SystemExit(f"{hrsid} has {len(found)} clutter patches of {size} pixels, {count} are needed")
    order = np.random.default_rng(0).permutation(count)
    return (stack(found)[order, :, :, 0] / 255.0) ** 2


def as_images(intensity: Array) -> npt.NDArray[np.uint8]:
    """8-bit amplitude (N, H, W, 1), as a product would store it."""
    return np.rint(255.0 * np.sqrt(intensity).clip(0.0, 1.0)).astype(np.uint8)[..., None]


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """One row per method, kind of target and contrast."""
    fit, calibrate, each = arguments.fit, arguments.calibrate, arguments.each
    clutter = clutter_patches(arguments.hrsid, fit + calibrate + each, arguments.size)
    images, test = as_images(clutter), clutter[fit + calibrate :]
    backbone = gepc.load_backbone(arguments.backbone)
    rows: list[dict[str, object]] = []
    for label, (method, options) in METHODS.items():
        detector = radar_detector(backbone, method, arguments.target_pixels, arguments.size, **options)
        detector.fit(images[:fit], images[fit : fit + calibrate])
        for kind, insert in KINDS.items():
            for level in arguments.decibels:
                rng = np.random.default_rng(1)
                targets = [insert(patch, 10.0 ** (level / 10.0), rng) for patch in test]
                found = detector.predict(as_images(np.stack(targets)), arguments.alpha)
                rows.append(
                    {"target": kind, "contrast_db": level, "method": label, "pd": float(found.mean()), "n": each}
                )
        print(label, "done", flush=True)
    return rows


def draw(rows: list[dict[str, object]], path: Path) -> None:
    """Curves of all methods, one panel for each kind of target."""
    figure, panels = plt.subplots(2, 4, figsize=(11.0, 5.2), sharex=True, sharey=True)
    for axes, kind in zip(panels.flat, KINDS, strict=False):
        for label, colour in zip(METHODS, COLOURS, strict=True):
            line = [row for row in rows if row["target"] == kind and row["method"] == label]
            over = 3 if colour == COLOURS[0] else 2  # the product is not hidden by others
            levels, found = ([row[name] for row in line] for name in ("contrast_db", "pd"))
            axes.plot(levels, found, "o-", ms=3, color=colour, label=label, zorder=over)
        axes.axvline(0.0, color="0.8", lw=0.8, zorder=0)
        axes.set_title(kind, fontsize=10)
        axes.set_ylim(-0.03, 1.03)
    for axes in panels[1]:
        axes.set_xlabel("contrast, dB")
    for axes in panels[:, 0]:
        axes.set_ylabel("detection probability")
    panels[1, 3].axis("off")
    panels[0, 3].xaxis.set_tick_params(labelbottom=True)
    panels[1, 3].legend(*panels[0, 0].get_legend_handles_labels(), loc="center", fontsize=9, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure and write the CSV file and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hrsid", type=Path, default=None)
    parser.add_argument("--backbone", default="sar-small")
    parser.add_argument("--alpha", type=float, default=1e-3, help="false-alarm rate per patch")
    parser.add_argument("--decibels", type=float, nargs="+", default=DECIBELS, help="contrasts of the targets")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--target-pixels", type=float, default=200)
    parser.add_argument("--fit", type=int, default=200)
    parser.add_argument("--calibrate", type=int, default=999)
    parser.add_argument("--each", type=int, default=30, help="patches for each kind of target and contrast")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = measure(arguments)
    with open(arguments.out / "contrast.csv", "w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, arguments.out / "contrast.png")


if __name__ == "__main__":
    main()

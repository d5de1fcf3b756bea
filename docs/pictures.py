"""The pictures of the README and of the pages "How it works", "Radar" and "Inspecting parts", made by the library.

    python docs/pictures.py [beach | radar | how | parts]

Without a name it draws all of them: images/beach.jpg and beach-map.jpg, radar-maps.png, how-*.png, parts.png. Some
minutes on one core.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from scipy.ndimage import gaussian_filter
from skimage import data

import gepc
from gepc.conformal.p_values import threshold
from gepc.detector import plots
from gepc.detector.plots import histogram
from gepc.detector.stream import stream
from gepc.images.noise import image_key, normal
from gepc.images.sources import open_images
from gepc.lab.radar.bench import radar_detector
from gepc.lab.radar.simulate import Sea, Target, simulate
from gepc.lab.report.demo import FIT_ROWS, FULL, INSIDE, OUTSIDE, TEST_ROWS, Search, patches, search, things_table
from gepc.methods.groups import find_action

OUT = Path(__file__).parent / "images"
LEVELS = (0.9999, 0.9979, 0.99)
ELEMENTS = ("flip_x", "rot90", "shift_x")


def probe(backbone: gepc.Backbone, pixels: np.ndarray, level: float) -> Figure:
    """One image through the method: noisy, transformed, predicted, mapped back, compared."""
    (t,) = gepc.Levels((level,)).timesteps(backbone.alphas_cumprod)
    image = pixels.transpose(2, 0, 1).astype(np.float32) / 127.5 - 1
    abar = backbone.alphas_cumprod[t]
    noise = normal(0, [image_key(image)], image.shape, t, 0)
    x = torch.from_numpy((abar**0.5 * image + (1 - abar) ** 0.5 * noise).astype(np.float32))
    base = backbone.score(x, t)
    figure = Figure(figsize=(7.2, 5.0), layout="constrained")
    grid = figure.subplots(len(ELEMENTS), 5)
    titles = ("image, $P_g x_t$", "prediction, $s(P_g x_t)$", "mapped back", "prediction, $s(x_t)$", "difference$^2$")
    residuals = []
    for row, name in zip(grid, ELEMENTS, strict=True):
        action = find_action(name)
        predicted = backbone.score(action.apply(x), t)
        residual = (action.inverse(predicted) - base).square().mean(1)[0]
        residuals.append(residual)
        for axes, field in zip(row, (action.apply(x), predicted, action.inverse(predicted), base), strict=False):
            scale = 1.0 if field.shape == x.shape and axes is row[0] else float(base.abs().quantile(0.99))
            axes.imshow(((field[0] / scale + 1) / 2).clamp(0, 1).permute(1, 2, 0))
        row[0].set_ylabel(name)
    top = float(torch.stack(residuals).quantile(0.995))
    for row, residual in zip(grid, residuals, strict=True):
        row[4].imshow(residual, cmap="inferno", vmin=0, vmax=top)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize=9)
    return figure


def radar(side: int = 128) -> Figure:
    """Simulated sea and ships with their maps by `gepc+:radar`, as in the paper's figure."""
    sea = Sea()
    ships = {
        "sea": (),
        "large ship": (Target(60, 70, heading=0.6),),
        "small ship": (Target(80, 50, 16, 5, heading=2.0, brightness=60.0),),
        "faint ship": (Target(40, 64, 30, 8, brightness=8.0, wake=60.0),),
        "two ships": (Target(30, 40, 24, 7, heading=1.0), Target(95, 88, 18, 6, heading=2.4, brightness=40.0)),
    }
    fit = np.stack([simulate(side, side, sea, (), seed)[0] for seed in range(60)])[..., None].clip(0.0, 1.0)
    detector = radar_detector(gepc.load_backbone("sar-small"), size=side, value_range=(0.0, 1.0)).fit(fit)
    shown = [
        simulate(side, side, sea, found, 100 + place)[0].clip(0.0, 1.0) for place, found in enumerate(ships.values())
    ]
    maps = detector.score_map([image[..., None] for image in shown])
    pictures = [(255 * np.sqrt(image)).astype(np.uint8)[..., None] for image in shown]
    return plots.maps(pictures, maps, list(ships), detector.map_limit())


def beach() -> Search:
    """The search of `gepc demo`, on larger photographs."""
    return search(gepc.load_backbone("photos-small"), replace(FULL, height=640, width=960, new_photographs=1))


def how() -> None:
    """The pictures of "How it works"."""
    backbone = gepc.load_backbone("celeba32-small")
    with torch.no_grad():
        face = data.astronaut()[20:212:6, 128:320:6]
        probe(backbone, face, 0.99).savefig(OUT / "how-probe.png", dpi=110)

    detector = gepc.GEPC(backbone, levels=LEVELS, keep=2)
    detector.fit(patches(INSIDE, FIT_ROWS)[:60])
    inside, others = patches(INSIDE, TEST_ROWS)[:24], {photograph: patches(photograph)[:10] for photograph in OUTSIDE}

    scores = {name: detector.score(images) for name, images in {INSIDE: inside, **others}.items()}
    outside = np.concatenate([scores[name] for name in others])
    limit = threshold(detector.calibration_scores_, 0.05)
    figure = histogram(scores[INSIDE], outside, limit, (INSIDE, "other photographs"))
    figure.savefig(OUT / "how-scores.png", dpi=150, facecolor="w")
    for name, values in scores.items():
        print(f"{name}: {(values > limit).sum()} of {len(values)} above the threshold at alpha 0.05")


def plate(seed: int, defect: str | None = None, side: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """A brushed metal plate with four holes (H, W), perhaps with a defect, and the mask of the defect."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side]
    grain = gaussian_filter(rng.standard_normal((side, side)), (0.6, 8)) * 60
    image = 150 + grain + 10 * np.sin(x / side * np.pi) + 3 * rng.standard_normal((side, side))
    for cy, cx in ((24, 24), (24, 104), (104, 24), (104, 104)):
        image[np.hypot(y - cy, x - cx) < 9] = 40
    cy, cx = rng.integers(45, 84, 2)
    squared = (y - cy) ** 2 + (x - cx) ** 2
    mask = np.zeros((side, side), dtype=bool)
    if defect == "scratch":
        mask = (abs((y - cy) - 0.6 * (x - cx)) < 1.2) & (abs(x - cx) < 20)
        image[mask] = 225
    if defect == "dent":
        mask, image = squared < 100, image - 45 * np.exp(-squared / 40)
    if defect == "hole missing":
        mask = np.hypot(y - 24, x - 24) < 9
        image[mask] = 150 + grain[mask]
    if defect == "faint stain":
        mask, image = squared < 400, image - 8 * np.exp(-squared / 200)
    return image.clip(0, 255).astype(np.uint8), mask


def parts(count: int = 20) -> Figure:
    """Plates with boxes around what the preset `inspect` finds, above their maps; prints what is found."""
    detector = gepc.create_detector(gepc.load_backbone("photos-small"), preset="inspect")
    detector.fit(np.stack([plate(seed)[0] for seed in range(300)]))
    kinds = ("good", "scratch", "dent", "hole missing", "faint stain")
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    for column, kind in zip(figure.subplots(2, len(kinds)).T, kinds, strict=True):
        made = [plate(2000 + seed, kind) for seed in range(count)]
        images = open_images(np.stack([image for image, _ in made]))
        (chunk,) = stream(detector.fitted, images, maps=True, batch_size=count)
        fields = chunk.fields or {}
        alarms = sum(result.p_value <= 0.05 for result in chunk.results)
        boxes = [detector.fitted.regions(fields, row) for row in range(count)]
        hits = sum(
            any(touches(region.box, mask) for region in found) for found, (_, mask) in zip(boxes, made, strict=True)
        )
        print(f"{kind}: {alarms} of {count} raise an alarm, {hits} have a box on the defect")
        column[0].imshow(made[0][0], cmap="gray", vmin=0, vmax=255)
        column[1].imshow(fields["sum"][0], cmap="inferno", vmin=0, vmax=detector.map_limit())
        column[0].set_title(kind)
        for region in boxes[0]:
            top, left, bottom, right = (2 * end for end in region.box)  # maps are at half the resolution
            edge = {"fill": False, "edgecolor": "#d62728", "linewidth": 2}
            column[0].add_patch(Rectangle((left, top), right - left, bottom - top, **edge))
        for axes in column:
            axes.set(xticks=[], yticks=[])
    return figure


def touches(box: tuple[int, int, int, int], mask: np.ndarray) -> bool:
    """Whether a box of a map at half the resolution has a pixel of the mask."""
    top, left, bottom, right = (2 * end for end in box)
    return bool(mask[top:bottom, left:right].any())


def main() -> None:
    """Write the pictures that are asked for."""
    wanted = sys.argv[1:] or ["beach", "radar", "how", "parts"]
    if "beach" in wanted:
        found = beach()
        found.boxed.save(OUT / "beach.jpg", quality=88)
        found.mapped.save(OUT / "beach-map.jpg", quality=88)
        print(things_table(found).markdown())
    if "radar" in wanted:
        radar().savefig(OUT / "radar-maps.png", dpi=150, facecolor="w")
    if "how" in wanted:
        how()
    if "parts" in wanted:
        parts().savefig(OUT / "parts.png", dpi=110, facecolor="w")


if __name__ == "__main__":
    main()

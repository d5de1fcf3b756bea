"""The pictures of the README and of the pages "How it works" and "Radar", made by the library with its own networks.

    python docs/pictures.py [beach | radar | how]

Without a name it draws all of them: images/beach.jpg and beach-map.jpg, radar-maps.png, how-*.png. Some minutes on one
core.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from skimage import data

import gepc
from gepc.conformal.p_values import threshold
from gepc.images.noise import image_key, normal
from gepc.lab.radar.bench import radar_detector
from gepc.lab.radar.simulate import Sea, Target, simulate
from gepc.lab.report import figures
from gepc.lab.report.demo import FIT_ROWS, FULL, INSIDE, OUTSIDE, TEST_ROWS, Search, draw, search, things_table
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
    detector = radar_detector(gepc.load_backbone("sar-tiny"), size=side, value_range=(0.0, 1.0)).fit(fit)
    shown = [
        simulate(side, side, sea, found, 100 + place)[0].clip(0.0, 1.0) for place, found in enumerate(ships.values())
    ]
    maps = detector.score_map([image[..., None] for image in shown])
    pictures = [(255 * np.sqrt(image)).astype(np.uint8)[..., None] for image in shown]
    return figures.maps(pictures, maps, list(ships), detector.map_limit())


def beach() -> Search:
    """The search of `gepc demo`, on larger photographs."""
    return search(gepc.load_backbone("photos-tiny"), replace(FULL, height=640, width=960, new_photographs=1))


def how() -> None:
    """The pictures of "How it works"."""
    backbone = gepc.load_backbone("celeba32-tiny")
    with torch.no_grad():
        face = data.astronaut()[20:212:6, 128:320:6]
        probe(backbone, face, 0.99).savefig(OUT / "how-probe.png", dpi=110)

    detector = gepc.GEPC(backbone, levels=LEVELS, keep=2)
    (fit,) = draw(INSIDE, [60], FIT_ROWS)
    (inside,) = draw(INSIDE, [24], TEST_ROWS)
    others = {photograph: draw(photograph, [10])[0] for photograph in OUTSIDE}
    detector.fit(fit)

    scores = {name: detector.score(patches) for name, patches in {INSIDE: inside, **others}.items()}
    outside = np.concatenate([scores[name] for name in others])
    limit = threshold(detector.calibration_scores_, 0.05)
    figure = figures.histogram(scores[INSIDE], outside, limit, (INSIDE, "other photographs"))
    figure.savefig(OUT / "how-scores.png", dpi=150, facecolor="w")
    for name, values in scores.items():
        print(f"{name}: {(values > limit).sum()} of {len(values)} above the threshold at alpha 0.05")


def main() -> None:
    """Write the pictures that are asked for."""
    wanted = sys.argv[1:] or ["beach", "radar", "how"]
    if "beach" in wanted:
        found = beach()
        found.boxed.save(OUT / "beach.jpg", quality=88)
        found.mapped.save(OUT / "beach-map.jpg", quality=88)
        print(things_table(found).markdown())
    if "radar" in wanted:
        radar().savefig(OUT / "radar-maps.png", dpi=150, facecolor="w")
    if "how" in wanted:
        how()


if __name__ == "__main__":
    main()

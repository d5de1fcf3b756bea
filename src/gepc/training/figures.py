"""Pictures of a run: a grid of samples and the loss curve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gepc.core.files import replacing
from gepc.images.sources import Image
from gepc.training.loss_log import LOG_EVERY, Row
from gepc.training.net import build_scheduler
from gepc.training.recipe import Recipe

if TYPE_CHECKING:
    from diffusers import UNet2DModel

GRID = 8
STEPS = 50
SHOWN_WIDTH = 96
GAP = 2


def write_samples(path: Path, net: UNet2DModel, recipe: Recipe, shape: tuple[int, ...], seed: int = 0) -> None:
    """A grid of images drawn from the net, as PNG, small ones enlarged."""
    from PIL import Image as PILImage

    pixels = np.round(255.0 * np.clip(sample(net, recipe, GRID * GRID, shape, seed) / 2.0 + 0.5, 0.0, 1.0))
    scale = max(1, SHOWN_WIDTH // shape[-1])
    tiles = pixels.astype(np.uint8).repeat(scale, axis=2).repeat(scale, axis=3)
    picture = PILImage.fromarray(_grid(tiles))
    with replacing(path) as draft:
        picture.save(draft, format="PNG")


def sample(
    net: UNet2DModel, recipe: Recipe, count: int, shape: tuple[int, ...], seed: int = 0, batch_size: int = 16
) -> Image:
    """`count` images (C, H, W) in [-1, 1] by deterministic DDIM in at most 50 steps from seeded noise."""
    import torch
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler.from_config(build_scheduler(recipe).config)
    scheduler.set_timesteps(min(STEPS, recipe.diffusion_steps))
    noise = np.random.default_rng(seed).standard_normal((count, *shape), dtype=np.float32)
    images = []
    with torch.no_grad():
        for start in range(0, count, batch_size):
            x = torch.from_numpy(noise[start : start + batch_size]).to(net.device)
            for timestep in scheduler.timesteps:
                x = scheduler.step(net(x, timestep, return_dict=False)[0], timestep, x, return_dict=False)[0]
            images.append(x.cpu().numpy())
    return np.concatenate(images)


def _grid(tiles: Image) -> Image:
    """(N, C, H, W) as rows of GRID tiles, (rows, columns) or (rows, columns, 3), a white gap between them."""
    count, channels, height, width = tiles.shape
    rows = -(-count // GRID)
    canvas = np.full((rows * (height + GAP) - GAP, GRID * (width + GAP) - GAP, channels), 255, dtype=tiles.dtype)
    for index, tile in enumerate(tiles):
        top, left = index // GRID * (height + GAP), index % GRID * (width + GAP)
        canvas[top : top + height, left : left + width] = tile.transpose(1, 2, 0)
    return canvas[..., 0] if channels == 1 else canvas


def write_loss_curve(path: Path, rows: list[Row]) -> bool:
    """The loss over the steps with a running mean, as PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    steps, losses = np.array([row.step for row in rows]), np.array([row.loss for row in rows])
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="0.8", linewidth=0.8, label=f"each {LOG_EVERY} steps")
    window = max(1, len(rows) // 40)
    smooth = np.convolve(losses, np.full(window, 1.0 / window), mode="valid")
    axes.plot(steps[window - 1 :], smooth, color="C0", label=f"mean of {LOG_EVERY * window} steps")
    axes.set(xlabel="step", ylabel="noise MSE", yscale="log")
    axes.legend()
    with replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=150)
    return True

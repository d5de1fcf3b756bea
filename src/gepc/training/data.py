"""Training images, and the batch of a step as a function of (seed, step), which makes a resumed run exact."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError
from gepc.images.batches import load_all
from gepc.images.formats import read_npz
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import Image, Images, iterate, open_images
from gepc.training.recipe import Recipe

MINIMUM_IMAGES = 16


def load_training_images(data: str | Path, recipe: Recipe) -> tuple[Image, Image]:
    """Training and held-out images as (N, C, H, W) in [-1, 1].

    The held-out images are the last `recipe.held_out` of a seeded shuffle.

    Parameters
    ----------
    data : a folder of images, or an `.npz` file with an array `train_x`; other arrays of it are not read.
    recipe : the recipe of the run.
    """
    is_archive = Path(data).suffix == ".npz"
    collection = open_images(
        read_npz(Path(data), default_keys=("train_x", "x", "images")) if is_archive else Path(data)
    )
    if len(collection) < MINIMUM_IMAGES:
        raise InputError(
            f"too few images in {data}: {len(collection)}; at least {MINIMUM_IMAGES} are needed, preferably thousands"
        )
    images = _load(collection, str(data), recipe)
    height, width = images.shape[2:]
    if height % recipe.stride or width % recipe.stride:
        raise InputError(
            f"images of {height}x{width} do not fit this network: the sides must be multiples of {recipe.stride}; "
            f"set image_size, for instance image_size={max(1, width // recipe.stride) * recipe.stride}"
        )
    order = np.random.default_rng(recipe.seed).permutation(len(images))
    held = min(recipe.held_out, len(images) // 4)
    return images[order[: len(images) - held]], images[order[len(images) - held :]]


def _load(collection: Images, where: str, recipe: Recipe) -> Image:
    size = None if recipe.image_size is None else (recipe.image_size, recipe.image_size)
    preprocessing = Preprocessing(value_range=recipe.value_range, size=size, channels=recipe.image_channels)
    try:
        return load_all(collection, preprocessing)
    except InputError as error:
        sizes = Counter(record.pixels.shape[:2] for record in iterate(collection) if record.pixels is not None)
        if size is not None or len(sizes) < 2:
            raise
        counts = ", ".join(f"{count} of {rows}x{columns}" for (rows, columns), count in sizes.most_common(3))
        more = ", ..." if len(sizes) > 3 else ""
        raise InputError(
            f"the images in {where} have {len(sizes)} different sizes ({counts}{more}); "
            "set image_size to resize them, for instance image_size=32"
        ) from error


@dataclass(frozen=True)
class Draw:
    """The random choices of one step: images, flips, timesteps and noise."""

    indices: npt.NDArray[np.int64]
    flip_x: npt.NDArray[np.bool_]
    flip_y: npt.NDArray[np.bool_]
    timesteps: npt.NDArray[np.int64]
    noise: npt.NDArray[np.float32]

    def part(self, index: int, parts: int) -> Draw:
        """The `index`-th of `parts` equal parts, the share of one of several devices."""
        return Draw(*(getattr(self, field.name)[index::parts] for field in fields(self)))


def draw(recipe: Recipe, count: int, shape: tuple[int, ...], table: npt.NDArray[np.int64], step: int) -> Draw:
    """The batch of one step. Epochs are seeded permutations of the images, divided into batches.

    Parameters
    ----------
    recipe : the recipe of the run.
    count : number of training images.
    shape : shape of an image.
    table : timesteps of low noise, see `low_noise_table`.
    step : the step.
    """
    rng = np.random.default_rng([recipe.seed, step, 0, 1])
    size = recipe.batch_size
    flips = {"flip_x": recipe.flips in ("horizontal", "both"), "flip_y": recipe.flips in ("vertical", "both")}
    return Draw(
        indices=_epoch_slice(recipe.seed, count, step * size, size),
        flip_x=(rng.random(size) < 0.5) & flips["flip_x"],
        flip_y=(rng.random(size) < 0.5) & flips["flip_y"],
        timesteps=sample_timesteps(recipe, table, rng, size),
        noise=rng.standard_normal((size, *shape), dtype=np.float32),
    )


def _epoch_slice(seed: int, count: int, start: int, size: int) -> npt.NDArray[np.int64]:
    positions = np.arange(start, start + size)
    picked = np.empty(size, dtype=np.int64)
    for epoch in np.unique(positions // count):
        here = positions // count == epoch
        picked[here] = _epoch_order(seed, count, int(epoch))[positions[here] % count]
    return picked


@lru_cache(maxsize=2)
def _epoch_order(seed: int, count: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch, 0, 2]).permutation(count)


def low_noise_table(
    recipe: Recipe, alphas_cumprod: npt.NDArray[np.float64], entries: int = 4096
) -> npt.NDArray[np.int64]:
    """Timesteps at `entries` values of rho, evenly spaced in log rho: a uniform choice is log-uniform in rho."""
    log_rho = 0.5 * np.log(1.0 / alphas_cumprod - 1.0)
    low, high = np.log(recipe.rho_range)
    wanted = low + (high - low) * (np.arange(entries) + 0.5) / entries
    right = np.clip(np.searchsorted(log_rho, wanted), 1, len(log_rho) - 1)
    nearer_left = wanted - log_rho[right - 1] < log_rho[right] - wanted
    return np.asarray(np.where(nearer_left, right - 1, right), dtype=np.int64)


def sample_timesteps(
    recipe: Recipe, table: npt.NDArray[np.int64], rng: np.random.Generator, size: int
) -> npt.NDArray[np.int64]:
    """Timesteps that are log-uniform in rho with probability `low_noise_share`, else uniform in t."""
    low_noise = rng.random(size) < recipe.low_noise_share
    favoured = table[rng.integers(0, len(table), size)]
    uniform = rng.integers(0, recipe.diffusion_steps, size)
    return np.where(low_noise, favoured, uniform)


def fingerprint(images: Image) -> str:
    """A short hash of the training images, so that a run is not resumed with different data."""
    return hashlib.blake2b(images[:: max(1, len(images) // 256)].tobytes(), digest_size=8).hexdigest()

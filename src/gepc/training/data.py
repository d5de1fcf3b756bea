"""Training images, and the batch of any step as a pure function of (seed, step): what makes a resumed run exact."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gepc.errors import InputError
from gepc.images import Image, Preprocessing, load_all, open_images
from gepc.training.recipe import Recipe

MINIMUM_IMAGES = 16


def load_training_images(data: str | Path, recipe: Recipe) -> tuple[Image, Image]:
    """Training and held-out images as (N, C, H, W) in [-1, 1].

    A folder of images or an `.npz` with `train_x`. A `test_x` part is never read: the held-out images are the last
    `recipe.held_out` of a seeded shuffle of the training part.
    """
    images = _load(Path(data), recipe)
    if len(images) < MINIMUM_IMAGES:
        raise InputError(f"{data} has {len(images)} images; training needs at least {MINIMUM_IMAGES}")
    height, width = images.shape[2:]
    if height % recipe.stride or width % recipe.stride:
        raise InputError(
            f"images of {height}x{width} do not fit a net with strides of {recipe.stride}; set image_size to a multiple of it"
        )
    order = np.random.default_rng(recipe.seed).permutation(len(images))
    held = min(recipe.held_out, len(images) // 4)
    return images[order[: len(images) - held]], images[order[len(images) - held :]]


def _load(path: Path, recipe: Recipe) -> Image:
    size = None if recipe.image_size is None else (recipe.image_size, recipe.image_size)
    preprocessing = Preprocessing(size=size, channels=recipe.image_channels)
    if path.suffix == ".npz":
        return load_all(open_images(_read_npz(path)), preprocessing)[0]
    return load_all(open_images(path), preprocessing)[0]


def _read_npz(path: Path) -> npt.NDArray[np.generic]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive.files)
            for name in ("train_x", "x", "images"):
                if name in names:
                    return np.asarray(archive[name])
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a plain .npz archive: {error}") from error
    raise InputError(f"{path} has no array train_x, x or images; it holds {', '.join(names) or 'nothing'}")


@dataclass(frozen=True)
class Draw:
    """What one step sees: which images, which of them flipped, at which timesteps, with which noise."""

    indices: npt.NDArray[np.int64]
    flip_x: npt.NDArray[np.bool_]
    flip_y: npt.NDArray[np.bool_]
    timesteps: npt.NDArray[np.int64]
    noise: npt.NDArray[np.float32]


def draw(
    recipe: Recipe, count: int, shape: tuple[int, ...], table: npt.NDArray[np.int64], step: int, rank: int = 0
) -> Draw:
    """The batch of `step` on process `rank`; epochs are seeded permutations, cut into batches across processes."""
    rng = np.random.default_rng([recipe.seed, step, rank, 1])
    size = recipe.batch_size
    flips = {"flip_x": recipe.flips in ("horizontal", "both"), "flip_y": recipe.flips in ("vertical", "both")}
    return Draw(
        indices=_epoch_slice(recipe.seed, count, step * size, size, rank),
        flip_x=(rng.random(size) < 0.5) & flips["flip_x"],
        flip_y=(rng.random(size) < 0.5) & flips["flip_y"],
        timesteps=sample_timesteps(recipe, table, rng, size),
        noise=rng.standard_normal((size, *shape), dtype=np.float32),
    )


def _epoch_slice(seed: int, count: int, start: int, size: int, rank: int) -> npt.NDArray[np.int64]:
    positions = np.arange(start, start + size)
    picked = np.empty(size, dtype=np.int64)
    for epoch in np.unique(positions // count):
        here = positions // count == epoch
        order = np.random.default_rng([seed, int(epoch), rank, 2]).permutation(count)
        picked[here] = order[positions[here] % count]
    return picked


def low_noise_table(
    recipe: Recipe, alphas_cumprod: npt.NDArray[np.float64], entries: int = 4096
) -> npt.NDArray[np.int64]:
    """Timesteps at `entries` values of rho, evenly spaced in log rho: a uniform pick is log-uniform in rho."""
    log_rho = 0.5 * np.log(1.0 / alphas_cumprod - 1.0)
    low, high = np.log(recipe.rho_range)
    wanted = low + (high - low) * (np.arange(entries) + 0.5) / entries
    right = np.clip(np.searchsorted(log_rho, wanted), 1, len(log_rho) - 1)
    nearer_left = wanted - log_rho[right - 1] < log_rho[right] - wanted
    return np.asarray(np.where(nearer_left, right - 1, right), dtype=np.int64)


def sample_timesteps(
    recipe: Recipe, table: npt.NDArray[np.int64], rng: np.random.Generator, size: int
) -> npt.NDArray[np.int64]:
    """log-uniform in rho with probability `low_noise_share`, else uniform in t."""
    low_noise = rng.random(size) < recipe.low_noise_share
    favoured = table[rng.integers(0, len(table), size)]
    uniform = rng.integers(0, recipe.diffusion_steps, size)
    return np.where(low_noise, favoured, uniform)


def fingerprint(images: Image) -> str:
    """A short hash of the training images, so that a run is not resumed on other data."""
    return hashlib.blake2b(images[:: max(1, len(images) // 256)].tobytes(), digest_size=8).hexdigest()

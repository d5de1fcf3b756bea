"""Training images, and the batch of a step as a function of (seed, step), which makes a resumed run exact."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError
from gepc.images.batches import load_all
from gepc.images.formats import Pixels
from gepc.images.preprocessing import Preprocessing, warn_about_range
from gepc.images.sources import Image, Images, ObservedImages, Record, open_images
from gepc.lab.training.recipe import Recipe

Integers = npt.NDArray[np.int64]
MINIMUM_IMAGES = 16


@dataclass(frozen=True)
class Survey:
    """How many images of a collection there are of each (height, width), and their channels."""

    sizes: Counter[tuple[int, int]]
    channels: int  # 1 if all images are grey, 3 if some are in colour; otherwise their number of channels


def survey(images: Images) -> Survey:
    """Read every image once; one that cannot be read is an `InputError`."""
    shapes = [record.pixels_for(0).shape for record in images]  # 0: the number of channels is not known
    sizes = Counter((shape[0], shape[1]) for shape in shapes)
    return Survey(sizes, max((*shape, 1)[2] for shape in shapes))


@dataclass(frozen=True)
class Crops:
    """Images that are larger than the network's input, from which a step takes random crops."""

    pixels: Sequence[Pixels]  # as they were read, (H, W) or (H, W, C) each; preprocessed, they would need more memory
    preprocessing: Preprocessing  # its `size` is the size of a crop

    def cut(self, indices: Integers, places: npt.NDArray[np.float64]) -> Image:
        """One crop (C, H, W) from each of the images `indices`, at (y, x) in `places`, from 0, the first, to 1."""
        assert self.preprocessing.size is not None
        height, width = self.preprocessing.size
        crops = []
        for index, (y, x) in zip(indices, places, strict=True):
            pixels = self.pixels[index]
            top, left = int(y * (pixels.shape[0] - height + 1)), int(x * (pixels.shape[1] - width + 1))
            crops.append(self.preprocessing(pixels[top : top + height, left : left + width]))
        return np.stack(crops)


@dataclass(frozen=True)
class TrainingData:
    """The images of a run."""

    images: Image  # (N, C, H, W) in [-1, 1]; their central crops if the recipe crops
    held_out: Image
    hashes: npt.NDArray[np.uint64]  # sorted, of the training images' sources, see `Record.content_hash`
    crops: Crops | None = None  # the training images that random crops are taken from


def open_training_images(data: str | Path) -> Images:
    """Open a folder of images, or the array `train_x` of an `.npz` file, or its only array."""
    try:
        collection = open_images(f"{data}:train_x" if Path(data).suffix == ".npz" else data)
    except InputError:
        collection = open_images(data)
    if len(collection) < MINIMUM_IMAGES:
        raise InputError(f"too few images in {data}: {len(collection)}; at least {MINIMUM_IMAGES} are needed")
    return collection


def load_training_images(data: str | Path, recipe: Recipe) -> TrainingData:
    """Read the images of a run. The held-out images are the last `recipe.held_out` of a seeded shuffle."""
    collection = open_training_images(data)
    channels = recipe.image_channels
    if channels is None or recipe.image_size is None:
        found = survey(collection)
        channels = found.channels if channels is None else channels
        if recipe.image_size is None and len(found.sizes) > 1:
            advice = "set image_size to resize them, for instance image_size=32"
            raise InputError(f"the images in {data} have {len(found.sizes)} different sizes; {advice}")
    observed = ObservedImages(collection, _hash_and_colour)
    size = None if recipe.image_size is None else (recipe.image_size, recipe.image_size)
    preprocessing = Preprocessing(recipe.value_range, size, "cut" if recipe.crop else "stretch", channels)
    crops = None
    if recipe.crop:
        images, crops = _load_crops(observed, preprocessing)
    else:
        images = load_all(observed, preprocessing)
    height, width = images.shape[2:]
    if height % recipe.stride or width % recipe.stride:
        side = max(1, width // recipe.stride) * recipe.stride
        wanted = f"the sides must be multiples of {recipe.stride}; set image_size, for instance image_size={side}"
        raise InputError(f"images of {width}x{height} do not fit this network: {wanted}")
    in_colour = sum(is_colour for _, is_colour in observed.seen.values())
    if channels == 1 and in_colour:
        message = f"images in colour are converted to grey, since image_channels is 1: {in_colour} of {len(images)}"
        warnings.warn(message, stacklevel=3)
    order = np.random.default_rng(recipe.seed).permutation(len(images))
    trained, held = np.split(order, [len(images) - min(recipe.held_out, len(images) // 4)])
    hashes = np.unique(np.asarray([observed.seen[index][0] for index in trained.tolist()], dtype=np.uint64))
    if crops is not None:
        crops = replace(crops, pixels=[crops.pixels[index] for index in trained])
    return TrainingData(images[trained], images[held], hashes, crops)


def _hash_and_colour(record: Record) -> tuple[int, bool]:
    is_colour = record.axes_known and record.pixels is not None and record.pixels.shape[2:] == (3,)
    return record.content_hash(), is_colour


def _load_crops(collection: Images, cut: Preprocessing) -> tuple[Image, Crops]:
    assert cut.size is not None
    whole, side = replace(cut, size=None), cut.size[0]
    warn_about_range(collection, cut.value_range)
    centres, pixels = [], []
    for record in collection:
        found = record.pixels_for(cut.channels)
        if min(found.shape[:2]) < side:
            size = f"{found.shape[0]}x{found.shape[1]}, smaller than the crops of {side}x{side}"
            raise InputError(f"{record.label} is {size}; leave it out, or set a smaller image_size")
        whole(found, record.label)  # an invalid pixel is found now, not in the step that crops it
        centres.append(cut(found, record.label))
        pixels.append(found)
    return np.stack(centres), Crops(pixels, cut)


@dataclass(frozen=True)
class Draw:
    """The random choices of one step: images, flips, timesteps, noise and places of crops."""

    indices: Integers
    flip_x: npt.NDArray[np.bool_]
    flip_y: npt.NDArray[np.bool_]
    timesteps: Integers
    noise: npt.NDArray[np.float32]
    places: npt.NDArray[np.float64]


def draw(recipe: Recipe, count: int, shape: tuple[int, ...], table: Integers, step: int) -> Draw:
    """The batch of one step: of `count` images of `shape`, with the timesteps of `low_noise_table`.

    Epochs are seeded permutations of the images, divided into batches.
    """
    rng = np.random.default_rng([recipe.seed, step, 0, 1])
    size = recipe.batch_size
    return Draw(
        indices=_epoch_slice(recipe.seed, count, step * size, size),
        flip_x=(rng.random(size) < 0.5) & (recipe.flips in ("horizontal", "both")),
        flip_y=(rng.random(size) < 0.5) & (recipe.flips in ("vertical", "both")),
        timesteps=sample_timesteps(recipe, table, rng, size),
        noise=rng.standard_normal((size, *shape), dtype=np.float32),
        places=np.random.default_rng([recipe.seed, step, 0, 3]).random((size, 2)),
    )


def _epoch_slice(seed: int, count: int, start: int, size: int) -> Integers:
    positions = np.arange(start, start + size)
    picked = np.empty(size, dtype=np.int64)
    for epoch in np.unique(positions // count):
        here = positions // count == epoch
        picked[here] = _epoch_order(seed, count, int(epoch))[positions[here] % count]
    return picked


@lru_cache(maxsize=2)
def _epoch_order(seed: int, count: int, epoch: int) -> Integers:
    return np.random.default_rng([seed, epoch, 0, 2]).permutation(count)


def low_noise_table(recipe: Recipe, alphas_cumprod: npt.NDArray[np.float64], entries: int = 4096) -> Integers:
    """Timesteps at `entries` values of rho, evenly spaced in log rho: a uniform choice is log-uniform in rho."""
    log_rho = 0.5 * np.log(1.0 / alphas_cumprod - 1.0)
    low, high = np.log(recipe.rho_range)
    wanted = low + (high - low) * (np.arange(entries) + 0.5) / entries
    right = np.clip(np.searchsorted(log_rho, wanted), 1, len(log_rho) - 1)
    nearer_left = wanted - log_rho[right - 1] < log_rho[right] - wanted
    return np.asarray(np.where(nearer_left, right - 1, right), dtype=np.int64)


def sample_timesteps(recipe: Recipe, table: Integers, rng: np.random.Generator, size: int) -> Integers:
    """Timesteps that are log-uniform in rho with probability `low_noise_share`, else uniform in t."""
    low_noise = rng.random(size) < recipe.low_noise_share
    favoured = table[rng.integers(0, len(table), size)]
    uniform = rng.integers(0, recipe.diffusion_steps, size)
    return np.where(low_noise, favoured, uniform)


def fingerprint(images: Image) -> str:
    """A short hash of the training images, so that a run is not resumed with different data."""
    return hashlib.blake2b(images[:: max(1, len(images) // 256)].tobytes(), digest_size=8).hexdigest()

"""Evaluation of a trained network: denoising error on held-out images and of baselines, samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import DDIMPipeline, UNet2DModel
from diffusers.utils import make_image_grid
from PIL import Image as PILImage

from gepc.backbones.base import Backbone
from gepc.backbones.load import load_backbone
from gepc.backbones.schedule import Levels
from gepc.core.files import replacing, write_json
from gepc.core.tables import markdown_table
from gepc.images.sources import Image
from gepc.lab.training.checkpoint import RUN_FOLDER
from gepc.lab.training.recipe import Recipe, build_scheduler
from gepc.methods.base import to_tensor

NAME = "held_out.json"
LEVELS = (0.9999, 0.9979, 0.99, 0.97, 0.9, 0.5)
NOISE_SEED = 0
GRID, SAMPLING_STEPS, SHOWN_WIDTH = 8, 50, 96


@dataclass(frozen=True)
class LevelError:
    """Mean squared error of the noise at one level, as predicted by the network, the best linear predictor and zero."""

    asked: float  # the requested level, as sqrt(abar)
    timestep: int
    sqrt_abar: float  # that of the nearest timestep
    net: float
    linear: float
    zero: float


def evaluate(out: str | Path, recipe: Recipe, images: Image, held_out: Image, step: int) -> list[LevelError]:
    """Evaluate the network in `out` and write `held_out.json` and `samples.png` to its run folder.

    The linear predictor is fitted to the training images. Returns the errors per level; there are none without held-out
    images, and for an energy network, which does not predict noise.
    """
    if recipe.objective != "noise":
        return []
    folder, errors = Path(out) / RUN_FOLDER, list[LevelError]()
    backbone = load_backbone(Path(out))
    if len(held_out):
        linear = fit_linear(images)
        errors = denoising_errors(backbone, linear, held_out)
        facts = {"step": step, "images": len(held_out), "linear": linear.kind, "noise_seed": NOISE_SEED}
        levels = [dataclasses.asdict(error) for error in errors]
        write_json(folder / NAME, {**facts, "parameters": backbone.parameters, "levels": levels})
    write_samples(folder / "samples.png", backbone.net, recipe)
    return errors


def evaluation_passes(recipe: Recipe, held_out: int) -> int:
    """The network passes of `evaluate` for that number of held-out images."""
    if recipe.objective != "noise":
        return 0
    return len(LEVELS) * held_out + GRID**2 * min(SAMPLING_STEPS, recipe.diffusion_steps)


def worse_than_linear(errors: Sequence[LevelError]) -> str | None:
    """What is wrong with a network that predicts noise no better than the best linear predictor; None if nothing is."""
    worse = [f"{error.asked:g}" for error in errors if error.net >= error.linear]
    if not worse:
        return None
    return (
        f"the network is no better than the best linear predictor at {len(worse)} of {len(errors)} levels "
        f"({', '.join(worse)}): it has learnt too little for a detector."
    )


def denoising_errors(backbone: Backbone, linear: LinearPredictor, held_out: Image) -> list[LevelError]:
    """mean (eps_hat(x_t) - noise)^2 over the held-out images at `LEVELS`.

    The noise of an image depends on its position, the timestep and a fixed seed, so it is the same for all predictors.
    """
    errors = []
    for asked in LEVELS:
        (timestep,) = Levels.sqrt_abar(asked).timesteps(backbone.alphas_cumprod)
        level = float(backbone.alphas_cumprod[timestep])
        predictors: list[Predictor] = [partial(_predict, backbone, timestep), linear.at(level), np.zeros_like]
        errors.append(LevelError(asked, timestep, level**0.5, *_noise_errors(predictors, held_out, timestep, level)))
    return errors


def _predict(backbone: Backbone, timestep: int, noisy: Image) -> Array:
    answer: Array = backbone.eps(to_tensor(noisy, backbone), timestep).cpu().numpy()
    return answer


def _noise_errors(
    predictors: Sequence[Predictor], images: Image, timestep: int, abar: float, batch_size: int = 64
) -> list[float]:
    sums = np.zeros(len(predictors))
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        seeds = ([NOISE_SEED, timestep, start + offset] for offset in range(len(batch)))
        fields = [np.random.default_rng(seed).standard_normal(batch.shape[1:], dtype=np.float32) for seed in seeds]
        noise = np.stack(fields)
        noisy = (np.sqrt(abar) * batch + np.sqrt(1.0 - abar) * noise).astype(np.float32)
        sums += [np.square(predict(noisy) - noise, dtype=np.float64).sum() for predict in predictors]
    return [float(total) for total in sums / images.size]


def error_table(errors: Iterable[LevelError]) -> str:
    """The held-out errors as an aligned Markdown table."""
    rows = [
        (f"{e.asked:g}", f"{e.timestep}", f"{e.sqrt_abar:.6f}", f"{e.net:.4f}", f"{e.linear:.4f}", f"{e.zero:.4f}")
        for e in errors
    ]
    return markdown_table(("level", "timestep", "sqrt(abar)", "net", "best linear", "always 0"), rows, aligned=True)


def write_samples(path: Path, net: UNet2DModel, recipe: Recipe) -> None:
    """Write a grid of samples by DDIM with at most 50 steps as PNG, small ones enlarged, at most three channels."""
    pipeline = DDIMPipeline(net, build_scheduler(recipe))
    pipeline.set_progress_bar_config(disable=True)
    steps, seeded = min(SAMPLING_STEPS, recipe.diffusion_steps), torch.Generator().manual_seed(0)
    images = pipeline(GRID**2, seeded, num_inference_steps=steps, output_type="np").images
    shown = images[..., :3] if images.shape[3] >= 3 else images[..., 0]
    height, width = images.shape[1:3]
    scale = max(1, SHOWN_WIDTH // width)
    pictures = [PILImage.fromarray(np.rint(255.0 * image).astype(np.uint8)) for image in shown]
    tiles = [one.resize((scale * width, scale * height), PILImage.Resampling.NEAREST) for one in pictures]
    with replacing(path) as draft:
        make_image_grid(tiles, GRID, GRID).save(draft, format="PNG")


FULL_DIMENSIONS = 4096
IMAGES_PER_DIMENSION = 2
CHUNK = 1024

Array = npt.NDArray[Any]
Predictor = Callable[[Image], Array]


def fit_linear(images: Image) -> LinearPredictor:
    """Fit the full covariance if it can be inverted and there are enough images for it, else a stationary one."""
    dimensions = int(np.prod(images.shape[1:]))
    if dimensions <= FULL_DIMENSIONS and len(images) >= IMAGES_PER_DIMENSION * dimensions:
        return FullCovariance(images)
    return StationaryCovariance(images)


class FullCovariance:
    """Sigma is the sample covariance of whole images; each level costs one Cholesky factorisation."""

    def __init__(self, images: Image) -> None:
        self.kind = f"full covariance of {len(images)} training images"
        self._mean = images.mean(axis=0, dtype=np.float64)
        self._covariance = torch.zeros(self._mean.size, self._mean.size, dtype=torch.float64)
        for chunk in np.array_split(images, range(CHUNK, len(images), CHUNK)):
            centred = torch.from_numpy((chunk - self._mean).reshape(len(chunk), -1))
            self._covariance += centred.T @ centred
        self._covariance /= len(images)

    def at(self, abar: float) -> Predictor:
        """eps_hat(x_t) at one noise level."""
        noisy_covariance = abar * self._covariance
        noisy_covariance.diagonal().add_(1.0 - abar)
        factor = torch.linalg.cholesky(noisy_covariance)

        def predict(noisy: Image) -> Array:
            centred = torch.from_numpy((noisy - np.sqrt(abar) * self._mean).reshape(len(noisy), -1))
            answer: Array = np.sqrt(1.0 - abar) * torch.cholesky_solve(centred.T, factor).T.numpy()
            return answer.reshape(noisy.shape)

        return predict


class StationaryCovariance:
    """Sigma is that of a periodic stationary field: one C x C cross-spectrum per spatial frequency."""

    def __init__(self, images: Image) -> None:
        self.kind = f"stationary covariance of {len(images)} training images"
        self._mean = images.mean(axis=0, dtype=np.float64)
        self._spectrum = np.zeros(1, dtype=np.complex128)
        for chunk in np.array_split(images, range(CHUNK, len(images), CHUNK)):
            waves = np.fft.rfft2(chunk - self._mean, norm="ortho")
            self._spectrum = self._spectrum + np.einsum("nchw,ndhw->hwcd", waves, waves.conj()) / len(images)

    def at(self, abar: float) -> Predictor:
        """eps_hat(x_t) at one noise level."""
        identity = np.eye(len(self._mean))
        inverse = np.linalg.inv(abar * self._spectrum + (1.0 - abar) * identity)

        def predict(noisy: Image) -> Array:
            waves = np.fft.rfft2(noisy - np.sqrt(abar) * self._mean, norm="ortho")
            waves = np.sqrt(1.0 - abar) * np.einsum("hwcd,ndhw->nchw", inverse, waves)
            return np.asarray(np.fft.irfft2(waves, s=noisy.shape[-2:], norm="ortho"))

        return predict


LinearPredictor = FullCovariance | StationaryCovariance

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from diffusers import DDIMScheduler
from PIL import Image as PILImage

from gepc.backbones.base import Backbone
from gepc.core.files import read_json
from gepc.images.sources import Image
from gepc.lab.training.evaluate import (
    LEVELS,
    FullCovariance,
    LevelError,
    LinearPredictor,
    StationaryCovariance,
    _noise_errors,
    denoising_errors,
    evaluate,
    fit_linear,
    worse_than_linear,
    write_samples,
)
from gepc.lab.training.loop import TrainingRun
from gepc.lab.training.recipe import Recipe, alphas_cumprod, build_net, build_scheduler, load_recipe

ABARS = (0.9999, 0.99, 0.8, 0.3)


def gaussian_images(count: int, shape: tuple[int, ...], seed: int) -> Image:
    """Independent pixels of standard deviations 0.02 to 0.5 around the mean 0.1."""
    scale = np.geomspace(0.02, 0.5, int(np.prod(shape))).reshape(shape)
    return (0.1 + scale * np.random.default_rng(seed).standard_normal((count, *shape))).astype(np.float32)


def measured_error(linear: LinearPredictor, images: Image, abar: float) -> float:
    noise = np.random.default_rng(9).standard_normal(images.shape)
    noisy = (np.sqrt(abar) * images + np.sqrt(1.0 - abar) * noise).astype(np.float32)
    return float(np.mean((linear.at(abar)(noisy) - noise) ** 2))


def closed_form(eigenvalues: np.ndarray, abar: float) -> float:
    return float(np.mean(abar * eigenvalues / (abar * eigenvalues + 1.0 - abar)))


@pytest.mark.parametrize("abar", ABARS)
def test_full_covariance_has_the_closed_form_error(abar: float) -> None:
    linear = FullCovariance(gaussian_images(4000, (1, 4, 4), seed=0))
    eigenvalues = np.geomspace(0.02, 0.5, 16) ** 2
    assert measured_error(linear, gaussian_images(4000, (1, 4, 4), seed=1), abar) == pytest.approx(
        closed_form(eigenvalues, abar), rel=0.03
    )


@pytest.mark.parametrize("abar", ABARS)
def test_stationary_covariance_has_the_closed_form_error(abar: float) -> None:
    spectrum = 0.01 + np.random.default_rng(0).random((6, 6))
    spectrum = spectrum + spectrum[-np.arange(6)][:, -np.arange(6)]  # that of a real field
    mixing = np.array([[1.0, 0.0, 0.0], [0.9, 0.2, 0.0], [0.8, 0.1, 0.1]])

    def field(count: int, seed: int) -> Image:
        white = np.random.default_rng(seed).standard_normal((count, 3, 6, 6))
        coloured = np.fft.ifft2(np.fft.fft2(white) * np.sqrt(spectrum)).real
        return np.einsum("cd,ndhw->nchw", mixing, coloured).astype(np.float32)

    eigenvalues = np.outer(np.linalg.eigvalsh(mixing @ mixing.T), spectrum)
    linear = StationaryCovariance(field(2000, seed=1))
    assert measured_error(linear, field(2000, seed=2), abar) == pytest.approx(closed_form(eigenvalues, abar), rel=0.03)


def test_both_predictors_agree_on_a_stationary_field() -> None:
    white = np.random.default_rng(3).standard_normal((6000, 1, 4, 4))
    images = (white + np.roll(white, 1, axis=3)).astype(np.float32)
    noisy = images[:5] + 0.1
    full, stationary = (kind(images).at(0.9)(noisy) for kind in (FullCovariance, StationaryCovariance))
    np.testing.assert_allclose(full, stationary, atol=0.05)


def test_which_covariance_is_fitted() -> None:
    few, many = (gaussian_images(count, (1, 4, 4), 0) for count in (31, 32))
    assert "stationary covariance of 31" in fit_linear(few).kind
    assert "full covariance of 32" in fit_linear(many).kind
    assert "stationary" in fit_linear(np.zeros((3, 1, 66, 64), np.float32)).kind


def test_a_network_that_has_not_learnt_enough_is_commented_on() -> None:
    good = LevelError(0.99, 3, 0.99, net=0.1, linear=0.2, zero=1.0)
    assert worse_than_linear([good]) is None
    advice = worse_than_linear([good, dataclasses.replace(good, asked=0.9, net=0.3)])
    assert advice is not None
    assert "no better than the best linear predictor at 1 of 2 levels (0.9)" in advice


def test_errors_per_level() -> None:
    """The network predicts no noise at all, so that its error is that of the trivial predictor."""
    abar, images = alphas_cumprod(Recipe(diffusion_steps=4000)), gaussian_images(300, (1, 4, 4), 0)
    silent = Backbone.from_callable(lambda x, _: 0.0 * x, abar, channels=1)
    held_out = gaussian_images(400, (1, 4, 4), 1)
    errors = denoising_errors(silent, fit_linear(images), held_out)
    assert [error.asked for error in errors] == list(LEVELS)
    for error in errors:
        assert error.timestep == np.abs(np.sqrt(abar) - error.asked).argmin()
        assert error.sqrt_abar == pytest.approx(np.sqrt(abar[error.timestep]))
        assert error.zero == error.net == pytest.approx(1.0, abs=4 * np.sqrt(2 / held_out.size))
        assert 0 < error.linear < error.zero
    assert [error.timestep for error in errors[:2]] == [15, 136]
    assert errors == denoising_errors(silent, fit_linear(images), held_out)


def test_errors_do_not_depend_on_the_batch_size() -> None:
    images = gaussian_images(50, (1, 4, 4), 0)
    whole, parts = (_noise_errors([np.zeros_like], images, 3, 0.9, batch_size=size) for size in (64, 7))
    assert whole == pytest.approx(parts, rel=1e-12)


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_the_grid_of_samples(tiny: Recipe, tmp_path: Path, channels: int) -> None:
    quick = dataclasses.replace(tiny, diffusion_steps=3, image_channels=channels)
    net = build_net(quick, 8, 12).eval()
    for name in ("samples.png", "again.png"):
        write_samples(tmp_path / name, net, quick)
    assert (tmp_path / "samples.png").read_bytes() == (tmp_path / "again.png").read_bytes()
    with PILImage.open(tmp_path / "samples.png") as picture:
        assert (picture.size, picture.mode) == ((8 * 96, 8 * 64), "RGB")
        assert len(picture.getcolors(10**6)) > 64


@pytest.fixture
def finished(data: Path, tiny: Recipe, tmp_path: Path) -> TrainingRun:
    run = TrainingRun(dataclasses.replace(tiny, steps=20, checkpoint_every=20), data, tmp_path / "out")
    run.loop()
    return run


def test_a_run_is_evaluated(finished: TrainingRun) -> None:
    errors = evaluate(finished.out, finished.recipe, finished.images, finished.held_out, finished.state.step)
    found = read_json(finished.folder / "held_out.json")
    assert (found["step"], found["images"], len(found["levels"])) == (20, 8, 6)
    assert [LevelError(**level) for level in found["levels"]] == errors
    with PILImage.open(finished.folder / "samples.png") as picture:
        assert picture.size == (8 * 96, 8 * 96)


def test_without_held_out_images_there_is_no_error(finished: TrainingRun) -> None:
    assert evaluate(finished.out, finished.recipe, finished.images, finished.held_out[:0], 20) == []
    assert not (finished.folder / "held_out.json").exists()


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_samples_are_drawn_with_the_schedule_of_the_recipe(schedule: str) -> None:
    """DDIM is made from the configuration of the recipe's scheduler, which must have its number of steps."""
    recipe = load_recipe("quick", {"schedule": schedule, "diffusion_steps": 4000})
    sampler = DDIMScheduler.from_config(build_scheduler(recipe).config)
    np.testing.assert_allclose(sampler.alphas_cumprod.numpy(), alphas_cumprod(recipe), rtol=1e-3, atol=1e-7)

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage

from gepc.core.errors import InputError
from gepc.images.sources import open_images
from gepc.lab.training.data import draw, fingerprint, load_training_images, low_noise_table, sample_timesteps
from gepc.lab.training.recipe import Recipe, alphas_cumprod, load_recipe


def write_pngs(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    folder.mkdir()
    for index, size in enumerate(sizes):
        PILImage.new("L", size, color=index).save(folder / f"{index:03d}.png")
    return folder


def test_held_out_images_are_apart_and_all_are_there(data: Path, tiny: Recipe) -> None:
    found = load_training_images(data, tiny)
    images, held_out = found.images, found.held_out
    assert images.shape == (32, 1, 8, 8)
    assert held_out.shape == (8, 1, 8, 8)
    assert len({image.tobytes() for image in np.concatenate([images, held_out])}) == 40


def test_a_test_part_is_never_read(tmp_path: Path, tiny: Recipe) -> None:
    black, white = np.zeros((20, 8, 8, 1), np.uint8), np.full((20, 8, 8, 1), 255, np.uint8)
    np.savez(tmp_path / "both.npz", test_x=white, train_x=black)
    found = load_training_images(tmp_path / "both.npz", tiny)
    images, held_out = found.images, found.held_out
    assert images.max() == held_out.max() == -1.0


def test_a_folder_of_files(tmp_path: Path, tiny: Recipe) -> None:
    found = load_training_images(write_pngs(tmp_path / "png", [(8, 8)] * 20), tiny)
    images, held_out = found.images, found.held_out
    assert (len(images), len(held_out)) == (15, 5)


def test_mixed_sizes_tell_to_set_image_size(tmp_path: Path, tiny: Recipe) -> None:
    folder = write_pngs(tmp_path / "png", [(8, 8)] * 17 + [(12, 8)] * 3)
    with pytest.raises(InputError, match="2 different sizes; set image_size"):
        load_training_images(folder, tiny)
    images = load_training_images(folder, dataclasses.replace(tiny, image_size=8)).images
    assert images.shape[1:] == (1, 8, 8)


def test_too_few_images(tmp_path: Path, tiny: Recipe) -> None:
    with pytest.raises(InputError, match=r"too few images in .*: 15; at least 16 are needed"):
        load_training_images(write_pngs(tmp_path / "png", [(8, 8)] * 15), tiny)


def test_a_size_that_the_strides_do_not_divide(tmp_path: Path, tiny: Recipe) -> None:
    with pytest.raises(InputError, match=r"9x9 .* multiples of 2; set image_size, for instance image_size=8"):
        load_training_images(write_pngs(tmp_path / "png", [(9, 9)] * 20), tiny)


def test_a_damaged_image_is_named(tmp_path: Path, tiny: Recipe) -> None:
    folder = write_pngs(tmp_path / "png", [(8, 8)] * 20)
    (folder / "003.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"003\.png is not an image"):
        load_training_images(folder, tiny)


def npy_bytes() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros((20, 8, 8, 1), np.uint8))
    return buffer.getvalue()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"text", npy_bytes()])
def test_a_damaged_npz_is_named(tmp_path: Path, tiny: Recipe, content: bytes) -> None:
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.npz is not a complete, plain \.npz"):
        load_training_images(tmp_path / "bad.npz", tiny)


def test_an_npz_without_images_says_what_it_holds(tmp_path: Path, tiny: Recipe) -> None:
    np.savez(tmp_path / "other.npz", labels=np.zeros(3), names=np.zeros(3))
    with pytest.raises(InputError, match=r"several arrays; choose one with other.npz:NAME \(labels, names\)"):
        load_training_images(tmp_path / "other.npz", tiny)


def test_value_range_of_float_images(tmp_path: Path, tiny: Recipe) -> None:
    np.savez(tmp_path / "unit.npz", train_x=np.linspace(0, 1, 20 * 64).reshape(20, 8, 8, 1))
    found = load_training_images(tmp_path / "unit.npz", dataclasses.replace(tiny, value_range=(0.0, 1.0)))
    images, held_out = found.images, found.held_out
    both = np.concatenate([images, held_out])
    assert (both.min(), both.max()) == (-1.0, 1.0)


def test_fingerprint_tells_images_apart(data: Path, tiny: Recipe) -> None:
    images = load_training_images(data, tiny).images
    other = images.copy()
    other[-1, 0, 0, 0] += 0.1
    assert fingerprint(images) == fingerprint(images.copy()) != fingerprint(other)


@given(seed=st.integers(0, 2**31), step=st.integers(0, 10**6))
def test_a_batch_depends_on_seed_and_step(seed: int, step: int) -> None:
    recipe = Recipe(batch_size=4, seed=seed, diffusion_steps=50)
    table = low_noise_table(recipe, alphas_cumprod(recipe), entries=64)
    whole, again = (draw(recipe, 10, (1, 2, 2), table, step) for _ in range(2))
    for field in dataclasses.fields(whole):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(whole, field.name))


@given(seed=st.integers(0, 2**31), count=st.integers(1, 40), batch=st.integers(1, 12))
def test_an_epoch_shows_each_image_once(seed: int, count: int, batch: int) -> None:
    recipe = Recipe(batch_size=batch, seed=seed, diffusion_steps=50)
    table = low_noise_table(recipe, alphas_cumprod(recipe), entries=8)
    shown = np.concatenate([draw(recipe, count, (1, 1, 1), table, step).indices for step in range(count)])
    for epoch in range(len(shown) // count):
        assert sorted(shown[epoch * count : (epoch + 1) * count]) == list(range(count))


def log_rho(abar: np.ndarray) -> np.ndarray:
    return 0.5 * np.log(1.0 / abar - 1.0)


@pytest.mark.parametrize("name", ["celeba32-tiny", "quick"])
def test_low_noise_levels_are_log_uniform_in_rho(name: str) -> None:
    recipe = load_recipe(name, {"low_noise_share": 1.0})
    abar, count = alphas_cumprod(recipe), 20_000
    timesteps = sample_timesteps(recipe, low_noise_table(recipe, abar), np.random.default_rng(0), count)
    drawn = np.sort(log_rho(abar)[timesteps])
    low, high = np.log(recipe.rho_range)
    wanted = np.clip((drawn - low) / (high - low), 0.0, 1.0)
    distance = np.abs(wanted - (np.arange(count) + 0.5) / count).max()
    inside = log_rho(abar)[timesteps.min() : timesteps.max() + 1]
    half_a_step = 0.5 * np.diff(inside).max() / (high - low)
    assert distance < 1.95 / np.sqrt(count) + half_a_step  # Kolmogorov-Smirnov at 0.1 %, timesteps being whole


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_the_share_of_low_noise_draws(share: float) -> None:
    recipe = load_recipe("celeba32-tiny", {"low_noise_share": share})
    table, count = low_noise_table(recipe, alphas_cumprod(recipe)), 20_000
    timesteps = sample_timesteps(recipe, table, np.random.default_rng(0), count)
    above = timesteps > table.max()  # only the uniform part gets there
    uniform_share = 1.0 - (table.max() + 1) / recipe.diffusion_steps
    wanted = (1.0 - share) * uniform_share
    assert abs(above.mean() - wanted) <= 4.0 * np.sqrt(max(wanted * (1.0 - wanted), 0.0) / count)


@given(low=st.floats(1e-4, 1.0), ratio=st.floats(1.1, 1e4), steps=st.integers(2, 5000))
def test_any_range_of_rho_gives_timesteps_of_the_schedule(low: float, ratio: float, steps: int) -> None:
    recipe = Recipe(rho_range=(low, low * ratio), diffusion_steps=steps)
    table = low_noise_table(recipe, alphas_cumprod(recipe), entries=64)
    assert table.min() >= 0
    assert table.max() < steps
    assert (np.diff(table) >= 0).all()


def write_pictures(folder: Path, modes: list[str], size: tuple[int, int] = (8, 8)) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(3)
    for index, mode in enumerate(modes):
        pixels = rng.integers(0, 256, (*size, 3) if mode == "RGB" else size, dtype=np.uint8)
        PILImage.fromarray(pixels).save(folder / f"{index:03d}.png")
    return folder


@pytest.mark.parametrize(("modes", "channels"), [(["L"] * 20, 1), (["RGB"] * 20, 3), (["L"] * 19 + ["RGB"], 3)])
def test_channels_as_the_images_are(tmp_path: Path, tiny: Recipe, modes: list[str], channels: int) -> None:
    folder = write_pictures(tmp_path / "png", modes)
    assert load_training_images(folder, dataclasses.replace(tiny, image_channels=None)).images.shape[1] == channels


def test_other_numbers_of_channels_are_kept(tmp_path: Path, tiny: Recipe) -> None:
    np.savez(tmp_path / "bands.npz", train_x=np.zeros((20, 8, 8, 5), np.uint8))
    recipe = dataclasses.replace(tiny, image_channels=None)
    assert load_training_images(tmp_path / "bands.npz", recipe).images.shape[1:] == (5, 8, 8)


def test_colour_images_for_a_grey_network_are_a_warning(tmp_path: Path, tiny: Recipe) -> None:
    folder = write_pictures(tmp_path / "png", ["L"] * 17 + ["RGB"] * 3)
    with pytest.warns(UserWarning, match="in colour are converted to grey, since image_channels is 1: 3 of 20"):
        load_training_images(folder, tiny)


def test_crops_are_windows_of_the_images(tmp_path: Path, tiny: Recipe) -> None:
    folder = write_pictures(tmp_path / "png", ["L"] * 20, (11, 14))
    found = load_training_images(folder, dataclasses.replace(tiny, image_size=8, crop=True))
    whole = load_training_images(folder, dataclasses.replace(tiny, image_size=None, channels=(8,))).images
    np.testing.assert_array_equal(found.images, whole[:, :, 1:9, 3:11])
    assert found.held_out.shape == (5, 1, 8, 8)
    assert found.crops is not None
    indices, almost = np.asarray([0, 4, 2]), 1.0 - 2.0**-53
    crops = found.crops.cut(indices, np.asarray([[0.0, 0.0], [almost, almost], [0.5, 0.0]]))
    np.testing.assert_array_equal(crops, [whole[0, :, :8, :8], whole[4, :, 3:, 6:], whole[2, :, 2:10, :8]])


def test_an_image_smaller_than_the_crop_is_named(tmp_path: Path, tiny: Recipe) -> None:
    folder = write_pngs(tmp_path / "png", [(8, 8)] * 17 + [(12, 6)] * 3)
    with pytest.raises(InputError, match=r"017\.png is 6x12, smaller than the crops of 8x8; leave it out"):
        load_training_images(folder, dataclasses.replace(tiny, image_size=8, crop=True))


def test_hashes_are_those_of_the_training_images_alone(tmp_path: Path, tiny: Recipe) -> None:
    folder = write_pictures(tmp_path / "png", ["L"] * 20)
    found = load_training_images(folder, tiny)
    hashes = {open_images(folder)[index].content_hash(): index for index in range(20)}
    order = np.random.default_rng(tiny.seed).permutation(20)
    assert found.hashes.dtype == np.uint64
    assert found.hashes.tolist() == sorted(found.hashes.tolist())
    assert {hashes[int(value)] for value in found.hashes} == set(order[:15].tolist())

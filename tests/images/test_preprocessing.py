"""Pixels of any range, size and number of channels become float32 (C, H, W) in [-1, 1], or an error."""

from __future__ import annotations

import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image as PILImage
from toys import as_uint8, pictures, toy_backbone, toy_detector

import gepc
from gepc.core.errors import InputError, OptionError, ValueRangeWarning
from gepc.images.batches import OnBadImage, chunks, load_all
from gepc.images.preprocessing import (
    LUMA,
    Preprocessing,
    accepted_channels,
    log_magnitude,
    rgb_picture,
    warn_about_range,
)
from gepc.images.sources import open_images
from gepc.runs.maps import write_maps

BYTES = as_uint8(pictures(4, size=(6, 5)))  # (N, H, W, C)
GREY8 = BYTES[0, :, :, 0]


def loaded(source: object, **options: object) -> npt.NDArray[np.float32]:
    return load_all(open_images(source), Preprocessing(**options))  # type: ignore[arg-type]


EXPECTED = loaded(BYTES)


# --- ranges ----------------------------------------------------------------------------------------------------------


def test_floats_are_minus_one_to_one_unless_told() -> None:
    """Trap: a [0, 1] float image is only read as such when value_range says so."""
    unit = (EXPECTED + 1) / 2
    np.testing.assert_allclose(loaded(unit, value_range=(0, 1)), EXPECTED, atol=1e-6)
    with pytest.warns(ValueRangeWarning, match=r"`value_range` to \(0, 1\)"):
        found = loaded(unit)
    np.testing.assert_array_equal(found, unit)


def test_no_warning_without_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_range(open_images(EXPECTED), None)
        warn_about_range(open_images(BYTES), None)
        warn_about_range(open_images(np.zeros((2, 3, 8, 8))), (0.0, 1.0))
        warn_about_range(open_images([]), None)


@pytest.mark.parametrize("pixels", [np.array([[-1.0, 1.5]]), np.array([[0.0, 255.0]]), np.array([[-300.0, 0.0]])])
def test_floats_outside_their_range_name_the_argument(pixels: npt.NDArray[np.float64]) -> None:
    with pytest.raises(InputError, match=r"picture has values from .* set `value_range`"):
        Preprocessing()(pixels, "picture")


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_any_range_maps_black_to_minus_one_and_white_to_one(low: float, width: float) -> None:
    pixels = low + width * np.array([[0.0, 0.25, 0.5, 1.0]])
    found = Preprocessing((low, low + width), channels=1)(pixels)
    np.testing.assert_allclose(found[0, 0], [-1.0, -0.5, 0.0, 1.0], atol=1e-3)
    assert np.abs(found).max() <= 1.0


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_integers_without_a_known_range_need_one(dtype: type) -> None:
    pixels = np.array([[0, 100]], dtype=dtype)
    with pytest.raises(InputError, match=r"range is not known; set `value_range`"):
        Preprocessing()(pixels)
    np.testing.assert_array_equal(Preprocessing((0, 100))(pixels)[0], [[-1, 1]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_pixels_that_are_not_finite_are_refused(bad: float) -> None:
    pixels = EXPECTED[0].transpose(1, 2, 0).copy()
    pixels[2, 3, 1] = bad
    with pytest.raises(InputError, match="scan has NaN or infinite pixels"):
        Preprocessing()(pixels, "scan")


NO_NUMBERS = {
    "text": np.full((8, 8, 3), "7"),
    "bytes": np.full((8, 8, 3), b"7"),
    "dates": np.full((8, 8, 3), 7, dtype="datetime64[s]"),
    "spans": np.full((8, 8, 3), 7, dtype="timedelta64[s]"),
    "records": np.zeros((8, 8, 3), dtype=[("a", "u1"), ("b", "u1")]),
    "void": np.zeros((8, 8, 3), dtype="V2"),
}


@pytest.mark.parametrize("magnitude", ["linear", "log"])
@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_what_holds_no_numbers_is_a_failure_of_its_own(tmp_path: Path, kind: str, magnitude: str) -> None:
    """With a range given too, and in the middle of a run."""
    np.save(tmp_path / "a.npy", np.full((8, 8, 3), 9, dtype=np.uint8))
    np.save(tmp_path / "b.npy", NO_NUMBERS[kind])
    preprocessing = Preprocessing(value_range=(0, 10), magnitude=magnitude)
    (chunk,) = chunks(open_images(tmp_path), preprocessing, 8, OnBadImage.ALL)
    assert chunk.indices == [0]
    assert [(index, "not numbers" in error) for index, _, error in chunk.failures] == [(1, True)]


def test_complex_and_empty_images_are_refused() -> None:
    with pytest.raises(InputError, match="complex; set `magnitude`"):
        Preprocessing()(np.ones((3, 3), dtype=np.complex64))
    with pytest.raises(InputError, match="is empty"):
        Preprocessing()(np.ones((0, 3, 3)))


def test_a_large_picture_takes_a_few_times_its_own_memory() -> None:
    """It is converted in blocks, and resized one channel after the other: about 5 bytes for each of its own."""
    picture = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), dtype=np.uint8)
    tracemalloc.start()
    try:
        prepared = Preprocessing(size=(8, 8))(picture)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 7 * picture.nbytes
    whole = (picture.astype(np.float64) * (2.0 / 255.0) - 1.0).astype(np.float32)
    np.testing.assert_array_equal(prepared, Preprocessing(size=(8, 8))(whole))


@pytest.mark.parametrize("pixels", [np.zeros(3), np.zeros((1, 2, 2, 3)), 5.0], ids=["vector", "batch", "number"])
def test_what_is_no_image_is_refused(pixels: Any) -> None:
    with pytest.raises(InputError, match=r"tile is empty or not \(H, W\) or \(H, W, C\)"):
        Preprocessing()(pixels, "tile")


def test_lists_and_pictures_are_taken_as_arrays() -> None:
    given: tuple[Any, ...] = (BYTES[0].astype(np.float64).tolist(), PILImage.fromarray(BYTES[0]))
    for pixels in given:
        np.testing.assert_array_equal(Preprocessing(value_range=(0, 255))(pixels), EXPECTED[0])


# --- channels and sizes ----------------------------------------------------------------------------------------------


def test_grey_and_colour_become_each_other() -> None:
    """Grey is repeated; colour becomes 0.299 R + 0.587 G + 0.114 B."""
    grey = Preprocessing(channels=1)(BYTES[0])
    np.testing.assert_allclose(grey[0], np.tensordot([0.299, 0.587, 0.114], EXPECTED[0], 1), atol=1e-6)
    np.testing.assert_array_equal(Preprocessing(channels=3)(GREY8), EXPECTED[0][[0, 0, 0]])
    assert abs(LUMA.sum() - 1.0) < 1e-12


@pytest.mark.parametrize("magnitude", ["linear", "log"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 13])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 13])
def test_no_band_is_dropped(count: int, channels: int, magnitude: str) -> None:
    """A fourth band used to be taken for transparency and dropped."""
    pixels = np.random.default_rng(count).integers(0, 256, (16, 17, count), dtype=np.uint8)
    preprocessing = Preprocessing(channels=channels, magnitude=magnitude)
    if count == channels:
        each = [Preprocessing(channels=1, magnitude=magnitude)(pixels[..., band])[0] for band in range(count)]
        np.testing.assert_array_equal(preprocessing(pixels), np.stack(each))
    elif {count, channels} == {1, 3}:
        assert preprocessing(pixels).shape == (channels, 16, 17)
    else:
        with pytest.raises(InputError, match=f"^scan has {count} channels, the backbone takes {channels}$"):
            preprocessing(pixels, "scan")
    assert (count in accepted_channels(channels)) == (count == channels or {count, channels} == {1, 3})


def test_a_detector_refuses_images_of_another_channel_count() -> None:
    images = pictures(24)
    detector = toy_detector().fit(images)
    bands = np.concatenate([images, images[:, :1]], axis=1)
    with pytest.raises(InputError, match="image 0 has 4 channels, the backbone takes 3"):
        detector.score(bands)
    with pytest.raises(InputError, match="image 0 has 4 channels, the backbone takes 3"):
        detector.fit(bands.transpose(0, 2, 3, 1))


@pytest.mark.parametrize("channels", [2, 4, 9])
def test_a_detector_of_any_number_of_channels(tmp_path: Path, channels: int) -> None:
    """From arrays in either order, with 8 pixels a side and up to 9 channels; its maps are pictures."""
    images = pictures(24, channels=channels)
    detector = toy_detector(toy_backbone(channels)).fit(images)
    found = detector.score(images[:3])
    np.testing.assert_array_equal(detector.score(images[:3].transpose(0, 2, 3, 1)), found)
    np.testing.assert_array_equal(detector.score(list(images[:3])), found)
    (entry,) = write_maps(detector.fitted, open_images(images[:1]), tmp_path)
    assert entry["error"] is None
    np.testing.assert_array_equal(np.load(tmp_path / entry["map"]), detector.score_map(images[:1])[0])


def test_the_picture_of_an_image_is_rgb() -> None:
    for count, shown in ((1, [0, 0, 0]), (2, [0, 0, 0]), (3, [0, 1, 2]), (5, [0, 1, 2])):
        image = pictures(1, channels=count)[0]
        np.testing.assert_allclose(rgb_picture(image), (image[shown].transpose(1, 2, 0) + 1) / 2, atol=1e-6)


def test_the_bands_that_are_shown() -> None:
    image = pictures(1, channels=5)[0]
    for bands, shown in (((4, 3, 2), [3, 2, 1]), ((5,), [4, 4, 4])):
        np.testing.assert_allclose(rgb_picture(image, bands), (image[shown].transpose(1, 2, 0) + 1) / 2, atol=1e-6)
    for bands in ((0, 1, 2), (4, 5, 6), (1, 2), ()):
        with pytest.raises(OptionError, match="one or three bands to show, from 1 to 5"):
            rgb_picture(image, bands)


def test_mixed_sizes_are_an_error_that_says_what_to_give() -> None:
    mixed = [np.zeros((6, 5), dtype=np.uint8), np.zeros((6, 7), dtype=np.uint8)]
    with pytest.raises(InputError, match=r"1 has 7x6 pixels \(width x height\) but 5x6 is expected; set `size`"):
        loaded(mixed)
    assert loaded(mixed, size=(4, 4)).shape == (2, 3, 4, 4)


@pytest.mark.parametrize("resize", ["stretch", "crop"])
@given(height=st.integers(1, 20), width=st.integers(1, 20), size=st.tuples(st.integers(1, 12), st.integers(1, 12)))
def test_resizing_gives_the_size_asked_for_and_keeps_a_constant_constant(
    resize: str, height: int, width: int, size: tuple[int, int]
) -> None:
    found = Preprocessing(size=size, resize=resize)(np.full((height, width), 51, dtype=np.uint8))
    assert found.shape == (3, *size)
    np.testing.assert_allclose(found, -0.6, atol=1e-6)


def test_halving_averages_with_antialiasing() -> None:
    """A checkerboard of single pixels becomes grey, not black or white."""
    board = np.indices((16, 16)).sum(0) % 2 == 0
    inner = Preprocessing(size=(8, 8))(board)[:, 1:-1, 1:-1]
    np.testing.assert_allclose(inner, 0.0, atol=1e-6)


def test_crop_keeps_the_middle() -> None:
    """A 4x8 image to 4x4: the middle four columns, untouched."""
    image = np.arange(32, dtype=np.uint8).reshape(4, 8)
    found = Preprocessing(size=(4, 4), resize="crop", channels=1)(image)
    np.testing.assert_array_equal(found, Preprocessing(channels=1)(image[:, 2:6]))


def test_exact_refuses_another_size_and_passes_its_own() -> None:
    exact = Preprocessing(size=(6, 5), resize="exact")
    np.testing.assert_array_equal(exact(BYTES[0]), EXPECTED[0])
    with pytest.raises(InputError, match=r"has 4x4 pixels \(width x height\) but 5x6 is expected"):
        exact(np.zeros((4, 4), dtype=np.uint8), "tile")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resize": "strech"}, "did you mean 'stretch'"),
        ({"channels": 0}, "channels must be at least 1, got 0"),
        ({"channels": 1.5}, "channels must be int, got 1.5"),
        ({"multiple": 0}, "multiple must be at least 1, got 0"),
        ({"size": 32}, "size must be a list, got 32"),
        ({"size": (32.5, 32)}, "size must be int, got 32.5"),
        ({"size": (3, 32, 32)}, "size must have 2 values, got 3"),
        ({"value_range": 255}, "value_range must be a list, got 255"),
        ({"value_range": ("black", "white")}, "value_range must be float, got 'black'"),
        ({"ignore": np.eye(3)}, "ignore must be Mask"),
        ({"value_range": (1, 0)}, "low < high"),
        ({"value_range": (0, float("nan"))}, "low < high"),
        ({"size": (0, 8)}, "size must be"),
        ({"size": (8, -1)}, "size must be"),
    ],
)
def test_impossible_preprocessing_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Preprocessing(**options)  # type: ignore[arg-type]


# --- log-magnitude ----------------------------------------------------------------------------------------------------

RADAR = arrays(np.uint8, (6, 5), elements=st.integers(0, 255))


@given(RADAR)
def test_every_depth_gives_the_same_picture(pixels: np.ndarray) -> None:
    fixed = Preprocessing(channels=1, magnitude="log")
    measured = Preprocessing(channels=1, magnitude="log", value_range=(0.0, 255.0))
    expected = fixed(pixels)
    assert np.allclose(expected[0], 2 * np.log1p(pixels.astype(float)) / np.log(256) - 1, atol=1e-6)
    assert np.allclose(fixed(pixels.astype(np.uint16) * 257), expected, atol=1e-6)
    assert np.allclose(measured(pixels.astype(np.float32)), expected, atol=1e-6)
    phase = np.exp(1j * np.arange(30).reshape(6, 5))
    assert np.allclose(measured((pixels * phase).astype(np.complex64)), expected, atol=1e-5)


@given(RADAR)
def test_each_pixel_depends_on_itself_alone_on_the_fixed_scale(pixels: np.ndarray) -> None:
    other = pixels.copy()
    other[0, 0] ^= 255
    change = Preprocessing(channels=1, magnitude="log")(other) != Preprocessing(channels=1, magnitude="log")(pixels)
    assert change.sum() == change[0, 0, 0] == 1


def test_patch_normalisation_takes_the_level_out_and_the_fixed_scale_keeps_it() -> None:
    rng = np.random.default_rng(0)
    y = rng.uniform(0.2, 0.4, (16, 16))
    low, high = (np.expm1(level * np.log(256.0)) / 255.0 for level in (y, y + 0.3))
    kept = [Preprocessing(value_range=(0, 1), channels=1, magnitude="log")(a) for a in (low, high)]
    assert np.allclose(kept[1] - kept[0], 0.6, atol=1e-5)
    own = [Preprocessing(value_range=(0, 1), channels=1, magnitude="log", normalise="patch")(a) for a in (low, high)]
    assert np.allclose(own[0], own[1], atol=1e-5)
    assert abs(float(own[0].mean())) < 1e-6
    assert abs(float(own[0].std()) - 0.25) < 1e-6
    flat = Preprocessing(channels=1, magnitude="log", normalise="patch")(np.full((4, 4), 7, np.uint8))
    assert not flat.any()


def test_three_channels_are_three_times_the_same_and_a_cut_resamples_nothing() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (9, 12), dtype=np.uint8)
    whole = Preprocessing(channels=3, magnitude="log")(pixels)
    assert np.array_equal(whole[0], whole[2])
    part = Preprocessing(channels=3, magnitude="log", size=(4, 4), resize="cut")(pixels)
    assert np.array_equal(part, whole[:, 2:6, 4:8])
    with pytest.raises(InputError, match="too small to cut 4x16"):
        Preprocessing(size=(16, 4), resize="cut")(pixels)


@pytest.mark.parametrize(
    ("pixels", "sentence"),
    [
        (np.full((4, 4), np.nan), "NaN or infinite pixels"),
        (np.full((4, 4), -3.0), "has magnitudes down to -3, below 0"),
        (np.full((4, 4), complex(np.nan, 1)), "NaN or infinite pixels"),
    ],
)
def test_pixels_that_are_no_magnitude_are_refused(pixels: np.ndarray, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        log_magnitude(pixels, (0.0, 1.0))


def test_the_white_of_float_and_complex_pixels_must_be_told() -> None:
    for kind in (np.float32, np.complex64):
        with pytest.raises(InputError, match=r"range is not known; set `value_range` to \(0, white\)"):
            Preprocessing(magnitude="log")(np.ones((4, 4), kind))
    assert log_magnitude(np.array([[5.0]]), (0.0, 1.0))[0, 0] == 1.0  # brighter than white saturates
    with pytest.raises(OptionError, match="`normalise` needs `magnitude`"):
        Preprocessing(normalise="patch")
    with pytest.raises(OptionError, match="did you mean 'log'"):
        Preprocessing(magnitude="logg")


def test_a_saved_detector_takes_its_preprocessing_along(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sea = (100 * rng.gamma(2.0, 0.5, (24, 8, 8))).astype(np.float32)
    detector = toy_detector(magnitude="log", normalise="patch", value_range=(0.0, 1000.0)).fit(sea)
    detector.save(tmp_path / "det")
    again = gepc.load_detector(tmp_path / "det", detector.backbone)
    assert (again.fitted.preprocessing.magnitude, again.fitted.preprocessing.normalise) == ("log", "patch")
    assert np.array_equal(again.score(sea[:4]), detector.score(sea[:4]))
    assert np.allclose(again.score((1j * sea[:4]).astype(np.complex64)[..., None]), detector.score(sea[:4]), rtol=1e-3)

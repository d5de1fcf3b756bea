"""Log-magnitude: one scene, one picture, whatever its depth; nothing smoothed; the detector carries it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from toys import toy_detector

import gepc
from gepc.core.errors import InputError, OptionError
from gepc.images.magnitude import log_magnitude
from gepc.images.preprocessing import Preprocessing

BYTES = arrays(np.uint8, (6, 5), elements=st.integers(0, 255))


@given(BYTES)
def test_every_depth_gives_the_same_picture(pixels: np.ndarray) -> None:
    fixed = Preprocessing(channels=1, magnitude="log")
    measured = Preprocessing(channels=1, magnitude="log", value_range=(0.0, 255.0))
    expected = fixed(pixels)
    assert np.allclose(expected[0], 2 * np.log1p(pixels.astype(float)) / np.log(256) - 1, atol=1e-6)
    assert np.allclose(fixed(pixels.astype(np.uint16) * 257), expected, atol=1e-6)
    assert np.allclose(measured(pixels.astype(np.float32)), expected, atol=1e-6)
    phase = np.exp(1j * np.arange(30).reshape(6, 5))
    assert np.allclose(measured((pixels * phase).astype(np.complex64)), expected, atol=1e-5)


@given(BYTES)
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
    with pytest.raises(InputError, match="too small to cut 16x4"):
        Preprocessing(size=(16, 4), resize="cut")(pixels)


@pytest.mark.parametrize(
    ("pixels", "sentence"),
    [
        (np.full((4, 4), np.nan), "16 NaN or infinite pixels"),
        (np.full((4, 4), -3.0), "magnitudes are not negative"),
        (np.full((4, 4), complex(np.nan, 1)), "16 NaN or infinite pixels"),
    ],
)
def test_pixels_that_are_no_magnitude_are_refused(pixels: np.ndarray, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        log_magnitude(pixels, (0.0, 1.0))


def test_the_white_of_float_and_complex_pixels_must_be_told() -> None:
    for kind in (np.float32, np.complex64):
        with pytest.raises(InputError, match="white is not known"):
            Preprocessing(magnitude="log")(np.ones((4, 4), kind))
    assert log_magnitude(np.array([[5.0]]), (0.0, 1.0))[0, 0] == 1.0  # brighter than white saturates
    with pytest.raises(OptionError, match="goes with magnitude='log'"):
        Preprocessing(normalise="patch")
    with pytest.raises(OptionError, match="did you mean 'log'"):
        Preprocessing(magnitude="logg")


def test_a_saved_detector_takes_its_preprocessing_along(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sea = (100 * rng.gamma(2.0, 0.5, (24, 8, 8))).astype(np.float32)
    detector = toy_detector(magnitude="log", normalise="patch", value_range=(0.0, 1000.0)).fit(sea)
    detector.save(tmp_path / "det")
    again = gepc.load_detector(tmp_path / "det", detector.backbone)
    assert (again.preprocessing_.magnitude, again.preprocessing_.normalise) == ("log", "patch")
    assert np.array_equal(again.score(sea[:4]), detector.score(sea[:4]))
    assert np.allclose(again.score((1j * sea[:4]).astype(np.complex64)[..., None]), detector.score(sea[:4]), rtol=1e-3)

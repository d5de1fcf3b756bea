"""Randomness is a function of (seed, picture, timestep, draw) alone, and it is the distribution it claims."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest
from toys import as_uint8, pictures

from gepc.images.noise import generator, image_key, normal, subsets
from gepc.images.preprocessing import Preprocessing

SHAPE = (3, 8, 8)
KEYS = [image_key(image) for image in pictures(5)]


@given(st.permutations(range(5)), st.integers(0, 5))
def test_noise_does_not_depend_on_the_other_images(order: list[int], cut: int) -> None:
    """Any order and any split into batches gives every image the same field."""
    together = normal(7, KEYS, SHAPE, timestep=3)
    parts = [order[:cut], order[cut:]]
    for part in parts:
        np.testing.assert_array_equal(normal(7, [KEYS[i] for i in part], SHAPE, timestep=3), together[part])


def test_noise_depends_on_everything_it_is_a_function_of() -> None:
    """Another seed, picture, timestep, draw or purpose: fields that have nothing in common."""
    fields = [
        normal(seed, [key], SHAPE, timestep, draw, purpose).ravel()
        for seed, key, timestep, draw, purpose in [
            (0, KEYS[0], 1, 0, "noise"),
            (1, KEYS[0], 1, 0, "noise"),
            (0, KEYS[1], 1, 0, "noise"),
            (0, KEYS[0], 2, 0, "noise"),
            (0, KEYS[0], 1, 1, "noise"),
            (0, KEYS[0], 1, 0, "probe"),
            (0, KEYS[0], 11, 0, "noise"),
        ]
    ]
    for first, second in itertools.combinations(fields, 2):
        assert abs(np.corrcoef(first, second)[0, 1]) < 4.5 / np.sqrt(first.size)


def test_noise_is_standard_normal() -> None:
    """Kolmogorov-Smirnov over 500 fields, and moments within 4.5 standard errors."""
    keys = [bytes([i // 256, i % 256]) for i in range(500)]
    values = normal(0, keys, (1, 8, 8), timestep=5).ravel().astype(np.float64)
    n = values.size
    assert abs(values.mean()) < 4.5 / np.sqrt(n)
    assert abs(values.var() - 1) < 4.5 * np.sqrt(2 / n)
    assert abs((values**4).mean() - 3) < 4.5 * np.sqrt(96 / n)
    assert kstest(values, "norm").pvalue > 1e-3


def test_numbers_are_not_run_together() -> None:
    """(timestep 1, draw 11) and (11, 1) are different draws."""
    assert generator(0, b"k", "noise", 1, 11).random() != generator(0, b"k", "noise", 11, 1).random()


@pytest.mark.parametrize("bits", [8, 16])
def test_a_picture_has_one_key_whatever_type_it_comes_in(bits: int) -> None:
    """Every grey value of 8 and 16 bits: as integers, and as floats in [-1, 1] and [0, 1] of either precision."""
    white = 2**bits - 1
    grey = np.arange(white + 1, dtype=np.uint8 if bits == 8 else np.uint16).reshape(-1, 2**8 // 16)
    unit = grey / np.float64(white)
    ways = {
        "integers": (grey, None),
        "float64 in [-1, 1]": (2 * unit - 1, None),
        "float32 in [-1, 1]": ((2 * unit - 1).astype(np.float32), None),
        "float32 arithmetic": (grey.astype(np.float32) / np.float32(white / 2) - np.float32(1), None),
        "float32 in [0, 1]": (unit.astype(np.float32), (0, 1)),
        "float32 in [0, white]": (grey.astype(np.float32), (0, white)),
    }
    keys = {
        name: image_key(Preprocessing(value_range, channels=1)(pixels)) for name, (pixels, value_range) in ways.items()
    }
    assert len(set(keys.values())) == 1, keys


def test_pictures_that_differ_in_one_pixel_or_in_shape_have_other_keys() -> None:
    image = as_uint8(pictures(1))[0]
    other = image.copy()
    other[3, 4, 1] ^= 1
    preprocess = Preprocessing()
    keys = {image_key(preprocess(picture)) for picture in (image, other, image.reshape(4, 16, 3))}
    assert len(keys) == 3


def test_subsets_have_their_size_and_every_subset_is_equally_likely() -> None:
    """All 15 pairs out of 6 over 3000 images, each count within 4.5 binomial standard deviations."""
    keys = [bytes([i // 256, i % 256]) for i in range(3000)]
    masks = subsets(0, keys, count=6, size=2, purpose="elements")
    assert (masks.sum(1) == 2).all()
    found = np.bincount(masks @ (1 << np.arange(6)), minlength=64)
    counts = np.array([found[(1 << i) + (1 << j)] for i, j in itertools.combinations(range(6), 2)])
    share = 1 / 15
    assert (np.abs(counts - 3000 * share) < 4.5 * np.sqrt(3000 * share * (1 - share))).all()


def test_keys_and_draws_never_change() -> None:
    """Saved detectors and caches depend on them: every number of every method follows from these two."""
    image = np.array([[[-1.0, -0.5, 0.0], [0.25, 0.5, 1.0]]], dtype=np.float32)
    key = image_key(image)
    assert key.hex() == "6870505d6e6c61cf50dff61dac1db781"
    field = normal(3, [key], (1, 2), timestep=7)
    np.testing.assert_array_equal(field, normal(3, [key], (1, 2), timestep=7, draw=0))
    np.testing.assert_allclose(field.ravel(), [-0.28517026, 1.0116208], rtol=1e-6)

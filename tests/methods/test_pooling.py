"""Pooling: mean over channels, then over all, the largest, or the largest locally averaged pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from literal_gepc import pool as literal_pool

from gepc.core.errors import InputError, OptionError
from gepc.methods.pooling import (
    KINDS,
    Pooling,
    box_filter,
    check_window,
    combine,
    energy,
    log_contrast,
    odd_eighth,
    position_distance,
    ring_sides,
    total,
    v_global,
)


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    kind=st.sampled_from(KINDS),
    topk=st.floats(0.001, 1.0),
    window=st.sampled_from([1, 3, 5, 9]),
)
def test_pooling_is_the_literal_one(
    seed: int, shape: tuple[int, int, int], kind: str, topk: float, window: int
) -> None:
    """Any image, share and window, also windows larger than the image; image by image."""
    energy = np.random.default_rng(seed).exponential(size=(2, *shape))
    found = Pooling(kind, topk, window)(torch.from_numpy(energy)).numpy()
    np.testing.assert_allclose(found, [literal_pool(image, kind, topk, window) for image in energy], rtol=1e-12)


def test_the_number_of_pixels_is_the_floor_and_at_least_one() -> None:
    """k = max(1, floor(topk H W)): 4 of 16 at 0.3, 1 of 16 at 0.01."""
    energy = torch.arange(16.0, dtype=torch.float64).reshape(1, 1, 4, 4)
    assert Pooling("topk", 0.3)(energy) == (15 + 14 + 13 + 12) / 4
    assert Pooling("topk", 0.01)(energy) == 15
    assert Pooling("topk", 1.0)(energy) == Pooling("mean")(energy)


def test_local_pooling_prefers_a_target_over_a_single_bright_pixel() -> None:
    """A 3x3 target of height 2 beats one pixel of height 9 in a window of 3, and loses to it without."""
    energy = torch.zeros(2, 1, 12, 12, dtype=torch.float64)
    energy[0, 0, 4:7, 4:7], energy[1, 0, 5, 5] = 2.0, 9.0
    smallest_share = 1 / 144
    with_window = Pooling("local", smallest_share, window=3)(energy)
    without = Pooling("topk", smallest_share)(energy)
    assert with_window.tolist() == pytest.approx([2.0, 1.0])
    assert without.tolist() == [2.0, 9.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "topkk"}, "did you mean 'topk'"),
        ({"topk": 0.0}, "share of the pixels"),
        ({"topk": 30}, "share of the pixels"),
        ({"topk": 1.01}, "share of the pixels"),
        ({"topk": -0.1}, "share of the pixels"),
        ({"window": 4}, "odd"),
        ({"window": 0}, "odd"),
        ({"window": -3}, "odd"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Pooling(**options)  # type: ignore[arg-type]


def test_the_distance_of_a_position_is_the_literal_one() -> None:
    fields = np.random.default_rng(4).normal(size=(3, 4, 6, 5)) * np.array([1.0, 2.0, 0.1, 5.0])[:, None, None]
    fields[:, 3] += fields[:, 0]
    found = position_distance(torch.from_numpy(fields)).numpy()
    for image, distances in zip(fields, found, strict=True):
        vectors = image.reshape(4, -1)
        centred = vectors - vectors.mean(1, keepdims=True)
        covariance = np.cov(vectors, bias=True)
        shrunk = covariance + 4 / 34 * (np.diag(np.diag(covariance)) - covariance)
        literal = np.einsum("cp,cd,dp->p", centred, np.linalg.inv(shrunk), centred)
        np.testing.assert_allclose(distances.ravel(), literal, rtol=1e-4)
    moved = torch.from_numpy(-3.0 * fields + 7.0)
    np.testing.assert_allclose(position_distance(moved).numpy(), found, rtol=1e-6)


def test_equal_and_constant_channels_have_a_finite_distance() -> None:
    field = torch.from_numpy(np.random.default_rng(6).normal(size=(1, 1, 8, 8)))
    found = position_distance(torch.cat([field, field, torch.zeros_like(field)], 1))
    assert torch.isfinite(found).all()
    assert position_distance(torch.zeros(1, 3, 4, 4)).max() == 0.0


def test_contrast_is_that_of_the_window_to_its_ring_whatever_the_gain() -> None:
    rng = np.random.default_rng(8)
    field = rng.normal(size=(40, 40))
    field[18:21, 20:23] += 4.0
    found = log_contrast(torch.from_numpy(field)[None], 3)[0]
    assert np.unravel_index(int(found.argmax()), found.shape) == (19, 21)
    offsets = np.maximum.outer(*(np.abs(np.arange(40) - centre) for centre in (19, 21)))
    ring = field[(offsets > 7) & (offsets <= 10)]
    assert float(found[19, 21]) == pytest.approx((field[18:21, 20:23].mean() - ring.mean()) / ring.std())
    other = log_contrast(torch.from_numpy(0.2 * field - 3.0)[None], 3)[0]
    assert torch.allclose(other, found)
    assert torch.isfinite(log_contrast(torch.zeros(2, 8, 8), 9)).all()
    assert torch.isfinite(log_contrast(torch.rand(2, 5, 7), 9)).all()


def test_the_common_scale_is_the_median_over_maps_of_their_quantile() -> None:
    """The 0.99 quantile interpolates between pixels."""
    pixels = np.arange(101.0, dtype=np.float32).reshape(1, 101)
    assert v_global([factor * pixels for factor in (1, 3, 4)]) == pytest.approx(3 * 99)


def test_maps_are_averaged_over_the_levels_that_were_evaluated() -> None:
    levels = np.ones((3, 2, 2, 3), dtype=np.float32) * np.array([1.0, 4.0], dtype=np.float32)[:, None, None]
    levels[1, 0] = np.nan
    levels[2, 1] = np.nan
    found = combine(levels, np.array([0.2, 0.6]))
    assert found.dtype == np.float32
    assert found.shape == (3, 2, 3)
    np.testing.assert_allclose(found[:, 0, 0], [(0.2 * 1 + 0.6 * 4) / 0.8, 4.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(found, np.broadcast_to(found[:, :1, :1], found.shape))


def test_every_variance_is_raised_by_a_millionth() -> None:
    """Of one channel the mean distance is var/(var + 1e-6 var), whatever its unit."""
    field = torch.from_numpy(np.random.default_rng(7).normal(size=(2, 1, 5, 5))) * 1e3
    assert position_distance(field).mean((1, 2)).tolist() == pytest.approx([1.0 / (1.0 + 1e-6)] * 2, rel=1e-9)


def test_contrast_keeps_its_precision_far_from_zero() -> None:
    """In float32 and with an offset of a thousand standard deviations, as in double precision."""
    field = torch.from_numpy(np.random.default_rng(9).normal(size=(2, 40, 40)) + 1000.0).float()
    assert torch.allclose(log_contrast(field, 3).double(), log_contrast(field.double(), 3), atol=1e-2)


def test_contrast_treats_rows_and_columns_alike() -> None:
    """Also where only one side of the image is too short for the ring."""
    field = torch.from_numpy(np.random.default_rng(10).normal(size=(2, 9, 40)))
    assert torch.allclose(log_contrast(field.mT, 3), log_contrast(field, 3).mT)


@pytest.mark.parametrize(
    ("shape", "sides"),
    [((64, 80), (45, 63)), ((63, 80), (31, 61)), ((32, 32), (15, 31)), ((9, 40), (3, 7)), ((5, 4), (1, 3))],
)
def test_the_ring_shrinks_in_images_that_are_smaller_than_it(shape: tuple[int, int], sides: tuple[int, int]) -> None:
    """Both sides stay odd, and the guard is about half of the ring."""
    assert ring_sides(45, 63, shape) == sides


@pytest.mark.parametrize("size", [(1, 1), (2, 16), (3, 3), (20, 3)])
def test_an_image_without_room_for_a_ring_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=f"an image of {size[1]}x{size[0]} pixels .* both sides must be at least 4"):
        log_contrast(torch.rand(2, *size), 9)


def test_sums_are_over_channels_and_pixels_in_double_precision() -> None:
    """1e8 + 1 - 1e8 is 1, though float32 has no number between 1e8 and 1e8 + 8."""
    field = torch.tensor([1e8, 1.0, -1e8, 2.0, 3.0, -5.0]).reshape(1, 2, 1, 3).repeat(2, 1, 1, 1)
    field[1] = torch.arange(6.0).reshape(2, 1, 3)
    assert total(field).tolist() == [1.0, 15.0]
    assert total(field).dtype == torch.float64
    assert energy(field[1:]).tolist() == [0 + 1 + 4 + 9 + 16 + 25]


def test_the_defaults_are_the_papers_share_and_a_window_of_nine() -> None:
    assert Pooling() == Pooling("topk", 0.3, 9)


@given(st.integers(1, 4096))
def test_an_eighth_of_the_side_is_the_largest_odd_number_up_to_it(side: int) -> None:
    odd = [number for number in range(1, side // 8 + 1) if number % 2 == 1]
    assert odd_eighth(side) == max(odd, default=1)


@pytest.mark.parametrize(("side", "window"), [(256, 31), (32, 3), (24, 3), (16, 1), (15, 1), (8, 1), (1, 1)])
def test_an_eighth_of_common_sides(side: int, window: int) -> None:
    assert odd_eighth(side) == window


def test_a_window_that_is_left_to_the_image_need_not_be_odd() -> None:
    check_window(None)
    check_window(1)
    with pytest.raises(OptionError, match="window is an odd number of pixels, got 2"):
        check_window(2)


def test_a_box_shrinks_at_the_border() -> None:
    field = torch.arange(12.0, dtype=torch.float64).reshape(1, 3, 4)
    found = box_filter(field, 3)[0]
    assert float(found[1, 1]) == float(field[0, 0:3, 0:3].mean())
    assert float(found[0, 0]) == float(field[0, 0:2, 0:2].mean())
    assert float(found[2, 3]) == float(field[0, 1:3, 2:4].mean())
    assert torch.equal(box_filter(field, 1), field)


def test_the_spread_of_a_flat_ring_is_a_thousandth_of_the_images() -> None:
    """A bright pixel amid zeros: the ring around it has no spread of its own."""
    field = torch.zeros(1, 30, 30, dtype=torch.float64)
    field[0, 15, 15] = 1.0
    spread = float((field - field.mean()).square().mean().sqrt())
    assert float(log_contrast(field, 1)[0, 15, 15]) == pytest.approx(1.0 / (1e-3 * spread), rel=1e-6)


def test_the_contrast_of_every_pixel_is_to_the_ring_that_lies_within_the_image() -> None:
    """Window 1: the guard has a side of 5 and the ring one of 7, cut off at the border."""
    field = np.random.default_rng(3).normal(size=(12, 11))
    found = log_contrast(torch.from_numpy(field)[None], 1)[0].numpy()
    for y, x in np.ndindex(field.shape):
        far = np.maximum.outer(np.abs(np.arange(12) - y), np.abs(np.arange(11) - x))
        ring = field[(far > 2) & (far <= 3)]
        assert found[y, x] == pytest.approx((field[y, x] - ring.mean()) / ring.std(), rel=1e-9)


def test_the_contrast_of_an_image_does_not_depend_on_the_others() -> None:
    """Flat clutter beside an image with much contrast: the least spread is that of each image."""
    rng = np.random.default_rng(0)
    flat, rough = torch.zeros(1, 48, 48), torch.from_numpy(rng.normal(size=(1, 48, 48)) * 50.0).float()
    flat[0, 20:23, 20:23] = 1.0
    alone = log_contrast(flat, 3)
    torch.testing.assert_close(log_contrast(torch.cat([flat, rough]), 3)[:1], alone)

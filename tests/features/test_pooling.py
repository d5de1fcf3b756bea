"""Pooling: mean over channels, then over all, the largest, or the largest locally averaged pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from literal_gepc import pool as literal_pool

from gepc.core.errors import OptionError
from gepc.features.pooling import KINDS, Pooling, position_distance, position_moments


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
        ({"window": 4}, "odd"),
        ({"window": 0}, "odd"),
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
        inverse = np.linalg.inv(np.cov(vectors, bias=True))
        literal = np.einsum("cp,cd,dp->p", centred, inverse, centred)
        np.testing.assert_allclose(distances.ravel(), literal, rtol=1e-4)
    assert found.mean() == pytest.approx(4.0, rel=1e-3)


def test_moments_of_several_images_are_those_of_all_their_positions() -> None:
    fields = torch.from_numpy(np.random.default_rng(5).normal(size=(3, 2, 4, 4)) + np.arange(3)[:, None, None, None])
    means, covariances = position_moments(fields)
    mean = means.mean(0)
    covariance = (covariances + means[:, :, None] * means[:, None]).mean(0) - torch.outer(mean, mean)
    vectors = fields.transpose(0, 1).reshape(2, -1)
    assert torch.allclose(mean, vectors.mean(1))
    assert torch.allclose(covariance, torch.cov(vectors, correction=0))
    apart = position_distance(fields, mean, covariance)
    together = position_distance(fields.transpose(0, 1).reshape(1, 2, 12, 4))
    assert torch.allclose(apart.reshape(1, 12, 4), together)


def test_equal_and_constant_channels_have_a_finite_distance() -> None:
    field = torch.from_numpy(np.random.default_rng(6).normal(size=(1, 1, 8, 8)))
    found = position_distance(torch.cat([field, field, torch.zeros_like(field)], 1))
    assert torch.isfinite(found).all()
    assert position_distance(torch.zeros(1, 3, 4, 4)).max() == 0.0

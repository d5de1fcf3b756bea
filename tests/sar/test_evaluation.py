"""Localisation metrics: exact values on small fields, and at chance. Intervals that resample whole images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.core.errors import InputError
from gepc.features.pooling import Pooling
from gepc.sar.results import bootstrap_intervals, localise, resample, smoothed


def test_a_map_that_is_the_mask_points_perfectly_and_its_opposite_never() -> None:
    mask = np.zeros((1, 4, 5), dtype=bool)
    mask[0, 1:3, 1:3] = True
    good, bad = localise(mask.astype(float), mask), localise(1.0 - mask, mask)
    assert (good.auroc[0], good.hit[0], good.energy[0], good.area[0]) == (1.0, 1.0, 1.0, 0.2)
    assert (bad.auroc[0], bad.hit[0], bad.energy[0]) == (0.0, 0.0, 0.0)


@given(st.integers(1, 19))
def test_a_flat_map_is_chance(count: int) -> None:
    mask = (np.arange(20) < count).reshape(1, 4, 5)
    for level in (0.0, 2.0):
        found = localise(np.full((1, 4, 5), level), mask)
        assert found.auroc[0] == 0.5
        assert np.allclose([found.hit[0], found.energy[0]], found.area[0])


def test_smoothing_is_the_filter_of_local_pooling() -> None:
    import torch

    field = np.random.default_rng(0).random((2, 12, 9)).astype(np.float32)
    pooled = Pooling("local", topk=1 / 108, window=3).pixels(torch.from_numpy(field))
    assert np.allclose(smoothed(field, 3).max((1, 2)), pooled.numpy())


def test_fields_that_cannot_be_measured_are_refused() -> None:
    mask = np.eye(3, dtype=bool)[None]
    with pytest.raises(InputError, match="must both be"):
        localise(np.ones((2, 3, 3)), mask)
    with pytest.raises(InputError, match="a patch without a box, or covered by one"):
        localise(np.ones((1, 3, 3)), np.zeros_like(mask))
    with pytest.raises(InputError, match="not negative"):
        localise(-np.ones((1, 3, 3)), mask)


def test_intervals_draw_whole_images() -> None:
    picked = resample(["a", "b", "a", "c"], np.random.default_rng(3))
    assert (picked == 0).sum() == (picked == 2).sum()
    values = np.repeat([0.0, 1.0] * 5, 20)

    def width(groups: list[str]) -> float:
        ((low, high),) = bootstrap_intervals(lambda v: [v.mean()], [values], [groups], draws=1000)
        return high - low

    assert width([str(k // 20) for k in range(200)]) > 3 * width([str(k) for k in range(200)])
    one_image = ["x"] * 200
    pair = bootstrap_intervals(lambda a, b: [b.mean() - a.mean()], [values, values + 1], [one_image] * 2, draws=300)
    assert pair == [(1.0, 1.0)]  # one image in each sample: nothing varies

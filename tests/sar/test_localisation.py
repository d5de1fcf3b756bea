"""Maps against boxes: exact values on small fields, and what chance gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.core.errors import InputError, OptionError
from gepc.features.pooling import Pooling
from gepc.sar.intervals import mean_interval, redraw, two_sample_interval
from gepc.sar.localisation import localise, smoothed
from gepc.sar.preset import local_pooling, sar_options


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
    with pytest.raises(InputError, match="no box, or is all box"):
        localise(np.ones((1, 3, 3)), np.zeros_like(mask))
    with pytest.raises(InputError, match="not negative"):
        localise(-np.ones((1, 3, 3)), mask)


def test_intervals_draw_whole_images() -> None:
    picked = redraw(["a", "b", "a", "c"], np.random.default_rng(3))
    assert (picked == 0).sum() == (picked == 2).sum()
    values = np.repeat([0.0, 1.0] * 5, 20)
    apart = mean_interval(values, [str(k) for k in range(200)])
    together = mean_interval(values, [str(k // 20) for k in range(200)])
    assert together[1] - together[0] > 3 * (apart[1] - apart[0])
    low, high = two_sample_interval(lambda a, b: np.array([b.mean() - a.mean()]), values, values + 1, ("x" * 200,) * 2)[
        0
    ]
    assert low == high == 1.0  # one image a side: nothing varies


@pytest.mark.parametrize(("pixels", "window"), [(1, 1), (20, 3), (50, 5), (200, 9), (800, 19)])
def test_pooling_follows_the_targets_size(pixels: int, window: int) -> None:
    options = local_pooling(pixels, 256)
    assert options == {"pool": "local", "window": window, "topk": pixels / 65536}
    Pooling(options["pool"], options["topk"], options["window"])


def test_options_of_the_domain() -> None:
    assert sar_options(sides="two")["calibration"] == "kde"
    assert sar_options(normalise="patch", size=128)["topk"] == 200 / 128**2
    for bad in ({"target_pixels": 0}, {"target_pixels": 20000}, {"sides": "three"}):
        with pytest.raises(OptionError):
            sar_options(**bad)  # type: ignore[arg-type]

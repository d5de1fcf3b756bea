"""Localisation metrics: exact values on small fields, and at chance. Intervals that resample whole images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.core.errors import InputError
from gepc.lab.metrics import bootstrap_intervals, localisation, region_overlap


def test_a_map_that_is_the_mask_points_perfectly_and_its_opposite_never() -> None:
    mask = np.zeros((1, 4, 5), dtype=bool)
    mask[0, 1:3, 1:3] = True
    good, bad = localisation(mask.astype(float), mask), localisation(1.0 - mask, mask)
    assert (good.auroc[0], good.hit[0], good.pro) == (1.0, 1.0, 1.0)
    assert (bad.auroc[0], bad.hit[0], bad.pro) == (0.0, 0.0, 0.0)


@given(st.integers(1, 19))
def test_a_flat_map_is_chance(count: int) -> None:
    mask = (np.arange(20) < count).reshape(1, 4, 5)
    for level in (-1.0, 0.0, 2.0):
        found = localisation(np.full((1, 4, 5), level), mask)
        assert found.auroc[0] == 0.5
        assert found.hit[0] == pytest.approx(mask.mean())


def test_regions_count_alike_whatever_their_size() -> None:
    mask = np.zeros((1, 40, 40), dtype=bool)
    mask[0, :20, :20] = True  # 400 pixels, found
    mask[0, 30:32, 30:32] = True  # 4 pixels, missed
    maps = np.random.default_rng(0).random((1, 40, 40))
    maps[0, :20, :20] += 10.0
    maps[0, 30:32, 30:32] -= 10.0
    assert region_overlap(maps, mask) == pytest.approx(0.5)


def test_a_random_map_overlaps_by_chance() -> None:
    rng = np.random.default_rng(1)
    masks = np.zeros((40, 32, 32), dtype=bool)
    masks[:, 8:16, 8:16] = True
    assert region_overlap(rng.random((40, 32, 32)), masks) == pytest.approx(0.15, abs=0.01)


def test_fields_that_cannot_be_measured_are_refused() -> None:
    mask = np.eye(3, dtype=bool)[None]
    with pytest.raises(InputError, match="must both be"):
        localisation(np.ones((2, 3, 3)), mask)
    with pytest.raises(InputError, match="an image without a region, or covered by one"):
        localisation(np.ones((1, 3, 3)), np.zeros_like(mask))
    with pytest.raises(InputError, match="an image without a region, or covered by one"):
        localisation(np.ones((1, 3, 3)), np.ones_like(mask))
    with pytest.raises(InputError, match="must both be"):
        localisation(np.ones((1, 3, 3, 2)), np.ones((1, 3, 3, 2), dtype=bool))
    with pytest.raises(InputError, match="must be finite"):
        localisation(np.full((1, 3, 3), np.nan), mask)


def test_intervals_draw_whole_images() -> None:
    values = np.repeat([0.0, 1.0] * 5, 20)

    def width(groups: list[str]) -> float:
        ((low, high),) = bootstrap_intervals(lambda v: [v.mean()], [values], [groups], draws=1000)
        return high - low

    assert width([str(k // 20) for k in range(200)]) > 3 * width([str(k) for k in range(200)])
    one_image = ["x"] * 200
    pair = bootstrap_intervals(lambda a, b: [b.mean() - a.mean()], [values, values + 1], [one_image] * 2, draws=300)
    assert pair == [(1.0, 1.0)]  # one image in each sample: nothing varies


def test_bootstrap_intervals_by_hand_and_their_default_number_of_draws() -> None:
    """The 2.5 % and 97.5 % quantiles of the measure over 300 samples of groups, drawn with replacement."""
    values, groups = np.random.default_rng(1).normal(size=9), list("aabcdefgh")
    rng, members = np.random.default_rng(0), [values[:2], *values[2:, None]]
    means = [np.concatenate([members[pick] for pick in rng.integers(0, 8, 8)]).mean() for _ in range(300)]
    ((low, high),) = bootstrap_intervals(lambda v: [v.mean()], [values], [groups])
    assert (low, high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), rel=1e-9)


def test_regions_that_touch_at_a_corner_are_one() -> None:
    """Two pixels, of which the map finds one: half of one region, as of two; with a third apart, 3/4 instead of 2/3."""
    mask = np.zeros((1, 30, 30), dtype=bool)
    mask[0, 5, 5] = mask[0, 6, 6] = mask[0, 20, 20] = True
    maps = np.random.default_rng(0).random((1, 30, 30))
    maps[0, 5, 5], maps[0, 6, 6], maps[0, 20, 20] = 9.0, -9.0, 9.0
    assert region_overlap(maps, mask) == pytest.approx(0.75)


def test_overlap_is_averaged_over_the_thresholds_that_up_to_three_tenths_outside_exceed() -> None:
    """Outside the values are 0, 1, ..., 1000; a region at 850 is above the thresholds from a share of 0.15 on."""
    maps, mask = np.append(np.arange(1001.0), 850.2).reshape(1, 2, 501), np.zeros((1, 2, 501), dtype=bool)
    mask[0, -1, -1] = True
    assert region_overlap(maps, mask) == pytest.approx(0.5, abs=0.002)
    maps[0, -1, -1] = 700.5  # just above the lowest threshold
    assert region_overlap(maps, mask) == pytest.approx(0.5 / 300, rel=1e-6)


def test_of_several_maxima_of_a_map_those_inside_count() -> None:
    field, mask = np.zeros((2, 3)), np.array([[True, True, False], [False, False, False]])
    field[0] = 7.0
    found = localisation([field], [mask])
    assert found.hit[0] == pytest.approx(2 / 3)
    assert found.auroc[0] == pytest.approx(1 - 0.5 * 1 / 4)


def test_ties_outside_overlap_by_chance() -> None:
    """A constant map marks nothing, and a map of few values is measured as if its ties were broken at random."""
    rng = np.random.default_rng(0)
    mask = np.zeros((64, 64), dtype=bool)
    mask[20:40, 20:40] = True
    assert localisation([np.ones((64, 64))], [mask]).pro == pytest.approx(0.15)
    coarse = (rng.random((64, 64)) + 0.5 * mask > 0.6).astype(float)
    broken = [localisation([coarse + 1e-6 * rng.random((64, 64))], [mask]).pro for _ in range(20)]
    assert localisation([coarse], [mask]).pro == pytest.approx(np.mean(broken), abs=0.005)

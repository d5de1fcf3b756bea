"""SPR on Gaussians: the denoising error has a closed expectation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussians import RHO, D, S, as_given, aurocs, batch_of, distance2, gaussian, method, passes, run, sample

import gepc
from gepc.core.errors import OptionError
from gepc.features.baselines.spr import _box, _eighth


def test_level_on_the_papers_schedule() -> None:
    assert method("spr").timesteps(gaussian()) == (132,)


@pytest.mark.parametrize("rho", [0.0633, 0.5])
def test_expected_residual(rho: float) -> None:
    """E|r|^2 = (rho^4 A + s^4 rho^2 D)/(s^2 + rho^2)^2; 3 draws of 300 images, within 4 standard errors."""
    extractor = method("spr", levels=f"rho:{rho}", pool="mean", window=1)
    (t,) = extractor.timesteps(gaussian())
    level = RHO[t]
    images = sample(300, 0.8)
    found = D * run(extractor, images)["spr"][:, 0]
    expected = (level**4 * distance2(images) + S**4 * level**2 * D) / (S**2 + level**2) ** 2
    gap = found - expected
    assert abs(gap.mean()) < 4 * gap.std() / np.sqrt(len(gap))
    assert gap.std() < expected.mean()


def test_the_score_is_read_from_the_map() -> None:
    extractor = method("spr", window=3)
    images, steps = sample(4), method("spr").timesteps(gaussian())
    table, maps = extractor.maps(gaussian(), batch_of(images), steps)
    assert maps.shape == (4, 1, 4, 4)
    np.testing.assert_allclose(table["spr"], maps.max((2, 3)), rtol=1e-6)
    np.testing.assert_array_equal(run(extractor, images)["spr"], table["spr"])


def test_the_box_shrinks_at_the_border() -> None:
    field = torch.arange(16.0).reshape(1, 4, 4)
    boxed = _box(field, 3)[0]
    assert boxed[0, 0] == field[0, :2, :2].mean()
    assert boxed[1, 1] == field[0, :3, :3].mean()
    assert [_eighth(side) for side in (8, 16, 32, 64, 256)] == [1, 1, 3, 7, 31]


def test_it_costs_three_passes_and_has_maps() -> None:
    assert passes(method("spr"), gaussian()) == (3, 0)
    images = as_given(30)
    detector = gepc.create_detector("spr", gaussian()).fit(images)
    assert detector.score_map(images[:2]).shape == (2, 4, 4)


def test_direction_at_a_level_that_carries_signal() -> None:
    wide, narrow = aurocs(method("spr", levels="rho:0.5"), "raw")
    assert wide > 0.95
    assert narrow < 0.2
    with pytest.raises(OptionError, match="odd number"):
        method("spr", window=4)

"""LMD on a Gaussian of independent pixels: what is filled in is a fresh sample, what is known stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussians import MU, D, S, as_given, aurocs, batch_of, distance2, gaussian, method, passes, run, sample

import gepc
from gepc.core.errors import InputError, OptionError
from gepc.features.baselines.lmd import LMD


def boards(extractor: LMD) -> list[torch.Tensor]:
    known = extractor._checkerboard(gaussian(), (4, 4))
    return [known, 1.0 - known]


def test_known_pixels_stay_and_the_others_are_drawn_from_the_model() -> None:
    """Per pixel mean MU and variance S^2 within 4 standard errors, whatever the image; 100 steps lose some variance."""
    extractor = LMD(blocks=4, steps=100, clip=False)
    images = sample(150, 0.8)
    known, _ = boards(extractor)
    filled = extractor.inpaint(gaussian(), batch_of(images), known, 0).numpy()
    hidden = np.broadcast_to(known.numpy() == 0, filled.shape)
    np.testing.assert_allclose(filled[~hidden], images[~hidden], rtol=1e-6)
    new, old = filled[hidden], images[hidden].astype(float)
    assert abs(new.mean() - MU) < 4 * S / np.sqrt(new.size)
    assert new.var() == pytest.approx(S**2, rel=0.12)
    assert abs(np.corrcoef(new, old)[0, 1]) < 4 / np.sqrt(new.size)


def test_expected_error_over_both_parities() -> None:
    """(A/D + s^2)/2 per pixel: 200 inpaintings by 100 steps, within 6 %."""
    extractor = LMD(blocks=2, steps=100, clip=False)
    images = sample(100, 0.7)
    batch = batch_of(images)
    errors = np.zeros(len(images))
    for repetition, known in enumerate(boards(extractor)):
        filled = extractor.inpaint(gaussian(), batch, known, repetition).numpy()
        errors += ((filled - images) ** 2).reshape(len(images), -1).mean(1)
    assert errors.mean() / 2 == pytest.approx((distance2(images).mean() / D + S**2) / 2, rel=0.06)


def test_the_boards_are_complementary_blocks() -> None:
    even, odd = boards(LMD(blocks=2))
    assert even.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    torch.testing.assert_close(even + odd, torch.ones(4, 4, dtype=torch.float64))
    with pytest.raises(InputError, match="8 blocks do not divide images of 4x4"):
        run(method("lmd"), sample(1))


def test_the_score_is_the_median_over_repetitions() -> None:
    """Of three the middle one; of two the mean."""
    images = np.clip(sample(4), -1, 1)
    three = LMD(blocks=2, repetitions=3, steps=5, distance="mse")
    by_hand = []
    for repetition in range(3):
        known = boards(three)[repetition % 2]
        filled = three.inpaint(gaussian(), batch_of(images), known, repetition).clamp(-1, 1).numpy()
        by_hand.append((((filled - images) / 2) ** 2).reshape(4, -1).mean(1))
    np.testing.assert_allclose(run(three, images)["lmd"][:, 0], np.median(by_hand, axis=0), rtol=1e-6)
    two = LMD(blocks=2, repetitions=2, steps=5, distance="mse")
    np.testing.assert_allclose(run(two, images)["lmd"][:, 0], np.mean(by_hand[:2], axis=0), rtol=1e-6)


def test_cost_is_repetitions_times_steps() -> None:
    assert passes(LMD(blocks=4), gaussian()) == (104, 0)
    assert passes(LMD(blocks=4, repetitions=4, steps=50), gaussian(), 1) == (200, 0)
    assert LMD(repetitions=10, steps=1000).cost(gaussian(), (32, 32)).forward == 10_000


def test_direction() -> None:
    extractor = LMD(blocks=4, repetitions=4, steps=20, distance="mse")
    wide, narrow = aurocs(extractor, "raw", count=80)
    assert wide > 0.95
    assert narrow < 0.2
    detector = gepc.create_detector("lmd", gaussian(), blocks=4, steps=4).fit(as_given(24))
    assert detector.score(as_given(2, seed=3)).shape == (2,)
    with pytest.raises(OptionError, match="repetitions must be at least 1"):
        LMD(repetitions=0)

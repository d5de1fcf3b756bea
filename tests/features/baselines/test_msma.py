"""MSMA on a Gaussian is one number ten times: all calibrators must rank by |x - mu|."""

from __future__ import annotations

import numpy as np
import pytest
from gaussians import ABAR, D, V, aurocs, distance2, gaussian, method, passes, run, sample
from scipy.stats import spearmanr

from gepc.scoring import Aggregation, create_calibrator


def test_levels_on_the_papers_schedule() -> None:
    expected = [27, 58, 113, 207, 363, 617, 1012, 1567, 2215, 2809]
    np.testing.assert_allclose(method("msma").timesteps(gaussian()), expected, atol=1)


def test_feature_is_exact() -> None:
    """sigma sqrt(abar) |x - mu| / v_t."""
    extractor, images = method("msma"), sample(20, 0.7)
    steps = list(extractor.timesteps(gaussian()))
    slope = np.sqrt((1 - ABAR[steps]) * ABAR[steps]) / V[steps]
    expected = np.sqrt(distance2(images))[:, None] * slope
    np.testing.assert_allclose(run(extractor, images)["msma"], expected, rtol=1e-12)


def test_noised_on_request() -> None:
    """E|eps|^2 = sigma^2 D/v for x_t of the training Gaussian."""
    extractor = method("msma", noised=True, levels="rho:0.5")
    (t,) = extractor.timesteps(gaussian())
    found = (run(extractor, sample(400))["msma"] ** 2).mean()
    assert found == pytest.approx((1 - ABAR[t]) * D / V[t], rel=4 * np.sqrt(2 / (400 * D)))


def test_it_costs_ten_passes() -> None:
    assert passes(method("msma"), gaussian()) == (10, 0)


@pytest.mark.parametrize("calibration", ["gmm", "mahalanobis", "knn", "kde"])
def test_every_calibrator_ranks_by_the_distance_to_the_mean(calibration: str) -> None:
    """Beyond the farthest ID image, where the order is not the density's choice."""
    extractor = method("msma")
    train, far = sample(300), sample(40, 1.5, seed=1)
    calibrator = create_calibrator(calibration).fit(extractor.columns(run(extractor, train)))
    scores = calibrator.score(extractor.columns(run(extractor, far)), np.full(10, 0.1), Aggregation())
    beyond = distance2(far) > distance2(train).max()
    assert beyond.sum() > 20
    assert spearmanr(scores[beyond], distance2(far)[beyond]).statistic == pytest.approx(1.0)


def test_direction() -> None:
    wide, narrow = aurocs(method("msma"), "raw", count=150)
    assert wide > 0.95
    assert narrow < 0.05
    assert min(aurocs(method("msma"), "gmm", count=150)) > 0.95
    assert min(aurocs(method("msma"), "kde", count=150)) > 0.95

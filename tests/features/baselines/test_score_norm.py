"""|s| on Gaussians: E|s|^2 = D/v_t, and what it is for other Gaussians."""

from __future__ import annotations

import numpy as np
import pytest
from gaussians import ABAR, MU, RHO, D, V, aurocs, gaussian, method, passes, run, sample

from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError


def test_expected_square_on_the_training_gaussian() -> None:
    """Relative Monte-Carlo error below 4 sqrt(2/(n D))."""
    extractor = method("score_norm")
    steps = extractor.timesteps(gaussian())
    np.testing.assert_allclose(RHO[list(steps)], (0.05, 0.17, 0.52), rtol=0.02)
    n = 400
    found = (run(extractor, sample(n))["score_norm"] ** 2).mean(0)
    np.testing.assert_allclose(found, D / V[list(steps)], rtol=4 * np.sqrt(2 / (n * D)))


def test_expected_square_elsewhere() -> None:
    """(D v' + abar |mu - mu'|^2)/v^2 for N(mu', s'^2 I)."""
    extractor = method("score_norm", levels=Levels.rho(0.52))
    (t,) = extractor.timesteps(gaussian())
    n, mean, spread = 600, -0.3, 0.8
    found = (run(extractor, sample(n, spread, mean=mean))["score_norm"] ** 2).mean()
    other = ABAR[t] * spread**2 + 1 - ABAR[t]
    assert found == pytest.approx((D * other + ABAR[t] * D * (MU - mean) ** 2) / V[t] ** 2, rel=0.03)


def test_eps_is_sigma_times_the_score() -> None:
    images = sample(3)
    scores, eps = (run(method("score_norm", of=of), images)["score_norm"] for of in ("score", "eps"))
    steps = list(method("score_norm").timesteps(gaussian()))
    np.testing.assert_allclose(eps, scores * np.sqrt(1 - ABAR[steps]), rtol=1e-12)


def test_draws_are_averaged_and_counted() -> None:
    assert passes(method("score_norm", draws=2), gaussian()) == (6, 0)
    assert passes(method("score_norm"), gaussian()) == (3, 0)


def test_direction() -> None:
    """Raw, it inverts for narrower data at low noise; the density does not."""
    low = method("score_norm", levels=Levels.rho(0.05))
    wide, narrow = aurocs(low, "raw")
    assert wide > 0.95
    assert narrow < 0.05
    assert min(aurocs(low, "kde")) > 0.95


def test_bad_options() -> None:
    with pytest.raises(OptionError, match="draws must be at least 1"):
        method("score_norm", draws=0)
    with pytest.raises(OptionError, match="unknown of 'scores'"):
        method("score_norm", of="scores")

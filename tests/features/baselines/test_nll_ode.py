"""The probability-flow likelihood of a Gaussian is known, and random signs give its trace exactly."""

from __future__ import annotations

import numpy as np
import pytest
from gaussians import ABAR, MU, RHO, D, S, aurocs, batch_of, gaussian, method, passes, run, sample
from toys import pictures, toy_backbone

import gepc
from gepc.backbones.schedule import cosine_alphas_cumprod
from gepc.core.errors import OptionError
from gepc.features.baselines.nll_ode import NllOde


def exact_bits(images: np.ndarray) -> np.ndarray:
    """-log2 N(y_0; mu, (s^2 + rho_0^2) I)/D + log2(127.5)."""
    y = images.astype(np.float64) / np.sqrt(ABAR[0])
    variance = S**2 + RHO[0] ** 2
    nats = 0.5 * (((y - MU) ** 2).reshape(len(y), -1).sum(1) / variance + D * np.log(2 * np.pi * variance))
    return nats / (D * np.log(2)) + np.log2(127.5)


@pytest.mark.parametrize(("steps", "tolerance"), [(16, 0.15), (64, 0.012), (250, 0.003)])
def test_the_likelihood_is_the_gaussians(steps: int, tolerance: float) -> None:
    """Bits per dimension; the error falls with the square of the steps down to the prior's mismatch."""
    images = sample(4, 0.7)
    np.testing.assert_allclose(run(NllOde(steps), images)["bpd"][:, 0], exact_bits(images), rtol=0, atol=tolerance)


def test_the_path() -> None:
    """Strictly ascending from the first timestep to rho = 80, even in log rho where the schedule is fine enough."""
    path = NllOde(16).path(gaussian())
    assert (path[0], path[-1], len(path)) == (0, 3967, 17)
    assert np.ptp(np.diff(np.log(RHO[path]))) < 0.4
    many = NllOde(250).path(gaussian())
    assert len(set(many)) == 251
    with pytest.raises(OptionError, match="500 steps do not fit"):
        NllOde(500).path(gaussian(cosine_alphas_cumprod(100)))


def test_the_answer_belongs_to_the_image() -> None:
    images = pictures(3)
    together = run(NllOde(3), images, toy_backbone())["bpd"]
    np.testing.assert_allclose(run(NllOde(3), images[2:], toy_backbone())["bpd"], together[2:], rtol=1e-5)


def test_cost() -> None:
    assert passes(method("nll_ode"), gaussian()) == (32, 32)
    assert gepc.create_detector("nll_ode", gaussian(), preset="paper").cost() == gepc.features.base.Cost(500, 500)
    assert batch_of(sample(1)).rows == 1


def test_direction() -> None:
    wide, narrow = aurocs(NllOde(8), "raw", count=120)
    assert wide > 0.95
    assert narrow < 0.05
    assert min(aurocs(NllOde(8), "kde", count=120)) > 0.95

"""SCOPED on Gaussians: T = |x_t - sqrt(abar) mu|^2/(D v_t), exactly, with one probe of random signs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussians import ABAR, MU, SHAPE, D, V, aurocs, batch_of, gaussian, method, passes, run, sample

import gepc
from gepc.backbones.analytic import GaussianBackbone
from gepc.features.baselines.hutchinson import eps_and_trace, signs

UNSIGNED = method("scoped", sign="none")


def test_levels_on_the_papers_schedule() -> None:
    assert UNSIGNED.timesteps(gaussian()) == (1, 300)


def test_statistic_is_exact_and_typical_near_one() -> None:
    images = sample(300)
    table = run(UNSIGNED, images)["scoped"]
    for column, t in enumerate(UNSIGNED.timesteps(gaussian())):
        x_t = batch_of(images).noised(gaussian(), t)[0].numpy()
        expected = ((x_t - np.sqrt(ABAR[t]) * MU) ** 2).reshape(300, -1).sum(1) / (D * V[t])
        np.testing.assert_allclose(table[:, column], expected, rtol=1e-12)
        assert table[:, column].mean() == pytest.approx(1, abs=4 * np.sqrt(2 / D / 300))
        assert table[:, column].var() == pytest.approx(2 / D, rel=0.35)


def test_exact_for_any_diagonal_covariance() -> None:
    """T = [sum (x_i - m_i)^2/l_i^2]/[sum 1/l_i]."""
    rng = np.random.default_rng(3)
    cov, mu = rng.uniform(0.05, 2.0, SHAPE), rng.uniform(-1, 1, SHAPE)
    backbone = GaussianBackbone(mu, cov, SHAPE, ABAR)
    images = sample(5)
    found = run(UNSIGNED, images, backbone)["scoped"][:, 1]
    x_t = batch_of(images).noised(backbone, 300)[0].numpy()
    values = ABAR[300] * cov + 1 - ABAR[300]
    expected = ((x_t - np.sqrt(ABAR[300]) * mu) ** 2 / values**2).sum((1, 2, 3)) / (1 / values).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_stein_identity() -> None:
    """E|s|^2 = -E tr ds/dx on the training data: the mean of |s|^2 against the (constant) trace."""
    backbone, images = gaussian(), sample(400)
    batch = batch_of(images)
    x_t, _ = batch.noised(backbone, 300)
    eps, trace = eps_and_trace(backbone, x_t, 300, [signs(backbone, batch, 300, 0)])
    sigma = np.sqrt(1 - ABAR[300])
    squares = eps.square().sum((1, 2, 3)) / sigma**2
    assert float(squares.mean()) == pytest.approx(float(trace.mean() / sigma), rel=4 * np.sqrt(2 / D / 400))


def test_probes_are_signs_that_belong_to_the_image() -> None:
    backbone, images = gaussian(), sample(6)
    field = signs(backbone, batch_of(images), 300, 0)
    assert set(field.unique().tolist()) == {-1.0, 1.0}
    torch.testing.assert_close(signs(backbone, batch_of(images[3:4]), 300, 0), field[3:4])
    assert not torch.equal(field, signs(backbone, batch_of(images), 300, 1))


def test_the_sign_is_that_of_the_summed_score() -> None:
    images = sample(20)
    plain, signed = (run(method("scoped", sign=sign), images)["scoped"] for sign in ("none", "sum"))
    np.testing.assert_array_equal(np.abs(signed), plain)
    for column, t in enumerate((1, 300)):
        score = gaussian().score(batch_of(images).noised(gaussian(), t)[0], t)
        np.testing.assert_array_equal(np.sign(signed[:, column]), np.sign(score.sum((1, 2, 3)).numpy()))


def test_a_vanishing_trace_is_held_off_and_counted() -> None:
    """eps constant in x: tr = 0, so T = |eps|^2/(sigma^2 D/1000), positive."""
    backbone = gepc.Backbone.from_callable(lambda x, t: 0.1 + 0.0 * x, ABAR, 3, 4)
    table = run(UNSIGNED, sample(3), backbone)
    assert (table["clamped"] == 1).all()
    np.testing.assert_allclose(table["scoped"], np.tile(10 / (1 - ABAR[[1, 300]]), (3, 1)), rtol=1e-5)


def test_cost() -> None:
    assert passes(method("scoped"), gaussian()) == (2, 2)
    assert passes(method("scoped", levels="rho:0.13", probes=3), gaussian()) == (3, 3)
    light = gepc.create_detector("scoped", gaussian(), preset="light")
    assert (light.cost().forward, light.cost().jvp) == (1, 1)


def test_direction() -> None:
    """Unsigned it inverts; signed it has no raw direction at all; the density works both ways."""
    one = {"levels": "rho:0.13"}
    wide, narrow = aurocs(method("scoped", sign="none", **one), "raw")
    assert wide > 0.95
    assert narrow < 0.05
    assert min(aurocs(method("scoped", sign="none", **one), "kde")) > 0.95
    assert min(aurocs(method("scoped", **one), "kde")) > 0.95
    assert aurocs(method("scoped", **one), "raw")[0] == pytest.approx(0.5, abs=0.1)
    assert min(aurocs(method("scoped"), "kde:standardise=true")) > 0.9

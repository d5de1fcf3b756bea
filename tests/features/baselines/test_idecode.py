"""iDECODe on the GEPC residual: zero under symmetry, GEPC's own numbers otherwise, and a valid p-value."""

from __future__ import annotations

import numpy as np
import pytest
from gaussians import ABAR, SHAPE, as_given, batch_of, gaussian, method, passes, run, sample
from toys import pictures, toy_backbone

import gepc
from gepc.backbones.analytic import GaussianBackbone
from gepc.scoring.metrics import auroc
from gepc.verdicts.conformal import CalibrationScores


def test_an_equivariant_score_gives_zero_and_p_one() -> None:
    """Pixels alike: every alpha is 0, so every p-value is 1."""
    assert np.abs(run(method("idecode"), sample(5))["idecode"]).max() < 1e-25
    exact = gepc.Backbone.from_callable(lambda x, t: x, ABAR, 3, 4)
    images = as_given(30)
    detector = gepc.create_detector("idecode", exact).fit(images)
    np.testing.assert_array_equal(detector.p_value(images[:4]), 1.0)


def test_one_element_is_gepcs_residual() -> None:
    """With G = {id, flip_x} every draw is the flip: n times the mean-pooled residual that GEPC keeps."""
    backbone, images = toy_backbone(), pictures(5)
    given = {"levels": "rho:0.3", "group": ("flip_x",)}
    ours = run(method("idecode", n=4, **given), images, backbone)["idecode"]
    theirs = run(method("gepc", pool="mean", **given), images, backbone)["s"][:, :, 1]
    np.testing.assert_allclose(ours, 4 * theirs, rtol=1e-5)


def test_elements_are_drawn_for_each_image() -> None:
    """Independent, with repetition, the same alone as in a batch; not the identity."""
    extractor, images = method("idecode", n=200), sample(3)
    chosen = extractor._choose(batch_of(images), 10, 6)  # type: ignore[attr-defined]
    assert set(np.unique(chosen)) == set(range(6))
    np.testing.assert_array_equal(extractor._choose(batch_of(images[1:2]), 10, 6)[0], chosen[1])  # type: ignore[attr-defined]


def test_cost_is_n_plus_one_at_each_level() -> None:
    assert passes(method("idecode"), gaussian()) == (6, 0)
    assert passes(method("idecode", n=3, levels="rho:0.05,0.2"), gaussian()) == (8, 0)


def test_p_is_valid_and_ranks_as_the_sum_does() -> None:
    """Over pixels of unequal mean. ID against ID: P(p <= a) <= a up to sampling; the AUROC of p is that of the sum."""
    mu = np.linspace(-0.5, 0.5, 48).reshape(SHAPE)
    backbone = GaussianBackbone(mu, 0.25, SHAPE, ABAR)
    extractor = method("idecode", levels="rho:0.5")
    calibration, fresh, other = (
        run(extractor, sample(200, spread, seed), backbone)["idecode"][:, 0]
        for seed, spread in ((0, 0.5), (1, 0.5), (2, 0.25))
    )
    reference = CalibrationScores.of(calibration, None)
    p = reference.p_values(fresh, None, None)
    for level in (0.1, 0.3, 0.5):
        assert (p <= level).mean() <= level + 3 * np.sqrt(level * (1 - level) * 2 / 200)
    p_other = reference.p_values(other, None, None)
    assert auroc(1 - p, 1 - p_other) == pytest.approx(auroc(fresh, other), abs=0.02)

"""Score norm, MSMA, SCOPED, EigenScore, SPR and iDECODe against their closed forms on Gaussians."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussians import (
    ABAR,
    MU,
    RHO,
    SHAPE,
    D,
    S,
    V,
    as_given,
    aurocs,
    batch_of,
    distance2,
    gaussian,
    method,
    passes,
    run,
    sample,
)
from scipy.stats import spearmanr
from toys import pictures, toy_backbone

import gepc
from gepc.backbones.schedule import Levels
from gepc.calibration import Aggregation, create_calibrator
from gepc.conformal.p_values import CalibrationScores
from gepc.core.errors import OptionError
from gepc.lab.analytic import GaussianBackbone, MixtureBackbone
from gepc.lab.baselines.score import EigenScore, eps_and_trace, signs
from gepc.lab.metrics import auroc
from gepc.methods.base import extract_map_parts, raw_maps
from gepc.methods.pooling import box_filter, odd_eighth

# --- score_norm ------------------------------------------------------------------------------------------------------

# |s| on Gaussians: E|s|^2 = D/v_t, and what it is for other Gaussians.


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


def test_direction_of_score_norm() -> None:
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


# --- msma ------------------------------------------------------------------------------------------------------------

# MSMA on a Gaussian is one number ten times: all calibrators must rank by |x - mu|.


def test_levels_on_the_papers_schedule_of_msma() -> None:
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


def test_direction_of_msma() -> None:
    wide, narrow = aurocs(method("msma"), "raw", count=150)
    assert wide > 0.95
    assert narrow < 0.05
    assert min(aurocs(method("msma"), "gmm", count=150)) > 0.95
    assert min(aurocs(method("msma"), "kde", count=150)) > 0.95


# --- scoped ----------------------------------------------------------------------------------------------------------

# SCOPED on Gaussians: T = |x_t - sqrt(abar) mu|^2/(D v_t), exactly, with one probe of random signs.

UNSIGNED = method("scoped", sign="none")


def test_levels_on_the_papers_schedule_of_scoped() -> None:
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


def test_without_noise_the_statistic_is_that_of_the_scaled_image() -> None:
    images = sample(4)
    table = run(method("scoped", sign="none", noised=False), images)["scoped"]
    for column, t in enumerate((1, 300)):
        np.testing.assert_allclose(table[:, column], ABAR[t] * distance2(images) / (D * V[t]), rtol=1e-12)


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


def test_cost_of_scoped() -> None:
    assert passes(method("scoped"), gaussian()) == (2, 2)
    assert passes(method("scoped", levels="rho:0.13", probes=3), gaussian()) == (3, 3)
    light = gepc.create_detector(gaussian(), "scoped", preset="light")
    assert (light.cost().forward, light.cost().jvp) == (1, 1)


def test_direction_of_scoped() -> None:
    """Unsigned it inverts; signed it has no raw direction at all; the density works both ways."""
    one = {"levels": "rho:0.13"}
    wide, narrow = aurocs(method("scoped", sign="none", **one), "raw")
    assert wide > 0.95
    assert narrow < 0.05
    assert min(aurocs(method("scoped", sign="none", **one), "kde")) > 0.95
    assert min(aurocs(method("scoped", **one), "kde")) > 0.95
    assert aurocs(method("scoped", **one), "raw")[0] == pytest.approx(0.5, abs=0.1)
    assert min(aurocs(method("scoped"), "kde:standardise=true")) > 0.9


# --- eigenscore ------------------------------------------------------------------------------------------------------

# EigenScore where the posterior covariance is known: on Gaussians it is blind, on a mixture it is not.

T = 814


def test_levels_on_the_papers_schedule_of_eigenscore() -> None:
    extractor = method("eigenscore", **EigenScore.presets["paper"].method)
    np.testing.assert_allclose(extractor.timesteps(gaussian()), (814, 1202, 1575, 1928, 2257), atol=2)
    assert extractor.cost(gaussian(), (4, 4)).forward == 30_000


def test_eigenvalues_of_a_gaussian() -> None:
    """c rho^2/(c + rho^2), largest first, the same for every image."""
    cov = np.full(D, 1e-4)
    cov[[5, 17, 40]] = 1.0, 0.09, 0.02
    backbone = GaussianBackbone(MU, cov.reshape(SHAPE), SHAPE, ABAR)
    found = EigenScore(k=3, iterations=40).eigenvalues(backbone, batch_of(sample(4)), T, 0).numpy()
    c = np.array([1.0, 0.09, 0.02])
    expected = c * RHO[T] ** 2 / (c + RHO[T] ** 2)
    np.testing.assert_allclose(found, np.tile(expected, (4, 1)), rtol=1e-8)


def test_values_do_not_need_distinct_vectors() -> None:
    """All eigenvalues alike: any vector will do, after one product."""
    found = run(method("eigenscore", iterations=1, k=2), sample(3))["eigenscore"]
    rho = RHO[list(method("eigenscore").timesteps(gaussian()))]
    np.testing.assert_allclose(found, np.tile(2 * S**2 * rho**2 / (S**2 + rho**2), (3, 1)), rtol=1e-9)


def test_a_mixture_is_seen() -> None:
    """N(+-a, s^2 I): s^2 rho^2/(s^2 + rho^2) + 4 w (1-w) rho^4 |a|^2/(s^2 + rho^2)^2 along a, up to the finite step."""
    a = np.full(SHAPE, 0.03)
    backbone = MixtureBackbone([1, 1], [a, -a], [0.01, 0.01], SHAPE, ABAR)
    images = np.stack([scale * a for scale in (0.0, 3.0, 5.0)]).astype(np.float32)
    batch = batch_of(images)
    found = EigenScore(iterations=80).eigenvalues(backbone, batch, T, 0).numpy()[:, 0]
    y = batch.noised(backbone, T)[0].numpy() / np.sqrt(ABAR[T])
    spread = 0.01 + RHO[T] ** 2
    w = 1 / (1 + np.exp(-2 * (a * y).sum((1, 2, 3)) / spread))
    expected = 0.01 * RHO[T] ** 2 / spread + 4 * w * (1 - w) * RHO[T] ** 4 * (a**2).sum() / spread**2
    np.testing.assert_allclose(found, expected, rtol=2e-2)
    assert np.ptp(found) > 0.1 * found.max()


@pytest.mark.parametrize(("options", "cost"), [({}, 96), ({"k": 2, "iterations": 3, "draws": 1}, 36)])
def test_cost_of_eigenscore(options: dict[str, int], cost: int) -> None:
    assert passes(method("eigenscore", **options), gaussian()) == (cost, 0)


# --- spr -------------------------------------------------------------------------------------------------------------

# SPR on Gaussians: the denoising error has a closed expectation.


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
    table, parts = extract_map_parts(extractor, gaussian(), batch_of(images), steps)
    maps = raw_maps(extractor, gaussian(), parts)
    assert maps.shape == (4, 1, 4, 4)
    np.testing.assert_allclose(table["spr"], maps.max((2, 3)), rtol=1e-6)
    np.testing.assert_array_equal(run(extractor, images)["spr"], table["spr"])


def test_the_box_shrinks_at_the_border() -> None:
    field = torch.arange(16.0).reshape(1, 4, 4)
    boxed = box_filter(field, 3)[0]
    assert boxed[0, 0] == field[0, :2, :2].mean()
    assert boxed[1, 1] == field[0, :3, :3].mean()
    assert [odd_eighth(side) for side in (8, 16, 32, 64, 256)] == [1, 1, 3, 7, 31]


def test_it_costs_three_passes_and_has_maps() -> None:
    assert passes(method("spr"), gaussian()) == (3, 0)
    images = as_given(30)
    detector = gepc.create_detector(gaussian(), "spr").fit(images)
    assert detector.score_map(images[:2]).shape == (2, 4, 4)


def test_direction_at_a_level_that_carries_signal() -> None:
    wide, narrow = aurocs(method("spr", levels="rho:0.5"), "raw")
    assert wide > 0.95
    assert narrow < 0.2
    with pytest.raises(OptionError, match="odd number"):
        method("spr", window=4)


# --- idecode ---------------------------------------------------------------------------------------------------------

# iDECODe on the GEPC residual: zero under symmetry, GEPC's own numbers otherwise, and a valid p-value.


def test_an_equivariant_score_gives_zero_and_p_one() -> None:
    """Pixels alike: every alpha is 0, so every p-value is 1."""
    assert np.abs(run(method("idecode"), sample(5))["idecode"]).max() < 1e-25
    exact = gepc.Backbone.from_callable(lambda x, t: x, ABAR, 3, 4)
    images = as_given(30)
    detector = gepc.create_detector(exact, "idecode").fit(images)
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

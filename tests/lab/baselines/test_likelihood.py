"""The variational bound, the probability-flow ODE, and methods that read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussians import ABAR, MU, RHO, SHAPE, D, S, aurocs, batch_of, distance2, gaussian, method, passes, run, sample
from scipy.stats import norm
from toys import pictures, toy_backbone

import gepc
from gepc.backbones.schedule import cosine_alphas_cumprod, log_variances
from gepc.core.errors import OptionError
from gepc.lab.analytic import GaussianBackbone
from gepc.lab.baselines.likelihood import Chain, NllOde, NllVlb, log_bin
from gepc.methods.base import Batch

# --- nll_vlb ---------------------------------------------------------------------------------------------------------

# The variational bound against its closed form on Gaussians, term by term; strata; the decoder; the cost.

SHORT = cosine_alphas_cumprod(60)


def copies(image: np.ndarray, count: int) -> Batch:
    """One image under many keys: many draws of its noise."""
    keys = [place.to_bytes(16, "little") for place in range(count)]
    return Batch(np.repeat(image[None], count, axis=0), keys, rows=count)


def closed_terms(image: np.ndarray, abar: np.ndarray) -> np.ndarray:
    """E L_t for t = 1 ... with reverse variance btilde, without clipping."""
    snr, v = abar / (1 - abar), abar * S**2 + 1 - abar
    error = ((1 - abar) ** 2 * distance2(image[None]) + abar * (1 - abar) * S**4 * D) / v**2
    return 0.5 * (snr[:-1] - snr[1:]) * error[1:]


def test_every_term_has_its_closed_expectation() -> None:
    """300 draws of the noise: each of 59 terms within 4.5 standard errors, and the last exactly."""
    image = sample(1, 0.7)[0]
    terms = NllVlb(strata=None, clip=False).terms(gaussian(SHORT), copies(image, 300)).numpy()
    assert terms.shape == (300, 61)
    gap = terms[:, 1:-1].mean(0) - closed_terms(image, SHORT)
    assert (np.abs(gap) < 4.5 * terms[:, 1:-1].std(0) / np.sqrt(300)).all()
    last = SHORT[-1]
    prior = 0.5 * (last * (image.astype(float) ** 2).sum() - D * last - D * np.log1p(-last))
    np.testing.assert_allclose(terms[:, -1], prior, rtol=1e-9)


@pytest.mark.parametrize("steps", [None, 20])
def test_strata_are_unbiased(steps: int | None) -> None:
    """8 strata against the closed sum, within 4.5 standard errors; on the respaced chain too."""
    image = sample(1, 0.7)[0]
    backbone = gaussian(SHORT)
    chain = Chain.of(backbone, steps)
    terms = NllVlb(steps=steps, strata=8, clip=False).terms(backbone, copies(image, 1500)).numpy()
    found = terms[:, 1:-1].sum(1)
    assert abs(found.mean() - closed_terms(image, chain.abar).sum()) < 4.5 * found.std() / np.sqrt(len(found))


def test_strata_cover_every_step_once() -> None:
    chain = Chain.of(gaussian(), None)
    edges = chain.strata(32)
    assert (edges[0], edges[-1], len(edges)) == (0, 3999, 33)
    assert (np.diff(edges) >= 1).all()
    assert chain.strata(None) == list(range(4000))
    assert Chain.of(gaussian(SHORT), None).strata(500) == list(range(60))


def test_the_sum_bounds_the_exact_likelihood() -> None:
    """L_T + sum + (D/2)(ln(2 pi/SNR_0) + 1) is at least -log N(x; mu, s^2 I) and within half a nat a dimension."""
    image = sample(1)[0]
    snr = ABAR[0] / (1 - ABAR[0])
    prior = 0.5 * (ABAR[-1] * (image.astype(float) ** 2).sum() - D * ABAR[-1] - D * np.log1p(-ABAR[-1]))
    bound = prior + closed_terms(image, ABAR).sum() + D / 2 * (np.log(2 * np.pi / snr) + 1)
    exact = -norm(MU, S).logpdf(image.astype(float)).sum()
    assert exact < bound < exact + 0.5 * D


def test_larger_reverse_variance() -> None:
    """D/2 [ln(b/bt) - 1 + bt/b] + (bt/b) times the term with bt."""
    backbone, batch = gaussian(SHORT), copies(sample(1)[0], 3)
    small, large = (
        NllVlb(strata=None, clip=False, variance=kind).terms(backbone, batch).numpy()[:, 1:-1]
        for kind in ("posterior", "beta")
    )
    log_b, log_bt = log_variances(Chain.of(backbone, None).abar)
    ratio = np.exp(log_bt - log_b)[1:]
    np.testing.assert_allclose(large, D / 2 * (-np.log(ratio) - 1 + ratio) + ratio * small, rtol=1e-9)


def test_learned_variance_interpolates(network_of: gepc.Backbone) -> None:
    """A network that learned its variance: v = 1 everywhere is `beta`, v = -1 is `posterior`, respaced too."""
    images = np.clip(sample(2), -1, 1)
    for value, kind in ((1.0, "beta"), (-1.0, "posterior")):
        network_of.value = value  # type: ignore[attr-defined]
        for steps in (None, 15):
            given = {"strata": None, "steps": steps}
            model = run(NllVlb(**given), images, network_of)["bpd"]  # type: ignore[arg-type]
            fixed = run(NllVlb(variance=kind, **given), images, network_of)["bpd"]  # type: ignore[arg-type]
            np.testing.assert_allclose(model, fixed, rtol=1e-6)


@pytest.fixture
def network_of() -> gepc.Backbone:
    """A backbone with a learned variance whose interpolation value is `value` everywhere."""

    class Learned(gepc.Backbone):
        learned_variance = True
        value = 1.0

        def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return 0.9 * x

        def eps_and_log_variance(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            large, small = (self.per_image(table, x, t) for table in log_variances(self.alphas_cumprod))
            share = (self.value + 1) / 2
            return self.eps(x, t), (share * large + (1 - share) * small).expand_as(x)

    return Learned(SHORT, 3, SHAPE[1:])


class LearnedGaussian(GaussianBackbone):
    """The exact noise prediction, with a learned variance halfway between btilde and beta, in float32."""

    learned_variance = True

    def eps_and_log_variance(self, x: torch.Tensor, t: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = torch.as_tensor(t)
        both = [self.per_image(table, x, steps).float() for table in log_variances(self.alphas_cumprod)]
        return self.eps(x, t), (0.5 * both[0] + 0.5 * both[1]).expand_as(x)


@pytest.mark.parametrize("steps", [None, 20])
def test_a_learned_variance_is_read_where_the_schedule_ends_in_pure_noise(steps: int | None) -> None:
    """A linear schedule down to abar = e^-50: beta and btilde round to one number, and every term has its closed form.

    D/2 [ln(v/bt) - 1 + bt/v] + (bt/v) times the term with bt, for v = sqrt(bt b).
    """
    abar = np.cumprod(1.0 - np.linspace(0.01, 0.95, 60))
    backbone, batch = LearnedGaussian(MU, S**2, SHAPE, abar), copies(sample(1)[0], 3)
    given = {"steps": steps, "strata": None, "clip": False}
    small = NllVlb(variance="posterior", **given).terms(backbone, batch).numpy()  # type: ignore[arg-type]
    found = NllVlb(**given).terms(backbone, batch).numpy()  # type: ignore[arg-type]
    log_b, log_bt = log_variances(Chain.of(backbone, steps).abar)
    ratio = np.exp(0.5 * (log_bt - log_b))[1:]
    expected = D / 2 * (-np.log(ratio) - 1 + ratio) + ratio * small[:, 1:-1]
    np.testing.assert_allclose(found[:, 1:-1], expected, rtol=1e-4, atol=1e-6)


def test_the_decoder_integrates_over_the_bin() -> None:
    """scipy's normal distribution in the middle, its tails at the ends; far away still finite and falling."""
    x = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0], dtype=torch.float64)
    mean, log_var = torch.full_like(x, 0.1), torch.full_like(x, 2 * np.log(0.05))
    found = log_bin(x, mean, log_var).numpy()
    gauss, h = norm(0.1, 0.05), 1 / 255
    inside = [gauss.cdf(v + h) - gauss.cdf(v - h) if v < 0.1 else gauss.sf(v - h) - gauss.sf(v + h) for v in x[1:4]]
    expected = [gauss.logcdf(-1 + h), *np.log(inside), gauss.logsf(1 - h)]
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    tight = log_bin(x, mean, torch.full_like(x, 2 * np.log(1e-3)))
    assert torch.isfinite(tight).all()
    assert tight[1] < tight[2]


def test_the_published_decoder_is_close_and_clamped() -> None:
    x = torch.tensor([0.1, 0.12, -0.9], dtype=torch.float64)
    mean, log_var = torch.full_like(x, 0.1), torch.full_like(x, 2 * np.log(0.02))
    exact, published = log_bin(x, mean, log_var), log_bin(x, mean, log_var, compat=True)
    torch.testing.assert_close(published[:2], exact[:2], rtol=5e-3, atol=0)
    assert published[2] == pytest.approx(np.log(1e-12))
    assert exact[2] < -1000


def test_cost_of_nll_vlb() -> None:
    """33F, 1000F when respaced, one pass a step in full."""
    assert passes(method("nll_vlb"), gaussian(), 1) == (33, 0)
    assert passes(method("nll_vlb", steps=1000, strata=None), gaussian(), 1) == (1000, 0)
    assert passes(method("nll_vlb", strata=None), gaussian(SHORT), 1) == (60, 0)
    costs = {
        preset: gepc.create_detector(gaussian(), "nll_vlb", preset=preset).cost().forward
        for preset in ("paper", "light", "full")
    }
    assert costs == {"paper": 1000, "light": 33, "full": 4000}


def test_direction_of_nll_vlb() -> None:
    """It inverts for narrower data; the two-sided density does not. Noise of the estimate blurs both at D = 48."""
    extractor = method("nll_vlb", strata=96, clip=False)
    wide, narrow = aurocs(extractor, "raw", count=100)
    assert wide > 0.95
    assert narrow < 0.2
    assert min(aurocs(extractor, "kde", count=100)) > 0.75


def test_bad_options() -> None:
    with pytest.raises(OptionError, match="unknown variance"):
        method("nll_vlb", variance="learnt")
    with pytest.raises(OptionError, match="steps must be at least 2, got 1"):
        method("nll_vlb", steps=1)
    with pytest.raises(OptionError, match="strata must be at least 1"):
        method("nll_vlb", strata=-2)


# --- typicality and dos ----------------------------------------------------------------------------------------------

# Methods that read a likelihood: input complexity, typicality, density of states, WAIC, likelihood ratio.


def test_typicality_is_two_sided() -> None:
    assert passes(method("typicality"), gaussian(), 1) == (33, 0)
    extractor = method("typicality", strata=96, clip=False)
    assert min(aurocs(extractor, extractor.calibration, count=100)) > 0.75


def test_density_of_states() -> None:
    """The bands and the prior sum to the bound; the norms are the score norm's; the density works both ways."""
    extractor, images = method("dos", clip=False), sample(3)
    table = run(extractor, images)
    abar = gaussian().alphas_cumprod
    prior = 0.5 * (abar[-1] * (images.astype(float) ** 2).sum((1, 2, 3)) - D * abar[-1] - D * np.log1p(-abar[-1]))
    np.testing.assert_allclose(table["bands"].sum(2)[:, 0] + prior / (D * np.log(2)), table["bpd"][:, 0], rtol=1e-9)
    np.testing.assert_allclose(table["norms"][:, 0], run(method("score_norm"), images)["score_norm"])
    assert extractor.columns(table).shape == (3, 1, 8) == (3, 1, len(extractor.column_names))
    assert passes(extractor, gaussian(), 1) == (36, 0)
    assert min(aurocs(extractor, "gmm", count=150)) > 0.95


# --- nll_ode ---------------------------------------------------------------------------------------------------------

# The probability-flow likelihood of a Gaussian is known, and random signs give its trace exactly.


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


def test_cost_of_nll_ode() -> None:
    assert passes(method("nll_ode"), gaussian()) == (32, 32)
    assert gepc.create_detector(gaussian(), "nll_ode", preset="paper").cost() == gepc.methods.base.Cost(500, 500)
    assert batch_of(sample(1)).rows == 1


def test_direction_of_nll_ode() -> None:
    wide, narrow = aurocs(NllOde(8), "raw", count=120)
    assert wide > 0.95
    assert narrow < 0.05
    assert min(aurocs(NllOde(8), "kde", count=120)) > 0.95


def test_the_cost_of_more_steps_of_nll_ode_than_the_schedule_has_is_an_error() -> None:
    with pytest.raises(OptionError, match="steps do not fit"):
        method("nll_ode", steps=5000).image_cost(gaussian(), (4, 4))

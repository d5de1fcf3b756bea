"""Methods that read a likelihood: input complexity, typicality, density of states, WAIC, likelihood ratio."""

from __future__ import annotations

import numpy as np
import pytest
from gaussians import D, aurocs, distance2, gaussian, method, passes, run, sample

from gepc.backbones.schedule import cosine_alphas_cumprod, rho_of
from gepc.core.errors import OptionError
from gepc.features.baselines.ic import packed_bits

RNG = np.random.default_rng(0)


def test_the_compressor_orders_by_complexity() -> None:
    """Constant << blocks < noise; uniform noise takes 8.0 to 8.6 bits a dimension."""
    blocks = np.kron(RNG.integers(0, 256, (3, 8, 8)), np.ones((1, 4, 4))) / 127.5 - 1
    noise = RNG.integers(0, 256, (3, 32, 32)) / 127.5 - 1
    bits = [packed_bits(image.astype(np.float32), "png") for image in (np.zeros((3, 32, 32)), blocks, noise)]
    assert 4 * bits[0] < bits[1] < bits[2]
    assert 8.0 <= bits[2] / 3072 <= 8.6
    assert packed_bits(noise[:1].astype(np.float32), "png") < bits[2] / 2
    assert packed_bits(np.concatenate([noise, noise[:1]]).astype(np.float32), "png") > bits[2]


def test_complexity_is_taken_from_the_bound() -> None:
    """S = bpd - L/D: slope one in the bound, the same bound as the likelihood's."""
    extractor, images = method("ic"), np.clip(sample(4), -1, 1)
    table = run(extractor, images)
    np.testing.assert_array_equal(table["bpd"], run(method("nll_vlb"), images)["bpd"])
    png = np.array([packed_bits(image, "png") for image in images]) / D
    np.testing.assert_allclose(extractor.columns(table)[:, 0, 0], table["bpd"][:, 0] - png)
    assert passes(extractor, gaussian(), 1) == (33, 0)


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


def test_waic() -> None:
    """mean + variance/D over draws, in nats of the image; per dimension."""
    extractor, images = method("waic", draws=4, strata=8), sample(3)
    table = run(extractor, images)
    nats = table["nll"][:, 0] * D
    np.testing.assert_allclose(extractor.columns(table)[:, 0, 0], (nats.mean(1) + nats.var(1, ddof=1) / D) / D)
    assert passes(extractor, gaussian(), 1) == (36, 0)
    with pytest.raises(OptionError, match="draws must be at least 2, got 1"):
        method("waic", draws=1)


def test_likelihood_ratio() -> None:
    """Losses have their closed expectation; the column is the weighted difference; two-sided."""
    extractor = method("lr", levels="rho:0.1,0.5,1,3")
    images = sample(500, 0.8)
    table = run(extractor, images)
    rho = rho_of(gaussian().alphas_cumprod)[list(extractor._timesteps(gaussian()))]  # type: ignore[attr-defined]
    expected = (rho**2 * distance2(images)[:, None] + 0.5**4 * D) / (0.25 + rho**2) ** 2 / D
    gap = table["loss"][:, 0] - expected
    assert (np.abs(gap.mean(0)) < 4 * gap.std(0) / np.sqrt(500)).all()
    loss = table["loss"][:, 0]
    by_hand = loss[:, :2] @ [1 / 3, 2 / 3] - loss @ [0.1, 0.2, 0.3, 0.4]
    np.testing.assert_allclose(extractor.columns(table)[:, 0, 0], by_hand)
    assert passes(method("lr"), gaussian(), 1) == (16, 0)
    assert passes(method("lr"), gaussian(cosine_alphas_cumprod(100)), 1)[0] <= 16
    with pytest.raises(OptionError, match="fraction"):
        method("lr", fraction=1.0)

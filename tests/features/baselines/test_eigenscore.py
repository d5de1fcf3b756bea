"""EigenScore where the posterior covariance is known: on Gaussians it is blind, on a mixture it is not."""

from __future__ import annotations

import numpy as np
import pytest
from gaussians import ABAR, MU, RHO, SHAPE, D, S, batch_of, gaussian, method, passes, run, sample

from gepc.backbones.analytic import GaussianBackbone, MixtureBackbone
from gepc.features.baselines.eigenscore import EigenScore

T = 814


def test_levels_on_the_papers_schedule() -> None:
    extractor = method("eigenscore", **EigenScore.presets["paper"])
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


def test_median_over_draws() -> None:
    images = sample(2)
    extractor = EigenScore(draws=3, iterations=2, over_draws="median")
    backbone = MixtureBackbone([1, 1], [0.3, -0.3], [0.01, 0.01], SHAPE, ABAR)
    values = [extractor.eigenvalues(backbone, batch_of(images), T, draw).numpy()[:, 0] for draw in range(3)]
    found = extractor.at_level(backbone, batch_of(images), T)["eigenscore"].numpy()
    np.testing.assert_allclose(found, np.median(values, axis=0))


def test_a_column_for_every_draw() -> None:
    extractor = EigenScore(draws=3, iterations=2, over_draws="all")
    images = sample(2)
    columns = extractor.columns(run(extractor, images))
    means = run(EigenScore(draws=3, iterations=2), images)["eigenscore"]
    assert columns.shape == (2, 3, 3)
    np.testing.assert_allclose(columns.mean(axis=2), means)


@pytest.mark.parametrize(("options", "cost"), [({}, 96), ({"k": 2, "iterations": 3, "draws": 1}, 36)])
def test_cost(options: dict[str, int], cost: int) -> None:
    assert passes(method("eigenscore", **options), gaussian()) == (cost, 0)

"""The simulator against the closed forms of the K distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gepc.core.errors import OptionError
from gepc.lab.radar.simulate import (
    KELVIN,
    Sea,
    Target,
    gamma_quantile,
    hull_box,
    ship_intensity,
    simulate,
    wake_reflectivity,
)


def moment(sea: Sea, order: int) -> float:
    """E[I^n]/E[I]^n of the K distribution."""
    shapes = [shape for shape in (sea.nu, sea.looks) if not math.isinf(shape)]
    logs = (math.lgamma(shape + order) - math.lgamma(shape) - order * math.log(shape) for shape in shapes)
    return math.exp(sum(logs))


def texture_correlation(rho: np.ndarray, nu: float, nodes: int = 40) -> np.ndarray:
    """Correlation of the gamma texture where the Gaussian field has correlation `rho`, by Gauss-Hermite quadrature.

    corr = nu (E[q(u) q(rho u + sqrt(1 - rho^2) v)] - 1) with u, v standard normal and q = `gamma_quantile`.
    """
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    first = gamma_quantile(points, nu)
    values = [
        weights @ ((first[:, None] * gamma_quantile(r * points[:, None] + math.sqrt(1 - r * r) * points, nu)) @ weights)
        for r in rho.clip(-1.0, 1.0)
    ]
    return nu * (np.array(values) - 1.0)


@pytest.mark.parametrize(("nu", "looks"), [(4.0, 2.0), (10.0, 1.0), (math.inf, 4.0)])
def test_intensity_has_the_moments_of_the_k_distribution(nu: float, looks: float) -> None:
    sea = Sea(nu, looks, correlation=2.0, mean=0.01)
    values = sea.intensity(1024, 1024, np.random.default_rng(0)) / sea.mean
    assert np.isclose(values.mean(), 1.0, atol=0.01)
    # the standard error of the n-th moment from its own variance, with one independent pixel in 4 pi l^2
    independent = values.size / (4 * math.pi * sea.correlation**2)
    for order in (2, 3):
        error = math.sqrt((moment(sea, 2 * order) - moment(sea, order) ** 2) / independent)
        assert abs((values**order).mean() - moment(sea, order)) < 4 * error
    assert moment(sea, 1) == pytest.approx(1.0)


def test_second_moments_in_closed_form() -> None:
    assert moment(Sea(4.0, 2.0), 2) == pytest.approx((1 + 1 / 4) * (1 + 1 / 2))
    assert moment(Sea(math.inf, 1.0), 3) == pytest.approx(6.0)


@pytest.mark.parametrize("nu", [1.0, 4.0])
def test_texture_is_correlated_as_it_should_be(nu: float) -> None:
    sea = Sea(nu, correlation=4.0)
    texture = np.concatenate([sea.texture(512, 512, np.random.default_rng(seed)) for seed in range(2)])
    centred = texture - 1.0
    lags = np.array([0, 2, 4, 8, 16])
    found = np.array([(centred * np.roll(centred, lag, axis=1)).mean() for lag in lags]) * nu
    expected = texture_correlation(np.exp(-0.5 * (lags / 4.0) ** 2), nu)
    assert expected[0] == pytest.approx(1.0, abs=0.02)
    assert np.allclose(found, expected, atol=0.08)


def test_speckle_is_independent_from_pixel_to_pixel() -> None:
    values = Sea(math.inf, 1.0).intensity(256, 256, np.random.default_rng(0))
    values = values / values.mean() - 1.0
    assert abs((values[:, 1:] * values[:, :-1]).mean()) < 4 / 256


def test_a_seed_is_a_scene() -> None:
    targets = (Target(30, 30, wake=40.0),)
    first, boxes = simulate(64, 64, Sea(), targets, seed=3)
    assert np.array_equal(first, simulate(64, 64, Sea(), targets, seed=3)[0])
    assert not np.array_equal(first, simulate(64, 64, Sea(), targets, seed=4)[0])
    assert boxes == [hull_box(targets[0])]


def test_a_ship_is_bright_inside_its_box_and_has_side_lobes_outside() -> None:
    target, sea = Target(64, 64, length=30, width=8, heading=0.0), Sea()
    box = hull_box(target)
    assert (box.x, box.y, box.width, box.height) == pytest.approx((49, 60, 30, 8))
    intensity = ship_intensity(target, sea, 128, 128, np.random.default_rng(0))
    inside = intensity[60:68, 49:79]
    assert inside.mean() > 20 * sea.mean
    assert inside.sum() > 0.6 * intensity.sum()
    assert intensity[64, 100] > 0


def test_a_wake_is_dark_in_the_middle_and_bright_at_the_kelvin_angle() -> None:
    field = wake_reflectivity(Target(100, 64, heading=0.0, wake=60.0), 128, 128)
    behind = 40
    arm = round(behind * math.tan(KELVIN))
    assert field[64, 100 - behind] < 0.8
    assert field[64 + arm, 100 - behind] > 1.2
    assert field[64 - arm, 100 - behind] > 1.2
    assert np.all(field[:, 101:] == 1.0)
    assert np.all(wake_reflectivity(Target(5, 5), 8, 8) == 1.0)


@pytest.mark.parametrize("options", [{"nu": 0.0}, {"looks": -1.0}, {"mean": 0.0}, {"correlation": -2.0}])
def test_a_sea_that_makes_no_sense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        Sea(**options)

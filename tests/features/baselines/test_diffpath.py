"""The inversion of a Gaussian is a product of scalars, and so are DiffPath's six moments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussians import ABAR, MU, RHO, S, as_given, aurocs, gaussian, method, passes, run, sample

import gepc
from gepc.backbones.schedule import cosine_alphas_cumprod
from gepc.core.errors import OptionError
from gepc.features.baselines.samplers import ddim_grid, invert, reconstruct

GRID = list(range(0, 4000, 400))
N = len(GRID)


def coefficients() -> np.ndarray:
    """c_n with eps_n = c_n (x/sqrt(abar_0) - mu)."""
    rho = RHO[GRID]
    growth = np.cumprod(np.concatenate([[1.0], 1 + np.diff(rho) * rho[:-1] / (S**2 + rho[:-1] ** 2)]))
    return rho / (S**2 + rho**2) * growth


def offsets(images: np.ndarray) -> np.ndarray:
    return (images.astype(np.float64) / np.sqrt(ABAR[0]) - MU).reshape(len(images), -1)


def test_six_moments_are_exact() -> None:
    images = sample(12, 0.7)
    table = run(method("diffpath", clip=False), images)
    c, d, z = coefficients(), N * np.diff(coefficients()), offsets(images)
    for power, suffix in ((1, ""), (2, "2"), (3, "3")):
        for name, scalars in (("eps", c), ("d", d)):
            expected = (scalars**power).sum() * (z**power).sum(1)
            np.testing.assert_allclose(table[name + suffix][:, 0], expected, rtol=1e-10, atol=1e-9)


def test_one_dimension_is_the_root_of_one_of_them() -> None:
    images = sample(5)
    extractor = method("diffpath", dim=1, clip=False)
    expected = N * np.linalg.norm(offsets(images), axis=1) * np.sqrt((np.diff(coefficients()) ** 2).sum())
    columns = extractor.columns(run(extractor, images))
    assert columns.shape == (5, 1, 1)
    np.testing.assert_allclose(columns[:, 0, 0], expected, rtol=1e-10)
    assert method("diffpath").columns(run(method("diffpath"), images)).shape == (5, 1, 6)


def test_clipping_rederives_eps_from_the_clipped_estimate() -> None:
    """A saturated pixel: xhat0 = 1 and eps = (y - 1)/rho_0, whatever the network said."""
    backbone = gepc.Backbone.from_callable(lambda x, t: x * 0 - 5.0, ABAR, 3, 4)
    x = torch.full((1, 3, 4, 4), 0.9999, dtype=torch.float64)
    eps = next(iter(invert(backbone, x, GRID, clip=True)))
    expected = (0.9999 / np.sqrt(ABAR[0]) - 1) / RHO[0]
    torch.testing.assert_close(eps, torch.full_like(eps, expected))


def test_the_score_norm_along_the_path() -> None:
    extractor = method("diffpath", dim=1, root="eps", clip=False)
    table = run(extractor, sample(3))
    np.testing.assert_allclose(extractor.columns(table)[:, 0, 0] ** 2, table["eps2"][:, 0])
    assert extractor.label == "diffpath[norm]"
    assert extractor.builds_on()[0].label == "diffpath[1-D]"


def test_ddim_is_exact_for_any_number_of_steps() -> None:
    """Down as up: y_0 - mu = (y - mu) prod[1 + (rho_{k-1} - rho_k) rho_k/(s^2 + rho_k^2)], ending at rho = 0."""
    x = torch.from_numpy(sample(3)).double()
    for grid in (GRID[:5], list(range(0, 2001, 50))):
        rho = np.concatenate([[0.0], RHO[grid]])
        factor = np.prod(1 - np.diff(rho) * rho[1:] / (S**2 + rho[1:] ** 2))
        found = reconstruct(gaussian(), x * np.sqrt(ABAR[grid[-1]]), grid, order=1)
        torch.testing.assert_close(found, MU + (x - MU) * factor, rtol=1e-10, atol=1e-12)


def test_adams_bashforth_is_closer_to_the_flow_than_ddim() -> None:
    """The exact flow to rho = 0 is y_0 - mu = (y - mu) s/sqrt(s^2 + rho^2)."""
    x = torch.from_numpy(sample(3)).double()
    grid = list(range(0, 2001, 100))
    exact = MU + (x - MU) * S / np.sqrt(S**2 + RHO[2000] ** 2)
    errors = [(reconstruct(gaussian(), x * np.sqrt(ABAR[2000]), grid, order) - exact).abs().max() for order in (1, 4)]
    assert errors[1] < errors[0] / 3


def test_the_grid() -> None:
    assert ddim_grid(4000, 10) == tuple(GRID)
    assert ddim_grid(1000, 10) == tuple(range(0, 1000, 100))
    with pytest.raises(OptionError, match="exactly 7 steps"):
        ddim_grid(12, 7)
    with pytest.raises(OptionError, match="exactly 11 steps"):
        run(method("diffpath", steps=11), sample(1), gaussian(cosine_alphas_cumprod(12)))


def test_it_costs_ten_passes() -> None:
    assert passes(method("diffpath"), gaussian()) == (10, 0)


def test_direction() -> None:
    assert min(aurocs(method("diffpath", dim=1, clip=False), "kde", count=150)) > 0.95
    assert min(aurocs(method("diffpath", clip=False), "gmm", count=150)) > 0.95


def test_presets_and_the_published_bandwidth() -> None:
    paper = gepc.create_detector("diffpath", gaussian(), preset="paper")
    light = gepc.create_detector("diffpath", gaussian(), preset="light", calibration="kde:bandwidth=5")
    assert (paper.calibration_name, paper.extractor.options()["dim"]) == ("gmm", 6)
    light.fit(as_given(30))
    assert (light.calibrator_.bandwidth_ == 5).all()  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="unknown root 'eps2'"):
        method("diffpath", dim=1, root="eps2")
    with pytest.raises(OptionError, match="dim must be 1 or 6"):
        method("diffpath", dim=2)


def test_sums_cancel_in_float64(tiny_unet: gepc.Backbone) -> None:
    """In float32 networks the signed sums still agree between batches to 1e-6 of their scale."""
    images = np.random.default_rng(0).uniform(-1, 1, (4, 3, 16, 16)).astype(np.float32)
    extractor = method("diffpath", steps=4)
    both = run(extractor, images, tiny_unet)
    one = run(extractor, images[:1], tiny_unet)
    scale = np.sqrt(both["eps2"][0] * 4 * 3 * 256)
    assert abs(both["eps"][0] - one["eps"][0]) < 1e-6 * scale

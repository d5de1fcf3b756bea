"""DDPM-OOD on Gaussians: the flow shrinks a noised image towards the mean by kappa = s/sqrt(s^2 + rho^2)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussians import ABAR, MU, RHO, D, S, batch_of, distance2, gaussian, method, passes, run, sample

import gepc
from gepc.core.errors import OptionError
from gepc.features.baselines.ddpm_ood import STARTS, original_rho
from gepc.features.baselines.samplers import reconstruct
from gepc.scoring.metrics import auroc

SCALED_LINEAR = np.cumprod(1 - np.linspace(0.0015**0.5, 0.0195**0.5, 1000) ** 2)
ALL = {"levels": ",".join(["rho:" + repr(original_rho(STARTS)[0]), *map(repr, original_rho(STARTS)[1:])])}


def test_the_published_cost_on_the_published_schedule() -> None:
    """Starts 10, 170, ..., 970 of a grid of 100: 2 + 18 + ... + 98 = 350 passes."""
    extractor = method("ddpm_ood", steps=100, **ALL)
    backbone = gaussian(SCALED_LINEAR)
    assert extractor.timesteps(backbone) == STARTS
    assert passes(extractor, backbone, 1) == (350, 0)


def test_starts_are_matched_by_rho_on_another_schedule() -> None:
    extractor = method("ddpm_ood", steps=100, **ALL)
    found = RHO[list(extractor.timesteps(gaussian()))]
    np.testing.assert_allclose(found[1:], original_rho(STARTS)[1:], rtol=0.12)
    light = method("ddpm_ood")
    assert len(light.timesteps(gaussian())) == 3
    passes(light, gaussian())


@pytest.mark.parametrize("rho", [0.3, 1.0])
def test_reconstruction_by_two_thousand_ddim_steps(rho: float) -> None:
    """MSE within 0.2 % of the exact flow's, image by image and in expectation [(1-k)^2 A + k^2 rho^2 D]/D."""
    grid = list(range(0, 4000, 2))
    start = grid[int(np.argmin(np.abs(RHO[grid] - rho)))]
    images = sample(40, 0.8)
    x_t, noise = batch_of(images).noised(gaussian(), start)
    found = reconstruct(gaussian(), x_t, [t for t in grid if t <= start], order=1)
    level = RHO[start]
    kappa = S / np.sqrt(S**2 + level**2)
    x = torch.from_numpy(images).double()
    exact = (kappa - 1) * (x - MU) + kappa * level * noise
    errors = [field.square().flatten(1).mean(1) for field in (found - x, exact)]
    torch.testing.assert_close(errors[0], errors[1], rtol=2e-3, atol=0)
    expected = ((1 - kappa) ** 2 * distance2(images) + kappa**2 * level**2 * D) / D
    gap = errors[0].numpy() - expected
    assert abs(gap.mean()) < 4 * gap.std() / np.sqrt(40)


def test_a_start_is_the_same_whichever_others_are_asked_for() -> None:
    """Also in the published code's way, where each start goes on with the history of those before it."""
    images, errors = np.clip(sample(5), -1, 1), []
    for compat in (False, True):
        extractor = method("ddpm_ood", compat=compat)
        steps = extractor.timesteps(gaussian())
        together = run(extractor, images)["mse"][:, 1]
        alone = run(extractor, images, timesteps=steps[1:2])["mse"][:, 0]
        np.testing.assert_allclose(together, alone, rtol=1e-9)
        errors.append(together)
        spared = extractor.cost(gaussian(), (8, 8)).forward - extractor.cost(gaussian(), (8, 8), 1).forward
        assert (spared == 0) == compat
    assert not np.allclose(*errors)


def test_table_and_columns() -> None:
    extractor = method("ddpm_ood", distances=("mse", "ssim"))
    table = run(extractor, np.clip(sample(4), -1, 1))
    assert set(table) == {"mse", "ssim"}
    assert extractor.columns(table).shape == (4, 3, 2)
    assert extractor.column_names == ("mse", "ssim")


def test_direction_from_rho_one_on() -> None:
    """Without the cut at the pictures' range, which these Gaussians leave: wider data above .9, narrower below .3."""
    grid = list(range(0, 4000, 40))
    below = [t for t in grid if RHO[t] <= 1.0]
    errors = []
    for seed, spread in enumerate((S, 2 * S, S / 2)):
        images = sample(150, spread, seed)
        x_t, _ = batch_of(images).noised(gaussian(), below[-1])
        gap = reconstruct(gaussian(), x_t, below) - torch.from_numpy(images)
        errors.append(gap.square().flatten(1).mean(1).numpy())
    assert auroc(errors[0], errors[1]) > 0.9
    assert auroc(errors[0], errors[2]) < 0.3


def test_bad_options() -> None:
    with pytest.raises(OptionError, match="unknown distance"):
        method("ddpm_ood", distances="l2")
    with pytest.raises(OptionError, match="at least one distance"):
        method("ddpm_ood", distances=())
    with pytest.raises(OptionError, match="unknown order '5'"):
        method("ddpm_ood", order=5)
    with pytest.raises(OptionError, match="exactly 3001 steps"):
        gepc.create_detector("ddpm_ood", gaussian(ABAR), steps=3001)

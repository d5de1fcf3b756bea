"""DiffPath, DDPM-OOD and LMD, and the samplers they share, against their closed forms on Gaussians."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from gaussians import ABAR, MU, RHO, D, S, as_given, aurocs, batch_of, distance2, gaussian, method, passes, run, sample
from scipy.ndimage import uniform_filter

import gepc
from gepc.backbones.schedule import cosine_alphas_cumprod
from gepc.core.errors import InputError, OptionError
from gepc.lab.baselines.paths import LMD, STARTS, original_rho, reconstruct
from gepc.lab.metrics import auroc
from gepc.methods.diffpath import ddim_grid, invert

# --- diffpath --------------------------------------------------------------------------------------------------------

# The inversion of a Gaussian is a product of scalars, and so are DiffPath's six moments.

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
    estimate, eps = next(iter(invert(backbone, x, GRID, clip=True)))
    torch.testing.assert_close(estimate, torch.ones_like(x))
    expected = (0.9999 / np.sqrt(ABAR[0]) - 1) / RHO[0]
    torch.testing.assert_close(eps, torch.full_like(eps, expected))


def test_the_score_norm_along_the_path() -> None:
    extractor = method("diffpath", dim=1, root="eps", clip=False)
    table = run(extractor, sample(3))
    np.testing.assert_allclose(extractor.columns(table)[:, 0, 0] ** 2, table["eps2"][:, 0])
    assert extractor.label == "diffpath[norm]"
    assert extractor.builds_on() == method("diffpath", dim=6, clip=False).builds_on()  # one table serves both


def test_the_second_version_weights_the_errors_of_the_score() -> None:
    """u_n = (1 - SSIM)(eps_n - noise_n), with noise_n from x_0 to the state y_n = mu + z growth_n of the inversion."""
    images, rho, c = np.clip(sample(6, 0.4), -1, 1), RHO[GRID], coefficients()
    z = offsets(images).reshape(images.shape)
    states = [MU + z * one * (S**2 + rho[n] ** 2) / rho[n] for n, one in enumerate(c)]
    estimates = [(y - rho[n] * c[n] * z) for n, y in enumerate(states)]

    def similarity(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = (np.clip((one + 1) / 2, 0, 1) for one in (a, b))
        mean = partial(uniform_filter, size=(1, 1, 7, 7), mode="nearest")
        k = 49 / 48
        va, vb, both = (k * (mean(p * q) - mean(p) * mean(q)) for p, q in ((a, a), (b, b), (a, b)))
        top = (2 * mean(a) * mean(b) + 1e-4) * (2 * both + 9e-4)
        return top / ((mean(a) ** 2 + mean(b) ** 2 + 1e-4) * (va + vb + 9e-4))

    x = images.astype(np.float64)
    errors = [c[n] * z - (states[n] - x) / rho[n] for n in range(N)]
    u = np.stack([(1 - similarity(x, estimates[n])) * errors[n] for n in range(N)])
    table = run(method("diffpath", clip=False, errors=True), images)
    for power, suffix in ((1, ""), (2, "2"), (3, "3")):
        for name, fields in (("eps", u), ("d", N * np.diff(u, axis=0))):
            expected = (fields**power).sum((0, 2, 3, 4))
            np.testing.assert_allclose(table[name + suffix][:, 0], expected, rtol=1e-7, atol=1e-7)


def test_presets_of_the_second_version() -> None:
    full, light = (gepc.create_detector(gaussian(), "diffpath", preset=name) for name in ("v2", "v2_light"))
    assert (full.extractor.label, light.extractor.label) == ("diffpath[errors 6-D]", "diffpath[errors norm]")
    assert full.extractor.builds_on() == light.extractor.builds_on() != method("diffpath").builds_on()
    assert passes(light.extractor, gaussian()) == (10, 0)
    scores = light.fit(as_given(40)).score(as_given(8, 2 * S, seed=5))
    assert np.isfinite(scores).all()
    latent = gepc.Backbone.from_callable(lambda x, t: x, ABAR, 3).with_encoder(lambda x: x[..., ::2, ::2], 2)
    with pytest.raises(OptionError, match="not of latents"):
        gepc.create_detector(latent, "diffpath", preset="v2").fit(as_given(20))


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


def test_direction_of_diffpath() -> None:
    assert min(aurocs(method("diffpath", dim=1, clip=False), "kde", count=150)) > 0.95
    assert min(aurocs(method("diffpath", clip=False), "gmm", count=150)) > 0.95


def test_presets_and_the_published_bandwidth() -> None:
    paper = gepc.create_detector(gaussian(), "diffpath", preset="paper")
    light = gepc.create_detector(gaussian(), "diffpath", preset="light", calibration="kde:bandwidth=5")
    assert (paper.calibration_name, paper.extractor.options()["dim"]) == ("gmm", 6)
    light.fit(as_given(30))
    assert (light.fitted.scorer.calibrator_.bandwidth_ == 5).all()  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="unknown root 'eps2'"):
        method("diffpath", dim=1, root="eps2")
    with pytest.raises(OptionError, match="dim must be 1 or 6"):
        method("diffpath", dim=2)
    with pytest.raises(OptionError, match="root has no effect with dim=6"):
        method("diffpath", root="eps")


def test_sums_cancel_in_float64(tiny_unet: gepc.Backbone) -> None:
    """In float32 networks the signed sums still agree between batches to 1e-6 of their scale."""
    images = np.random.default_rng(0).uniform(-1, 1, (4, 3, 16, 16)).astype(np.float32)
    extractor = method("diffpath", steps=4)
    both = run(extractor, images, tiny_unet)
    one = run(extractor, images[:1], tiny_unet)
    scale = np.sqrt(both["eps2"][0] * 4 * 3 * 256)
    assert abs(both["eps"][0] - one["eps"][0]) < 1e-6 * scale


# --- ddpm_ood --------------------------------------------------------------------------------------------------------

# DDPM-OOD on Gaussians: the flow shrinks a noised image towards the mean by kappa = s/sqrt(s^2 + rho^2).

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
    images, extractor = np.clip(sample(5), -1, 1), method("ddpm_ood")
    steps = extractor.timesteps(gaussian())
    together = run(extractor, images)["mse"][:, 1]
    alone = run(extractor, images, timesteps=steps[1:2])["mse"][:, 0]
    np.testing.assert_allclose(together, alone, rtol=1e-9)
    assert extractor.cost(gaussian(), (8, 8), 1).forward < extractor.cost(gaussian(), (8, 8)).forward


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
        gepc.create_detector(gaussian(ABAR), "ddpm_ood", steps=3001)


# --- lmd -------------------------------------------------------------------------------------------------------------

# LMD on a Gaussian of independent pixels: what is filled in is a fresh sample, what is known stays.


def boards(extractor: LMD) -> list[torch.Tensor]:
    known = extractor._checkerboard(gaussian(), (4, 4))
    return [known, 1.0 - known]


def test_known_pixels_stay_and_the_others_are_drawn_from_the_model() -> None:
    """Per pixel mean MU and variance S^2 within 4 standard errors, whatever the image; 100 steps lose some variance."""
    extractor = LMD(blocks=4, steps=100, clip=False)
    images = sample(150, 0.8)
    known, _ = boards(extractor)
    filled = extractor.inpaint(gaussian(), batch_of(images), known, 0).numpy()
    hidden = np.broadcast_to(known.numpy() == 0, filled.shape)
    np.testing.assert_allclose(filled[~hidden], images[~hidden], rtol=1e-6)
    new, old = filled[hidden], images[hidden].astype(float)
    assert abs(new.mean() - MU) < 4 * S / np.sqrt(new.size)
    assert new.var() == pytest.approx(S**2, rel=0.12)
    assert abs(np.corrcoef(new, old)[0, 1]) < 4 / np.sqrt(new.size)


def test_expected_error_over_both_parities() -> None:
    """(A/D + s^2)/2 per pixel: 200 inpaintings by 100 steps, within 6 %."""
    extractor = LMD(blocks=2, steps=100, clip=False)
    images = sample(100, 0.7)
    batch = batch_of(images)
    errors = np.zeros(len(images))
    for repetition, known in enumerate(boards(extractor)):
        filled = extractor.inpaint(gaussian(), batch, known, repetition).numpy()
        errors += ((filled - images) ** 2).reshape(len(images), -1).mean(1)
    assert errors.mean() / 2 == pytest.approx((distance2(images).mean() / D + S**2) / 2, rel=0.06)


def test_the_boards_are_complementary_blocks() -> None:
    even, odd = boards(LMD(blocks=2))
    assert even.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    torch.testing.assert_close(even + odd, torch.ones(4, 4, dtype=torch.float64))
    with pytest.raises(InputError, match="8 blocks do not divide images of 4x4"):
        run(method("lmd"), sample(1))


def test_the_score_is_the_median_over_repetitions() -> None:
    """Of three the middle one; of two the mean."""
    images = np.clip(sample(4), -1, 1)
    three = LMD(blocks=2, repetitions=3, steps=5, distance="mse")
    by_hand = []
    for repetition in range(3):
        known = boards(three)[repetition % 2]
        filled = three.inpaint(gaussian(), batch_of(images), known, repetition).clamp(-1, 1).numpy()
        by_hand.append((((filled - images) / 2) ** 2).reshape(4, -1).mean(1))
    np.testing.assert_allclose(run(three, images)["lmd"][:, 0], np.median(by_hand, axis=0), rtol=1e-6)
    two = LMD(blocks=2, repetitions=2, steps=5, distance="mse")
    np.testing.assert_allclose(run(two, images)["lmd"][:, 0], np.mean(by_hand[:2], axis=0), rtol=1e-6)


def test_cost_is_repetitions_times_steps() -> None:
    assert passes(LMD(blocks=4), gaussian()) == (104, 0)
    assert passes(LMD(blocks=4, repetitions=4, steps=50), gaussian(), 1) == (200, 0)
    assert LMD(repetitions=10, steps=1000).cost(gaussian(), (32, 32)).forward == 10_000


def test_direction_of_lmd() -> None:
    extractor = LMD(blocks=4, repetitions=4, steps=20, distance="mse")
    wide, narrow = aurocs(extractor, "raw", count=80)
    assert wide > 0.95
    assert narrow < 0.2
    detector = gepc.create_detector(gaussian(), "lmd", blocks=4, steps=4).fit(as_given(24))
    assert detector.score(as_given(2, seed=3)).shape == (2,)
    with pytest.raises(OptionError, match="repetitions must be at least 1"):
        LMD(repetitions=0)


def test_the_cost_of_images_that_the_blocks_of_lmd_do_not_divide_is_an_error() -> None:
    """So that a benchmark says so before its first pass."""
    with pytest.raises(InputError, match="blocks do not divide images of 20x20"):
        method("lmd").image_cost(gaussian(), (20, 20))

"""Gaussian paths: for Gaussian data every kind of network is known exactly, and each must give the same noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gepc
from gepc.backbones.base import CallableBackbone
from gepc.backbones.path import GaussianPath, SigmaScheduler, read_scheduler
from gepc.backbones.schedule import Scheduler, linear_alphas_cumprod
from gepc.core.errors import BackboneError, InputError, OptionError
from gepc.lab.analytic import GaussianBackbone

MU, VARIANCE = 0.3, 0.4
SHAPE = (2, 4, 4)
Network = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def per_image(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, 1, 1, 1)


def noise_of(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """E[n | y] for y = a x_0 + b n and x_0 ~ N(MU, VARIANCE)."""
    a, b = per_image(a), per_image(b)
    return b * (y - a * MU) / (a**2 * VARIANCE + b**2)


def data_of(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """E[x_0 | y]."""
    a, b = per_image(a), per_image(b)
    return MU + a * VARIANCE * (y - a * MU) / (a**2 * VARIANCE + b**2)


def check_exact(backbone: gepc.Backbone) -> None:
    """The noise prediction on x_t of the backbone's schedule, at ten of its levels, to 1e-10."""
    steps = np.unique(np.linspace(0, backbone.n_steps - 1, 10).astype(int))
    t = torch.from_numpy(steps)
    x = torch.randn(len(t), *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = GaussianBackbone(MU, VARIANCE, SHAPE, backbone.alphas_cumprod)
    torch.testing.assert_close(backbone.eps(x, t), exact.eps(x, t), rtol=1e-10, atol=1e-10)


def of_path(path: GaussianPath, network: Network) -> gepc.Backbone:
    return CallableBackbone("test", network, path, SHAPE[0], SHAPE[1], 1, "cpu")


# --- functions -------------------------------------------------------------------------------------------------------


def test_noise() -> None:
    abar = linear_alphas_cumprod(100)

    def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        share = torch.from_numpy(abar)[t]
        return noise_of(x, share.sqrt(), (1 - share).sqrt())

    check_exact(gepc.Backbone.from_callable(eps, abar, SHAPE[0], SHAPE[1]))


def test_denoiser() -> None:
    backbone = gepc.Backbone.from_denoiser(
        lambda y, sigma: data_of(y, torch.ones_like(sigma), sigma), np.geomspace(0.002, 80, 50), SHAPE[0], SHAPE[1]
    )
    check_exact(backbone)


@pytest.mark.parametrize(("data_time", "noise_time"), [(0.0, 1.0), (1.0, 0.0), (0.0, 1000.0), (999.0, -1.0)])
@pytest.mark.parametrize("levels", [None, np.linspace(0.01, 1.0, 30)], ids=["default", "to s = 1"])
def test_flow_in_either_direction_and_on_any_scale(
    data_time: float, noise_time: float, levels: npt.NDArray[np.float64] | None
) -> None:
    def velocity(y: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        s = (time - data_time) / (noise_time - data_time)
        forward = noise_of(y, 1 - s, s) - data_of(y, 1 - s, s)
        return forward if noise_time > data_time else -forward

    backbone = gepc.Backbone.from_flow(
        velocity, SHAPE[0], SHAPE[1], data_time=data_time, noise_time=noise_time, levels=levels
    )
    assert backbone.family == "flow"
    check_exact(backbone)


@given(st.floats(0.01, 0.99))
def test_a_flow_has_the_signal_to_noise_ratio_of_its_path(share: float) -> None:
    backbone = gepc.Backbone.from_flow(lambda y, s: y, 1, 8, levels=[share])
    assert backbone.alphas_cumprod[0] == pytest.approx((1 - share) ** 2 / ((1 - share) ** 2 + share**2), rel=1e-12)


@pytest.mark.parametrize("levels", [[0.0, 0.5], [0.5, 0.2], [0.5, 1.1], [], [float("nan")]])
def test_levels_of_a_flow(levels: list[float]) -> None:
    with pytest.raises(InputError, match="levels"):
        gepc.Backbone.from_flow(lambda y, s: y, 1, 8, levels=levels)


def test_a_flow_needs_two_times() -> None:
    with pytest.raises(OptionError, match="data_time and noise_time must differ, got 1 for both"):
        gepc.Backbone.from_flow(lambda y, s: y, 1, 8, data_time=1.0)


# --- schedulers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_predictions_of_a_scheduler_with_betas(kind: str, zero_snr: bool) -> None:
    scheduler = Scheduler(100, prediction_type=kind, rescale_betas_zero_snr=zero_snr)
    abar = torch.tensor(scheduler.alphas_cumprod())

    def network(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        a, b = abar[time.long()].sqrt(), (1 - abar[time.long()]).sqrt()
        eps, x0 = noise_of(x, a, b), data_of(x, a, b)
        v = per_image(a) * eps - per_image(b) * x0
        return {"epsilon": eps, "v_prediction": v, "sample": x0}[kind]

    check_exact(of_path(GaussianPath.of_scheduler(scheduler), network))


@pytest.mark.parametrize("kind", ["edm", "consistency"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_edm_and_consistency_scalings(kind: str, prediction: str) -> None:
    """F is what makes c_skip y + c_out F the exact denoiser."""
    scheduler = SigmaScheduler(kind, 40, prediction_type=prediction)

    def network(given: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        sigma = torch.exp(time / 250.0 if kind == "consistency" else time * 4.0)
        y = given * per_image((sigma**2 + 0.25).sqrt())
        above = sigma - 0.002 if kind == "consistency" else sigma
        c_skip, c_out = 0.25 / (above**2 + 0.25), above * 0.5 / (sigma**2 + 0.25).sqrt()
        if prediction == "v_prediction":
            c_out = -c_out
        answer = data_of(y, torch.ones_like(sigma), sigma) - per_image(c_skip) * y
        return answer / per_image(c_out)

    check_exact(of_path(scheduler.path(), network))


@pytest.mark.parametrize("image_range", [(0.0, 1.0), (-1.0, 1.0)])
def test_the_score_of_a_variance_exploding_network(image_range: tuple[float, float]) -> None:
    """Of images in [0, 1], as diffusers' pipeline has them: y = x + sigma n there."""
    low, high = image_range
    half, middle = (high - low) / 2, (high + low) / 2
    scheduler = SigmaScheduler("ve", 50, sigma_min=0.01, sigma_max=100.0, image_range=image_range)

    def score(y: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return -(y - middle - half * MU) / per_image(half**2 * VARIANCE + sigma**2)

    check_exact(of_path(scheduler.path(), score))


def test_a_flow_scheduler() -> None:
    def velocity(y: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        s = time / 200
        return noise_of(y, 1 - s, s) - data_of(y, 1 - s, s)

    check_exact(of_path(SigmaScheduler("flow", 200).path(), velocity))


@pytest.mark.parametrize("name", ["EDMEulerScheduler", "CMStochasticIterativeScheduler"])
def test_the_scalings_are_those_of_diffusers(name: str) -> None:
    """Levels, inputs, times and denoised images by diffusers' own code."""
    import diffusers

    theirs = getattr(diffusers, name)(num_train_timesteps=30)
    path = read_scheduler({"_class_name": name, **theirs.config}, "here").path()  # type: ignore[union-attr]
    theirs.set_timesteps(30)
    sigmas = theirs.sigmas[:-1].flip(0).double()[-path.alphas_cumprod.size :]
    np.testing.assert_allclose(1.0 / np.sqrt(path.alphas_cumprod) ** 2 - 1.0, sigmas**2, rtol=2e-4)
    y, answer = torch.randn(2, len(sigmas), 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sigma = per_image(sigmas)
    if name == "EDMEulerScheduler":
        given, times = theirs.precondition_inputs(y, sigma), theirs.precondition_noise(sigmas)
        denoised = theirs.precondition_outputs(y, answer, sigma)
    else:
        given, times = y / (sigma**2 + 0.25).sqrt(), torch.from_numpy(theirs.sigma_to_t(sigmas.numpy()))
        c_skip, c_out = theirs.get_scalings_for_boundary_condition(sigma)
        denoised = c_skip * y + c_out * answer

    def look_up(table: npt.NDArray[np.float64]) -> torch.Tensor:
        return per_image(torch.from_numpy(table))

    ours, seen = path.network_input(y / (1 + sigma**2).sqrt(), look_up)
    torch.testing.assert_close(ours, y, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(seen, given, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(path.times, times, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(path.eps(answer, y, look_up), (y - denoised) / sigma, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"_class_name": "EDMDPMSolverMultistepScheduler", "sigma_data": 1.0}, "edm"),
        ({"_class_name": "ScoreSdeVeScheduler"}, "ve"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "use_dynamic_shifting": True}, "flow"),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "prediction_type": "flow_prediction", "flow_shift": 3.0},
            "flow",
        ),
    ],
)
def test_schedulers_without_betas(config: dict[str, object], kind: str) -> None:
    scheduler = read_scheduler(config, "here")
    assert isinstance(scheduler, SigmaScheduler)
    assert scheduler.kind == kind
    assert scheduler.num_train_timesteps == (2000 if kind == "ve" else 1000)


def test_a_scheduler_that_cannot_be_read() -> None:
    with pytest.raises(BackboneError, match="here: the scheduler: sigma_max must be float"):
        read_scheduler({"_class_name": "EDMEulerScheduler", "sigma_max": "large"}, "here")
    with pytest.raises(BackboneError, match="VQDiffusionScheduler, which has no beta schedule"):
        read_scheduler({"_class_name": "VQDiffusionScheduler"}, "here")

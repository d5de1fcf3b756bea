"""Schedules in float64, noise levels, and what a scheduler config says."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.backbones.path import read_scheduler
from gepc.backbones.schedule import (
    Levels,
    Scheduler,
    check_alphas_cumprod,
    cosine_alphas_cumprod,
    linear_alphas_cumprod,
    rho_of,
)
from gepc.core.errors import BackboneError, InputError, OptionError

COSINE = cosine_alphas_cumprod(4000)
PAPER = (0.99997, 0.9999, 0.9979, 0.9969)
PAPER_CELEBA = (0.99997, 0.99, 0.999, 0.9969)


def test_paper_levels_on_the_cosine_schedule() -> None:
    assert Levels(PAPER).timesteps(COSINE) == (5, 15, 136, 172)
    assert Levels(PAPER_CELEBA).timesteps(COSINE) == (5, 86, 172, 332)


def test_levels_name_the_same_timesteps_on_every_scale() -> None:
    for timestep in (3, 136, 2000):
        abar = COSINE[timestep]
        for levels in (
            Levels.sqrt_abar(abar**0.5),
            Levels.snr(abar / (1 - abar)),
            Levels.rho((1 / abar - 1) ** 0.5),
            Levels.index(timestep),
        ):
            assert levels.timesteps(COSINE) == (timestep,)
            assert Levels.of(str(levels)) == levels


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6))
def test_rho_levels_are_the_nearest_in_log_rho(values: list[float]) -> None:
    table = np.log(rho_of(COSINE))
    nearest = {int(np.abs(table - np.log(value)).argmin()) for value in values}
    assert Levels.rho(*values).timesteps(COSINE) == tuple(sorted(nearest))


@pytest.mark.parametrize("text", ["sqrt_abar:1.5", "rho:-1", "index:2.5", "snr:0", "noise:0.1", "rho:a,b", "rho:"])
def test_bad_levels_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        Levels.of(text)


def test_level_index_behind_the_end() -> None:
    with pytest.raises(OptionError, match="ends at 3999"):
        Levels.index(4000).timesteps(COSINE)


def test_levels_on_a_schedule_that_ends_at_zero() -> None:
    abar = np.array([0.9, 0.5, 0.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Levels.rho(1.0).timesteps(abar) == (1,)
        assert Levels.snr(9.0).timesteps(abar) == (0,)
    assert rho_of(abar)[2] == np.inf


@pytest.mark.parametrize("abar", [[], [np.nan], [1.0, 0.5], [0.5, 0.9], [0.5, -0.1]])
def test_impossible_schedules_are_refused(abar: list[float]) -> None:
    with pytest.raises(InputError, match="alphas_cumprod"):
        check_alphas_cumprod(abar)


def test_a_schedule_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        check_alphas_cumprod([0.9, 0.5])[0] = 0.1


def test_default_schedules_equal_diffusers_own() -> None:
    assert np.array_equal(linear_alphas_cumprod(1000), Scheduler().alphas_cumprod())
    cosine = Scheduler(num_train_timesteps=4000, beta_schedule="squaredcos_cap_v2").alphas_cumprod()
    np.testing.assert_allclose(cosine, COSINE, rtol=1e-15)


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("name", ["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"])
def test_every_schedule_agrees_with_diffusers_to_its_float32(name: str, zero_snr: bool) -> None:
    from diffusers import DDPMScheduler

    theirs = DDPMScheduler(num_train_timesteps=1000, beta_schedule=name, rescale_betas_zero_snr=zero_snr)
    ours = read_scheduler(theirs.config, "x").alphas_cumprod()
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, theirs.alphas_cumprod.numpy(), atol=1e-6)
    if zero_snr:
        assert ours[-1] == 0.0


def test_float64_matters_at_the_first_steps() -> None:
    from diffusers import DDPMScheduler

    theirs = DDPMScheduler(num_train_timesteps=4000, beta_schedule="squaredcos_cap_v2").alphas_cumprod.double().numpy()
    noise_error = (1 - theirs[0]) / (1 - COSINE[0]) - 1
    assert abs(noise_error) > 1e-3  # this is what a float32 schedule would have cost


def test_trained_betas_set_the_length() -> None:
    scheduler = read_scheduler({"trained_betas": [0.1, 0.2], "num_train_timesteps": 1000}, "x")
    np.testing.assert_allclose(scheduler.alphas_cumprod(), [0.9, 0.72])
    assert scheduler.n_train == 2


def test_network_times() -> None:
    plain = Scheduler(num_train_timesteps=4000)
    assert plain.network_times()[136] == 136.0
    rescaled = Scheduler(num_train_timesteps=4000, rescale_timesteps=True)
    assert rescaled.network_times()[136] == 34.0


def test_a_scheduler_without_betas_is_refused() -> None:
    with pytest.raises(BackboneError, match=r"KarrasVeScheduler.*from_denoiser"):
        read_scheduler({"_class_name": "KarrasVeScheduler", "sigma_max": 1348.0}, "scheduler_config.json")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"beta_schedule": "linaer"}, "did you mean 'linear'"),
        ({"beta_schedule": "linear", "prediction_type": "noise"}, "prediction_type"),
        ({"beta_schedule": "linear", "variance_type": "big"}, "variance_type"),
        ({"beta_schedule": "linear", "num_train_timesteps": 0}, "at least 1"),
        ({"beta_schedule": "linear", "num_train_timesteps": "many"}, "num_train_timesteps"),
    ],
)
def test_a_bad_scheduler_config_names_its_file(config: dict[str, object], word: str) -> None:
    with pytest.raises(BackboneError, match=rf"folder/scheduler_config.json.*{word}"):
        read_scheduler(config, "folder/scheduler_config.json")


def test_golden_schedules(golden) -> None:  # type: ignore[no-untyped-def]
    from gepc.backbones.openai.options import read_options

    ours = read_options(golden.config).scheduler(learned_variance=True).alphas_cumprod()
    np.testing.assert_allclose(ours, golden.abar, rtol=1e-12)

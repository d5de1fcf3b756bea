"""Backbones made in Python, and the checks that every backbone makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gepc import Backbone
from gepc.core.errors import BackboneError, InputError

ABAR = np.array([0.99, 0.9, 0.5, 0.1])


def gaussian_eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The exact noise prediction for x_0 ~ N(0, 4): sigma x/(4 abar + sigma^2)."""
    abar = torch.as_tensor(ABAR)[t].to(x.dtype)[:, None, None, None]
    return torch.sqrt(1 - abar) * x / (4 * abar + 1 - abar)


def test_a_function_is_a_backbone() -> None:
    backbone = Backbone.from_callable(gaussian_eps, ABAR, channels=1)
    x = torch.randn(5, 1, 4, 4)
    t = torch.tensor([0, 1, 2, 3, 0])
    assert torch.equal(backbone.eps(x, t), gaussian_eps(x, t))
    assert torch.equal(backbone.eps(x, 2), gaussian_eps(x, torch.full((5,), 2)))
    assert backbone.forward_count == 10
    backbone.reset_counts()
    assert backbone.forward_count == 0
    assert backbone.fingerprint is None
    assert "callable" in repr(backbone)


def test_score_is_minus_eps_over_sigma() -> None:
    backbone = Backbone.from_callable(gaussian_eps, ABAR, channels=1)
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    expected = -x / (4 * ABAR[1] + 1 - ABAR[1])
    torch.testing.assert_close(backbone.score(x, 1), expected, rtol=1e-12, atol=0)


def test_a_denoiser_gives_the_same_noise() -> None:
    """For x_0 ~ N(0, 4) the denoiser is D(y, sigma) = 4 y/(4 + sigma^2)."""
    sigmas = np.sqrt(1 / ABAR - 1)
    backbone = Backbone.from_denoiser(lambda y, s: y * (4 / (4 + s**2))[:, None, None, None], sigmas, channels=1)
    np.testing.assert_allclose(backbone.alphas_cumprod, ABAR)
    x = torch.randn(4, 1, 4, 4, dtype=torch.float64)
    t = torch.arange(4)
    torch.testing.assert_close(backbone.eps(x, t), gaussian_eps(x, t), rtol=1e-12, atol=0)
    torch.testing.assert_close(backbone.eps(x, 3), gaussian_eps(x, torch.full((4,), 3)), rtol=1e-12, atol=0)


def test_a_blind_denoiser() -> None:
    backbone = Backbone.from_denoiser(lambda y, _: torch.zeros_like(y), [0.1, 1.0])
    x = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(backbone.eps(x, 1), x * 2**0.5)


@pytest.mark.parametrize("sigmas", [[], [0.0, 1.0], [1.0, 0.5], [np.inf]])
def test_bad_sigmas(sigmas: list[float]) -> None:
    with pytest.raises(InputError, match="positive, finite and ascending"):
        Backbone.from_denoiser(lambda y, _: y, sigmas)


def test_a_module_is_put_in_eval_mode() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = torch.nn.Dropout(0.9)
            self.layer = torch.nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self.layer(self.dropout(x))

    net = Net().train()
    backbone = Backbone.from_callable(net, ABAR)
    assert not net.training
    assert backbone.parameters == 12
    assert backbone.device == torch.device("cpu")
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(backbone.eps(x, 0), backbone.eps(x, 0))


def test_jvp_of_a_linear_prediction() -> None:
    backbone = Backbone.from_callable(gaussian_eps, ABAR, channels=1)
    x, v = torch.randn(2, 3, 1, 4, 4, dtype=torch.float64)
    answer, tangent = backbone.jvp(x, 1, v)
    torch.testing.assert_close(answer, gaussian_eps(x, torch.full((3,), 1)))
    torch.testing.assert_close(tangent, gaussian_eps(v, torch.full((3,), 1)))
    assert (backbone.forward_count, backbone.jvp_count) == (3, 3)


@pytest.mark.parametrize(
    "t", [4, -1, torch.tensor([0, 4]), torch.tensor([-1, 0]), torch.tensor([0.5, 1.0]), torch.tensor([1])]
)
def test_a_timestep_that_does_not_exist(t: int | torch.Tensor) -> None:
    backbone = Backbone.from_callable(gaussian_eps, ABAR, channels=1)
    with pytest.raises(InputError, match=r"outside the schedule, 0 to 3|one whole number per image"):
        backbone.eps(torch.zeros(2, 1, 4, 4), t)


def test_answers_are_checked() -> None:
    x = torch.zeros(2, 3, 4, 4)
    wrong_shape = Backbone.from_callable(lambda x, t: x[:, :1], ABAR)
    with pytest.raises(BackboneError, match=r"\(2, 1, 4, 4\) to an input of shape \(2, 3, 4, 4\)"):
        wrong_shape.eps(x, 0)
    infinite = Backbone.from_callable(lambda x, t: x / 0, ABAR)
    with pytest.raises(BackboneError, match="NaN or infinite"):
        infinite.eps(x, 0)


def test_sizes_are_checked() -> None:
    fixed = Backbone.from_callable(gaussian_eps, ABAR, image_size=32)
    fixed.check_size(32, 32)
    with pytest.raises(InputError, match="takes 32x32"):
        fixed.check_size(16, 32)
    free = Backbone.from_callable(gaussian_eps, ABAR, size_multiple=4)
    free.check_size(12, 40)
    with pytest.raises(InputError, match="multiples of 4"):
        free.check_size(12, 42)


def test_jvp_of_a_denoiser() -> None:
    backbone = Backbone.from_denoiser(lambda y, s: y * (4 / (4 + s**2))[:, None, None, None], [0.1, 1.0])
    x, v = torch.randn(2, 3, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(backbone.jvp(x, 1, v)[1], backbone.eps(v, 1))

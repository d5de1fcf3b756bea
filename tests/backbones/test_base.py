"""What every backbone does: splitting, counting, checking; and backbones made of functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gepc import Backbone
from gepc.core.errors import BackboneError, InputError, OptionError

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


@pytest.mark.parametrize("rows", [1, 3, 7, 8, None])
def test_the_network_never_sees_more_than_rows_images(rows: int | None) -> None:
    """eps, jvp and the log-variance split a batch alike, count it once, and give what the whole batch gives."""
    seen: list[int] = []

    def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return gaussian_eps(x, t).tanh()

    whole, split = (Backbone.from_callable(eps, ABAR, channels=1) for _ in range(2))
    split.rows = rows
    x, v = torch.randn(2, 7, 1, 4, 4, dtype=torch.float64)
    t = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    expected = [whole.eps(x, t), *whole.jvp(x, t, v), *whole.eps_and_log_variance(x, t)]
    seen.clear()
    found = [split.eps(x, t), *split.jvp(x, t, v), *split.eps_and_log_variance(x, t)]
    assert max(seen) == min(rows or 7, 7)
    assert sum(seen) == 3 * 7
    assert (split.forward_count, split.jvp_count) == (whole.forward_count, whole.jvp_count) == (21, 7)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_variance_of_the_reverse_step_without_a_learned_one() -> None:
    backbone = Backbone.from_callable(gaussian_eps, ABAR, channels=1)
    x = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    eps, log_variance = backbone.eps_and_log_variance(x, 2)
    posterior = (1 - ABAR[2] / ABAR[1]) * (1 - ABAR[1]) / (1 - ABAR[2])
    assert torch.equal(eps, backbone.eps(x, 2))
    torch.testing.assert_close(log_variance, torch.full_like(x, np.log(posterior)))


def test_a_table_of_numbers_per_timestep() -> None:
    backbone = Backbone.from_callable(gaussian_eps, ABAR, channels=1)
    x = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
    found = backbone.per_image(np.arange(4.0), x, torch.tensor([3, 1]))
    assert found.tolist() == [[[[3.0]]], [[[1.0]]]]


@pytest.mark.parametrize("channels", [1, 2, 4, 13])
def test_any_number_of_channels(channels: int) -> None:
    x = torch.randn(2, channels, 4, 4)
    for backbone in (
        Backbone.from_callable(gaussian_eps, ABAR, channels=channels),
        Backbone.from_denoiser(lambda y, _: y / 2, [0.1, 1.0], channels=channels),
    ):
        assert backbone.channels == channels
        assert backbone.eps(x, 1).shape == x.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, "channels must be at least 1, got 0"),
        ({"channels": -1}, "channels must be at least 1, got -1"),
        ({"channels": 2.5}, "channels must be int, got 2.5"),
        ({"channels": "3"}, "channels must be int, got '3'"),
        ({"size_multiple": 0}, "size_multiple must be at least 1, got 0"),
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"image_size": 8.0}, "image_size must be int, got 8.0"),
        ({"image_size": (8,)}, "image_size must be int"),
    ],
)
def test_numbers_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Backbone.from_callable(gaussian_eps, ABAR, **options)


def test_numbers_of_numpy_and_lists_are_taken_as_plain_numbers() -> None:
    backbone = Backbone.from_callable(gaussian_eps, ABAR, channels=np.int64(1), image_size=[np.int32(8), 4])
    assert (backbone.channels, backbone.image_size) == (1, (8, 4))
    assert {type(number) for number in (backbone.channels, *backbone.describe()["image_size"])} == {int}


def test_a_description_holds_the_precision_and_not_the_device() -> None:
    facts = Backbone.from_callable(gaussian_eps, ABAR, channels=1).describe()
    assert facts["precision"] == "float32"
    assert "device" not in facts

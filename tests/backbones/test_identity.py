"""Weights of backbones made in Python are found, hashed and compared; where there are none, loading says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import ToyNet, pictures, toy_backbone

import gepc
from gepc.backbones.base import LatentBackbone
from gepc.backbones.identity import digest_of, modules_in
from gepc.backbones.schedule import cosine_alphas_cumprod
from gepc.core.errors import BackboneError, OptionError

ABAR = cosine_alphas_cumprod(1000)


class Wrapper:
    """A callable object that holds its network in a list."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.nets = [net]

    def __call__(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.nets[0](x, t)  # type: ignore[no-any-return]

    def predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self(x, t)


def call(net: torch.nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return net(x, t)  # type: ignore[no-any-return]


def closure_of_closure(net: torch.nn.Module) -> Callable[..., Any]:
    def inner(x: torch.Tensor, t: torch.Tensor) -> Any:
        return net(x, t)

    return lambda x, t: inner(x, t)


HOLDERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "module": lambda net: net,
    "bound method": lambda net: net.forward,
    "partial": lambda net: partial(call, net),
    "closure": lambda net: lambda x, t: net(x, t),
    "closure of a closure": closure_of_closure,
    "object": Wrapper,
    "method of an object": lambda net: Wrapper(net).predict,
}


def net_of(seed: int) -> ToyNet:
    net = ToyNet()
    torch.nn.init.normal_(net.block.kernel, generator=torch.Generator().manual_seed(seed))
    return net


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("make", ["from_callable", "from_denoiser", "from_flow"])
def test_other_weights_are_refused(kind: str, make: str, tmp_path: Path) -> None:
    def backbone(seed: int) -> gepc.Backbone:
        function = HOLDERS[kind](net_of(seed))
        if make == "from_callable":
            return gepc.Backbone.from_callable(function, ABAR, 3, 8)
        if make == "from_denoiser":
            return gepc.Backbone.from_denoiser(function, np.geomspace(0.01, 10.0, 50), 3, 8)
        return gepc.Backbone.from_flow(function, 3, 8)

    first = backbone(0)
    assert first.sha256 == backbone(0).sha256
    assert first.unchecked == []
    assert "unchecked" not in first.describe()
    detector = gepc.create_detector(first, "score_norm").fit(pictures(30))
    detector.save(tmp_path)
    same = gepc.load_detector(tmp_path, backbone(0))
    np.testing.assert_array_equal(same.score(pictures(3)), detector.score(pictures(3)))
    with pytest.raises(BackboneError, match="fitted with other weights than this backbone"):
        gepc.load_detector(tmp_path, backbone(1))


GLOBAL_NET = net_of(2)


def test_modules_of_the_script_are_found() -> None:
    """A function of a script reads its network from the script's own variables."""
    assert modules_in(lambda x, t: GLOBAL_NET(x, t)) == [GLOBAL_NET]
    assert modules_in(lambda x, t: torch.nn.functional.relu(x)) == []


def test_the_digest_sees_names_types_shapes_bytes_and_buffers() -> None:
    def digest(**tensors: torch.Tensor) -> str | None:
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return digest_of([module])

    values = torch.arange(4.0)
    digests = [digest(a=values), digest(b=values), digest(a=values.bfloat16()), digest(a=values.reshape(2, 2))]
    digests += [digest(a=values + 1), digest(a=values, b=torch.tensor(1)), digest(), digest_of([])]
    assert len(set(digests)) == len(digests)
    assert digests[-1] is None
    nets = [net_of(0), net_of(1)]
    assert digest_of(nets) == digest_of(nets[::-1]) != digest_of(nets[:1])


def test_weights_that_change_after_the_backbone_was_made() -> None:
    net = net_of(0)
    backbone = gepc.Backbone.from_callable(lambda x, t: net(x, t), ABAR, 3, 8)
    before = backbone.sha256
    net.load_state_dict(net_of(1).state_dict())
    assert backbone.sha256 != before


def test_a_subclass_with_a_network() -> None:
    class Mine(gepc.Backbone):
        def __init__(self, net: torch.nn.Module) -> None:
            super().__init__(ABAR, 3, 8)
            self.mine = net

        def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self.mine(x, t)  # type: ignore[no-any-return]

    assert Mine(net_of(0)).sha256 == Mine(net_of(0)).sha256 != Mine(net_of(1)).sha256


def test_features_of_functions_are_not_cached() -> None:
    """The code of a function may change while its weights stay the same."""
    assert gepc.Backbone.from_callable(net_of(0), ABAR, 3, 8).fingerprint is None


def test_a_plain_function_cannot_be_compared(tmp_path: Path) -> None:
    backbone = toy_backbone()
    assert backbone.sha256 is None
    assert backbone.describe()["unchecked"] == ["network"]
    gepc.create_detector(backbone, "score_norm").fit(pictures(30)).save(tmp_path)
    with pytest.warns(UserWarning, match=r"weights of the network cannot be compared .* no torch module was found"):
        gepc.load_detector(tmp_path, toy_backbone())


def test_other_weights_of_an_encoder_are_refused(tmp_path: Path) -> None:
    def backbone(seed: int) -> gepc.Backbone:
        encoder = torch.nn.Conv2d(3, 3, 2, 2, bias=False).requires_grad_(False)
        torch.nn.init.normal_(encoder.weight, generator=torch.Generator().manual_seed(seed))
        inner = gepc.Backbone.from_callable(net_of(0), ABAR, 3, 4)
        return inner.with_encoder(lambda x: encoder(x), 2)

    detector = gepc.create_detector(backbone(0), "score_norm").fit(pictures(30))
    detector.save(tmp_path)
    assert gepc.load_detector(tmp_path, backbone(0)).backbone.unchecked == []
    with pytest.raises(BackboneError, match="whose encoder_sha256 is"):
        gepc.load_detector(tmp_path, backbone(1))


def test_an_encoder_without_modules_cannot_be_compared() -> None:
    latent = gepc.Backbone.from_callable(net_of(0), ABAR, 3, 4).with_encoder(
        lambda x: torch.nn.functional.avg_pool2d(x, 2), 2
    )
    assert latent.unchecked == ["encoder"]


def test_a_latent_backbone_in_front_of_a_loaded_one_is_made_in_python() -> None:
    """Its source would name the inner backbone alone, and cached features would not depend on the encoder."""
    inner = gepc.load_backbone("photos-tiny", device="cpu")
    latent = inner.with_encoder(torch.nn.Conv2d(3, 3, 2, 2), 2)
    assert isinstance(latent, LatentBackbone)
    assert (latent.source, latent.load_options, latent.fingerprint) == (None, {}, None)
    assert latent.sha256 == inner.sha256


def test_a_latent_backbone_makes_the_passes_of_the_inner_one_and_counts_them() -> None:
    inner = gepc.Backbone.from_callable(net_of(0), ABAR, 3, 4)
    latent = inner.with_encoder(lambda x: torch.nn.functional.avg_pool2d(x, 2), 2)
    x = torch.zeros(5, 3, 4, 4)
    latent.rows = 2
    assert torch.equal(latent.eps(x, 3), inner.eps(x, 3))
    latent.jvp(x, 3, x)
    latent.encode(torch.zeros(2, 3, 8, 8))
    assert (latent.counts, inner.counts) == ((10, 5, 2), (5, 0, 0))
    assert latent.net is inner.net
    assert list(latent.eps_and_activations(x, 3)[1]) == ["block"]
    torch.testing.assert_close(latent.eps_and_log_variance(x, 3)[1], inner.eps_and_log_variance(x, 3)[1])
    latent.reset_counts()
    assert latent.counts == (0, 0, 0)


def test_an_encoder_goes_before_a_noise_predictor(tmp_path: Path) -> None:
    from families import energy_net

    energy_net(tmp_path)
    with pytest.raises(OptionError, match="predicts noise, and this one gives energies"):
        gepc.load_backbone(tmp_path, device="cpu").with_encoder(lambda x: x, 1)

"""Which layers are recorded, and that recording changes nothing else."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import gepc
from gepc.backbones.activations import feature_map, find_layers
from gepc.backbones.schedule import cosine_alphas_cumprod
from gepc.core.errors import BackboneError, OptionError


class ResBlock(nn.Module):
    """A convolution added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.convolution(x)


class Net(nn.Module):
    """eps(x, t) with two residual blocks, or with plain convolutions alone."""

    def __init__(self, blocks: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.body = nn.ModuleList([ResBlock(6), ResBlock(6)] if blocks else [nn.Conv2d(6, 6, 1)])
        self.last = nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for block in self.body:
            y = block(y)
        return self.last(y) + 0.001 * t.reshape(-1, 1, 1, 1)


def backbone(blocks: bool = True) -> gepc.Backbone:
    torch.manual_seed(0)
    return gepc.Backbone.from_callable(Net(blocks).double(), cosine_alphas_cumprod(100))


def x(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_residual_blocks_are_recorded_and_convolutions_where_there_are_none() -> None:
    assert list(find_layers(Net())) == ["body.0", "body.1"]
    assert list(find_layers(Net(blocks=False))) == ["first", "body.0", "last"]
    assert list(find_layers(Net(), ["body.*.convolution", "last"])) == [
        "body.0.convolution",
        "body.1.convolution",
        "last",
    ]


def test_blocks_within_blocks_are_recorded_once() -> None:
    outer = ResBlock(4)
    outer.add_module("inner", ResBlock(4))
    assert list(find_layers(nn.Sequential(outer))) == ["0"]


def test_the_maps_are_the_outputs_of_the_layers_and_the_noise_is_unchanged() -> None:
    network = backbone()
    eps, maps = network.eps_and_activations(x(), 7)
    assert torch.equal(eps, network.eps(x(), 7))
    first = network.net.body[0](network.net.first(x()))
    torch.testing.assert_close(maps["body.0"], first, rtol=0, atol=0)
    torch.testing.assert_close(maps["body.1"], network.net.body[1](first), rtol=0, atol=0)
    assert not maps["body.0"].requires_grad


def test_splitting_a_batch_changes_nothing_and_every_image_counts_once() -> None:
    network = backbone()
    whole = network.eps_and_activations(x(), 7)
    network.reset_counts()
    network.rows = 2
    parts = network.eps_and_activations(x(), 7)
    assert network.forward_count == 5
    torch.testing.assert_close(parts[0], whole[0])
    for name, field in whole[1].items():
        torch.testing.assert_close(parts[1][name], field)


def test_no_hook_is_left_behind() -> None:
    network = backbone()
    network.eps_and_activations(x(), 7)
    with pytest.raises(OptionError, match=r"'body\.7'"):
        network.eps_and_activations(x(), 7, ["body.7"])
    assert not any(module._forward_hooks for module in network.net.modules())


def test_a_plain_function_has_no_activations() -> None:
    network = gepc.Backbone.from_callable(lambda x, t: x, cosine_alphas_cumprod(100))
    with pytest.raises(BackboneError, match="plain function"):
        network.eps_and_activations(x(), 7)


def test_a_module_without_known_layers_asks_for_names() -> None:
    with pytest.raises(BackboneError, match="`layers`"):
        find_layers(nn.Sequential(nn.Linear(3, 3)))


def test_tokens_become_a_grid_with_the_aspect_ratio_of_the_image() -> None:
    tokens = torch.arange(2 * 8 * 3).reshape(2, 8, 3)
    grid = feature_map((tokens[:, :2], tokens), (16, 32))
    assert grid.shape == (2, 3, 2, 4)
    assert torch.equal(grid[0, :, 1, 2], tokens[0, 6])
    assert feature_map(torch.zeros(2, 7, 3), (16, 16)).shape == (2, 3, 7, 1)
    with pytest.raises(BackboneError, match="2 dimensions"):
        feature_map(torch.zeros(2, 3), (16, 16))
    for output, kind in (({"sample": grid}, "dict"), (None, "NoneType"), ((), "tuple")):
        with pytest.raises(BackboneError, match=f"a recorded layer returned a {kind} without tensors"):
            feature_map(output, (16, 16))


def test_a_pass_in_another_thread_does_not_mix_its_activations_in() -> None:
    """Hooks are part of the module, which all threads share: the other pass would overwrite what is recorded."""
    net, others = backbone(), torch.ones(2, 3, 8, 8, dtype=torch.float64)
    expected, alone = net.eps_and_activations(x(), 3)[1], net.eps_and_activations(others, 3)[1]
    results: list[dict[str, torch.Tensor]] = []
    thread = threading.Thread(target=lambda: results.append(net.eps_and_activations(others, 3)[1]))

    def meanwhile(*_: object) -> None:
        if not thread.ident:
            thread.start()
            thread.join(0.5)  # it cannot end before this pass has ended

    net.net.body[1].register_forward_hook(meanwhile)
    net.reset_counts()
    _, found = net.eps_and_activations(x(), 3)
    thread.join()
    for given, wanted in ((found, expected), (results[0], alone)):
        assert list(given) == list(wanted)
        assert all(torch.equal(given[name], wanted[name]) for name in wanted)
    assert net.forward_count == 7

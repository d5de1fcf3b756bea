"""Energy objectives: Langevin steps, gradients of losses in closed form, runs that resume, detectors of networks."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import gepc
from gepc.cli.app import app
from gepc.core.errors import InputError, OptionError
from gepc.lab.energy.network import EnergyBackbone, EnergyNet
from gepc.lab.training import checkpoint
from gepc.lab.training.choices import recipe_for
from gepc.lab.training.energy_losses import LOSSES, augment, igebm, improved_cd, langevin, vaebm
from gepc.lab.training.loop import Tick, train
from gepc.lab.training.recipe import ENERGIES, Recipe, load_recipe

QUICK: dict[str, Any] = {
    "channels": (8, 8),
    "image_channels": 1,
    "batch_size": 4,
    "steps": 5,
    "warmup_steps": 2,
    "checkpoint_every": 2,
    "held_out": 4,
    "langevin_steps": 2,
    "replay": 12,
}


def quick(objective: str, **changes: Any) -> Recipe:
    latent = {"latent": 3} if objective == "vaebm" else {}
    return load_recipe(None, {**QUICK, **latent, "objective": objective, **changes})


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


# --- Langevin dynamics -----------------------------------------------------------------------------------------------


def test_one_step_moves_down_the_gradient_and_adds_noise() -> None:
    """On E = a |x|^2/2: x - step a x + noise n."""
    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    recipe = Recipe(langevin_steps=1, langevin_step=0.3, langevin_noise=0.5, langevin_clip=None)
    found = langevin(lambda y: y.square().sum(1), x, recipe, generator())
    torch.testing.assert_close(found, x - 0.3 * 2 * x + 0.5 * torch.randn(2, 6, generator=generator()))
    still = dataclasses.replace(recipe, langevin_noise=0.0)
    torch.testing.assert_close(
        langevin(lambda y: 100 * y.sum(1), x, dataclasses.replace(still, langevin_clip=0.2), generator(), bound=0.9),
        (x - 0.3 * 0.2).clamp(-0.9, 0.9),
    )


def test_the_chain_has_its_stationary_law() -> None:
    """On E = a x^2/2 the chain is autoregressive, with the variance noise^2/(1 - (1 - step a)^2)."""
    recipe = Recipe(langevin_steps=200, langevin_step=0.1, langevin_noise=None, langevin_clip=None)
    chains = langevin(lambda y: 0.5 * 4.0 * y.square().sum(1), torch.zeros(40, 500), recipe, generator())
    expected = 2 * 0.1 / (1 - (1 - 0.1 * 4) ** 2)
    assert float(chains.var()) == pytest.approx(expected, rel=5 * np.sqrt(2 / chains.numel()))
    assert float(chains.mean()) == pytest.approx(0.0, abs=5 * np.sqrt(expected / chains.numel()))


# --- losses ----------------------------------------------------------------------------------------------------------


class Linear(torch.nn.Module):
    """E(x) = w . x, with a buffer of chains."""

    def __init__(self, weight: torch.Tensor, replay: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.register_buffer("replay", replay, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).flatten(1).sum(1)


def linear() -> tuple[Any, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    weight, images = torch.randn(1, 2, 2, generator=numbers), torch.rand(3, 1, 2, 2, generator=numbers)
    return Linear(weight * 0.01, torch.rand(1, 1, 2, 2, generator=numbers) * 0.1), images


PLAIN = Recipe(
    langevin_steps=4, langevin_step=0.2, langevin_noise=0.0, langevin_clip=None, restart_share=0.0, energy_penalty=0.0
)


def test_the_gradient_of_the_contrast_on_a_linear_energy() -> None:
    """d/dw (w.x - w.x') = mean x - mean x', with x' = x'_0 - steps step w; the penalty adds 2 p mean E x."""
    net, images = linear()
    start, w = net.replay.clone(), net.weight.detach().clone()
    igebm(PLAIN, net, images, generator()).backward()
    fake = start[0] - 4 * 0.2 * w
    torch.testing.assert_close(net.weight.grad, images.mean(0) - fake)
    torch.testing.assert_close(net.replay[0], fake)

    net, images = linear()
    igebm(dataclasses.replace(PLAIN, energy_penalty=0.5), net, images, generator()).backward()
    squares = [(one * w).sum() * one for one in (*images, fake)]
    penalty = sum(squares[:3]) / 3 + squares[3]
    torch.testing.assert_close(net.weight.grad, images.mean(0) - fake + penalty)


@pytest.mark.parametrize("through", [1, 3])
def test_the_kl_term_passes_through_the_last_steps(through: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """E_fixed(x') with x' = ... - step w for each of the last steps: d/dw = -through step w. The entropy is fixed."""
    monkeypatch.setattr("gepc.lab.training.energy_losses.augment", lambda x, _: x)
    net, images = linear()
    w = net.weight.detach().clone()
    without, _ = linear()
    igebm(PLAIN, without, images, generator()).backward()
    improved_cd(dataclasses.replace(PLAIN, kl_weight=2.0, kl_steps=through), net, images, generator()).backward()
    torch.testing.assert_close(net.weight.grad - without.weight.grad, 2.0 * -through * 0.2 * w)


def test_the_energy_of_vaebm_does_not_move_the_decoder() -> None:
    """Without the VAE's own loss, only the correction has a gradient; with it, the decoder follows the bound alone."""
    net = EnergyNet(1, (8, 8), (4, 8), latent=3)
    images, recipe = torch.rand(4, 1, 8, 8), quick("vaebm")
    vaebm(recipe, net, images, generator()).backward()
    found = [one.grad.clone() for one in net.vae.parameters()]  # type: ignore[union-attr]
    net.zero_grad()
    noise = torch.randn(4, 3, generator=generator())
    (net.vae.negative_bound(images, noise).mean() / 64).backward()  # type: ignore[union-attr]
    for mine, own in zip(found, net.vae.parameters(), strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(mine, own.grad)


def test_the_bound_of_the_vae_by_hand() -> None:
    net = EnergyNet(1, (8, 8), (4, 8), latent=3)
    assert net.vae is not None
    with torch.no_grad():
        net.vae.log_variance.fill_(0.7)
        x = torch.rand(2, 1, 8, 8)
        mean, log_std = net.vae.encoder(x).chunk(2, 1)
        posterior = torch.distributions.Normal(mean, log_std.exp())
        divergence = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).sum(1)
        likelihood = torch.distributions.Normal(net.vae.decoder(mean), np.exp(0.35)).log_prob(x).sum((1, 2, 3))
        constant = 0.5 * 64 * np.log(2 * np.pi)
        torch.testing.assert_close(net.vae.negative_bound(x), divergence - likelihood - constant)
        torch.testing.assert_close(net(x), net.correction(x) + net.vae.negative_bound(x))


def test_augmented_chains_stay_images() -> None:
    x = torch.rand(16, 3, 8, 8) * 2 - 1
    moved = augment(x, generator())
    assert moved.shape == x.shape
    assert float(moved.abs().max()) <= 1.0
    assert not torch.equal(moved, x)
    torch.testing.assert_close(moved, augment(x, generator()))


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", list(LOSSES))
def test_a_resumed_run_is_the_uninterrupted_one(objective: str, data: Path, tmp_path: Path) -> None:
    """Weights, averages, moments and the replay buffer, bit for bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recipe = quick(objective)
    train(recipe, data, whole)

    def stop(tick: Tick) -> None:
        if tick.step == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):  # so that nobody takes the network for a finished one
        train(recipe, data, parts, on_tick=stop)
    assert checkpoint.read_state(parts / "training").step == 3  # type: ignore[union-attr]
    assert train(recipe, data, parts).step == 5
    for name in ("training/checkpoint.safetensors", "diffusion_pytorch_model.safetensors"):
        mine, theirs = load_file(whole / name), load_file(parts / name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert ("buffer/replay" in load_file(whole / "training/checkpoint.safetensors")) == (objective != "vaebm")
    assert "replay" not in load_file(whole / "diffusion_pytorch_model.safetensors")


def test_train_fit_and_score_at_the_command_line(data: Path, tmp_path: Path) -> None:
    """The energies of the saved detector are those of the network."""
    net, detector, scores = tmp_path / "net", tmp_path / "det", tmp_path / "scores.csv"

    def run(*words: object) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return result.output

    settings = [f"--set={name}={json.dumps(value)}" for name, value in {**QUICK, "image_size": 8}.items()]
    told = run("train", "--objective", "improved_cd", "--data", data, "--out", net, *settings)
    assert "an energy network does not predict noise" in told
    assert "energies" in run("info", net, "--json")
    run("info", net)
    other = tmp_path / "other.npz"  # images that the network was not trained on
    pixels = np.random.default_rng(6).integers(0, 256, (30, 8, 8, 1), dtype=np.uint8)
    np.savez(other, x=pixels)
    run("fit", f"{other}:x", "--backbone", net, "--method", "energy", "--out", detector)
    run("score", detector, f"{other}:x", "--out", scores, "--alpha", 0.2)
    backbone = gepc.load_backbone(net, device="cpu")
    assert isinstance(backbone, EnergyBackbone)
    x = torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1)
    written = np.genfromtxt(scores, delimiter=",", names=True, dtype=None, encoding="utf-8")["score"]
    np.testing.assert_allclose(written, backbone.energy(x).numpy(), rtol=1e-4)
    assert backbone.trained_on is not None
    refused = CliRunner().invoke(app, ["fit", f"{other}:x", "--backbone", str(net), "--out", str(tmp_path / "no")])
    assert refused.exit_code != 0


def test_recipes_of_energy_networks(data: Path, tmp_path: Path) -> None:
    chosen, _ = recipe_for(data, tmp_path, overrides={"objective": "vaebm"})
    assert (chosen.objective, chosen.latent, chosen.langevin_clip) == ("vaebm", 64, None)
    assert load_recipe(None, {"objective": "vaebm"}).latent == ENERGIES["vaebm"]["latent"]
    assert load_recipe(None, {"objective": "igebm", "learning_rate": 0.5}).learning_rate == 0.5
    for wrong, message in (
        ({"objective": "gan"}, "unknown objective 'gan'"),
        ({"objective": "vaebm", "latent": None}, "latent must be at least 1"),
        ({"objective": "igebm", "init": "celeba32-tiny"}, "init must be left out"),
        ({"langevin_clip": 0.0}, "langevin_clip must be positive"),
    ):
        with pytest.raises(OptionError, match=message):
            load_recipe(None, wrong)


def test_another_objective_is_another_run(data: Path, tmp_path: Path) -> None:
    train(quick("igebm", steps=1), data, tmp_path / "net")
    with pytest.raises(InputError, match=r"objective \(igebm, not improved_cd\)"):
        train(quick("improved_cd"), data, tmp_path / "net")

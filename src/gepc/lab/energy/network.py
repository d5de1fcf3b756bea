"""Energy networks E(x), which are low for images like those they were trained on, and their backbone."""

import json
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gepc.backbones.base import Backbone
from gepc.backbones.weights import check_shapes, read_all, weight_files
from gepc.core.errors import BackboneError
from gepc.core.files import sha256


class ResidualBlock(nn.Module):
    """Two convolutions with a shortcut, without normalisation, which would tie the energies of a batch."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(before, after, 1)
        self.convolutions = nn.Sequential(
            nn.SiLU(), nn.Conv2d(before, after, 3, padding=1), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, C, H, W) with the new number of channels."""
        output: torch.Tensor = self.shortcut(x) + self.convolutions(x)
        return output


class VAE(nn.Module):
    """A small convolutional VAE: q(z|x) and p(x|z) = N(decoder(z), v I) with one learned v, prior N(0, I)."""

    def __init__(self, image_channels: int, size: tuple[int, int], channels: tuple[int, ...], latent: int) -> None:
        super().__init__()
        factor = 2 ** (len(channels) - 1)
        grid = (channels[-1], size[0] // factor, size[1] // factor)
        down = [layer for a, b in pairwise(channels) for layer in (nn.SiLU(), nn.Conv2d(a, b, 4, 2, 1))]
        up = [layer for b, a in pairwise(channels[::-1]) for layer in (nn.SiLU(), nn.ConvTranspose2d(b, a, 4, 2, 1))]
        first, last = nn.Conv2d(image_channels, channels[0], 3, 1, 1), nn.Conv2d(channels[0], image_channels, 3, 1, 1)
        self.encoder = nn.Sequential(first, *down, nn.SiLU(), nn.Flatten(), nn.Linear(prod(grid), 2 * latent))
        self.decoder = nn.Sequential(
            nn.Linear(latent, prod(grid)), nn.Unflatten(1, grid), *up, nn.SiLU(), last, nn.Tanh()
        )
        self.log_variance = nn.Parameter(torch.zeros(()))

    def negative_bound(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """-log p(x|z) + KL(q(z|x), N(0, I)), (N,), up to a constant; z = mean + std noise, without noise the mean."""
        mean, log_std = self.encoder(x).chunk(2, dim=1)
        z = mean if noise is None else mean + log_std.exp() * noise
        misfit = (x - self.decoder(z)).square().flatten(1)
        likelihood = 0.5 * (misfit / self.log_variance.exp() + self.log_variance).sum(1)
        divergence = 0.5 * (mean.square() + (2 * log_std).exp() - 1.0) - log_std
        bound: torch.Tensor = likelihood + divergence.sum(1)
        return bound


class EnergyNet(nn.Module):
    """E(x) by residual blocks, averaged over the last one's pixels; with a VAE, E(x) - log p_VAE(x) by its bound.

    Parameters
    ----------
    image_channels, image_size : of the images; (height, width).
    channels : width at each resolution; the resolution halves from one to the next.
    latent : dimensions of the VAE's latent; None is a network without a VAE.
    """

    def __init__(
        self, image_channels: int, image_size: tuple[int, int], channels: tuple[int, ...], latent: int | None = None
    ) -> None:
        super().__init__()
        sizes = {"image_channels": image_channels, "image_size": image_size, "channels": channels, "latent": latent}
        self.config = {"_class_name": "EnergyNet", **sizes}
        blocks = [layer for a, b in pairwise(channels) for layer in (nn.AvgPool2d(2), ResidualBlock(a, b))]
        first = nn.Conv2d(image_channels, channels[0], 3, padding=1)
        self.features = nn.Sequential(first, ResidualBlock(channels[0], channels[0]), *blocks, nn.SiLU())
        self.head = nn.Linear(channels[-1], 1)
        self.vae = None if latent is None else VAE(image_channels, image_size, channels, latent)

    def correction(self, x: torch.Tensor) -> torch.Tensor:
        """Return E(x) without the part of the VAE, (N,)."""
        energy: torch.Tensor = self.head(self.features(x).mean((2, 3)))[:, 0]
        return energy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the energies (N,) of images (N, C, H, W)."""
        return self.correction(x) if self.vae is None else self.correction(x) + self.vae.negative_bound(x)

    def to_json_string(self) -> str:
        """Return the config as the text of `config.json`."""
        return json.dumps(self.config, indent=2) + "\n"


class EnergyBackbone(Backbone):
    """Energies E(x), (N,), of images (N, C, H, W) in [-1, 1] by a module `net`, which does not predict noise."""

    family = "energy"
    gives = "energies"

    def __init__(self, net: nn.Module, channels: int, image_size: Any = None, device: Any = "cpu") -> None:
        super().__init__([0.5], channels, image_size)  # a schedule of one step, which is not used
        self.device = torch.device(device)
        self.net = net.to(self.device).eval().requires_grad_(False)
        self.parameters = sum(weight.numel() for weight in net.parameters())

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        raise BackboneError("this network gives energies, not noise predictions; use the method `energy`")

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        """E(x), (N,). Costs N forward passes."""
        with torch.no_grad():
            return self._run(lambda images, _: (self.net(images),), x, 0, shape=(len(x),))[0]

    def one_pass(self, x: torch.Tensor) -> torch.Tensor:
        """Return E(x), the pass that commands time."""
        return self.energy(x)


def load_energy(folder: Path, config: dict[str, Any], device: Any) -> EnergyBackbone:
    """Load the network that training wrote to `folder`; the entry point `gepc.networks` names this function."""
    files = weight_files(folder)
    try:
        size, channels = tuple(config["image_size"]), config["image_channels"]
        with torch.device("meta"):
            net = EnergyNet(channels, size, tuple(config["channels"]), config["latent"])
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise BackboneError(f"{folder / 'config.json'} does not describe an energy network: {error}") from error
    tensors = read_all(files)
    check_shapes(str(files[0]), tensors, {name: tuple(value.shape) for name, value in net.state_dict().items()})
    net.load_state_dict(tensors, assign=True)
    backbone = EnergyBackbone(net, channels, size, device)
    backbone.sha256 = sha256(*files)
    return backbone

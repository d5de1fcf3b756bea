"""Objectives that train an energy network: p(x) proportional to exp(-E(x)), with samples from Langevin dynamics.

    igebm        E(x) - E(x') + penalty (E(x)^2 + E(x')^2),   x' of a replay buffer of chains, moved by Langevin steps
    improved_cd  the same, with some chains augmented, and the term that contrastive divergence leaves out: E_fixed(x')
                 - entropy(x'), whose gradient passes through the last Langevin steps, x' = x'(theta)
    vaebm        E is added to -log p_VAE(x); x' = decoder(z), z by Langevin in latent space on E(decoder(z)) + |z|^2/2

Means over a batch. Beside their size, these differ from the published networks: there is no spectral normalisation (the
penalty bounds the energies); the entropy is that of the batch, mean log |x'_i - x'_j| to the nearest neighbour; the VAE
is trained at the same time as E, whose gradient does not reach it, instead of before.
"""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from gepc.lab.energy.network import EnergyNet
from gepc.lab.training.recipe import Recipe

Energy = Callable[[Tensor], Tensor]
Loss = Callable[[Recipe, EnergyNet, Tensor, Generator], Tensor]


def langevin(
    energy: Energy, x: Tensor, recipe: Recipe, generator: Generator, bound: float | None = None, through: int = 0
) -> Tensor:
    """x <- x - step dE/dx + noise n, n ~ N(0, I), `recipe.langevin_steps` times.

    With noise = sqrt(2 step) and a small step the chain has the density exp(-E).

    Parameters
    ----------
    energy : E(x), (N,).
    x : where the chains start.
    recipe : `langevin_step`, `langevin_noise` (None: sqrt(2 step)) and `langevin_clip`, the largest |dE/dx| of a pixel.
    generator : of the noise, on the CPU.
    bound : samples are clipped to [-bound, bound] after every step; None does not clip them.
    through : how many of the last steps the answer can be differentiated through.
    """
    step, clip, bound = recipe.langevin_step, recipe.langevin_clip or math.inf, bound or math.inf
    noise = math.sqrt(2.0 * step) if recipe.langevin_noise is None else recipe.langevin_noise
    for place in range(recipe.langevin_steps):
        kept = place >= recipe.langevin_steps - through
        x = x if kept and x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(energy(x).sum(), x, create_graph=kept)
        fresh = torch.randn(x.shape, generator=generator).to(x)
        x = (x - step * slope.clamp(-clip, clip) + noise * fresh).clamp(-bound, bound)
    return x if through else x.detach()


def contrast(recipe: Recipe, real: Tensor, fake: Tensor) -> Tensor:
    """mean E(x) - mean E(x') + penalty (mean E(x)^2 + mean E(x')^2)."""
    return real.mean() - fake.mean() + recipe.energy_penalty * (real.square().mean() + fake.square().mean())


def replayed(recipe: Recipe, net: EnergyNet, size: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Places of the replay buffer and where their chains go on: some are started again, from uniform noise."""
    buffer = net.get_buffer("replay")
    rows = torch.randint(len(buffer), (size,), generator=generator)
    again = torch.rand(size, generator=generator) < recipe.restart_share
    uniform = torch.rand((size, *buffer.shape[1:]), generator=generator) * 2.0 - 1.0
    return rows, torch.where(again.reshape(-1, 1, 1, 1).to(buffer.device), uniform.to(buffer), buffer[rows])


def igebm(recipe: Recipe, net: EnergyNet, images: Tensor, generator: Generator) -> Tensor:
    """The loss of `igebm`; the buffer is updated."""
    rows, start = replayed(recipe, net, len(images), generator)
    fake = langevin(net, start, recipe, generator, bound=1.0)
    net.get_buffer("replay")[rows] = fake
    return contrast(recipe, net(images), net(fake))


def improved_cd(recipe: Recipe, net: EnergyNet, images: Tensor, generator: Generator) -> Tensor:
    """The loss of `improved_cd`; the buffer is updated."""
    rows, start = replayed(recipe, net, len(images), generator)
    chosen = torch.rand(len(images), 1, 1, 1, generator=generator) < recipe.restart_share
    start = torch.where(chosen.to(start.device), augment(start, generator), start)
    fake = langevin(net, start, recipe, generator, bound=1.0, through=recipe.kl_steps)
    net.get_buffer("replay")[rows] = fake.detach()
    fixed = {name: weight.detach() for name, weight in net.named_parameters()}
    gaps = torch.cdist(fake.flatten(1), fake.flatten(1)) + torch.eye(len(fake)).to(fake) * 1e9
    divergence = torch.func.functional_call(net, fixed, (fake,)).mean() - gaps.amin(1).clamp_min(1e-6).log().mean()
    loss: Tensor = contrast(recipe, net(images), net(fake.detach())) + recipe.kl_weight * divergence
    return loss


def vaebm(recipe: Recipe, net: EnergyNet, images: Tensor, generator: Generator) -> Tensor:
    """The loss of `vaebm`: that of the VAE per pixel, and the contrast of E between images and decoded samples."""
    vae = net.vae
    assert vae is not None and recipe.latent is not None  # noqa: PT018
    shape = (len(images), recipe.latent)
    noise, start = (torch.randn(shape, generator=generator).to(images) for _ in range(2))

    def energy(z: Tensor) -> Tensor:
        return net.correction(vae.decoder(z)) + 0.5 * z.square().sum(1)

    fake = vae.decoder(langevin(energy, start, recipe, generator)).detach()
    bound = vae.negative_bound(images, noise).mean() / images[0].numel()
    return contrast(recipe, net.correction(images), net.correction(fake)) + bound


def augment(x: Tensor, generator: Generator) -> Tensor:
    """Every image mirrored, shifted by up to 2 pixels, of other contrast and brightness, and blurred, at random."""
    count = len(x)
    flip, blur = torch.rand(2, count, 1, 1, 1, generator=generator).to(x) < 0.5
    gain, offset = torch.rand(2, count, 1, 1, 1, generator=generator).to(x) * 0.4 - 0.2
    x = torch.where(flip, x.flip(-1), x)
    x = torch.where(blur, torch.nn.functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False), x)
    shifts = torch.randint(-2, 3, (count, 2), generator=generator).tolist()
    moved = [image.roll(tuple(shift), (-2, -1)) for image, shift in zip(x, shifts, strict=True)]
    return torch.clamp(torch.stack(moved) * (1.0 + gain) + offset, -1.0, 1.0)


LOSSES: dict[str, Loss] = {"igebm": igebm, "improved_cd": improved_cd, "vaebm": vaebm}

"""The variational bound on -log p(x), term by term, shared by the methods that start from a likelihood.

With reverse steps N(mean, var) on retained timesteps, btilde the posterior variance, and SNR = abar/(1 - abar):

    L_T = KL(N(sqrt(abar_T) x, (1 - abar_T) I) || N(0, I))
    L_t = sum_i 1/2 [ln(var/btilde) - 1 + (btilde/var) (1 + (SNR_{t-1} - SNR_t) (x - xhat0)_i^2)]
    L_0 = -log of a Gaussian around xhat0, integrated over the 8-bit bin

Ho, Jain & Abbeel, NeurIPS 2020; Nichol & Dhariwal, ICML 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import FloatArray, log_variances
from gepc.core.errors import check_choice
from gepc.features.base import Batch, Cost
from gepc.features.baselines.samplers import even_in
from gepc.features.templates import WholeImage, check_least
from gepc.images import noise

if TYPE_CHECKING:
    import torch

HALF_BIN = 1.0 / 255.0
OPEN_ENDED = 0.999


@dataclass(frozen=True)
class Chain:
    """The retained timesteps and the variances of the steps between them, recomputed from the retained abar."""

    timesteps: npt.NDArray[np.int64]
    abar: FloatArray

    @classmethod
    def of(cls, backbone: Backbone, steps: int | None) -> Chain:
        """All timesteps of the schedule with some signal left, or so many, evenly spread with both ends."""
        usable = int((backbone.alphas_cumprod > 0.0).sum())
        count = usable if steps is None else min(steps, usable)
        timesteps = np.round(np.linspace(0, usable - 1, count)).astype(np.int64)
        return cls(timesteps, backbone.alphas_cumprod[timesteps])

    def __len__(self) -> int:
        return len(self.timesteps)

    @cached_property
    def snr(self) -> FloatArray:
        """abar/(1 - abar)."""
        return self.abar / (1.0 - self.abar)

    @cached_property
    def log_variances(self) -> tuple[FloatArray, FloatArray]:
        """ln beta and ln btilde; the latter takes at the first step its value at the second."""
        return log_variances(self.abar)

    def strata(self, count: int | None) -> list[int]:
        """Edges e_0 = 0 < e_1 < ...: stratum k holds the steps after e_k up to e_{k+1}; None is one step each.

        Even in ln(1 - abar), in which the terms of natural images are nearly even too.
        """
        if count is None or count >= len(self) - 1:
            return list(range(len(self)))
        return even_in(np.log1p(-self.abar), count)


@dataclass(frozen=True)
class Bound(WholeImage):
    """The parameters of the bound, and its terms.

    Parameters
    ----------
    steps : retain so many timesteps (1000 of 4000 in the literature); None keeps all.
    strata : split the steps into so many contiguous strata, look at one random step in each and count it for all of
        them, which is unbiased; None looks at every step. L_0 is always looked at.
    clip : bring xhat0 into [-1, 1], as improved-diffusion does.
    variance : of the reverse steps: `model`, learned where the backbone has learned it, else btilde; `posterior`,
        btilde; or `beta`.
    compat : the published decoder: a tanh approximation of the normal distribution, probabilities at least 1e-12.
    """

    steps: int | None = None
    strata: int | None = 32
    clip: bool = True
    variance: str = "model"
    compat: bool = False

    def __post_init__(self) -> None:
        check_choice("variance", self.variance, ("model", "posterior", "beta"))
        check_least(2, steps=self.steps)
        check_least(1, strata=self.strata)

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """One pass a stratum, or a step, and one for L_0."""
        return Cost(forward=len(Chain.of(backbone, self.steps).strata(self.strata)))

    def terms(self, backbone: Backbone, batch: Batch, draw: int = 0) -> torch.Tensor:
        """(N, 2 + strata) float64 in nats: L_0, what each stratum adds, L_T. `draw` tells noise draws apart."""
        import torch

        chain = Chain.of(backbone, self.steps)
        edges = np.asarray(chain.strata(self.strata))
        sizes = np.diff(edges)
        uniform = np.stack([noise.generator(batch.seed, key, "strata", draw).random(len(sizes)) for key in batch.keys])
        chosen = edges[:-1] + 1 + np.floor(uniform * sizes).astype(np.int64)
        found = [self._term(backbone, batch, chain, np.zeros(len(batch), dtype=np.int64), draw)]
        for place, size in enumerate(sizes):
            found.append(float(size) * self._term(backbone, batch, chain, chosen[:, place], draw))
        x0 = batch.clean(backbone).double().flatten(1)
        last = float(chain.abar[-1])
        found.append(0.5 * (last * x0.square() - last - math.log1p(-last)).sum(1))
        return torch.stack(found, 1)

    def _term(
        self, backbone: Backbone, batch: Batch, chain: Chain, step: npt.NDArray[np.int64], draw: int
    ) -> torch.Tensor:
        """L_t of every image at its own step, (N,)."""
        import torch

        x0 = batch.clean(backbone)
        t = torch.from_numpy(chain.timesteps[step]).to(x0.device)
        x_t = backbone.sqrt_abar(x0, t) * x0 + backbone.sigma(x0, t) * _noise(
            backbone, batch, chain.timesteps[step], draw
        )
        eps, share = self._predict(backbone, x_t, t)
        spread = [torch.from_numpy(table[step]).to(x0.device).reshape(-1, 1, 1, 1) for table in chain.log_variances]
        log_var = share * spread[0] + (1.0 - share) * spread[1]
        estimate = ((x_t - backbone.sigma(x0, t) * eps) / backbone.sqrt_abar(x0, t)).double()
        if self.clip:
            estimate = estimate.clamp(-1.0, 1.0)
        if step[0] == 0:
            return -log_bin(x0.double(), estimate, log_var, self.compat).flatten(1).sum(1)
        drop = torch.from_numpy(chain.snr[step - 1] - chain.snr[step]).to(x0.device).reshape(-1, 1, 1, 1)
        ratio = spread[1] - log_var
        error = (x0.double() - estimate).square()
        return 0.5 * (ratio.exp() * (1.0 + drop * error) - 1.0 - ratio).flatten(1).sum(1)

    def _predict(
        self, backbone: Backbone, x_t: torch.Tensor, t: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """eps, and u of the variance exp(u ln beta + (1 - u) ln btilde) on the backbone's own schedule."""
        if self.variance != "model" or not backbone.learned_variance:
            return backbone.eps(x_t, t), float(self.variance == "beta")
        eps, log_var = backbone.eps_and_log_variance(x_t, t)
        large, small = (backbone.per_image(table, x_t, t).double() for table in log_variances(backbone.alphas_cumprod))
        return eps, (log_var.double() - small) / (large - small)


def _noise(backbone: Backbone, batch: Batch, timesteps: npt.NDArray[np.int64], draw: int) -> torch.Tensor:
    """The noise that belongs to each image at its own timestep."""
    import torch

    if (timesteps == timesteps[0]).all():
        return batch.noise(backbone, int(timesteps[0]), draw)
    shape = batch.images.shape[1:]
    fields = [
        noise.normal(batch.seed, [key], shape, int(t), draw) for key, t in zip(batch.keys, timesteps, strict=True)
    ]
    return torch.from_numpy(np.concatenate(fields)).to(device=backbone.device, dtype=backbone.dtype)


def log_bin(x: torch.Tensor, mean: torch.Tensor, log_var: torch.Tensor, compat: bool = False) -> torch.Tensor:
    """log of the Gaussian's mass in the 8-bit bin around each x; the bins at -1 and 1 reach to infinity."""
    import torch

    inverse = torch.exp(-0.5 * log_var)
    low, high = (x - mean - HALF_BIN) * inverse, (x - mean + HALF_BIN) * inverse
    if compat:
        return _log_bin_tanh(x, low, high)
    # on the side where the distribution function is small, differences lose nothing
    flip = low + high > 0
    near, far = torch.where(flip, -low, high), torch.where(flip, -high, low)
    log_near = torch.special.log_ndtr(near)
    inside = log_near + torch.log1p(-torch.exp(torch.special.log_ndtr(far) - log_near))
    below, above = torch.special.log_ndtr(high), torch.special.log_ndtr(-low)
    return torch.where(x < -OPEN_ENDED, below, torch.where(x > OPEN_ENDED, above, inside))


def _log_bin_tanh(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    import torch

    def distribution(z: torch.Tensor) -> torch.Tensor:
        return 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)))

    upper, lower = distribution(high), distribution(low)
    mass = torch.where(x < -OPEN_ENDED, upper, torch.where(x > OPEN_ENDED, 1.0 - lower, upper - lower))
    return mass.clamp_min(1e-12).log()


def bits_per_dim(nats: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Nats of a whole image as bits per dimension."""
    return nats / (math.prod(batch.images.shape[1:]) * math.log(2.0))

"""Methods that read the likelihood: the variational bound, methods that build on it, the probability-flow ODE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import FloatArray, Levels, log_variances, rho_of
from gepc.core.options import at_least, one_of
from gepc.images import noise
from gepc.lab.baselines.paths import HIGHEST_RHO, even_in
from gepc.lab.baselines.score import ScoreNorm, eps_and_trace, signs
from gepc.methods.base import Batch, Columns, Cost, Derived, Features, Table, WholeImage, register
from gepc.methods.pooling import energy
from gepc.methods.presets import Preset, Presets

Steps = npt.NDArray[np.int64]
HALF_BIN = 1.0 / 255.0
OPEN_ENDED = 0.999


@dataclass(frozen=True)
class Chain:
    """The retained timesteps and the variances of the steps between them, recomputed from the retained abar."""

    timesteps: Steps
    abar: FloatArray

    @classmethod
    def of(cls, backbone: Backbone, steps: int | None) -> Chain:
        """All timesteps of the schedule with abar > 0, or `steps` of them, evenly spread with both ends."""
        usable = int((backbone.alphas_cumprod > 0.0).sum())
        count = usable if steps is None else min(steps, usable)
        timesteps = np.round(np.linspace(0, usable - 1, count)).astype(np.int64)
        return cls(timesteps, backbone.alphas_cumprod[timesteps])

    @property
    def snr(self) -> FloatArray:
        """abar/(1 - abar)."""
        return self.abar / (1.0 - self.abar)

    @cached_property
    def log_posterior(self) -> FloatArray:
        """ln btilde; at the first step it takes its value at the second."""
        return log_variances(self.abar)[1]

    @cached_property
    def log_extent(self) -> FloatArray:
        """ln beta - ln btilde."""
        return log_extent(self.abar)

    def strata(self, count: int | None) -> list[int]:
        """Edges e_0 = 0 < e_1 < ...: stratum k holds the steps after e_k up to e_{k+1}; None is one step each."""
        if count is None or count >= len(self.abar) - 1:
            return list(range(len(self.abar)))
        return even_in(np.log1p(-self.abar), count)  # in which the terms of natural images are nearly even, too


@dataclass(frozen=True)
class BoundOptions:
    """The parameters of the variational bound, for the bound itself and for methods that build on it.

    Parameters
    ----------
    steps : number of timesteps to retain (1000 of 4000 in the literature); None keeps all.
    strata : number of contiguous strata to split the steps into. One random step of each is evaluated and counted for
        the whole stratum, which is unbiased; None evaluates every step. L_0 is always evaluated.
    clip : clip xhat0 to [-1, 1], as improved-diffusion does.
    variance : variance of the reverse steps: `model` (learned where the backbone has learned it, else btilde),
        `posterior` (btilde) or `beta`.
    compat : use the published decoder: a tanh approximation of the normal distribution, probabilities at least 1e-12.
    """

    calibration: ClassVar[str] = "raw"
    pixels_only: ClassVar[str | None] = "it is a likelihood of 8-bit pixels"
    presets: ClassVar[Presets] = {
        "paper": Preset({"steps": 1000, "strata": None}),
        "light": Preset({"strata": 32}),
        "full": Preset({"steps": None, "strata": None}),
    }

    steps: int | None = at_least(2, None)
    strata: int | None = at_least(1, 32)
    clip: bool = True
    variance: str = one_of("model", "posterior", "beta")
    compat: bool = False

    @property
    def bound(self) -> NllVlb:
        """The bound with these parameters."""
        return NllVlb(**{field.name: getattr(self, field.name) for field in fields(BoundOptions)})


@register("nll_vlb")
@dataclass(frozen=True)
class NllVlb(BoundOptions, WholeImage):
    """Negative log-likelihood by the variational bound, in bits per dimension.

    With reverse steps N(mean, var) on the retained timesteps, btilde the posterior variance, and SNR = abar/(1 - abar):

        L_T = KL(N(sqrt(abar_T) x, (1 - abar_T) I) || N(0, I))
        L_t = sum_i 1/2 [ln(var/btilde) - 1 + (btilde/var) (1 + (SNR_{t-1} - SNR_t) (x - xhat0)_i^2)]
        L_0 = -log of a Gaussian around xhat0, integrated over the 8-bit bin
        bpd = (L_0 + sum_t L_t + L_T)/(D ln 2)

    Ho, Jain & Abbeel, NeurIPS 2020; Nichol & Dhariwal, ICML 2021.

    The score is raw and one-sided: an image is OOD where the model finds it unlikely. That inverts for images simpler
    than the training set (SVHN under CIFAR-10).

    The parameters are those of `BoundOptions`.
    """

    column_names = ("bpd",)

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        return Cost(forward=len(Chain.of(backbone, self.steps).strata(self.strata)))

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """The sum of the terms, and `terms`: L_0, the strata and L_T, all in bits per dimension."""
        terms = bits_per_dim(self.terms(backbone, batch), batch)
        return {"bpd": terms.sum(1), "terms": terms}

    def terms(self, backbone: Backbone, batch: Batch, draw: int = 0) -> Tensor:
        """(N, 2 + strata) float64 in nats: L_0, the contribution of each stratum, L_T; `draw` numbers noise draws."""
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

    def _term(self, backbone: Backbone, batch: Batch, chain: Chain, step: Steps, draw: int) -> Tensor:
        """L_t of every image at its own step, (N,)."""
        x0 = batch.clean(backbone)
        t = torch.from_numpy(chain.timesteps[step]).to(x0.device)
        field = _noise(backbone, batch, chain.timesteps[step], draw)
        x_t = backbone.sqrt_abar(x0, t) * x0 + backbone.sigma(x0, t) * field
        eps, share = self._predict(backbone, x_t, t)
        posterior, extent = (_per_image(table[step], x0) for table in (chain.log_posterior, chain.log_extent))
        log_var = posterior + share * extent
        estimate = ((x_t - backbone.sigma(x0, t) * eps) / backbone.sqrt_abar(x0, t)).double()
        if self.clip:
            estimate = estimate.clamp(-1.0, 1.0)
        if step[0] == 0:
            return -log_bin(x0.double(), estimate, log_var, self.compat).flatten(1).sum(1)
        drop = _per_image(chain.snr[step - 1] - chain.snr[step], x0)
        ratio = posterior - log_var
        error = (x0.double() - estimate).square()
        return 0.5 * (ratio.exp() * (1.0 + drop * error) - 1.0 - ratio).flatten(1).sum(1)

    def _predict(self, backbone: Backbone, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor | float]:
        """eps, and u of the variance exp(u ln beta + (1 - u) ln btilde) on the backbone's own schedule."""
        if self.variance != "model" or not backbone.learned_variance:
            return backbone.eps(x_t, t), float(self.variance == "beta")
        eps, log_var = backbone.eps_and_log_variance(x_t, t)
        # in the precision of the network, so that rounding ln btilde cancels; the divisor may be as small as 1e-20
        posterior = backbone.per_image(log_variances(backbone.alphas_cumprod)[1], x_t, t)
        extent = _per_image(log_extent(backbone.alphas_cumprod)[t.cpu().numpy()], x_t)
        return eps, (log_var - posterior).double() / extent


def log_extent(abar: FloatArray) -> FloatArray:
    """ln beta_t - ln btilde_t = ln((1 - abar_t)/(1 - abar_{t-1})) > 0, also where both logarithms round to one number.

    At the first step it is the difference of the entries of `log_variances`.
    """
    beta, posterior = log_variances(abar)
    between = np.log1p((abar[:-1] - abar[1:]) / (1.0 - abar[:-1]))
    return np.concatenate([beta[:1] - posterior[:1], between])


def _per_image(values: FloatArray, like: Tensor) -> Tensor:
    """One number per image, (N, 1, 1, 1) float64, on the device of `like`."""
    return torch.from_numpy(values).to(like.device).reshape(-1, 1, 1, 1)


def _noise(backbone: Backbone, batch: Batch, timesteps: Steps, draw: int) -> Tensor:
    """The noise that belongs to each image at its own timestep."""
    if (timesteps == timesteps[0]).all():
        return batch.noise(backbone, int(timesteps[0]), draw)
    shape = batch.images.shape[1:]
    found = [noise.normal(batch.seed, [key], shape, int(t), draw) for key, t in zip(batch.keys, timesteps, strict=True)]
    return torch.from_numpy(np.concatenate(found)).to(batch.clean(backbone))


def log_bin(x: Tensor, mean: Tensor, log_var: Tensor, compat: bool = False) -> Tensor:
    """log of the Gaussian's mass in the 8-bit bin around each x; the bins at -1 and 1 extend to infinity."""
    inverse = torch.exp(-0.5 * log_var)
    low, high = (x - mean - HALF_BIN) * inverse, (x - mean + HALF_BIN) * inverse
    if compat:
        upper, lower = (torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)) / 2.0 + 0.5 for z in (high, low))
        masses = (upper, 1.0 - lower, upper - lower)
        below, above, inside = (mass.clamp_min(1e-12).log() for mass in masses)
    else:
        # on the side where the distribution function is small, differences lose no precision
        flip = low + high > 0
        near, far = torch.where(flip, -low, high), torch.where(flip, -high, low)
        log_near = torch.special.log_ndtr(near)
        inside = log_near + torch.log1p(-torch.exp(torch.special.log_ndtr(far) - log_near))
        below, above = torch.special.log_ndtr(high), torch.special.log_ndtr(-low)
    return torch.where(x < -OPEN_ENDED, below, torch.where(x > OPEN_ENDED, above, inside))


def bits_per_dim(nats: Tensor, batch: Batch) -> Tensor:
    """Nats of a whole image as bits per dimension."""
    return nats / (math.prod(batch.images.shape[1:]) * math.log(2.0))


@register("typicality")
@dataclass(frozen=True)
class Typicality(BoundOptions, Derived):
    """Typicality test. Nalisnick, Matsukawa, Teh & Lakshminarayanan, 2019.

        |NLL(x) - mean of NLL over ID images|

    for one image, from the variational bound, in standard deviations. Two-sided, unlike the likelihood itself. In the
    paper the model is trained on the ID set. The parameters are those of `BoundOptions`.
    """

    calibration: ClassVar[str] = "abs_z"
    column_names = ("bpd",)

    def builds_on(self) -> tuple[NllVlb]:
        return (self.bound,)


@register("dos")
@dataclass(frozen=True)
class DensityOfStates(BoundOptions, Derived):
    """Density of states: a density over several summary statistics. Morningstar et al., AISTATS 2021.

    The statistics: the bound in bits per dimension, its contributions in bands of noise levels, and the score norm at a
    few levels.

    Parameters
    ----------
    bands : number of bands that the terms of the bound are summed in.
    levels : noise levels of the score norms.

    The others are those of `BoundOptions`.
    """

    calibration: ClassVar[str] = "gmm"

    bands: int = at_least(1, 4)
    levels: Levels = Levels.rho(0.05, 0.17, 0.52)

    @property
    def column_names(self) -> tuple[str, ...]:
        bands = [f"band{place}" for place in range(self.bands)]
        return ("bpd", *bands, *(f"norm{place}" for place in range(len(self.levels.values))))

    def builds_on(self) -> tuple[NllVlb, ScoreNorm]:
        return self.bound, ScoreNorm(self.levels)

    def complete(self, tables: Sequence[Table], batch: Batch) -> Table:
        """`bpd` (N, 1), its terms but L_T as `bands` (N, 1, bands) from low noise to high, `norms` (N, 1, levels)."""
        bound, norms = tables
        bands = np.array_split(bound["terms"][:, :, :-1], self.bands, axis=2)
        return {
            "bpd": bound["bpd"],
            "bands": np.stack([band.sum(2) for band in bands], axis=2),
            "norms": norms["score_norm"][:, None],
        }

    def columns(self, table: Table) -> Columns:
        return np.concatenate([table["bpd"][:, :, None], table["bands"], table["norms"]], axis=2)


@register("nll_ode")
@dataclass(frozen=True)
class NllOde(WholeImage):
    """Negative log-likelihood by the probability-flow ODE, in bits per dimension. Song et al., ICLR 2021.

    In y = x_t/sqrt(abar) and rho the flow is dy/drho = eps, and

        log p(y_0) = log N(x_T; 0, I) + (D/2) ln abar_T + integral of sqrt(abar) tr(d eps/dx) drho

    with one Hutchinson probe of random signs for the whole path. Steps are even in log rho, from the schedule's first
    timestep to rho = 80, where the prior holds to about 1/rho^2. Heun's rule integrates y in rho, the trapezium rule
    the trace in log rho. Steps are fixed, so that the result is a function of the image and not of its batch.

    Parameters
    ----------
    steps : number of steps of Heun's rule.
    """

    calibration: ClassVar[str] = "raw"
    column_names = ("bpd",)
    presets: ClassVar[Presets] = {"paper": Preset({"steps": 250}), "light": Preset({"steps": 16})}

    steps: int = at_least(1, 16)

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        steps = len(self.path(backbone)) - 1  # an error if they do not fit into the schedule
        return Cost(forward=2 * steps, jvp=2 * steps)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        # of the image in units of 0 ... 255, hence the log2(127.5)
        return {"bpd": bits_per_dim(-self.log_density(backbone, batch), batch) + math.log2(127.5)}

    def path(self, backbone: Backbone) -> list[int]:
        """The ascending timesteps between steps."""
        (top,) = Levels.rho(HIGHEST_RHO).timesteps(backbone.alphas_cumprod)
        return even_in(np.log(rho_of(backbone.alphas_cumprod[: top + 1])), self.steps)

    def log_density(self, backbone: Backbone, batch: Batch) -> Tensor:
        """log p(y_0) in nats, (N,) float64."""
        probe = signs(backbone, batch, 0)
        abar = backbone.alphas_cumprod
        timesteps = self.path(backbone)

        def slopes(y: Tensor, t: int) -> tuple[Tensor, Tensor]:
            """dy/drho, and the integrand of the trace per log rho."""
            root = float(abar[t]) ** 0.5
            eps, trace = eps_and_trace(backbone, y * root, t, [probe])
            return eps, trace * root * float(rho_of(abar[t]))

        y: Tensor = batch.clean(backbone) / float(abar[0]) ** 0.5
        growth = y.new_zeros(len(y)).double()
        for now, then in pairwise(timesteps):
            rho, ahead = float(rho_of(abar[now])), float(rho_of(abar[then]))
            eps, trace = slopes(y, now)
            eps_then, trace_then = slopes(y + (ahead - rho) * eps, then)
            y = y + 0.5 * (ahead - rho) * (eps + eps_then)
            growth += 0.5 * math.log(ahead / rho) * (trace + trace_then)
        last, size = float(abar[timesteps[-1]]), y[0].numel()
        constant = 0.5 * size * (math.log(last) - math.log(2.0 * math.pi))
        return growth + constant - 0.5 * last * energy(y)

"""Negative log-likelihood by the probability-flow ODE, in bits per dimension. Song et al., ICLR 2021.

In y = x_t/sqrt(abar) and rho the flow is dy/drho = eps, and

    log p(y_0) = log N(x_T; 0, I) + (D/2) ln abar_T + integral of sqrt(abar) tr(d eps/dx) drho

with one Hutchinson probe of random signs for the whole path. Steps are even in log rho, as far as the schedule is
fine enough, from its first timestep to rho = 80, where the prior holds to about 1/rho^2. Heun's rule carries y, in
rho, and the trapezium the trace, in log rho: each is exact at both ends for a Gaussian. Fixed steps, unlike the
usual adaptive solver whose steps the whole batch decides, make the answer a function of the image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels, rho_of
from gepc.features.base import Batch, Cost, register
from gepc.features.baselines.hutchinson import eps_and_trace, signs
from gepc.features.baselines.samplers import even_in
from gepc.features.baselines.vlb import bits_per_dim
from gepc.features.templates import WholeImage, check_least, energy

if TYPE_CHECKING:
    import torch

    from gepc.features.templates import Features

HIGHEST_RHO = 80.0


@register("nll_ode")
@dataclass(frozen=True)
class NllOde(WholeImage):
    """-log2 p per dimension of the image in 0 ... 255; `steps` of Heun's rule."""

    calibration: ClassVar[str] = "raw"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"steps": 250}, "light": {"steps": 16}}

    steps: int = 16

    def __post_init__(self) -> None:
        check_least(1, steps=self.steps)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Bits per dimension."""
        return ("bpd",)

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """Two Jacobian-vector products a step."""
        return Cost(forward=2 * self.steps, jvp=2 * self.steps)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """-log2 p(y_0)/D, and log2(127.5) for the change of units."""
        return {"bpd": bits_per_dim(-self.log_density(backbone, batch), batch) + math.log2(127.5)}

    def path(self, backbone: Backbone) -> list[int]:
        """The timesteps between steps, ascending."""
        (top,) = Levels.rho(HIGHEST_RHO).timesteps(backbone.alphas_cumprod)
        return even_in(np.log(rho_of(backbone.alphas_cumprod[: top + 1])), self.steps)

    def log_density(self, backbone: Backbone, batch: Batch) -> torch.Tensor:
        """log p(y_0) in nats, (N,) float64."""
        probe = signs(backbone, batch, 0)
        abar = backbone.alphas_cumprod
        timesteps = self.path(backbone)

        def slopes(y: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
            """dy/drho, and the trace's part per log rho."""
            root = float(abar[t]) ** 0.5
            eps, trace = eps_and_trace(backbone, y * root, t, [probe])
            return eps, trace * root * float(rho_of(abar[t]))

        y: torch.Tensor = batch.clean(backbone) / float(abar[0]) ** 0.5
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

"""SCOPED: the squared score over its curvature. Barkley, Culbertson & Fridovich-Keil, 2025.

    T = |eps|^2 / (sigma_t tr(d eps/dx)) = |s|^2 / -tr(ds/dx), about 1 on typical images

at two levels, times a global sign; the score is the most surprising level's -log density. Their code is not public:
the sign factor, which the paper calls necessary on images, is read as the sign of sum_i s_i (`sign="sum"`), which is
unverified; `sign="none"` leaves it out. At tiny rho an accurate network has T = 1 for every image. The curvature
-tr(ds/dx), at least D for the exact score of data with a variance up to 1, is kept at least D/1000 in size and keeps
its sign (the table counts where); T is standardised at each level so that the maximum is fair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import check_choice
from gepc.features.base import Batch, Cost, register
from gepc.features.baselines.hutchinson import eps_and_trace, signs
from gepc.features.templates import PerLevel, check_least, energy, total

if TYPE_CHECKING:
    from gepc.features.templates import Features

SMALLEST = 1e-3


@register("scoped")
@dataclass(frozen=True)
class SCOPED(PerLevel):
    """T at each level; with several `probes` the trace is averaged, not T."""

    calibration: ClassVar[str] = "kde:standardise=true"
    aggregate: ClassVar[str] = "max"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "light": {"levels": Levels.rho(0.13)},
        "unsigned": {"levels": Levels.rho(0.13), "sign": "none"},
    }

    levels: Levels = Levels.rho(0.0045, 0.13)
    probes: int = 1
    sign: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(1, probes=self.probes)
        check_choice("sign", self.sign, ("sum", "none"))

    def level_cost(self, size: tuple[int, int]) -> Cost:
        """One Jacobian-vector product a probe, which also gives eps."""
        return Cost(forward=self.probes, jvp=self.probes)

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """T as `scoped`, and where its denominator had to be kept away from 0 as `clamped`."""
        x_t, _ = batch.noised(backbone, t)
        probes = [signs(backbone, batch, t, probe) for probe in range(self.probes)]
        eps, trace = eps_and_trace(backbone, x_t, t, probes)
        sigma = float(np.sqrt(1.0 - backbone.alphas_cumprod[t]))
        kappa = trace * sigma
        floor = SMALLEST * eps[0].numel() * sigma**2
        small = kappa.abs() < floor
        value = energy(eps) / kappa.sign().where(kappa != 0, 1.0).mul(floor).where(small, kappa)
        if self.sign == "sum":
            value = value * total(eps).lt(0).double().mul(2.0).sub(1.0)
        return {"scoped": value, "clamped": small.double()}

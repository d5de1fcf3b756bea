"""Methods published after the paper: UFCOD, flow mismatch, and local intrinsic dimension with likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels, rho_of
from gepc.features.base import (
    Batch,
    Columns,
    Cost,
    DerivedExtractor,
    Extractor,
    Features,
    HasMaps,
    MapParts,
    PerLevel,
    Table,
    WholeImage,
    check_least,
    energy,
    register,
    to_numpy,
)
from gepc.features.baselines.likelihood import NllVlb
from gepc.features.baselines.paths import DiffPath
from gepc.features.baselines.score import eps_and_trace, signs


@register("ufcod")
@dataclass(frozen=True)
class UFCOD(DerivedExtractor, WholeImage):
    """UFCOD: energy of the path from an image to noise and of its changes, by a soft minimum over ID images.

        (sum eps^2, sum d^2) along DDIM inversion as in DiffPath, standardised
        score = -log mean_i exp(-|z - z_i|),   z_i: 100 ID images

    arXiv 2605.03410. The text leaves open how the two sums are scaled and the temperature of the soft minimum; here
    they are standardised on the ID images and the temperature is 1. It shares the passes of DiffPath.

    Parameters
    ----------
    steps : number of steps of the inversion.
    clip : clip the estimate of x_0, as in DiffPath.
    """

    calibration: ClassVar[str] = "soft_minimum"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}, "light": {}}

    steps: int = 10
    clip: bool = True

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """One pass per step."""
        return Cost(forward=self.steps)

    def builds_on(self) -> tuple[DiffPath]:
        """The sums along the path."""
        return (DiffPath(dim=1, steps=self.steps, clip=self.clip),)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """All sums of the path."""
        return self.builds_on()[0].of_images(backbone, batch)

    @property
    def column_names(self) -> tuple[str, ...]:
        """The two sums."""
        return "eps2", "d2"


@register("flow_mismatch")
@dataclass(frozen=True)
class FlowMismatch(HasMaps, PerLevel):
    """Flow mismatch: how far the predicted velocity is from the one that made the noisy image.

        mean |vhat - (noise - x_0)|,   for a noise prediction vhat - v = (1 + rho)(eps - noise)

    arXiv 2605.23070. On the straight path x = (1 - s) x_0 + s noise, s = rho/(1 + rho); any Gaussian path is brought to
    it by scaling. One-sided, summed over levels as z-scores.

    Parameters
    ----------
    levels : noise levels; s = .1, .3, .5, .7, .9 by default.
    draws : noise draws to average.
    """

    calibration: ClassVar[str] = "z"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"draws": 4}, "light": {}}

    levels: Levels = Levels.rho(1 / 9, 3 / 7, 1.0, 7 / 3, 9.0)
    draws: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(1, draws=self.draws)

    def level_cost(self, size: tuple[int, int]) -> Cost:
        """One pass per draw."""
        return Cost(forward=self.draws)

    def field(self, backbone: Backbone, batch: Batch, t: int) -> torch.Tensor:
        """|vhat - v|, averaged over draws and channels, (N, H, W)."""
        scale = 1.0 + float(rho_of(backbone.alphas_cumprod[t]))
        parts = []
        for draw in range(self.draws):
            x_t, noise = batch.noised(backbone, t, draw)
            parts.append(scale * (backbone.eps(x_t, t) - noise).abs().mean(1))
        return torch.stack(parts).mean(0)

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """The mean over pixels as `flow_mismatch`."""
        return {"flow_mismatch": self.field(backbone, batch, t).double().mean((1, 2))}

    def map_parts(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> tuple[Table, MapParts]:
        """The table and |vhat - v| from the same passes."""
        fields = torch.stack([self.field(backbone, batch, int(t)) for t in timesteps], dim=1)
        table = {"flow_mismatch": to_numpy(fields.double().mean((2, 3)))}
        return table, {"residual": fields.float().cpu().numpy()}


@dataclass(frozen=True)
class FLIPD(PerLevel):
    """Local intrinsic dimension by FLIPD, a part of `lid`: the image itself is scaled to the level, without noise."""

    name: ClassVar[str] = "flipd"

    probes: int = 1

    def level_cost(self, size: tuple[int, int]) -> Cost:
        """One Jacobian-vector product per probe, which also gives eps."""
        return Cost(forward=self.probes, jvp=self.probes)

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """LID/D = 1 - sigma tr(d eps/dx)/D + |eps|^2/D."""
        abar = float(backbone.alphas_cumprod[t])
        probes = [signs(backbone, batch, t, probe) for probe in range(self.probes)]
        eps, trace = eps_and_trace(backbone, abar**0.5 * batch.clean(backbone), t, probes)
        return {"flipd": 1.0 + (energy(eps) - (1.0 - abar) ** 0.5 * trace) / eps[0].numel()}


@register("lid")
@dataclass(frozen=True)
class LocalDimension(DerivedExtractor, NllVlb):
    """Local intrinsic dimension with likelihood: an image is OOD if it is unlikely, or lies on too thin a manifold.

        LID = D + sigma^2 (tr ds/dx + |s|^2)  at x = sqrt(abar) x_0,  s = -eps/sigma
        score = log(1 + e^z(bpd)) + log(1 + e^z(-LID)),   bpd: the variational bound of `nll_vlb`

    Kamkari et al., ICML 2024, with the estimator FLIPD of Kamkari et al., NeurIPS 2024. They threshold likelihood and
    dimension apart; the sum of smooth positive parts is one score for the same two conditions.

    Parameters
    ----------
    levels : noise level of the dimension.
    probes : Hutchinson probes of the trace.

    The others are those of `NllVlb`.
    """

    calibration: ClassVar[str] = "softplus"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"strata": None, "probes": 4}, "light": {}}

    levels: Levels = Levels((0.998,))
    probes: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "levels", Levels.of(self.levels))
        check_least(1, probes=self.probes)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Bits per dimension, and the negative dimension of each level."""
        return ("bpd", *(f"thin{place}" for place in range(len(self.levels.values))))

    def builds_on(self) -> tuple[Extractor, ...]:
        """The bound and the dimension."""
        return self.plain(), FLIPD(self.levels, self.probes)

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """The cost of both parts."""
        return self.cost_of_parts(backbone, size)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """`bpd` (N, 1) and `thin` (N, 1, levels)."""
        return self.from_parts(backbone, batch)

    def complete(self, tables: Sequence[Table], batch: Batch) -> Table:
        """The bound and the negative dimension."""
        bound, dimension = tables
        return {"bpd": bound["bpd"], "thin": -dimension["flipd"][:, None]}

    def columns(self, table: Table) -> Columns:
        """(N, 1, 1 + levels)."""
        return np.concatenate([table["bpd"][:, :, None], table["thin"]], axis=2)

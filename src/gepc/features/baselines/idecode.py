"""iDECODe on the GEPC residual. Kaur et al., AAAI 2022, without its trained network.

    alpha_j = |P_g^-1 s(P_g x_t) - s(x_t)|^2 / |s(x_t)|^2,  g_j uniform on G without the identity, j = 1 ... n

The statistic is sum_j alpha_j and the answer its conformal p-value among calibration images, which draw fresh noise
and fresh elements as every image does. Rank by the sum, which has fewer ties; decide by p.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.features.base import Batch, Cost, register
from gepc.features.groups import Action, Group
from gepc.features.templates import PerLevel, check_least, energy
from gepc.images import noise

if TYPE_CHECKING:
    import torch

    from gepc.features.templates import Features


@register("idecode")
@dataclass(frozen=True)
class IDecode(PerLevel):
    """The sum of `n` random residuals at each level."""

    calibration: ClassVar[str] = "raw"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}, "light": {}}

    levels: Levels = Levels.rho(0.065)
    n: int = 5
    group: Group = Group.of("paper")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "group", Group.of(self.group))
        check_least(1, n=self.n)

    def level_cost(self, size: tuple[int, int]) -> Cost:
        """The reference and n moved copies; an element drawn twice is evaluated twice."""
        return Cost(forward=self.n + 1)

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """sum_j alpha_j, from eps, where sigma cancels."""
        x_t, _ = batch.noised(backbone, t)
        actions = self.group.for_size(*batch.size).moving
        chosen = self._choose(batch, t, len(actions))
        base = backbone.eps(x_t, t)
        gaps = base.new_zeros(len(batch)).double()
        for picks in chosen.T:
            moved = backbone.eps(_each(x_t, actions, picks), t)
            gaps += energy(_each(moved, actions, picks, inverse=True) - base)
        return {"idecode": gaps / energy(base)}

    def _choose(self, batch: Batch, t: int, count: int) -> npt.NDArray[np.int64]:
        """Positions of the n elements of every image, (N, n), independent and with repetition."""
        draws = [noise.generator(batch.seed, key, "idecode", t).integers(0, count, self.n) for key in batch.keys]
        return np.stack(draws)


def _each(
    x: torch.Tensor, actions: tuple[Action, ...], picks: npt.NDArray[np.int64], inverse: bool = False
) -> torch.Tensor:
    """Every image moved by its own element."""
    import torch

    out = torch.empty_like(x)
    for position in np.unique(picks):
        rows = torch.from_numpy(np.flatnonzero(picks == position)).to(x.device)
        action = actions[int(position)]
        out[rows] = action.inverse(x[rows]) if inverse else action.apply(x[rows])
    return out

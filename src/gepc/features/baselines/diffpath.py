"""DiffPath: moments of the path from an image to noise. Heng, Thiery & Soh, NeurIPS 2024.

DDIM inversion of x_0 on N evenly strided timesteps gives eps_0 ... eps_{N-1}, and d_n = N (eps_{n+1} - eps_n):

    1-D   sqrt(sum d^2), or sqrt(sum eps^2), the score norm along the path
    6-D   sum eps, sum eps^2, sum eps^3, sum d, sum d^2, sum d^3      sums over steps, channels and pixels

As in the authors' code the estimate of x_0 is clipped and eps re-derived from it (`clip`), and the image is taken for
x_t at t = 0. Their kernel density has bandwidth 5, which means something for N = 10 and 32x32x3 alone: it is
`calibration="kde:bandwidth=5"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gepc.backbones.base import Backbone
from gepc.core.errors import OptionError, check_choice
from gepc.features.base import Batch, Columns, Cost, DerivedExtractor, Table, register
from gepc.features.baselines.samplers import ddim_grid, invert
from gepc.features.templates import WholeImage, check_least, total

if TYPE_CHECKING:
    import torch

    from gepc.features.templates import Features

MOMENTS = ("eps", "eps2", "eps3", "d", "d2", "d3")


@register("diffpath")
@dataclass(frozen=True)
class DiffPath(DerivedExtractor, WholeImage):
    """Six signed moments, or the `root` of one of them: d or eps; `steps` must divide the schedule evenly."""

    calibration: ClassVar[str] = "gmm"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"dim": 6, "calibration": "gmm"},
        "light": {"dim": 1, "calibration": "kde"},
    }

    dim: int = 6
    steps: int = 10
    clip: bool = True
    root: str = "d"

    def __post_init__(self) -> None:
        if self.dim not in (1, 6):
            raise OptionError(f"dim must be 1 or 6, got {self.dim}")
        check_choice("root", self.root, ("d", "eps"))
        check_least(2, steps=self.steps)

    @property
    def label(self) -> str:
        """With the dimension, or as a norm."""
        return f"{self.name}[norm]" if (self.dim, self.root) == (1, "eps") else f"{self.name}[{self.dim}-D]"

    @property
    def column_names(self) -> tuple[str, ...]:
        """The six moments, or the root."""
        return MOMENTS if self.dim == 6 else ("diffpath",)

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """One pass a step."""
        return Cost(forward=self.steps)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """All six moments, whichever are used: they cost no pass."""
        grid = ddim_grid(backbone.n_steps, self.steps)
        sums = dict.fromkeys(MOMENTS, batch.clean(backbone).new_zeros(len(batch)).double())
        before: torch.Tensor | None = None
        for eps in invert(backbone, batch.clean(backbone), grid, self.clip):
            _add_moments(sums, "eps", eps.double())
            if before is not None:
                _add_moments(sums, "d", self.steps * (eps.double() - before))
            before = eps.double()
        return sums

    def builds_on(self) -> tuple[DiffPath, ...]:
        """All forms read the same table, that of the plain one."""
        plain = replace(self, dim=1, root="d")
        return () if self == plain else (plain,)

    def columns(self, table: Table) -> Columns:
        """(N, 1, 6) or (N, 1, 1)."""
        if self.dim == 1:
            return np.sqrt(table[f"{self.root}2"])[:, :, None]
        return super().columns(table)


def _add_moments(sums: dict[str, torch.Tensor], name: str, field: torch.Tensor) -> None:
    for power, key in enumerate((name, f"{name}2", f"{name}3"), start=1):
        sums[key] = sums[key] + total(field**power)

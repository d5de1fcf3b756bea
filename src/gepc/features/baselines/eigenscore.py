"""EigenScore: the posterior covariance's largest eigenvalues. Shoushtari et al., 2025.

    Cov[x_0 | y] = rho^2 d xhat0/dy,  y = x_t/sqrt(abar)      m_t = mean over draws of lambda_1 + ... + lambda_K

summed over levels as z-scores. The eigenvectors come from subspace iteration with central differences
J v = [xhat0(y + c v) - xhat0(y - c v)]/(2c), and the eigenvalues are Rayleigh quotients rho^2 v^T J v, signed and of
second order in the vectors' error. The step is c = |y|/100 within [0.05, 1]: below, float32 rounding rules.

The authors' code stops when vectors settle, discards draws that do not and draws again (a selection), sets broken
features to 0, and chooses window and aggregation by AUROC with OOD images; here the number of iterations is fixed,
every draw counts, and the levels are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels, rho_of
from gepc.core.errors import check_choice
from gepc.features.base import Batch, Cost, register
from gepc.features.templates import PerLevel, check_least, total

if TYPE_CHECKING:
    import torch

    from gepc.features.templates import Features


@register("eigenscore")
@dataclass(frozen=True)
class EigenScore(PerLevel):
    """The sum of the `k` largest eigenvalues at each level.

    Parameters
    ----------
    levels : where to look.
    k, iterations : eigenvalues, and products with the Jacobian for each; the last product gives the quotient.
    draws, over_draws : noise draws, and their `mean` or `median`; `all` makes a column of each.
    """

    calibration: ClassVar[str] = "z"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "levels": Levels.rho(0.342, 0.522, 0.724, 0.958, 1.24),
            "k": 3,
            "iterations": 50,
            "draws": 20,
        },
        "light": {},
    }

    levels: Levels = Levels.rho(0.342, 0.724, 1.24)
    k: int = 1
    iterations: int = 8
    draws: int = 2
    over_draws: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(1, k=self.k, iterations=self.iterations, draws=self.draws)
        check_choice("over_draws", self.over_draws, ("mean", "median", "all"))

    @property
    def column_names(self) -> tuple[str, ...]:
        """One, or one for each draw."""
        each = tuple(f"{self.name}{draw}" for draw in range(self.draws))
        return each if self.over_draws == "all" else (self.name,)

    def level_cost(self, size: tuple[int, int]) -> Cost:
        """Two passes a product."""
        return Cost(forward=2 * self.k * self.iterations * self.draws)

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """m_t."""
        import torch

        found = torch.stack([self.eigenvalues(backbone, batch, t, draw).sum(1) for draw in range(self.draws)], 1)
        if self.over_draws == "all":
            return dict(zip(self.column_names, found.unbind(1), strict=True))
        return {self.name: found.mean(1) if self.over_draws == "mean" else found.quantile(0.5, dim=1)}

    def eigenvalues(self, backbone: Backbone, batch: Batch, t: int, draw: int) -> torch.Tensor:
        """(N, k) float64, largest first."""
        import torch

        rho = float(rho_of(backbone.alphas_cumprod[t]))
        y = batch.noised(backbone, t, draw)[0] / float(backbone.alphas_cumprod[t]) ** 0.5
        # the starting vectors are noise of their own: draws beyond those that noise the image
        first = self.draws + draw * self.k
        vectors = [batch.noise(backbone, t, first + place) for place in range(self.k)]
        for _ in range(self.iterations):
            basis = _orthonormal(torch.stack([vector.flatten(1) for vector in vectors], 2))
            vectors = [_product(backbone, y, t, basis[:, :, place].reshape(y.shape)) for place in range(self.k)]
        quotients = [
            total(basis[:, :, place].reshape(y.shape).double() * vectors[place].double()) for place in range(self.k)
        ]
        return rho**2 * torch.stack(quotients, 1).sort(dim=1, descending=True).values


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns of each (N, D, k)."""
    import torch

    if columns.shape[2] == 1:
        return torch.nn.functional.normalize(columns, dim=1)
    basis: torch.Tensor = torch.linalg.qr(columns)[0]
    return basis


def _product(backbone: Backbone, y: torch.Tensor, t: int, v: torch.Tensor) -> torch.Tensor:
    """d xhat0/dy times unit vectors v: v - rho d eps/dy v, by a central difference of eps."""
    root = float(backbone.alphas_cumprod[t]) ** 0.5
    rho = float(rho_of(backbone.alphas_cumprod[t]))
    c: torch.Tensor = (0.01 * y.flatten(1).norm(dim=1)).clamp(0.05, 1.0).reshape(-1, 1, 1, 1)
    slope = (backbone.eps(root * (y + c * v), t) - backbone.eps(root * (y - c * v), t)) / (2.0 * c)
    return v - rho * slope

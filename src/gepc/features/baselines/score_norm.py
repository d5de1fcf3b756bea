"""Score norm: how large the predicted score is. A magnitude, blind to symmetry.

    n_t = mean over draws of |s(x_t, t)|        s = -eps/sigma_t

Against data smoother than the training set the raw norm falls instead of rising; the density over ID values, which is
two-sided, does not mind. Near pure noise |eps| tends to sqrt(D) for any image.
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
from gepc.features.templates import PerLevel, check_least, energy

if TYPE_CHECKING:
    from gepc.features.templates import Features


@register("score_norm")
@dataclass(frozen=True)
class ScoreNorm(PerLevel):
    """|s| or |eps| of the noised image at each level.

    Parameters
    ----------
    levels : where to look.
    draws : noise draws to average over.
    of : `score`, or `eps` for |eps| = sigma_t |s|. The norm along an inversion is `diffpath` with dim=1, root=eps.
    """

    calibration: ClassVar[str] = "kde"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"levels": Levels.rho(0.17)}, "light": {}}

    levels: Levels = Levels.rho(0.05, 0.17, 0.52)
    draws: int = 1
    of: str = "score"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(1, draws=self.draws)
        check_choice("of", self.of, ("score", "eps"))

    def level_cost(self, size: tuple[int, int]) -> Cost:
        """One pass a draw."""
        return Cost(forward=self.draws)

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """The mean norm over the draws."""
        sigma = float(np.sqrt(1.0 - backbone.alphas_cumprod[t])) if self.of == "score" else 1.0
        norms = [
            energy(backbone.eps(batch.noised(backbone, t, draw)[0], t)).sqrt() / sigma for draw in range(self.draws)
        ]
        return {"score_norm": sum(norms[1:], norms[0]) / self.draws}

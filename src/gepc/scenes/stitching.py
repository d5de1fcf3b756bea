"""One map from overlapping tile maps, a few lines at a time.

    M(y, x) = sum_i w(y - y_i, x - x_i) m_i(y - y_i, x - x_i) / sum_i w(y - y_i, x - x_i),

over the tiles i that hold the pixel, w(u, v) = w_h(u) w_w(v) with w_n(u) = sin^2(pi (u + 1/2)/n). The weight falls to
nearly nothing at a tile's border, so the map has no step where a tile begins, and a constant field stays that constant.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gepc.features.maps import Map
from gepc.scenes.tiling import Grid

Array = npt.NDArray[np.float64]


def weights(n: int) -> Array:
    """w_n(u) = sin^2(pi (u + 1/2)/n) for u = 0 ... n - 1: positive, symmetric; at stride n/2 they sum to 1."""
    return np.asarray(np.sin(np.pi * (np.arange(n) + 0.5) / n) ** 2)


class Stitcher:
    """The sums of the formula for the lines of one row of tiles; finished lines go out, the rest moves up.

    Sums are float64 and the map float32, so that a float32 constant comes out as exactly itself.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._weight = np.outer(weights(grid.tile[0]), weights(grid.tile[1]))
        self.total = np.zeros((grid.tile[0], grid.width))
        self.share = np.zeros((grid.tile[0], grid.width))
        self._begun = 0  # lines that earlier rows have added to

    def add(self, left: int, field: Map) -> None:
        """Add a tile of the current row."""
        part = slice(left, left + self._grid.tile[1])
        self.total[:, part] += self._weight * field
        self.share[:, part] += self._weight

    def advance(self, lines: int) -> Map:
        """The uppermost `lines` lines, NaN where no tile was added; the lines below become the uppermost."""
        seen = self.share[:lines] > 0.0
        out = np.full((lines, self._grid.width), np.nan, dtype=np.float32)
        out[seen] = (self.total[:lines][seen] / self.share[:lines][seen]).astype(np.float32)
        for sums in (self.total, self.share):
            sums[: len(sums) - lines] = sums[lines:]
            sums[len(sums) - lines :] = 0.0
        self._begun = len(self.total) - lines
        return out

    def state(self) -> dict[str, Array]:
        """What an interrupted run needs to go on, after `advance`: the lines that are begun."""
        return {"total": self.total[: self._begun], "share": self.share[: self._begun]}

    def restore(self, state: dict[str, Array]) -> None:
        """Take up where `state` was saved."""
        self._begun = len(state["total"])
        self.total[: self._begun], self.share[: self._begun] = state["total"], state["share"]

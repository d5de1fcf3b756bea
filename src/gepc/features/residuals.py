"""The passes of GEPC: one noise level of a batch under every group element, and the fields compared.

Works on eps = -sigma s: every feature but b is a ratio in which sigma cancels. Formulas are in `gepc.features.gepc`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.features.base import Batch, Table
from gepc.features.groups import Action, Group
from gepc.images import noise

if TYPE_CHECKING:
    import torch

    from gepc.features.gepc import GepcExtractor

PER_ELEMENT = ("s", "cos", "x0")
LAGS: dict[str, tuple[tuple[int, int], ...]] = {
    "ax": ((0, 1),),
    "ay": ((1, 0),),
    "ad": ((1, 1), (1, -1)),
    "ax2": ((0, 2),),
    "ay2": ((2, 0),),
}
"""Autocorrelations of the denoising error: name -> shifts (down, right) in pixels, averaged."""
CORRELATIONS = (*LAGS, "ac")
"""Those, and the correlation between its channels, which a network of one channel does not have."""
WITHOUT_GROUP = ("b", "d", *CORRELATIONS)


class LevelPass:
    """One timestep and one noise draw of a batch; `run` makes the passes and gives this level's row of the table."""

    def __init__(
        self,
        method: GepcExtractor,
        backbone: Backbone,
        batch: Batch,
        group: Group,
        t: int,
        draw: int,
        used: npt.NDArray[np.bool_],
        with_maps: bool,
    ) -> None:
        import torch

        self.method, self.backbone, self.group, self.t = method, backbone, group, t
        self.count, self.rows, self.with_maps, self.size = len(batch), batch.rows, with_maps, batch.size
        self.used = np.flatnonzero(used)
        self.wanted = set(method.features)
        x_t, field = batch.noised(backbone, t, draw)
        pick = torch.from_numpy(self.used).to(x_t.device)
        self.x_t, self.noise = (x_t, field) if len(self.used) == self.count else (x_t[pick], field[pick])
        self.chosen = self._choose_elements(batch)

    def _choose_elements(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """Which images (rows) are compared under which non-identity elements (columns); the same for every draw."""
        moving, size = len(self.group.moving), self.method.group_samples
        if self.wanted <= set(WITHOUT_GROUP):
            return np.zeros((len(self.used), moving), dtype=bool)
        if size is None or size >= moving:
            return np.ones((len(self.used), moving), dtype=bool)
        keys = [batch.keys[int(index)] for index in self.used]
        return noise.subsets(batch.seed, keys, moving, size, "elements", self.t)

    def run(self) -> tuple[Table, npt.NDArray[np.float32]]:
        """This level's row of the table, and the map (empty unless asked for)."""
        self.base = self.backbone.eps(self.x_t, self.t)
        self.energy = self.method.pooling(self.base.square())
        if "x0" in self.wanted:
            self.x0_energy = self._x0_energy()
        row: dict[str, torch.Tensor] = self._without_group()
        transported = []
        field = self.base.new_zeros((len(self.used), *self.size))
        columns = {name: self._empty(len(self.group)) for name in PER_ELEMENT if name in self.wanted}
        for values in columns.values():
            values[:, 0] = 0.0
        for position, picked, moved in self._transport():
            gap = (moved - self.base[picked]).square().mean(1)
            self._compare(columns, position + 1, picked, moved, gap)
            if self.with_maps:
                field[picked] += gap / self.energy[picked, None, None]
            if self.wanted & {"pair", "cycle"}:
                transported.append((position + 1, picked, moved))
        row.update(columns)
        row.update(self._between(transported))
        table = {name: self._spread(values) for name, values in row.items()}
        return table, self._finish_map(field)

    def _transport(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(element, images, P_g^-1 eps(P_g x_t)), with as many elements in one network call as `rows` allows."""
        import torch

        waiting: list[tuple[int, torch.Tensor]] = []
        for position in range(len(self.group.moving)):
            picked = torch.from_numpy(np.flatnonzero(self.chosen[:, position])).to(self.x_t.device)
            if len(picked) == 0:
                continue
            if waiting and sum(len(rows) for _, rows in waiting) + len(picked) > self.rows:
                yield from self._evaluate(waiting)
                waiting = []
            waiting.append((position, picked))
        if waiting:
            yield from self._evaluate(waiting)

    def _evaluate(self, waiting: list[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        import torch

        actions: list[Action] = [self.group.moving[position] for position, _ in waiting]
        whole = len(self.x_t)
        moved = [
            action.apply(self.x_t if len(picked) == whole else self.x_t[picked])
            for action, (_, picked) in zip(actions, waiting, strict=True)
        ]
        answers = self.backbone.eps(torch.cat(moved) if len(moved) > 1 else moved[0].contiguous(), self.t)
        parts = torch.split(answers, [len(picked) for _, picked in waiting])
        for action, (position, picked), part in zip(actions, waiting, parts, strict=True):
            yield position, picked, action.inverse(part)

    def _compare(
        self,
        columns: dict[str, torch.Tensor],
        column: int,
        picked: torch.Tensor,
        moved: torch.Tensor,
        gap: torch.Tensor,
    ) -> None:
        if "s" in columns:
            columns["s"][picked, column] = (self.method.pooling.pixels(gap) / self.energy[picked]).double()
        if "cos" in columns:
            cosine = self._cosine(moved, self.base[picked])
            columns["cos"][picked, column] = (1.0 - cosine).double()
        if "x0" in columns:
            # x0_g - x0 = -(sigma/sqrt(abar)) (eps_g - eps)
            abar = float(self.backbone.alphas_cumprod[self.t])
            pooled = self.method.pooling.pixels(gap) * ((1.0 - abar) / abar)
            columns["x0"][picked, column] = (pooled / self.x0_energy[picked]).double()

    @staticmethod
    def _cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = a.flatten(1), b.flatten(1)
        norms = (a.square().sum(1) * b.square().sum(1)).sqrt()
        return (a * b).sum(1) / norms.clamp_min(1e-30)

    def _x0_energy(self) -> torch.Tensor:
        abar = float(self.backbone.alphas_cumprod[self.t])
        x0 = (self.x_t - self.base * (1.0 - abar) ** 0.5) / abar**0.5
        return self.method.pooling(x0.square())

    def _without_group(self) -> dict[str, torch.Tensor]:
        row: dict[str, torch.Tensor] = {}
        if "b" in self.wanted:
            row["b"] = self.energy.double() / (1.0 - float(self.backbone.alphas_cumprod[self.t]))
        if not self.wanted & {"d", *CORRELATIONS}:
            return row
        error = self.base - self.noise
        if "d" in self.wanted:
            row["d"] = self.method.pooling(error.square()).double()
        row.update({name: autocorrelation(error, shifts) for name, shifts in LAGS.items() if name in self.wanted})
        if "ac" in self.wanted and error.shape[1] > 1:
            row["ac"] = channel_correlation(error)
        return row

    def _between(self, transported: list[tuple[int, torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """pair and cycle: differences between transported scores, the identity's being the reference itself."""
        import torch

        if not transported:
            return {}
        everyone = torch.arange(len(self.base), device=self.base.device)
        members = {0: (everyone, self.base), **{column: (rows, moved) for column, rows, moved in transported}}
        size = len(self.group)
        lists = {"pair": list(combinations(range(size), 2)), "cycle": [(i, (i + 1) % size) for i in range(size)]}
        row = {}
        for name in sorted(self.wanted & set(lists)):
            values = self._empty(len(lists[name]))
            for column, (first, second) in enumerate(lists[name]):
                self._disagreement(values, column, members.get(first), members.get(second))
            row[name] = values
        return row

    def _disagreement(
        self,
        values: torch.Tensor,
        column: int,
        first: tuple[torch.Tensor, torch.Tensor] | None,
        second: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        if first is None or second is None:
            return
        import torch

        both = first[0][torch.isin(first[0], second[0])]
        if len(both) == 0:
            return
        a, b = (moved[torch.searchsorted(rows, both)] for rows, moved in (first, second))
        values[both, column] = (self.method.pooling((a - b).square()) / self.energy[both]).double()

    def _empty(self, width: int) -> torch.Tensor:
        import torch

        return torch.full((len(self.used), width), torch.nan, dtype=torch.float64, device=self.base.device)

    def _spread(self, values: torch.Tensor) -> npt.NDArray[np.float64]:
        """Rows of the images used at this level, put back among all; NaN for the others."""
        out = np.full((self.count, *values.shape[1:]), np.nan)
        out[self.used] = values.cpu().numpy()
        return out

    def _finish_map(self, field: torch.Tensor) -> npt.NDArray[np.float32]:
        """Mean over g, identity included; a random subset of elements is scaled up to the group."""
        if not self.with_maps:
            return np.empty(0, dtype=np.float32)
        evaluated = max(1, int(self.chosen[0].sum())) if len(self.chosen) else 1
        size = len(self.group)
        field = field * ((size - 1) / size / evaluated)
        out = np.full((self.count, *self.size), np.nan, dtype=np.float32)
        out[self.used] = field.float().cpu().numpy()
        return out


def autocorrelation(field: torch.Tensor, shifts: Sequence[tuple[int, int]]) -> torch.Tensor:
    """mean_pixels f(p) f(p + shift) / mean_pixels f^2 over all channels, averaged over the shifts; nothing wraps round.

    0 where no two pixels of the image are that far apart.
    """
    import torch

    power = field.square().flatten(1).mean(1, dtype=torch.float64).clamp_min(1e-30)
    total = power.new_zeros(len(field))
    for down, right in shifts:
        height, width = field.shape[-2] - down, field.shape[-1] - abs(right)
        if height < 1 or width < 1:
            continue
        left = max(0, -right)
        here = field[..., :height, left : left + width]
        there = field[..., down : down + height, left + right : left + right + width]
        total += (here * there).flatten(1).mean(1, dtype=power.dtype) / power
    return total / len(shifts)


def channel_correlation(field: torch.Tensor) -> torch.Tensor:
    """mean f_c f_c' / mean f^2 over pixels and pairs of channels c != c': ((sum_c f_c)^2/sum_c f_c^2 - 1)/(C - 1).

    0 for channels that have nothing in common, 1 for equal ones.
    """
    import torch

    power = field.square().flatten(1).sum(1, dtype=torch.float64).clamp_min(1e-30)
    together = field.sum(1).square().flatten(1).sum(1, dtype=torch.float64)
    return (together / power - 1.0) / (field.shape[1] - 1)

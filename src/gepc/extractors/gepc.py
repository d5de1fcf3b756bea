"""GEPC: how far the score disagrees with itself when the noisy image is flipped, rotated or shifted.

With r_g = P_g^-1 s(P_g x_t) - s(x_t), the transported scores s_g = s + r_g and b = pool(s(x_t)^2):

    s     mean_g       pool(r_g^2) / b                        residual energy (the paper's default)
    cos   mean_g       1 - <s_g, s> / (|s_g| |s|)             over channels and pixels together
    pair  mean_{g<g'}  pool((s_g - s_g')^2) / b               dispersion of the transported scores
    cycle mean_i       pool((s_{g_i} - s_{g_{i+1}})^2) / b    once around the group in its order, closed
    x0    mean_g       pool((x0_g - x0)^2) / pool(x0^2)       the same as s for x0 = (x_t - sigma eps)/sqrt(abar)
    b     pool(s^2)                                           score energy
    d     pool((eps - noise)^2)                               denoising error, known because we drew the noise

The means include the identity, whose residual is zero and is never evaluated: |G| passes a level, not 1 + |G|.
The paper names cycle consistency without a formula; this one needs no further pass, as the paper says of all of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from gepc import noise
from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.errors import OptionError, check_choice
from gepc.extractors.base import Batch, Columns, Cost, Extractor, Table, register
from gepc.groups import Action, Group
from gepc.pooling import Pooling

if TYPE_CHECKING:
    import torch

FEATURES = ("s", "cos", "pair", "cycle", "x0", "b", "d")
PER_ELEMENT = ("s", "cos", "x0")
WITHOUT_GROUP = ("b", "d")
PAPER_LEVELS = (0.99997, 0.9999, 0.9979, 0.9969)
PAPER_LEVELS_CELEBA = (0.99997, 0.99, 0.999, 0.9969)

log = logging.getLogger(__name__)


@register("gepc")
@dataclass(frozen=True)
class GepcExtractor(Extractor):
    """The table keeps every (level, group element), so that ablations are arithmetic on it.

    Parameters
    ----------
    levels : where to look; see `Levels.of`.
    features : which of s, cos, pair, cycle, x0, b, d to compute; nothing else is.
    pool, topk, window : how a field becomes a number; see `gepc.pooling.Pooling`.
    group : which actions to compare; see `Group.of`.
    mc_samples : noise draws to average over.
    group_samples : evaluate only that many random non-identity elements per image and level.
    level_samples : evaluate only that many random levels per image.
    """

    calibration: ClassVar[str] = "kde"
    keep: ClassVar[int | None] = 2

    levels: Levels = Levels(PAPER_LEVELS)
    features: tuple[str, ...] = ("s",)
    pool: str = "topk"
    topk: float = 0.3
    window: int = 9
    group: Group = Group.of("paper")
    mc_samples: int = 1
    group_samples: int | None = None
    level_samples: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", Levels.of(self.levels))
        object.__setattr__(self, "group", Group.of(self.group))
        object.__setattr__(self, "features", (self.features,) if isinstance(self.features, str) else self.features)
        Pooling(self.pool, self.topk, self.window)
        if not self.features:
            raise OptionError(f"name at least one feature ({', '.join(FEATURES)})")
        for name in self.features:
            check_choice("feature", name, FEATURES)
        if len(set(self.features)) != len(self.features):
            raise OptionError(f"a feature is named twice: {', '.join(self.features)}")
        if self.mc_samples < 1:
            raise OptionError(f"mc_samples must be at least 1, got {self.mc_samples}")
        self._check_samples()

    def _check_samples(self) -> None:
        moving = len(self.group.moving)
        if self.group_samples is not None:
            if not 1 <= self.group_samples <= moving:
                raise OptionError(f"group_samples must be between 1 and {moving}, got {self.group_samples}")
            if "cycle" in self.features:
                raise OptionError("the feature 'cycle' needs the whole group; leave group_samples out")
            if "pair" in self.features and self.group_samples < 2:
                raise OptionError("the feature 'pair' needs group_samples of at least 2")
        if self.level_samples is not None and self.level_samples < 1:
            raise OptionError(f"level_samples must be at least 1, got {self.level_samples}")

    @property
    def pooling(self) -> Pooling:
        """pool(A)."""
        return Pooling(self.pool, self.topk, self.window)

    @property
    def column_names(self) -> tuple[str, ...]:
        """The features asked for, in the order asked."""
        return self.features

    @property
    def base_column(self) -> int:
        """CV(t) looks at s where it is computed, as in the paper; else at the first feature."""
        return self.features.index("s") if "s" in self.features else 0

    def timesteps(self, backbone: Backbone) -> tuple[int, ...]:
        """The candidate levels on the backbone's schedule."""
        return self.levels.timesteps(backbone.alphas_cumprod)

    def cost(self, backbone: Backbone, size: tuple[int, int], levels: int | None = None) -> Cost:
        """|G| passes per level and draw: one reference and one for each element but the identity."""
        count = len(self.timesteps(backbone)) if levels is None else levels
        if self.level_samples is not None:
            count = min(count, self.level_samples)
        moving = len(self.group.for_size(*size).moving)
        if self.group_samples is not None:
            moving = min(moving, self.group_samples)
        if set(self.features) <= set(WITHOUT_GROUP):
            moving = 0
        return Cost(forward=count * (1 + moving) * self.mc_samples)

    def paper_cost(self, levels: int) -> Cost:
        """What the paper counts: (1 + |G|) K m, the identity evaluated twice."""
        return Cost(forward=(1 + len(self.group)) * levels * self.mc_samples)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """Each feature as (N, levels, ...): per element, per pair, or (b, d) one number; NaN where sub-sampled."""
        return self._run(backbone, batch, timesteps)[0]

    def maps(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> tuple[Table, npt.NDArray[np.float32]]:
        """The table, and per level the map mean_g mean_c r_g^2 / b as (N, levels, H, W), from the same passes."""
        table, maps = self._run(backbone, batch, timesteps, with_maps=True)
        return table, np.stack(maps, axis=1)

    def columns(self, table: Table) -> Columns:
        """Mean over the group, and the features side by side."""
        return np.stack([self.reduce(name, table[name]) for name in self.features], axis=2)

    def reduce(self, feature: str, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The paper's scalar from table values: the mean over g (or over pairs), identity included.

        With a random subset of elements it is the unbiased estimate: what was left out (NaN) is replaced by the mean
        of its kind, elements by sampled elements, pairs with and without the identity each by theirs.
        """
        if feature in WITHOUT_GROUP:
            return values
        if feature in PER_ELEMENT:
            size = values.shape[2]
            return np.asarray(_nanmean(values[:, :, 1:]) * ((size - 1) / size))
        if feature == "pair":
            size = _group_size(values.shape[2])
            with_identity, others = values[:, :, : size - 1], values[:, :, size - 1 :]
            if others.shape[2] == 0:
                return _nanmean(with_identity)
            return (2.0 * _nanmean(with_identity) + (size - 2) * _nanmean(others)) / size
        return np.asarray(values.mean(axis=2))

    def _run(
        self, backbone: Backbone, batch: Batch, timesteps: Sequence[int], with_maps: bool = False
    ) -> tuple[Table, list[npt.NDArray[np.float32]]]:
        group = self._group_for(batch.size)
        used = self._level_masks(batch, len(timesteps))
        rows: list[Table] = []
        maps: list[npt.NDArray[np.float32]] = []
        for position, t in enumerate(timesteps):
            draws = [
                _Level(self, backbone, batch, group, t, draw, used[:, position], with_maps).run()
                for draw in range(self.mc_samples)
            ]
            rows.append({name: np.mean([row[name] for row, _ in draws], axis=0) for name in draws[0][0]})
            if with_maps:
                maps.append(np.mean([field for _, field in draws], axis=0, dtype=np.float32))
        return {name: np.stack([row[name] for row in rows], axis=1) for name in rows[0]}, maps

    def _group_for(self, size: tuple[int, int]) -> Group:
        group = self.group.for_size(*size)
        if len(group) < len(self.group):
            dropped = sorted(set(self.group.names) - set(group.names))
            log.info("images of %dx%d are not square: %s left out", *size, ", ".join(dropped))
        return group

    def _level_masks(self, batch: Batch, count: int) -> npt.NDArray[np.bool_]:
        if self.level_samples is None or self.level_samples >= count:
            return np.ones((len(batch), count), dtype=bool)
        return noise.subsets(batch.seed, batch.keys, count, self.level_samples, "levels")


class _Level:
    """One timestep and one noise draw of a batch.

    Works on eps = -sigma s: every feature but b is a ratio in which sigma cancels.
    """

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
        if "d" in self.wanted:
            row["d"] = self.method.pooling((self.base - self.noise).square()).double()
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
        out = np.zeros((self.count, *self.size), dtype=np.float32)
        out[self.used] = field.float().cpu().numpy()
        return out


def _group_size(pairs: int) -> int:
    """|G| from |G| (|G| - 1)/2."""
    return (1 + math.isqrt(1 + 8 * pairs)) // 2


def _nanmean(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean over the last axis of what was evaluated; NaN where nothing was."""
    seen = ~np.isnan(values)
    total = np.where(seen, values, 0.0).sum(axis=-1)
    count = seen.sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)

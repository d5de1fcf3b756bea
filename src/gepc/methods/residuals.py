"""The passes of GEPC: one noise level of a batch under every group element, and the comparison of the fields.

Computed from eps = -sigma s: sigma cancels in every feature but b. The formulas are in `gepc.methods.gepc`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from gepc.backbones.base import Backbone
from gepc.images import noise
from gepc.methods.base import Batch, MapParts, Table
from gepc.methods.groups import SQUARE_SYMMETRIES, Action, Group
from gepc.methods.pooling import log_contrast, position_distance

if TYPE_CHECKING:
    from gepc.methods.gepc import GepcExtractor

PER_ELEMENT = ("s", "cos", "x0", "var", "var_g")
LAGS: dict[str, tuple[tuple[int, int], ...]] = {
    "ax": ((0, 1),),
    "ay": ((1, 0),),
    "ad": ((1, 1), (1, -1)),
    "ax2": ((0, 2),),
    "ay2": ((2, 0),),
}
"""Autocorrelations of the denoising error: name -> shifts (down, right) in pixels, averaged."""
CORRELATIONS = (*LAGS, "ac")  # and the correlation between channels, which a network of one channel does not have
ACTIVATIONS = ("inner", "h")  # of inner layers: one number or two per channel
PIXEL_TESTS = ("os_cfar", "pixel_rx")  # of targets in radar images: features of the image, without a pass
WITHOUT_GROUP = ("b", "d", "cycle", "h", *PIXEL_TESTS, *CORRELATIONS)
GRID, VECTOR_CHANNELS = 64, 256  # the largest side of the grid of activations, and number of channels on it
FRESH = 1 << 16  # the first noise draw that `cycle` adds to the estimate of x_0; smaller ones noise the image


@dataclass
class Answer:
    """What the network returns for a batch: eps, the log-variance for `var`, the activations for `inner` and `h`."""

    eps: torch.Tensor
    log_variance: torch.Tensor | None = None
    maps: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def split(self, sizes: Sequence[int]) -> Iterator[Answer]:
        """The answers for consecutive parts of the batch."""
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            part = slice(end - size, end)
            log_variance = None if self.log_variance is None else self.log_variance[part]
            yield Answer(self.eps[part], log_variance, {name: maps[part] for name, maps in self.maps.items()})


@dataclass
class LevelPass:
    """One timestep and one noise draw of a batch."""

    method: GepcExtractor
    backbone: Backbone
    batch: Batch
    group: Group  # the elements that act on images of this size
    t: int
    draw: int
    used: npt.NDArray[np.bool_]  # which images are evaluated at this level, (N,)
    with_maps: bool = False

    def __post_init__(self) -> None:
        self.wanted = set(self.method.features)
        self.abar = float(self.backbone.alphas_cumprod[self.t])
        self.rows = np.flatnonzero(self.used)
        x_t, field = self.batch.noised(self.backbone, self.t, self.draw)
        pick = torch.from_numpy(self.rows).to(x_t.device)
        self.x_t, self.noise = (x_t, field) if self.used.all() else (x_t[pick], field[pick])
        self.chosen = self._choose_elements()

    def _choose_elements(self) -> npt.NDArray[np.bool_]:
        """The non-identity elements (columns) that each image (row) is compared under; the same for every draw."""
        moving, size = len(self.group.moving), self.method.group_samples
        if not self.method.compares:
            return np.zeros((len(self.rows), moving), dtype=bool)
        if size is None or size >= moving:
            return np.ones((len(self.rows), moving), dtype=bool)
        keys = [self.batch.keys[int(row)] for row in self.rows]
        return noise.subsets(self.batch.seed, keys, moving, size, "elements", self.t)

    def run(self) -> tuple[Table, MapParts]:
        """This level's row of the table, and the parts of the map (none without `with_maps`)."""
        self.answer = self._network(self.x_t, self._records)
        self.base = self.answer.eps
        self.energy = self.method.pooling(self.base.square())
        row = self._without_group()
        transported: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        fields = self._empty_maps()
        for name in PER_ELEMENT:
            if name in self.wanted:
                row[name] = self.base.new_full((len(self.rows), len(self.group)), torch.nan, dtype=torch.float64)
                row[name][:, 0] = 0.0
        turning = [action.name for action in self.group.moving if action.name in SQUARE_SYMMETRIES]
        for position, picked, answer in self._transport():
            action = self.group.moving[position]
            moved = action.inverse(answer.eps)
            gap = (moved - self.base[picked]).square().mean(1)
            for name, values in self._compare(picked, answer, moved, gap).items():
                row[name][picked, position + 1] = values.double()
            if self._grids and "inner" in self.wanted and action.name in turning:
                here = self._grids_of(picked)
                ratios = inner_residual(here, answer.maps, action)
                if "inner" not in row:
                    row["inner"] = ratios.new_full((len(self.rows), len(turning), ratios.shape[1]), torch.nan)
                row["inner"][picked, turning.index(action.name)] = ratios
                if "inner" in fields:
                    fields["inner"][picked] += inner_map(here, answer.maps, action, self.batch.size)
            if "residual" in fields:
                fields["residual"][picked] += gap / self.energy[picked, None, None]
            if self.wanted & {"pair", "walk"}:
                transported.append((position + 1, picked, moved))
        row.update(self._between(transported))
        table = {name: self._spread(values) for name, values in row.items()}
        return table, self._map_parts(fields) if self.with_maps else {}

    @property
    def _records(self) -> bool:
        """Whether the activations for x_t are needed."""
        return bool(self.wanted.intersection(ACTIVATIONS))

    def _network(self, x: torch.Tensor, record: bool) -> Answer:
        """One network call with what the features need of it."""
        if record and self.backbone.net is not None:
            eps, maps = self.backbone.eps_and_activations(x, self.t, self.method.layers)
            return Answer(eps, maps=maps)
        if "var" in self.wanted:
            return Answer(*self.backbone.eps_and_log_variance(x, self.t))
        return Answer(self.backbone.eps(x, self.t))

    def _empty_maps(self) -> dict[str, torch.Tensor]:
        """A field of zeros for each part of the map that compares group elements."""
        parts = {"residual": self.method.compares, "inner": bool(self._grids) and "inner" in self.wanted}
        shape = (len(self.rows), *self.batch.size)
        return {name: self.base.new_zeros(shape) for name, has in parts.items() if has and self.with_maps}

    def _grids_of(self, picked: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """`_grids` of some of the images."""
        whole = len(picked) == len(self.rows)
        return self._grids if whole else {name: maps[picked] for name, maps in self._grids.items()}

    @cached_property
    def _grids(self) -> dict[str, torch.Tensor]:
        """The activations for x_t that have the image's two dimensions; tokens that form no grid are left out."""
        return {name: maps for name, maps in self.answer.maps.items() if maps.shape[3] > 1 or maps.shape[2] == 1}

    def _pooled_variance(self, answer: Answer) -> torch.Tensor:
        """pool(log variance of the reverse step), (N,)."""
        assert answer.log_variance is not None
        return self.method.pooling(answer.log_variance).double()

    def _transport(self) -> Iterator[tuple[int, torch.Tensor, Answer]]:
        """(element, images, answer to P_g x_t), with as many elements in one network call as `rows` allows."""
        waiting: list[tuple[int, torch.Tensor]] = []
        for position in range(len(self.group.moving)):
            picked = torch.from_numpy(np.flatnonzero(self.chosen[:, position])).to(self.x_t.device)
            if len(picked) == 0:
                continue
            if waiting and sum(len(rows) for _, rows in waiting) + len(picked) > self.batch.rows:
                yield from self._evaluate(waiting)
                waiting = []
            waiting.append((position, picked))
        if waiting:
            yield from self._evaluate(waiting)

    def _evaluate(self, waiting: list[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor, Answer]]:
        moved = [self._moved(self.group.moving[position], picked) for position, picked in waiting]
        together = torch.cat(moved) if len(moved) > 1 else moved[0].contiguous()
        answers = self._network(together, "inner" in self.wanted).split([len(part) for part in moved])
        for (position, picked), answer in zip(waiting, answers, strict=True):
            yield position, picked, answer

    def _moved(self, action: Action, picked: torch.Tensor) -> torch.Tensor:
        """P_g x_t; where the action is on pixels, sqrt(abar) encode(P_g x) + sigma P_g noise."""
        whole = len(picked) == len(self.x_t)
        if self.batch.pixels is None or self.backbone.act_on == "latents":
            return action.apply(self.x_t if whole else self.x_t[picked])
        rows = torch.from_numpy(self.rows).to(picked.device)[picked]
        latents = self.batch.moved(self.backbone, action)[rows]
        moved: torch.Tensor = latents * self.abar**0.5 + action.apply(self.noise[picked]) * (1.0 - self.abar) ** 0.5
        return moved

    def _compare(
        self, picked: torch.Tensor, answer: Answer, moved: torch.Tensor, gap: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """s, cos, x0 and var of one element; `moved` is P_g^-1 eps(P_g x_t), `gap` is mean_c r_g^2."""
        found: dict[str, torch.Tensor] = {}
        for name in ("s", "var_g"):  # the variance over g of s is taken when the table is reduced
            if name in self.wanted:
                found[name] = self.method.pooling.pixels(gap) / self.energy[picked]
        if "cos" in self.wanted:
            a, b = moved.flatten(1), self.base[picked].flatten(1)
            norms = (a.square().sum(1) * b.square().sum(1)).sqrt()
            found["cos"] = 1.0 - (a * b).sum(1) / norms.clamp_min(1e-30)
        if "x0" in self.wanted:
            # x0_g - x0 = -(sigma/sqrt(abar)) (eps_g - eps)
            pooled = self.method.pooling.pixels(gap) * ((1.0 - self.abar) / self.abar)
            found["x0"] = pooled / self._x0_energy[picked]
        if "var" in self.wanted:
            found["var"] = (self._pooled_variance(answer) - self._pooled_variance(self.answer)[picked]).abs()
        return found

    @cached_property
    def _x0_energy(self) -> torch.Tensor:
        x0 = (self.x_t - self.base * (1.0 - self.abar) ** 0.5) / self.abar**0.5
        return self.method.pooling(x0.square())

    def _without_group(self) -> dict[str, torch.Tensor]:
        row: dict[str, torch.Tensor] = {}
        if "b" in self.wanted:
            row["b"] = self.energy.double() / (1.0 - self.abar)
        if "h" in self.wanted and self.answer.maps:
            row["h"] = channel_statistics(self.answer.maps)
        for name in self.wanted.intersection(PIXEL_TESTS):
            row[name] = self._pixel_test(name)
        if "cycle" in self.wanted:
            row["cycle"] = self._renoised().double()
        if not self.wanted & {"d", *CORRELATIONS}:
            return row
        error = self.base - self.noise
        if "d" in self.wanted:
            row["d"] = self.method.pooling(error.square()).double()
        row.update({name: autocorrelation(error, shifts) for name, shifts in LAGS.items() if name in self.wanted})
        if "ac" in self.wanted and error.shape[1] > 1:
            row["ac"] = channel_correlation(error)
        return row

    @cached_property
    def _distance(self) -> torch.Tensor:
        """Of the first half of the layers."""
        return activation_distance(dict(list(self._grids.items())[: (len(self._grids) + 1) // 2]), self.batch.size)

    @cached_property
    def _images(self) -> torch.Tensor:
        return self.batch.clean(self.backbone)[torch.from_numpy(self.rows).to(self.x_t.device)]

    @cached_property
    def _contrast(self) -> torch.Tensor:
        return log_contrast(self._images.float().mean(1), self.method.window)

    def _pixel_test(self, name: str) -> torch.Tensor:
        """log pool(-log Pfa) of a detector without a network, at the size of a target."""
        from gepc.lab.radar.cfar import RX, OrderStatisticCFAR, PixelTest

        topk, window = self.method.topk, self.method.window
        test: PixelTest = RX(topk, window) if name == "pixel_rx" else OrderStatisticCFAR(topk, window, scale="log")
        return test.pooled(-test.log_pfa(self._images))

    def _renoised(self) -> torch.Tensor:
        """pool((x_t' - x_t)^2/(x_t^2 + 1e-8)), x_t' the estimate of x_0 under fresh noise of the same level."""
        fresh = self.batch.noise(self.backbone, self.t, FRESH + self.draw)[torch.from_numpy(self.rows)]
        return self.method.pooling((1.0 - self.abar) * (fresh - self.base).square() / (self.x_t.square() + 1e-8))

    def _between(self, transported: list[tuple[int, torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """pair and walk: differences between transported scores; NaN where one of the two was not evaluated."""
        size = len(self.group)
        pairs = {"pair": list(combinations(range(size), 2)), "walk": [(i, (i + 1) % size) for i in range(size)]}
        wanted = sorted(self.wanted & set(pairs))
        if not wanted:
            return {}
        scores = self.base.new_full((size, *self.base.shape), torch.nan)
        scores[0] = self.base
        for column, picked, moved in transported:
            scores[column, picked] = moved
        row = {}
        for name in wanted:
            gaps = [self.method.pooling((scores[i] - scores[j]).square()) / self.energy for i, j in pairs[name]]
            row[name] = torch.stack(gaps, 1).double()
        return row

    def _spread(self, values: torch.Tensor) -> npt.NDArray[Any]:
        """From the rows of the images used at this level to all images, in float32 or float64; NaN for the others."""
        numbers = (values if values.dtype == torch.float64 else values.float()).cpu().numpy()
        out = np.full((len(self.batch), *numbers.shape[1:]), np.nan, dtype=numbers.dtype)
        out[self.rows] = numbers
        return out

    def _map_parts(self, fields: Mapping[str, torch.Tensor]) -> MapParts:
        """Means over g, identity included; a random subset of elements is scaled up to the group."""
        evaluated = int(self.chosen.sum(axis=1).max(initial=1))  # the same for every image
        size = len(self.group)
        share = (size - 1) / size / evaluated
        return {name: self._spread(field * share).astype(np.float32) for name, field in fields.items()}


def channel_statistics(maps: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean and standard deviation over pixels of every channel of the recorded layers, (N, 2 C): all means first."""
    fields = [field.float() for field in maps.values()]
    means = [field.mean((2, 3), keepdim=True) for field in fields]
    # torch.var_mean takes nine times as long on channels-last fields
    deviations = [(field - mean).square().mean((2, 3)).sqrt() for field, mean in zip(fields, means, strict=True)]
    return torch.cat([mean.flatten(1) for mean in means] + deviations, 1)


def inner_residual(maps: Mapping[str, torch.Tensor], moved: Mapping[str, torch.Tensor], action: Action) -> torch.Tensor:
    """mean_pixels (A - P_g^-1 A_g)^2 / mean_pixels A^2 for every channel, (N, C), of `maps` A and `moved` A_g."""
    ratios = []
    for name, here in maps.items():
        gap = (here - action.inverse(moved[name])).float().square().mean((2, 3))
        ratios.append(gap / here.float().square().mean((2, 3)).clamp_min(1e-30))
    return torch.cat(ratios, 1)


def inner_map(
    maps: Mapping[str, torch.Tensor], moved: Mapping[str, torch.Tensor], action: Action, size: tuple[int, int]
) -> torch.Tensor:
    """`inner_residual` before the mean over pixels, at `size`, averaged over channels and over layers, (N, H, W)."""
    fields = []
    for name, here in maps.items():
        energy = here.float().square().mean((2, 3), keepdim=True).clamp_min(1e-30)
        gap = (here - action.inverse(moved[name])).float().square() / energy
        fields.append(interpolate(gap.mean(1, keepdim=True), size, mode="bilinear")[:, 0])
    return torch.stack(fields).mean(0)


def activation_distance(maps: Mapping[str, torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
    """RX in the inner layers: how unusual the activations at a position are among those of the image, (N, H, W).

    d^2/C of the vectors of all C channels (`position_distance`) on a grid of at most 64 cells along a side. It compares
    an image with itself, so that another sensor is not foreign as a whole.
    """
    grid = _common_grid(size)
    vectors = torch.cat([adaptive_avg_pool2d(layer.float(), grid) for layer in maps.values()], 1)
    distance = position_distance(vectors) / vectors.shape[1]
    return interpolate(distance[:, None], size, mode="bilinear")[:, 0]


def _common_grid(size: tuple[int, int]) -> tuple[int, int]:
    """Cells of a grid over an image of `size`, at most `GRID` along a side."""
    step = -(-max(size) // GRID)
    return -(-size[0] // step), -(-size[1] // step)


def position_vectors(maps: Mapping[str, torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
    """The activations at each position of a common grid, (N, C, h, w), with at most 64 positions along a side.

    Of the channels at most 256 are taken, evenly spaced over all layers: neighbouring channels say much the same.
    """
    grid = _common_grid(size)
    channels = sum(activations.shape[1] for activations in maps.values())
    every = torch.linspace(0, channels - 1, min(channels, VECTOR_CHANNELS)).round().long()
    found, first = [], 0
    for activations in maps.values():
        taken = every[(every >= first) & (every < first + activations.shape[1])] - first
        first += activations.shape[1]
        layer = activations[:, taken.to(activations.device)].float()
        larger = layer.shape[2] > grid[0] or layer.shape[3] > grid[1]
        found.append(adaptive_avg_pool2d(layer, grid) if larger else interpolate(layer, grid, mode="bilinear"))
    return torch.cat(found, 1)


def autocorrelation(field: torch.Tensor, shifts: Sequence[tuple[int, int]]) -> torch.Tensor:
    """mean f(p) f(p + shift) / mean f^2 over pixels and shifts, without wrap-around; 0 if a shift exceeds the image."""
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
    """mean f_c f_c' / mean f^2 over pixels and pairs of channels c != c': ((sum_c f_c)^2/sum_c f_c^2 - 1)/(C - 1)."""
    power = field.square().flatten(1).sum(1, dtype=torch.float64).clamp_min(1e-30)
    together = field.sum(1).square().flatten(1).sum(1, dtype=torch.float64)
    return (together / power - 1.0) / (field.shape[1] - 1)

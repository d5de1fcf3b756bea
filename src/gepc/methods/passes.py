"""The network passes of GEPC: one noise level of a batch, for x_t and for P_g x_t under every group element.

The answers are plain frozen values, which the functions of `gepc.methods.features` read. Everything is in units of
eps = -sigma s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import log_variances
from gepc.methods.base import Batch, noised
from gepc.methods.groups import Action, Group
from gepc.methods.pooling import Pooling

Activations = Mapping[str, torch.Tensor]
TOGETHER_PIXELS = 1 << 17  # of moved copies in one network call; larger calls are not faster and take more memory
FRESH = 1 << 16  # the first noise draw that `cycle` adds to the estimate of x_0; smaller ones noise the image


@dataclass(frozen=True)
class LevelAnswers:
    """What is known about n images at one noise level and one noise draw, and what the network answers for x_t."""

    rows: npt.NDArray[np.int64]  # positions of the n images in their batch
    t: int
    abar: float
    images: torch.Tensor  # x_0, (n, C, H, W), as the next four
    noise: torch.Tensor
    x_t: torch.Tensor
    eps: torch.Tensor  # eps(x_t)
    pooling: Pooling  # pool
    activations: Activations = field(default_factory=dict)  # of inner layers, (n, C_l, H_l, W_l) by name, if recorded
    log_variance: torch.Tensor | None = None  # of the reverse step, if asked for
    fresh_noise: torch.Tensor | None = None  # a second draw of noise, if asked for
    log_range: tuple[float, ...] = ()  # ln beta_t and ln btilde_t, if the log-variance is asked for

    @property
    def size(self) -> tuple[int, int]:
        """(H, W)."""
        return self.x_t.shape[2], self.x_t.shape[3]

    @cached_property
    def energy(self) -> torch.Tensor:
        """pool(eps^2), (n,)."""
        return self.pooling(self.eps.square())

    @cached_property
    def error(self) -> torch.Tensor:
        """e = eps - noise, the denoising error, (n, C, H, W)."""
        return self.eps - self.noise

    @cached_property
    def estimate_energy(self) -> torch.Tensor:
        """pool(x0^2) of the estimate x0 = (x_t - sigma eps)/sqrt(abar), (n,)."""
        x0 = (self.x_t - self.eps * (1.0 - self.abar) ** 0.5) / self.abar**0.5
        return self.pooling(x0.square())

    @cached_property
    def grids(self) -> Activations:
        """The activations that have the image's two dimensions; tokens that form no grid are left out."""
        highest = -(-self.size[0] // self.size[1])  # of a grid with a single column: a narrow image has such layers
        return {name: maps for name, maps in self.activations.items() if maps.shape[3] > 1 or maps.shape[2] <= highest}


@dataclass(frozen=True)
class ElementAnswers:
    """What the network answers for P_g x_t under one group element g, for those images that are compared under it."""

    action: Action  # g
    rows: torch.Tensor  # positions of the images in `LevelAnswers`
    eps: torch.Tensor  # the transported answer P_g^-1 eps(P_g x_t)
    gap: torch.Tensor  # the weight of g times the mean over channels of r_g^2 = (P_g^-1 eps(P_g x_t) - eps(x_t))^2
    activations: Activations  # for P_g x_t, not moved back, if recorded
    log_variance: torch.Tensor | None  # for P_g x_t, not moved back, if asked for


class _Answer(NamedTuple):
    """What the network returns for one batch of inputs."""

    eps: torch.Tensor
    activations: Activations
    log_variance: torch.Tensor | None

    def split(self, sizes: Sequence[int]) -> Iterator[_Answer]:
        """The answers for consecutive parts of the batch."""
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            part = slice(end - size, end)
            log_variance = None if self.log_variance is None else self.log_variance[part]
            yield _Answer(self.eps[part], {name: maps[part] for name, maps in self.activations.items()}, log_variance)


@dataclass(frozen=True)
class Passes:
    """How the network is evaluated for a batch, at any noise level."""

    backbone: Backbone
    batch: Batch
    group: Group  # the elements that act on images of this size
    pooling: Pooling
    layers: tuple[str, ...] | None = None  # the layers to record; None chooses them
    record: bool = False  # whether to record the activations for x_t
    record_moved: bool = False  # whether to record the activations for P_g x_t
    log_variance: bool = False  # whether to ask for the log-variance of the reverse step
    fresh_noise: bool = False  # whether to draw noise a second time

    def at(self, t: int, draw: int, used: npt.NDArray[np.bool_]) -> LevelAnswers:
        """The pass for x_t, of the images that are `used` (N,) at this level."""
        rows = np.flatnonzero(used)
        fields = [self.batch.clean(self.backbone), self.batch.noise(self.backbone, t, draw)]
        if self.fresh_noise:
            fields.append(self.batch.noise(self.backbone, t, FRESH + draw))
        if not used.all():
            picked = torch.from_numpy(rows).to(self.backbone.device)
            fields = [values[picked] for values in fields]
        images, noise = fields[:2]
        fresh_noise = fields[2] if self.fresh_noise else None
        abar = float(self.backbone.alphas_cumprod[t])
        x_t = noised(images, noise, abar)
        eps, activations, log_variance = self._network(x_t, t, self.record)
        limits = log_variances(self.backbone.alphas_cumprod) if self.log_variance else ()
        log_range = tuple(float(limit[t]) for limit in limits)
        return LevelAnswers(
            rows, t, abar, images, noise, x_t, eps, self.pooling, activations, log_variance, fresh_noise, log_range
        )

    def transported(self, level: LevelAnswers, chosen: npt.NDArray[np.bool_]) -> Iterator[ElementAnswers]:
        """The passes for P_g x_t, one element after another, so that they need not be in memory together.

        A network call has as many elements as `Batch.rows` and `TOGETHER_PIXELS` allow, and at least one.

        Parameters
        ----------
        level : the answers for x_t.
        chosen : the elements other than the identity (columns) that each image (row) is compared under.
        """
        waiting: list[tuple[Action, torch.Tensor]] = []
        most = min(self.batch.rows, TOGETHER_PIXELS // (level.size[0] * level.size[1]))
        for position, action in enumerate(self.group.moving):
            rows = torch.from_numpy(np.flatnonzero(chosen[:, position])).to(level.x_t.device)
            if len(rows) == 0:
                continue
            if waiting and sum(len(others) for _, others in waiting) + len(rows) > most:
                yield from self._together(level, waiting)
                waiting = []
            keys = [self.batch.keys[int(row)] for row in level.rows[chosen[:, position]]]
            waiting.append((action.drawn(self.batch.seed, keys), rows))
        if waiting:
            yield from self._together(level, waiting)

    def _together(
        self, level: LevelAnswers, elements: Sequence[tuple[Action, torch.Tensor]]
    ) -> Iterator[ElementAnswers]:
        """One network call for several elements, each with the images that are compared under it."""
        moved = [self._moved(level, action, rows) for action, rows in elements]
        together = torch.cat(moved) if len(moved) > 1 else moved[0].contiguous()
        answers = self._network(together, level.t, self.record_moved).split([len(part) for part in moved])
        for (action, rows), answer in zip(elements, answers, strict=True):
            here = level.eps[rows]
            eps = action.transported(answer.eps, here)
            gap = (eps - here).square().mean(1) * action.weight
            yield ElementAnswers(action, rows, eps, gap, answer.activations, answer.log_variance)

    def _moved(self, level: LevelAnswers, action: Action, rows: torch.Tensor) -> torch.Tensor:
        """P_g x_t; where the action is on pixels, sqrt(abar) encode(P_g x) + sigma P_g noise."""
        intensity = action.kind == "intensity"  # acts on the clean image, and not on the noise
        if self.batch.pixels is None or self.backbone.act_on == "latents":
            if intensity:
                return noised(action.apply(level.images[rows]), level.noise[rows], level.abar)
            return action.apply(level.x_t if len(rows) == len(level.x_t) else level.x_t[rows])
        in_batch = torch.from_numpy(level.rows).to(rows.device)[rows]
        drawn = self.group.actions[self.group.names.index(action.name)].drawn(self.batch.seed, self.batch.keys)
        noise = level.noise[rows] if intensity else action.apply(level.noise[rows])
        return noised(self.batch.moved(self.backbone, drawn)[in_batch], noise, level.abar)

    def _network(self, x: torch.Tensor, t: int, record: bool) -> _Answer:
        if record and self.backbone.net is not None:
            return _Answer(*self.backbone.eps_and_activations(x, t, self.layers), None)
        if self.log_variance:
            eps, log_variance = self.backbone.eps_and_log_variance(x, t)
            return _Answer(eps, {}, log_variance)
        return _Answer(self.backbone.eps(x, t), {}, None)

"""GEPC: how far the score disagrees with itself when the noisy image is flipped, rotated or shifted.

With r_g = P_g^-1 s(P_g x_t) - s(x_t), the transported scores s_g = s + r_g and b = pool(s(x_t)^2):

    s     mean_g       pool(r_g^2) / b                        residual energy (the paper's default)
    cos   mean_g       1 - <s_g, s> / (|s_g| |s|)             over channels and pixels together
    pair  mean_{g<g'}  pool((s_g - s_g')^2) / b               dispersion of the transported scores
    walk  mean_i       pool((s_{g_i} - s_{g_{i+1}})^2) / b    once around the group in its order, closed
    x0    mean_g       pool((x0_g - x0)^2) / pool(x0^2)       the same as s for x0 = (x_t - sigma eps)/sqrt(abar)
    b     pool(s^2)                                           score energy
    d     pool((eps - noise)^2)                               denoising error, known because we drew the noise
    inner mean_g       mean_p (A - P_g^-1 A_g)^2 / mean_p A^2 the residual of inner layers, for each of their channels

and as the authors' code defines them, with x_t' the estimate x0 under fresh noise of the same level, and v the log of
the learned variance:

    cycle pool((x_t' - x_t)^2 / (x_t^2 + 1e-8))               does the image survive denoising and noising again?
    var   mean_g       |pool(v_g) - pool(v)|                  the same as s for the learned variance
    var_g var_g        pool(r_g^2) / b                        variance over the group

The means include the identity, whose residual is zero and is never evaluated: |G| passes per level, not 1 + |G|.
In `inner` A are the activations for x_t and A_g those for P_g x_t; the mean is over flips, rotations and
transpositions without the identity.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError, check_choice
from gepc.core.options import at_least
from gepc.images import noise
from gepc.methods.base import Batch, Columns, Cost, Extractor, HasMaps, MapParts, Table, register
from gepc.methods.groups import SQUARE_SYMMETRIES, Group
from gepc.methods.pooling import Pooling
from gepc.methods.residuals import ACTIVATIONS, PER_ELEMENT, WITHOUT_GROUP, LevelPass

FEATURES = ("s", "cos", "pair", "walk", "x0", "b", "d", "inner", "cycle", "var", "var_g")
PAPER_LEVELS = (0.99997, 0.9999, 0.9979, 0.9969)
PAPER_LEVELS_CELEBA = (0.99997, 0.99, 0.999, 0.9969)
DEFAULT_LEVELS = (0.9999, 0.998, 0.99, 0.97, 0.9)  # a wider range than the paper's; selection keeps the most stable

TINY = 1e-30  # an exactly equivariant network has residuals of 0: constant columns, which calibration reports

log = logging.getLogger(__name__)


@register("gepc")
@dataclass(frozen=True)
class GepcExtractor(HasMaps, Extractor):
    """Group-equivariant posterior consistency, the method of the paper.

    The table keeps every (level, group element), so that ablations are arithmetic on it. The parameters are those of
    `gepc.GEPC`. On a backbone that is a plain function, without layers, the feature `inner` is left out.
    """

    keep: ClassVar[int | None] = 2
    known_features: ClassVar[tuple[str, ...]] = FEATURES
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"levels": Levels(PAPER_LEVELS)},
        "paper-celeba": {"levels": Levels(PAPER_LEVELS_CELEBA)},
        "inner": {"features": ("inner",)},
    }
    level_pass: ClassVar[type[LevelPass]] = LevelPass

    levels: Levels = Levels(DEFAULT_LEVELS)
    features: tuple[str, ...] = ("s",)
    pool: str = "topk"
    topk: float = 0.3
    window: int = 9
    group: Group = Group.of("paper")
    mc_samples: int = at_least(1, 1)
    group_samples: int | None = None
    level_samples: int | None = at_least(1, None)
    layers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.layers, str):
            object.__setattr__(self, "layers", (self.layers,))
        Pooling(self.pool, self.topk, self.window)
        if not self.features:
            raise OptionError(f"name at least one feature ({', '.join(self.known_features)})")
        for name in self.features:
            check_choice("feature", name, self.known_features)
        if len(set(self.features)) != len(self.features):
            raise OptionError(f"a feature is named twice: {', '.join(self.features)}")
        if "inner" in self.features and not set(self.group.names) & set(SQUARE_SYMMETRIES):
            raise OptionError("the feature 'inner' needs a group with a flip or a rotation")
        if "var" in self.features and set(self.features) & set(ACTIVATIONS):
            raise OptionError("the feature 'var' cannot be combined with inner and h; leave one of them out")
        if self.group_samples is not None:
            self._check_group_samples(self.group_samples)

    def _check_group_samples(self, count: int) -> None:
        moving = len(self.group.moving)
        if not 1 <= count <= moving:
            raise OptionError(f"group_samples must be between 1 and {moving}, got {count}")
        if "walk" in self.features:
            raise OptionError("the feature 'walk' needs the whole group; leave group_samples out")
        if "pair" in self.features and count < 2:
            raise OptionError("the feature 'pair' needs group_samples of at least 2")

    @property
    def pooling(self) -> Pooling:
        """pool(A)."""
        return Pooling(self.pool, self.topk, self.window)

    @property
    def calibration_name(self) -> str:
        """The default calibrator: parts calibrated apart and added up, if one of the features has many columns."""
        return f"parts:narrow={self.calibration}" if set(self.features) & set(ACTIVATIONS) else self.calibration

    @property
    def _ordered(self) -> tuple[str, ...]:
        """The features in the order of the columns: as asked, those of inner layers last."""
        return tuple(sorted(self.features, key=ACTIVATIONS.__contains__))

    @property
    def column_names(self) -> tuple[str, ...]:
        return self._ordered

    def _present(self, table: Table) -> list[str]:
        """The features in the order of the columns, without those that this backbone does not have."""
        present = [name for name in self._ordered if name in table]
        if not present:
            raise OptionError(f"this backbone has no feature {', '.join(self.features)}; name another feature")
        return present

    def stability(self, table: Table) -> npt.NDArray[np.float64]:
        """The paper's u_t: s where it is computed, otherwise the first feature; a mean over the channels of `inner`."""
        present = self._present(table)
        name = "s" if "s" in present else present[0]
        if name in ACTIVATIONS:
            return _nanmean(table[name].reshape(*table[name].shape[:2], -1))
        return self.reduce(name, table[name])

    def timesteps(self, backbone: Backbone) -> tuple[int, ...]:
        return self.levels.timesteps(backbone.alphas_cumprod)

    def cost(self, backbone: Backbone, size: tuple[int, int], levels: int | None = None) -> Cost:
        """|G| passes per level and draw: one reference and one for each element other than the identity."""
        count = len(self.timesteps(backbone)) if levels is None else levels
        moving = len(self.acting(size).moving) if self.compares else 0
        count, moving = min(count, self.level_samples or count), min(moving, self.group_samples or moving)
        return Cost(forward=count * (1 + moving) * self.mc_samples)

    def encoder_passes(self, backbone: Backbone, size: tuple[int, int]) -> int:
        """One, and with `act_on="pixels"` one more for every element other than the identity."""
        passes = super().encoder_passes(backbone, size)
        if backbone.act_on == "pixels" and self.compares:
            passes *= len(self.group.for_size(*size))
        return passes

    def paper_cost(self, levels: int) -> Cost:
        """The cost as the paper counts it: (1 + |G|) K m, with the identity evaluated twice."""
        return Cost(forward=(1 + len(self.group)) * levels * self.mc_samples)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """Each feature as (N, levels, ...): per element, per pair, or (b, d) one number; NaN where sub-sampled."""
        return self._run(backbone, batch, timesteps)[0]

    def map_parts(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> tuple[Table, MapParts]:
        """The parts are `residual`, mean_g mean_c r_g^2 / b, and with the feature `inner` that of the inner layers."""
        return self._run(backbone, batch, timesteps, with_maps=True)

    @property
    def has_maps(self) -> bool:
        return self.compares  # otherwise there is no residual

    @property
    def compares(self) -> bool:
        """Whether any feature compares group elements."""
        return not set(self.features) <= set(WITHOUT_GROUP)

    @property
    def by_level(self) -> bool:
        return self.level_samples is None  # the levels drawn for an image depend on how many there are

    def for_fitting(self) -> GepcExtractor:
        return replace(self, level_samples=None)

    def as_scored(self, columns: Columns, keys: Sequence[bytes], seed: int) -> Columns:
        return np.where(self._level_masks(keys, seed, columns.shape[1])[:, :, None], columns, np.nan)

    def columns(self, table: Table) -> Columns:
        return np.concatenate([self._columns_of(name, table[name]) for name in self._present(table)], axis=2)

    def parts(self, table: Table) -> dict[str, int]:
        """Columns that are calibrated together: those of the network's output, and those of its inner layers."""
        widths = {"output": 0, "layers": 0}
        for name in self._present(table):
            part = "layers" if name in ACTIVATIONS else "output"
            widths[part] += self._columns_of(name, table[name][:1]).shape[2]
        return {part: width for part, width in widths.items() if width}

    def _columns_of(self, feature: str, values: npt.NDArray[np.float64]) -> Columns:
        if feature == "h":  # means, and standard deviations, which are positive with a long tail
            means, deviations = np.split(values, 2, axis=2)
            return np.concatenate([means, np.log(np.maximum(deviations, TINY))], axis=2)
        if feature == "inner":
            return np.log(np.maximum(_nanmean(np.moveaxis(values, 2, 3)), TINY))
        return self.reduce(feature, values)[:, :, None]

    def reduce(self, feature: str, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The paper's scalar from table values: the mean over g (or over pairs), identity included.

        With a random subset of elements the estimate is unbiased: pairs with the identity are averaged apart.
        """
        if feature in WITHOUT_GROUP:
            return values
        if feature == "var_g":
            return _nanmean((values - _nanmean(values)[..., None]) ** 2)
        if feature in PER_ELEMENT:
            size = values.shape[2]
            return np.asarray(_nanmean(values[:, :, 1:]) * ((size - 1) / size))
        if feature == "pair":
            size = (1 + math.isqrt(1 + 8 * values.shape[2])) // 2  # |G| from the number of pairs
            with_identity, others = values[:, :, : size - 1], values[:, :, size - 1 :]
            if others.shape[2] == 0:
                return _nanmean(with_identity)
            return (2.0 * _nanmean(with_identity) + (size - 2) * _nanmean(others)) / size
        return np.asarray(values.mean(axis=2))

    def _run(
        self, backbone: Backbone, batch: Batch, timesteps: Sequence[int], with_maps: bool = False
    ) -> tuple[Table, MapParts]:
        if "var" in self.features and not backbone.learned_variance:
            raise OptionError("the feature 'var' needs a network with learned variance; this one has none")
        group = self.acting(batch.size)
        if len(group) < len(self.group):
            dropped = sorted(set(self.group.names) - set(group.names))
            log.info("images of %dx%d are not square: %s left out", *batch.size, ", ".join(dropped))
        used = self._level_masks(batch.keys, batch.seed, len(timesteps))
        rows: list[Table] = []
        maps: list[MapParts] = []
        for position, t in enumerate(timesteps):
            one_pass = partial(self.level_pass, self, backbone, batch, group, t)
            draws = [one_pass(draw, used[:, position], with_maps).run() for draw in range(self.mc_samples)]
            rows.append({name: np.mean([row[name] for row, _ in draws], axis=0) for name in draws[0][0]})
            parts = [found for _, found in draws]
            maps.append({name: np.mean([part[name] for part in parts], axis=0, dtype=np.float32) for name in parts[0]})
        return _by_level(rows), _by_level(maps)

    def acting(self, size: tuple[int, int]) -> Group:
        """The group on images of that size: rotations by a quarter turn need square ones."""
        return self.group.for_size(*size)

    def _level_masks(self, keys: Sequence[bytes], seed: int, count: int) -> npt.NDArray[np.bool_]:
        if self.level_samples is None or self.level_samples >= count:
            return np.ones((len(keys), count), dtype=bool)
        return noise.subsets(seed, keys, count, self.level_samples, "levels")


def _by_level(levels: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """Levels side by side: (N, levels, ...) by name."""
    return {name: np.stack([level[name] for level in levels], axis=1) for name in levels[0]}


def _nanmean(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean over the last axis of what was evaluated; NaN where nothing was."""
    seen = ~np.isnan(values)
    total = np.where(seen, values, 0.0).sum(axis=-1)
    count = seen.sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)

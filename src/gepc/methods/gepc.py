"""GEPC: how far the score disagrees with itself when the noisy image is flipped, rotated or shifted.

The features and their formulas are in `gepc.methods.features`. Averages over the group include the identity, whose
residual is zero and is never evaluated: |G| passes per level, not 1 + |G|.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError, check_choice
from gepc.core.options import at_least
from gepc.core.parts import OUTPUT, Part
from gepc.images import noise
from gepc.methods.base import Batch, Columns, Cost, Extractor, HasMaps, MapParts, Table, register
from gepc.methods.features import MAP_PARTS, Feature, MapPart, compute_row, find_feature, nanmean
from gepc.methods.groups import Group
from gepc.methods.passes import Passes
from gepc.methods.pooling import Pooling
from gepc.methods.presets import Preset, Presets

FEATURES = ("s", "residual", "cos", "pair", "walk", "x0", "b", "d", "inner", "cycle", "var", "var_raw", "var_g")
PAPER_LEVELS = (0.99997, 0.9999, 0.9979, 0.9969)
PAPER_LEVELS_CELEBA = (0.99997, 0.99, 0.999, 0.9969)
DEFAULT_LEVELS = (0.9999, 0.998, 0.99, 0.97, 0.9)  # a wider range than the paper's; selection keeps the most stable

log = logging.getLogger(__name__)


@register("gepc")
@dataclass(frozen=True)
class GepcExtractor(HasMaps, Extractor):
    """Group-equivariant posterior consistency, the method of the paper.

    The table keeps every (level, group element), so that ablations are arithmetic on it. On a backbone that is a plain
    function, without layers, the feature `inner` is left out.

    Parameters
    ----------
    levels : candidate noise levels.
    features : any of s, residual, cos, pair, walk, x0, b, d, inner, cycle, var, var_raw and var_g; the formulas are in
        `gepc.methods.features`.
    pool : pooling over pixels: `mean`, `topk` or `local`.
    topk : the share of the largest pixels, for `topk` and `local`.
    window : side of the box filter, for `local`.
    group : a named group (`paper`, `c4`, `d4`, `flips`, `shifts`, `colours`, `sign`, `so2:samples=4`,
        `translations:max=2,samples=4`), `auto` to choose while fitting, or a list of element names or actions.
    mc_samples : noise draws to average.
    group_samples : a random subset of this many elements per image and level; None uses all.
    level_samples : a random subset of this many levels per image when scoring; None uses all, as fitting does.
    layers : names of the layers that `inner` compares, with wildcards; None chooses them.
    """

    keep: ClassVar[int | None] = 2
    presets: ClassVar[Presets] = {
        "paper": Preset({"levels": Levels(PAPER_LEVELS)}),
        "paper-celeba": Preset({"levels": Levels(PAPER_LEVELS_CELEBA)}),
        # what the authors' code does, for a backbone that was loaded with time_scale=4
        "released": Preset({"levels": Levels(PAPER_LEVELS)}),
        "released-svhn": Preset({"levels": Levels(PAPER_LEVELS), "topk": 0.37}),
        "released-celeba": Preset({"levels": Levels(PAPER_LEVELS_CELEBA), "features": ("s", "cos", "pair")}),
        "inner": Preset({"features": ("inner",)}),
    }

    transformed: ClassVar[bool] = False  # whether columns of the network's output are transformed, mostly by logarithms

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
            raise OptionError("name at least one feature, such as s")
        if len(set(self.features)) != len(self.features):
            raise OptionError(f"a feature is named twice: {', '.join(self.features)}")
        kinds = self.kinds
        layers = [kind.name for kind in kinds if kind.layers]
        for kind in kinds:
            if kind.log_variance and layers:
                raise OptionError(f"the feature {kind.name!r} cannot be combined with {layers[0]}; leave one out")
            if kind.per == "element" and not set(kind.elements(self.group)) - {"id"}:
                raise OptionError(f"the feature {kind.name!r} needs a group with a flip or a rotation")
        if self.layers is not None and not (layers or any(MAP_PARTS[name].layers for name in self.shown_parts)):
            raise OptionError("`layers` needs a feature of inner layers, such as inner", options=("layers",))
        if self.group_samples is not None:
            self._check_group_samples(self.group_samples)

    def _check_group_samples(self, count: int) -> None:
        moving = len(self.group.moving)
        if not 1 <= count <= moving:
            raise OptionError(f"group_samples must be between 1 and {moving}, got {count}")
        for kind in self.kinds:
            if kind.least_elements is None:
                raise OptionError(f"the feature {kind.name!r} needs the whole group; leave group_samples out")
            least = kind.least_elements
            if kind.per == "element":  # an image must not draw elements without this feature alone
                without = moving - len(set(kind.elements(self.group)) - {"id"})
                least = max(least, without + 1)
            if count < least:
                raise OptionError(f"the feature {kind.name!r} needs group_samples of at least {least} with this group")

    @property
    def pooling(self) -> Pooling:
        """pool(A)."""
        return Pooling(self.pool, self.topk, self.window)

    @property
    def kinds(self) -> list[Feature]:
        """The features in the order of the columns: as asked, those of inner layers last."""
        return sorted(map(self.find_feature, self.features), key=lambda kind: kind.layers)

    def find_feature(self, name: str) -> Feature:
        """The feature of that name: one of the paper and its code."""
        check_choice("feature", name, FEATURES)
        return find_feature(name)

    @property
    def each_element(self) -> bool:
        """Whether a feature has a column for every group element, or one for all of them."""
        return False

    @property
    def calibration_name(self) -> str:
        """The default calibrator: parts calibrated apart and combined, if one of the features has many columns."""
        return f"evidence:narrow={self.calibration}" if self.kinds[-1].layers else self.calibration

    @property
    def column_names(self) -> tuple[str, ...]:
        """Features with a column for each element as `s:rot90`; for square images and several channels."""
        names: list[str] = []
        for kind in self.kinds:
            each = self.each_element and kind.by_element
            names += [f"{kind.name}:{action.name}" for action in self.group.moving] if each else [kind.name]
        return tuple(names)

    def _present(self, table: Table) -> list[Feature]:
        """The features in the order of the columns, without those that this backbone does not have."""
        present = [kind for kind in self.kinds if kind.name in table]
        if not present:
            missing = f"there is no feature {', '.join(self.features)} with this backbone and group"
            raise OptionError(f"{missing}; name another feature")
        return present

    def stability(self, table: Table) -> npt.NDArray[np.float64]:
        """The paper's u_t: s where it is computed, otherwise the first feature; a mean over the channels of layers."""
        present = self._present(table)
        kind = next((kind for kind in present if kind.name == "s"), present[0])
        values = table[kind.name]
        return nanmean(values.reshape(*values.shape[:2], -1)) if kind.layers else kind.average(values)

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
            passes *= len(self.acting(size))
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
    def square_only(self) -> bool:
        return self.compares and super().square_only

    @property
    def compares(self) -> bool:
        """Whether any feature compares group elements."""
        return any(kind.per != "image" for kind in self.kinds)

    @property
    def memory(self) -> float:
        """More where the activations for x_t are held during the passes for P_g x_t; measured on `photos-tiny`."""
        return 1.6 if any(kind.layers and kind.per != "image" for kind in self.kinds) else 1.0

    @property
    def shown_parts(self) -> list[str]:
        """Names of the parts of the map: `residual`, mean_g mean_c r_g^2 / b, and that of the inner layers."""
        return [*(["residual"] if self.compares else []), *(["inner"] if "inner" in self.features else [])]

    @property
    def by_level(self) -> bool:
        return self.level_samples is None  # the levels drawn for an image depend on how many there are

    def for_fitting(self) -> GepcExtractor:
        return replace(self, level_samples=None)

    def as_scored(self, columns: Columns, keys: Sequence[bytes], seed: int) -> Columns:
        return np.where(self._level_masks(keys, seed, columns.shape[1])[:, :, None], columns, np.nan)

    def columns(self, table: Table) -> Columns:
        return np.concatenate([self._columns_of(kind, table) for kind in self._present(table)], axis=2)

    def parts(self, table: Table) -> tuple[Part, ...]:
        """The network's output and its inner layers, and views of the output: what each feature looks at."""
        output: list[int] = []
        layers: list[int] = []
        views: dict[str, list[int]] = {}
        weights: dict[str, float] = {}
        first = 0
        for kind in self._present(table):
            columns = range(first, first + self._columns_of(kind, table).shape[2])
            first = columns.stop
            (layers if kind.layers else output).extend(columns)
            if not kind.layers:
                views.setdefault(kind.looks_at, []).extend(columns)
                weights[kind.looks_at] = kind.weight
        parts = [Part.of(name, columns) for name, columns in ((OUTPUT, output), ("structure", layers)) if columns]
        seen = [Part.of(name, columns, view=True) for name, columns in views.items() if len(views) > 1]
        return (*parts, *(replace(part, weight=weights[part.name]) for part in seen))

    def _columns_of(self, kind: Feature, table: Table) -> Columns:
        return kind.columns(table[kind.name], self.each_element, self.transformed)

    def _run(
        self, backbone: Backbone, batch: Batch, timesteps: Sequence[int], with_maps: bool = False
    ) -> tuple[Table, MapParts]:
        if self.group.auto:
            raise OptionError("group='auto' is chosen by fit; take the group of a fitted detector's method")
        group = self.acting(batch.size)
        if len(group) < len(self.group):
            dropped = sorted(set(self.group.names) - set(group.names))
            log.info("images of %dx%d are not square: %s left out", *batch.size, ", ".join(dropped))
        parts = [MAP_PARTS[name] for name in self.shown_parts] if with_maps else []
        passes = self._passes(backbone, batch, group, parts)
        used = self._level_masks(batch.keys, batch.seed, len(timesteps))
        rows: list[Table] = []
        maps: list[MapParts] = []
        for position, t in enumerate(timesteps):
            draws = []
            for draw in range(self.mc_samples if used[:, position].any() else 0):
                level = passes.at(t, draw, used[:, position])
                chosen = self._chosen_elements(batch, level.rows, len(group.moving), t)
                draws.append(compute_row(self.kinds, parts, group, level, passes.transported(level, chosen)))
            rows.append(_mean_over_draws([row for row, _ in draws], used[:, position]))
            maps.append(_mean_over_draws([fields for _, fields in draws], used[:, position]))
        return _by_level(rows), _by_level(maps)

    def _passes(self, backbone: Backbone, batch: Batch, group: Group, parts: list[MapPart]) -> Passes:
        kinds = self.kinds
        if any(kind.log_variance for kind in kinds) and not backbone.learned_variance:
            raise OptionError("the feature 'var' needs a network with learned variance; this one has none")
        return Passes(
            backbone,
            batch,
            group,
            self.pooling,
            self.layers,
            record=any(kind.layers for kind in kinds) or any(part.layers for part in parts),
            record_moved=any(kind.layers and kind.per != "image" for kind in kinds),
            log_variance=any(kind.log_variance for kind in kinds),
            fresh_noise=any(kind.fresh_noise for kind in kinds),
        )

    def acting(self, size: tuple[int, int]) -> Group:
        """The group on images of that size: rotations by a quarter turn need square ones."""
        return self.group.for_size(*size)

    def _level_masks(self, keys: Sequence[bytes], seed: int, count: int) -> npt.NDArray[np.bool_]:
        """Which levels (columns) each image (row) is evaluated at."""
        if self.level_samples is None or self.level_samples >= count:
            return np.ones((len(keys), count), dtype=bool)
        return noise.subsets(seed, keys, count, self.level_samples, "levels")

    def _chosen_elements(self, batch: Batch, rows: npt.NDArray[np.int64], moving: int, t: int) -> npt.NDArray[np.bool_]:
        """The non-identity elements (columns) that each image (row) is compared under; the same for every draw."""
        if not self.compares or self.group_samples is None or self.group_samples >= moving:
            return np.full((len(rows), moving), self.compares)
        keys = [batch.keys[int(row)] for row in rows]
        return noise.subsets(batch.seed, keys, moving, self.group_samples, "elements", t)


def _mean_over_draws(
    draws: Sequence[dict[str, torch.Tensor]], used: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[Any]]:
    """Means by name, for all images of the batch; NaN for those that are not `used`. Empty without a draw."""
    means: dict[str, npt.NDArray[Any]] = {}
    for name in draws[0] if draws else ():
        values = np.mean([draw[name].cpu().numpy() for draw in draws], axis=0)
        means[name] = np.full((len(used), *values.shape[1:]), np.nan, dtype=values.dtype)
        means[name][used] = values
    return means


def _by_level(levels: Sequence[dict[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """Levels side by side, (N, levels, ...) by name; NaN for a level at which no image was evaluated."""
    evaluated = next((level for level in levels if level), {})
    empty = {name: np.full_like(values, np.nan) for name, values in evaluated.items()}
    return {name: np.stack([(level or empty)[name] for level in levels], axis=1) for name in evaluated}

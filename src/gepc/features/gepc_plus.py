"""GEPC+: further features from the passes of GEPC, with the denoising error.

The passes of one noise level give the residuals r_g and also the denoising error e = eps(x_t) - noise, known because
we drew the noise. With pool and the features of `gepc.features.gepc`, the columns at each level are

    log s_g   pool(r_g^2) / b              symmetry: does the network know which way up the image is?
    log d     pool(e^2)                    likelihood: how much of the noise does the network miss?
    ax, ay    <e(p), e(p + 1 pixel)>       whiteness: is the error structured? Autocorrelations of e along x and y,
    ad        the same on the diagonals    on both diagonals, and at two pixels, each divided by <e, e>
    ax2, ay2  the same at two pixels
    ac        <e_c, e_c'>                  the same between channels: is the error coloured?

and on request log cos, log b and the logarithms of GEPC's other features. At each level a shrunk covariance of the ID
columns gives the metric, and the score is the squared distance to the fifth nearest ID image in it, averaged over
levels. Energies are positive with long right tails, hence the logarithms. Every residual costs a pass; d and the
autocorrelations cost none.

Why rot90: under an element that is its own inverse (flips, rot180) an image and its transform have the same |r_g|,
so an image upside down scores the same as the upright one. A quarter turn is not its own inverse, and with the mirror
flip_x it generates all symmetries of the square.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError, check_choice
from gepc.features.base import Batch, Columns, Maps, Table, register
from gepc.features.gepc import FEATURES, GepcExtractor
from gepc.features.groups import Group
from gepc.features.residuals import CORRELATIONS, PER_ELEMENT, LevelPass

MapParts = dict[str, npt.NDArray[np.float32]]

FAST_LEVELS = (0.99,)
FULL_LEVELS = (0.998, 0.99, 0.97, 0.9)
MAP_PARTS = ("sum", "residual", "error")
TINY = 1e-30  # an exactly equivariant network has s = 0: a constant column, which calibration reports


class PlusPass(LevelPass):
    """A level pass that also maps the denoising error."""

    def _finish_map(self, field: Any) -> npt.NDArray[np.float32]:
        """(N, 2, H, W): the residual map mean_g mean_c r_g^2 / b, and the error map mean_c e^2 / b."""
        residual = super()._finish_map(field)
        if not self.with_maps:
            return residual
        error = (self.base - self.noise).square().mean(1) / self.energy[:, None, None]
        return np.stack([residual, self._spread(error).astype(np.float32)], axis=1)


@register("gepc+")
@dataclass(frozen=True)
class GepcPlus(GepcExtractor):
    """GEPC plus the denoising error and its autocorrelations, from the same network passes.

    Parameters
    ----------
    features : any of s, cos, b, d, pair, cycle, x0 (in logarithms) and ax, ay, ad, ax2, ay2, ac (without).
        A network of one channel has no ac, and no column for it.
    elements : `each` gives s, cos and x0 a column for every group element, `mean` one for all of them.
    map_part : `sum`, or one of its two parts: `residual` (where the transported scores disagree) and `error` (where the
        network misses the noise). Both are in units of b, so that they can be added.

    The others are those of `gepc.features.gepc.GepcExtractor`. The preset `fast`, one level and one transform, costs 2
    passes; `full`, four levels and two transforms, costs 12. On images that are not square rot90 drops out of `full`;
    give `fast` another element there, such as rot180.
    """

    calibration: ClassVar[str] = "level_knn"
    keep: ClassVar[int | None] = None
    known_features: ClassVar[tuple[str, ...]] = (*FEATURES, *CORRELATIONS)
    level_pass: ClassVar[type[LevelPass]] = PlusPass
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fast": {"levels": Levels(FAST_LEVELS), "group": Group.of("rot90")},
        "full": {"levels": Levels(FULL_LEVELS), "group": Group.of(("rot90", "flip_x"))},
    }

    levels: Levels = Levels(FULL_LEVELS)
    features: tuple[str, ...] = ("s", "d", *CORRELATIONS)
    group: Group = Group.of(("rot90", "flip_x"))
    elements: str = "each"
    map_part: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("elements", self.elements, ("each", "mean"))
        check_choice("map_part", self.map_part, MAP_PARTS)
        if self.map_part == "residual" and not self.compares:
            raise OptionError("map_part='residual' needs a feature that compares group elements, such as s")
        if self.elements == "each" and self.group_samples is not None:
            raise OptionError("`group_samples` leaves elements out at random, so `elements` must be 'mean'")

    @property
    def _ordered(self) -> tuple[str, ...]:
        """The features with s first."""
        return tuple(sorted(self.features, key=lambda name: name != "s"))

    @property
    def column_names(self) -> tuple[str, ...]:
        """Features with a column for each element as `s:rot90`; for square images and several channels."""
        names: list[str] = []
        for feature in self._ordered:
            spread = self.elements == "each" and feature in PER_ELEMENT
            names += [f"{feature}:{action.name}" for action in self.group.moving] if spread else [feature]
        return tuple(names)

    def stability(self, table: Table) -> npt.NDArray[np.float64]:
        """s where it is computed, otherwise the first feature; not its logarithm, which the columns hold."""
        name = self._present(table)[0]
        return self.reduce(name, table[name])

    def _present(self, table: Table) -> list[str]:
        """The features with s first; a network of one channel has no ac."""
        present = [name for name in self._ordered if name in table]
        if not present:
            raise OptionError("ac compares channels and the backbone has one; name another feature")
        return present

    def columns(self, table: Table) -> Columns:
        """The features side by side, energies as logarithms."""
        return np.concatenate([self._columns_of(name, table[name]) for name in self._present(table)], axis=2)

    def _columns_of(self, feature: str, values: npt.NDArray[np.float64]) -> Columns:
        if feature in CORRELATIONS:
            return values[:, :, None]
        if feature in PER_ELEMENT and self.elements == "each":
            return np.log(np.maximum(values[:, :, 1:], TINY))
        return np.log(np.maximum(self.reduce(feature, values), TINY))[:, :, None]

    @property
    def has_maps(self) -> bool:
        """True: every pass has a denoising error."""
        return True

    def maps(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> tuple[Table, Maps]:
        """The table, and per level the map that `map_part` names as (N, levels, H, W), from the same passes."""
        table, parts = self.map_parts(backbone, batch, timesteps)
        if self.map_part != "sum":
            return table, parts[self.map_part]
        return table, parts["residual"] + parts["error"]

    def map_parts(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> tuple[Table, MapParts]:
        """The table, and the residual map and the error map, each (N, levels, H, W)."""
        table, fields = self._run(backbone, batch, timesteps, with_maps=True)
        both = np.stack(fields, axis=1)
        return table, {"residual": both[:, :, 0], "error": both[:, :, 1]}

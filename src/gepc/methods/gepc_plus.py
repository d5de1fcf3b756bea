"""GEPC+: all that the passes of GEPC know: symmetry, denoising error, and the activations of inner layers.

The passes of one noise level give the residuals r_g, the denoising error e = eps(x_t) - noise, known because we drew
the noise, and the activations A of the network's inner layers. With pool and the features of `gepc.methods.gepc`, the
columns at each level are, in two parts,

    output  log s_g   pool(r_g^2) / b              symmetry: does the network know which way up the image is?
            log d     pool(e^2)                    likelihood: how much of the noise does the network miss?
            ax, ay    <e(p), e(p + 1 pixel)>       whiteness: is the error structured? Autocorrelations of e along x
            ad        the same on the diagonals    and y, on both diagonals, and at two pixels, each divided by <e, e>
            ax2, ay2  the same at two pixels
            ac        <e_c, e_c'>                  the same between channels: is the error coloured?
    layers  log inner mean_p (A - P_g^-1 A_g)^2 / mean_p A^2, for every channel: symmetry of the inner layers
            h         mean_p A and log std_p A, for every channel: what the network sees in the image

For targets that are small in their image (the preset `radar`), d is pooled locally and calibrated one-sided, beside

            os_cfar   log pool(-log Pfa) of order-statistic CFAR, which compares a pixel with a ring around it
            pixel_rx  log pool(-log Pfa) of RX, which compares 3x3 pixels with those of the whole image; both without a
                      network, see `gepc.lab.radar.cfar`

and on request log b, log cos and the logarithms of GEPC's other features. Each part is calibrated by itself and their
standardised scores are added (`gepc.calibration.Parts`). The output is scored by the squared distance to the fifth
nearest ID image in the metric of a shrunk covariance, the layers by the Mahalanobis distance in their principal
components. Every residual costs a pass; all other features cost none.

Why rot90: under an element that is its own inverse (flips, rot180) an image and its transform have the same |r_g|, so
an image upside down scores the same as the upright one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError, check_choice
from gepc.methods.base import Columns, MapParts, Maps, register
from gepc.methods.gepc import FEATURES, TINY, GepcExtractor
from gepc.methods.groups import Group
from gepc.methods.residuals import ACTIVATIONS, CORRELATIONS, PER_ELEMENT, PIXEL_TESTS, LevelPass, position_vectors

FAST_LEVELS = (0.99,)
INSPECT_LEVELS = (0.998,)
"""Less noise, because noise hides small defects; chosen on synthetic defects in good magnetic tiles."""
FULL_LEVELS = (0.998, 0.99, 0.97, 0.9)
ALONE = ("d", *CORRELATIONS, "h")  # features of a single pass
MAP_PARTS = ("sum", "residual", "inner", "error", "activations", "target")
LOCAL = ("d", *PIXEL_TESTS)  # of targets that are small in their image; chosen on inserted targets


class PlusPass(LevelPass):
    """A level pass that also maps the denoising error, the activations, or a target."""

    @property
    def _maps_target(self) -> bool:
        return self.with_maps and getattr(self.method, "map_part", None) == "target"

    @property
    def _records(self) -> bool:
        return super()._records or self._maps_target

    def _map_parts(self, fields: Mapping[str, torch.Tensor]) -> MapParts:
        """Also the error map mean_c e^2 / b, the activations of every position (N, C, h, w), and a target's map."""
        parts = super()._map_parts(fields)
        error = (self.base - self.noise).square().mean(1) / self.energy[:, None, None]
        parts["error"] = self._spread(error).astype(np.float32)
        if self._grids and "h" in self.wanted:
            parts["activations"] = self._spread(position_vectors(self._grids, self.batch.size))
        if self._maps_target:
            target = self._contrast.square() + (self._distance if self._grids else 0.0)
            parts["target"] = self._spread(target).astype(np.float32)
        return parts


@register("gepc+")
@dataclass(frozen=True)
class GepcPlus(GepcExtractor):
    """GEPC plus the denoising error and the activations of inner layers, from the same network passes.

    Parameters
    ----------
    features : any of s, cos, b, d, pair, walk, x0, cycle, var, var_g (in logarithms), ax, ay, ad, ax2, ay2, ac
        (without), inner, h, os_cfar and pixel_rx (the last two for log-magnitudes). A network of one channel has no
        ac, a plain function no inner and h: their columns are left out.
    elements : `each` gives s, cos and x0 a column for every group element, `mean` one for all of them.
    map_part : the map that is shown: `sum`, all parts together, or one of them: `residual` (where the transported
        scores disagree), `inner` (the same of inner layers), `error` (where the network misses the noise) and
        `activations` (where the inner layers are unlike those of in-distribution images). A raw `sum` is residual +
        error, both in units of b. `target` is the square of `gepc.methods.pooling.log_contrast` + d^2/C, d the
        distance of the activations at a position from those of the whole image.

    The others are those of `gepc.methods.gepc.GepcExtractor`. The preset `fast`, one level and one transform, costs 2
    passes and is the default; `full`, four levels and two transforms, costs 12; `single`, without a transform, costs 1;
    `radar`, for targets that are small in their image, costs 1; `inspect`, for small defects, takes images of any size
    at half resolution and scores them by their maps, with one pass. On images that are not square, where rot90
    does not act, rot180 replaces it if no other element is left.
    """

    has_maps = True  # every pass has a denoising error
    calibration: ClassVar[str] = "level_knn"
    keep: ClassVar[int | None] = None
    known_features: ClassVar[tuple[str, ...]] = (*FEATURES, *CORRELATIONS, "h", *PIXEL_TESTS)
    level_pass: ClassVar[type[LevelPass]] = PlusPass
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fast": {},
        "full": {"levels": Levels(FULL_LEVELS), "group": Group.of(("rot90", "flip_x"))},
        "single": {"features": ALONE},
        "radar": {
            "features": LOCAL,
            "group": Group.of("rot180"),  # does not mix range and azimuth
            "pool": "local",
            "topk": 0.003,
            "calibration": "tail",
            "fuse": "max",
            "map_part": "target",
            "magnitude": "log",
        },
        "inspect": {
            "levels": Levels(INSPECT_LEVELS),
            "features": ALONE,
            "group": Group.of("rot180"),
            "resize": "half",
            "score_from": "map",
        },
    }

    levels: Levels = Levels(FAST_LEVELS)
    features: tuple[str, ...] = ("s", "inner", *ALONE)
    group: Group = Group.of("rot90")
    elements: str = "each"
    map_part: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("elements", self.elements, ("each", "mean"))
        check_choice("map_part", self.map_part, MAP_PARTS)
        if self.map_part == "residual" and not self.compares:
            raise OptionError("map_part='residual' needs a feature that compares group elements, such as s")
        if self.elements == "each" and self.group_samples is not None:
            raise OptionError(
                "`group_samples` leaves elements out at random, so `elements` must be 'mean'",
                options=("group_samples", "elements"),
            )

    def acting(self, size: tuple[int, int]) -> Group:
        """The group on images of that size; rot180 where none of its elements acts on images that are not square."""
        if size[0] != size[1] and all(action.square_only for action in self.group.moving):
            return Group.of("rot180")
        return super().acting(size)

    @property
    def _ordered(self) -> tuple[str, ...]:
        return tuple(sorted(super()._ordered, key=lambda name: name != "s"))

    @property
    def column_names(self) -> tuple[str, ...]:
        """Features with a column for each element as `s:rot90`; for square images and several channels."""
        names: list[str] = []
        for feature in self._ordered:
            spread = self.elements == "each" and feature in PER_ELEMENT
            names += [f"{feature}:{action.name}" for action in self.group.moving] if spread else [feature]
        return tuple(names)

    def _columns_of(self, feature: str, values: npt.NDArray[np.float64]) -> Columns:
        if feature in (*CORRELATIONS, *PIXEL_TESTS):
            return values[:, :, None]
        if feature in ACTIVATIONS:
            return super()._columns_of(feature, values)
        if feature in PER_ELEMENT and self.elements == "each":
            return np.log(np.maximum(values[:, :, 1:], TINY))
        return np.log(np.maximum(self.reduce(feature, values), TINY))[:, :, None]

    def raw_map(self, parts: MapParts) -> Maps:
        if self.map_part == "sum":
            return parts["error"] + parts.get("residual", np.float32(0.0))
        if self.map_part not in parts or parts[self.map_part].ndim > 4:
            raise OptionError(f"there is no raw map of {self.map_part!r} here; choose sum, residual or error")
        return parts[self.map_part]

"""GEPC+: all that the passes of GEPC know: symmetry, denoising error, and the activations of inner layers.

The columns at each level are features of `gepc.methods.features`, in two parts:

    output  log s_g   symmetry: does the network know which way up the image is?
            log d     likelihood: how much of the noise does the network miss?
            ax, ay    whiteness: is the error structured? Autocorrelations of the denoising error along x and y,
            ad        on both diagonals,
            ax2, ay2  and at two pixels
            ac        the same between channels: is the error coloured?
    layers  log inner symmetry of the inner layers, for every channel
            h         mean and log standard deviation of every channel: what the network sees in the image

For targets that are small in their image (the preset `radar`), d is pooled locally and calibrated one-sided, beside
the features `os_cfar` and `pixel_rx` of `gepc.lab.radar.cfar`, which need no network. All other features are taken in
logarithms on request. Each part is calibrated by itself, and Fisher's rule combines their tail probabilities
(`gepc.calibration.evidence`). Three views of the output have a quarter of the weight: orientation, texture and noise,
and colour. The output is scored by the Mahalanobis distance with a shrunk covariance. The layers are scored by the
local outlier factor: the distance to the nearest ID images, in units of the distances between those. Every residual
costs a pass; all other features cost none.

Why rot90: under an element that is its own inverse (flips, rot180) an image and its transform have the same |r_g|, so
an image upside down scores the same as the upright one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError
from gepc.core.options import one_of
from gepc.methods.base import Batch, MapModel, MapParts, Maps, Table, register
from gepc.methods.features import Feature, find_feature
from gepc.methods.gepc import GepcExtractor
from gepc.methods.groups import Group
from gepc.methods.presets import Preset, Presets

CORRELATIONS = ("ax", "ay", "ad", "ax2", "ay2", "ac")
FAST_LEVELS = (0.99,)
INSPECT_LEVELS = (0.9999,)
"""Hardly any noise, because noise hides defects; chosen on synthetic defects in good magnetic tiles."""
FULL_LEVELS = (0.998, 0.99, 0.97, 0.9)
ALONE = ("d", *CORRELATIONS, "h")  # features of a single pass
MAP_PARTS = ("sum", "residual", "inner", "error", "activations", "target")
LOCAL = ("d", "os_cfar", "pixel_rx")  # of targets that are small in their image; chosen on inserted targets


@register("gepc+")
@dataclass(frozen=True)
class GepcPlus(GepcExtractor):
    """GEPC plus the denoising error and the activations of inner layers, from the same network passes.

    Parameters
    ----------
    features : names of `gepc.methods.features`; os_cfar and pixel_rx are for log-magnitudes. A network of one channel
        has no ac, a plain function no inner and h: their columns are left out.
    elements : `each` gives s, cos and x0 a column for every group element, `mean` one for all of them.
    map_part : the map that is shown: `sum`, all parts together, or one of them: `residual` (where the transported
        scores disagree), `inner` (the same of inner layers), `error` (where the network misses the noise) and
        `activations` (where the inner layers are unlike those of in-distribution images). A raw `sum` is residual +
        error, both in units of b. `target` is the square of `gepc.methods.pooling.log_contrast` + d^2/C, d the
        distance of the activations at a position from those of the whole image.
    positions : how maps compare the activations at a position with those of ID images: `gaussian`, the Mahalanobis
        distance from all of them, or `memory`, the distance to the nearest of a coreset of them. With `memory`, the
        calibrated map `sum` is that of the activations alone, and bands of 4 pixels along the border have statistics of
        their own.

    The others are those of `gepc.methods.gepc.GepcExtractor`. The preset `fast`, one level and one transform, costs 2
    passes and is the default; `full`, four levels and two transforms, costs 12; `single`, without a transform, costs 1;
    `radar`, for targets that are small in their image, costs 1; `inspect`, for defects of parts, takes images of any
    size at half resolution and scores them by their maps, with one pass. On images that are not square, where rot90
    does not act, rot180 replaces it if no other element is left.
    """

    has_maps = True  # every pass has a denoising error
    calibration: ClassVar[str] = "level_knn"
    keep: ClassVar[int | None] = None
    transformed: ClassVar[bool] = True
    presets: ClassVar[Presets] = {
        "fast": Preset(),
        "full": Preset({"levels": Levels(FULL_LEVELS), "group": Group.of(("rot90", "flip_x"))}),
        "single": Preset({"features": ALONE}),
        "radar": Preset(
            {
                "features": LOCAL,
                "group": Group.of("rot180"),  # does not mix range and azimuth
                "pool": "local",
                "topk": 0.003,
                "map_part": "target",
            },
            preprocessing={"magnitude": "log"},
            calibration={"calibration": "evidence:rule=minimum,narrow=z,whole=0,view=1"},
        ),
        "inspect": Preset(
            {
                "levels": Levels(INSPECT_LEVELS),
                "features": ALONE,
                "group": Group.of("rot180"),
                "positions": "memory",
            },
            preprocessing={"resize": "half"},
            calibration={"score_from": "map"},
        ),
    }

    levels: Levels = Levels(FAST_LEVELS)
    features: tuple[str, ...] = ("s", "inner", *ALONE)
    group: Group = Group.of("rot90")
    elements: str = one_of("each", "mean")
    map_part: str = one_of(*MAP_PARTS)
    positions: str = one_of("gaussian", "memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.map_part == "residual" and not self.compares:
            raise OptionError("map_part='residual' needs a feature that compares group elements, such as s")
        if self.elements == "each" and self.group_samples is not None:
            raise OptionError(
                "`group_samples` leaves elements out at random, so `elements` must be 'mean'",
                options=("group_samples", "elements"),
            )

    @property
    def map_model(self) -> MapModel:
        """With a memory, numbers that were chosen with synthetic defects in good tiles: `benchmarks/maps.py`."""
        model = super().map_model
        if self.positions == "gaussian":
            return model
        memory = "level_local_memory:size=1000"
        alone = ("activations",)
        return replace(model, positions=memory, band=4, images=128, learnt=0.6, leading=alone, one_sided=alone)

    @property
    def each_element(self) -> bool:
        return self.elements == "each"

    @property
    def calibration_name(self) -> str:
        return "evidence" if self.kinds[-1].layers else self.calibration

    @property
    def kinds(self) -> list[Feature]:
        """The features in the order of the columns: s first, those of inner layers last."""
        return sorted(super().kinds, key=lambda kind: kind.name != "s")

    def find_feature(self, name: str) -> Feature:
        """Any registered feature."""
        return find_feature(name)

    @property
    def shown_parts(self) -> list[str]:
        """Also the denoising error, the activations of every position, and a target's map if it is shown."""
        activations = ["activations"] if "h" in self.features else []
        target = ["target"] if self.map_part == "target" else []
        return [*super().shown_parts, "error", *activations, *target]

    def acting(self, size: tuple[int, int]) -> Group:
        """The group on images of that size; rot180 where none of its elements acts on images that are not square."""
        if size[0] != size[1] and all(action.square_only for action in self.group.moving):
            return Group.of("rot180")
        return super().acting(size)

    def map_parts(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> tuple[Table, MapParts]:
        """The parts in `shown_parts`, without those that this backbone does not have."""
        table, parts = super().map_parts(backbone, batch, timesteps)
        if self.map_part not in ("sum", *parts):
            missing = f"the features {', '.join(self.features)} give no map of {self.map_part!r} with this backbone"
            raise OptionError(f"{missing}; choose {', '.join(['sum', *parts])}", options=("map_part",))
        return table, parts

    def raw_map(self, parts: MapParts) -> Maps:
        if self.map_part == "sum":
            return parts["error"] + parts.get("residual", np.float32(0.0))
        if self.map_part not in parts or parts[self.map_part].ndim > 4:
            raise OptionError(f"there is no raw map of {self.map_part!r} here; choose sum, residual or error")
        return parts[self.map_part]

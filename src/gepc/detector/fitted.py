"""The fitted state of a detector: everything that scoring needs, and nothing that changes.

`fit` builds it, `load_detector` reads it, and scoring, saving, exporting, the service and the cluster take it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gepc.backbones.base import Backbone
from gepc.calibration.scorer import Scorer
from gepc.conformal.p_values import Array, CalibrationScores, Guarantee
from gepc.core.errors import InputError, OptionError, check_choice
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import Image
from gepc.maps.regions import MapRegion, map_regions
from gepc.maps.statistics import TOGETHER, Fields, MapStatistics
from gepc.methods.base import (
    Batch,
    Cost,
    Extractor,
    MapParts,
    Table,
    cost_of,
    extract_map_parts,
    extract_table,
    raw_maps,
)
from gepc.methods.pooling import Map, combine


@dataclass(frozen=True, eq=False)
class FittedDetector:
    """What a detector has learnt, with all that it takes to score an image.

    Attributes
    ----------
    method : the method with its parameters.
    options : all parameters of the method and the detector as JSON values.
    backbone : the network.
    preprocessing : how pixels become the network's input.
    levels : the candidate timesteps.
    scorer : the selected levels and the calibrator.
    reference : the calibration scores, by group.
    maps : the statistics of calibrated maps; None without them.
    map_scale : v_global, the common scale of raw maps; None for a method without maps.
    fit_images : how many images the scorer was fitted on.
    input_size : (H, W) of the first image as the network saw it.
    seed : the noise of an image is a function of this number and of the image's content.
    batch_size : the largest number of images per network call; it does not change a score.
    score_from : `features`, or `map` for the mean of the highest values of the calibrated map.
    group_choice : why `group="auto"` took or left out each action, as in `gepc.methods.symmetries.Evidence`.

    Examples
    --------
    >>> import gepc, numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
    >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
    >>> detector.fitted.input_size
    (8, 8)
    """

    method: Extractor
    options: Mapping[str, Any]
    backbone: Backbone
    preprocessing: Preprocessing
    levels: tuple[int, ...]
    scorer: Scorer
    reference: CalibrationScores
    maps: MapStatistics | None
    map_scale: float | None
    fit_images: int
    input_size: tuple[int, int]
    seed: int
    batch_size: int
    score_from: str
    group_choice: tuple[Mapping[str, Any], ...] = ()

    # --- scoring -------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> tuple[int, ...]:
        """The timesteps that selection kept, as a tuple of int."""
        return tuple(self.levels[position] for position in self.scorer.selection_.kept)

    @property
    def weights(self) -> Array:
        """The weights of the kept timesteps, as an array that sums to 1."""
        return self.scorer.selection_.weights

    def evaluate(
        self, images: Sequence[Image], keys: Sequence[bytes] | None = None, maps: bool = False, raw: bool = False
    ) -> tuple[Array, Fields | None, dict[str, Array]]:
        """Evaluate preprocessed images of one size with one set of network passes.

        Parameters
        ----------
        images : arrays (C, H, W).
        keys : the keys of their noise; by default those of their content.
        maps : whether to return maps, too.
        raw : return maps before calibration.

        Returns
        -------
        The scores (N,), the maps (N, H, W) of each part by name, or None, and the tail probabilities (N,) of each part
        of the score by name.

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> scores, maps, evidence = detector.fitted.evaluate(images[:2].astype(np.float32), maps=True)
        >>> scores.shape, maps["sum"].shape
        ((2,), (2, 8, 8))
        """
        batch = self._batch(images, keys)
        if not maps and self.score_from == "features":
            table = extract_table(self.method, self.backbone, batch, self.kept)
            scores, evidence = self.scorer.explain_kept(self.method.columns(table))
            return scores, None, evidence
        table, parts = extract_map_parts(self.method, self.backbone, batch, self.kept)
        calibrated = None
        if self.maps is not None and (self.score_from == "map" or not raw):
            calibrated = self.maps.z(parts, batch.size, self.preprocessing.ignored(batch.size))
        if self.score_from == "map" and self.maps is not None and calibrated is not None:
            scores, evidence = self.maps.map_scores(calibrated), dict[str, Array]()
        else:
            scores, evidence = self.scorer.explain_kept(self.method.columns(table))
        if not maps:
            return scores, None, evidence
        if raw or calibrated is None:
            return scores, {self.map_part: self.raw_map(parts)}, evidence
        return scores, calibrated, evidence

    def map_parts(self, images: Sequence[Image]) -> tuple[Table, MapParts]:
        """The features of preprocessed images at the kept levels, and the parts of their maps."""
        return extract_map_parts(self.method, self.backbone, self._batch(images), self.kept)

    def raw_map(self, parts: MapParts) -> Map:
        """The maps of some images before calibration, 0 where pixels are ignored."""
        maps = combine(raw_maps(self.method, self.backbone, parts), self.weights)
        ignored = self.preprocessing.ignored((maps.shape[1], maps.shape[2]))
        return maps if ignored is None else np.where(ignored, np.float32(0.0), maps)

    def _batch(self, images: Sequence[Image], keys: Sequence[bytes] | None = None) -> Batch:
        if len({image.shape for image in images}) != 1:
            raise InputError("give one or more arrays (C, H, W) of one size")
        self.backbone.check_size(*images[0].shape[1:])
        keys = [image_key(image) for image in images] if keys is None else keys
        return Batch(np.stack(images), keys, self.seed, self.batch_size)

    def without_groups(self) -> FittedDetector:
        """Return this detector with one group of calibration images; scores and maps do not depend on groups.

        Returns
        -------
        FittedDetector

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> detector.fitted.without_groups().reference.grouped
        False
        """
        return replace(self, reference=CalibrationScores.of(self.reference.scores, None))

    def cost(self) -> Cost:
        """Count the network passes per image.

        Returns
        -------
        Cost

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> print(detector.fitted.cost())
        2F+0J
        """
        return cost_of(self.method, self.backbone, self.input_size, len(self.kept))

    def guarantee(self, alpha: float = 0.05) -> Guarantee:
        """State what is guaranteed at this false-alarm rate with the calibration images (of the smallest group).

        Parameters
        ----------
        alpha : the false-alarm rate.

        Returns
        -------
        Guarantee

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> detector.fitted.guarantee(0.1).n
        20
        """
        return Guarantee.at(alpha, self.reference.smallest, self.reference.trimmed)

    # --- maps ----------------------------------------------------------------------------------------------------

    @property
    def has_maps(self) -> bool:
        """Whether there are maps."""
        return self.method.has_maps and self.map_scale is not None

    @property
    def map_part(self) -> str:
        """The part of the maps that is shown: `sum`, all of them together, unless the method's options differ."""
        return str(getattr(self.method, "map_part", TOGETHER))

    def showing(self, part: str) -> FittedDetector:
        """Return this detector with maps of one part alone. Raw maps keep the scale that they were fitted with.

        Parameters
        ----------
        part : the name of the part, such as `residual` or `error`; only the maps of `gepc+` have parts.

        Returns
        -------
        FittedDetector

        Raises
        ------
        OptionError
            If the maps of the method have no parts, or none of that name.

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> detector.fitted.showing("error").map_part
        'error'
        """
        if not hasattr(self.method, "map_part"):
            raise OptionError(f"the maps of {self.method.name!r} have no parts; only those of gepc+ do")
        method: Any = self.method
        shown = replace(method, map_part=part)
        if self.maps is not None:
            check_choice("map_part", part, self.maps.names)
        return replace(self, method=shown, options={**self.options, "map_part": part})

    def map_limit(self, alpha: float = 0.05, raw: bool = False) -> float:
        """Compute the end of the colour scale of maps, the same for all images.

        For calibrated maps it is the value above which a pixel has a family-wise p-value of at most `alpha`, see
        `gepc.maps.statistics`. For raw maps it is `map_scale`.

        Parameters
        ----------
        alpha : the false-alarm rate of the regions of a map.
        raw : whether the maps are raw.

        Returns
        -------
        float

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> detector.fitted.map_limit(0.1) > 0.0
        True
        """
        self.check_maps()
        if raw or self.maps is None:
            return self.map_scale or 1.0
        return self.maps.limit(self.map_part, alpha)

    def regions(self, fields: Fields, row: int, alpha: float = 0.05, raw: bool = False) -> list[MapRegion]:
        """Find the regions of the map in that row of `fields`; see `gepc.maps.regions.map_regions`.

        With probability at least 1 - alpha an in-distribution image has none. The list is empty if there are too few
        calibration maps for this rate. For raw maps, regions are the pixels above `map_scale`, without p-values.

        Parameters
        ----------
        fields : the maps (N, H, W) of each part by name, as `evaluate` returns them.
        row : which of the N images.
        alpha : the false-alarm rate.
        raw : whether the maps are raw.

        Returns
        -------
        list of MapRegion
            The regions, the highest score first.

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> _, maps, _ = detector.fitted.evaluate(images[:1].astype(np.float32), maps=True)
        >>> len(detector.fitted.regions(maps, 0, alpha=0.1))
        0
        """
        statistics = None if raw else self.maps
        if statistics is not None and not statistics.allows(alpha):
            return []
        own = {name: np.asarray(field[row]) for name, field in fields.items()}
        return map_regions(own, self.map_part, self.map_limit(alpha, raw), statistics)

    def check_maps(self) -> None:
        """Raise `OptionError` for a method without maps."""
        if not self.method.has_maps:
            names = ", ".join(self.method.column_names)
            raise OptionError(f"the method {self.method.name!r} has no maps of {names}; the method gepc+ has maps")

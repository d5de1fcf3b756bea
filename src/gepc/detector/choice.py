"""Which transform to compare under, and at which noise level, from in-distribution images and the backbone alone.

Two rules for `gepc+`, both deterministic and without any out-of-distribution image:

violation    A transform is of use where the network breaks the symmetry much, and about equally for all ID images:
             if it hardly breaks it, s_g is noise; if it does so for some images only, s_g describes their content.
             The element with the largest mean over the levels of

                 log( mean(s_g)^2 / std(s_g) )          over ID images: the mean of s_g over its CV

             It chooses the element and leaves the levels as they are. (1 + |elements|) passes per level and image.

synthetic    Every image is changed into an outlier (`outliers`, the kinds in turn). For every level and element,
             the two-pass detector is fitted on one half of the images and scores the other half and its outliers, and
             the other way round; the best has the highest AUROC, averaged over kinds. It chooses both the element and
             the level, and costs twice as much.

Either looks at some of the images that `fit` learns from and never at those it holds out, so p-values stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.schedule import Levels
from gepc.core.errors import InputError, OptionError, check_choice
from gepc.detector.detector import Detector
from gepc.detector.outliers import KINDS, synthetic_outlier
from gepc.detector.registry import create_detector, options_of
from gepc.features.base import Batch, Table
from gepc.features.gepc import GepcExtractor
from gepc.features.gepc_plus import GepcPlus
from gepc.features.groups import Group
from gepc.features.residuals import PER_ELEMENT
from gepc.images.noise import image_key
from gepc.images.sources import Image
from gepc.scoring import Aggregation, create_calibrator
from gepc.scoring.metrics import auroc

Array = npt.NDArray[np.float64]

RULES = ("violation", "synthetic")
LEAST = 2 * len(KINDS)


@dataclass(frozen=True)
class Trial:
    """What the rule says of one element at one timestep; None stands for all levels together. Higher is better."""

    element: str
    timestep: int | None
    value: float


@dataclass(frozen=True)
class Choice:
    """The rule's answer: all trials, best first, and the network passes they took in all."""

    rule: str
    trials: tuple[Trial, ...]
    passes: int

    @property
    def best(self) -> Trial:
        """The trial that the rule prefers."""
        return self.trials[0]

    @property
    def options(self) -> dict[str, Any]:
        """What to give `create_detector("gepc+", ...)`."""
        chosen: dict[str, Any] = {"group": [self.best.element]}
        if self.best.timestep is not None:
            chosen["levels"] = str(Levels.index(self.best.timestep))
        return chosen

    def apply(self, detector: Detector) -> Detector:
        """An unfitted detector like this one, with the chosen options."""
        options = {**options_of(detector), **self.options}
        return create_detector(detector.extractor.name, detector.backbone, **options)


def choose(
    detector: Detector,
    images: Any,
    rule: str = "violation",
    elements: Group | str | Sequence[str] = "paper",
    count: int = 128,
) -> Choice:
    """Compare the elements (and levels) on at most `count` of the images that `detector.fit(images)` would learn from.

    `detector` is an unfitted `gepc+`; its levels are the candidates. Give `fit` the same images afterwards.
    """
    check_choice("rule", rule, RULES)
    method = detector.extractor
    if not isinstance(method, GepcPlus) or "s" not in method.features:
        raise OptionError("choose is for the method 'gepc+' with the feature s among its features")
    if count < LEAST:
        raise OptionError(f"count must be at least {LEAST}, two images for each kind of outlier; got {count}")
    chosen = detector.fitting_images(images, count)
    if len(chosen) < LEAST:
        raise InputError(f"choosing needs at least {LEAST} different images to learn from; there are {len(chosen)}")
    group = Group.of(elements).for_size(*chosen[0].shape[1:])
    wide = replace(method, group=group, elements="each", mc_samples=1, group_samples=None, level_samples=None)
    before = detector.backbone.forward_count
    if rule == "violation":
        seen = table_of(detector, replace(wide, features=("s",), map_part="sum"), chosen)
        trials = by_violation(seen["s"], group)
    else:
        changed = [synthetic_outlier(image, KINDS[place % len(KINDS)]) for place, image in enumerate(chosen)]
        inside, outside = (table_of(detector, wide, part) for part in (chosen, changed))
        trials = by_separation(inside, outside, wide, detector.calibration_name, wide.timesteps(detector.backbone))
    return Choice(rule, trials, detector.backbone.forward_count - before)


def by_violation(s: Array, group: Group) -> tuple[Trial, ...]:
    """Elements ranked by the mean over levels of log(mean^2/std), from s (N, levels, |G|) of ID images."""
    mean, std = s[:, :, 1:].mean(axis=0), s[:, :, 1:].std(axis=0)
    broken = mean > 1e-12  # what an exactly equivariant network leaves is rounding
    value = np.where(broken, np.log(np.where(broken, mean**2 / np.maximum(std, 1e-300), 1.0)), -np.inf).mean(axis=0)
    found = [Trial(action.name, None, float(v)) for action, v in zip(group.moving, value, strict=True)]
    return _ranked(found)


def by_separation(
    inside: Table, outside: Table, method: GepcPlus, calibration: str, timesteps: Sequence[int]
) -> tuple[Trial, ...]:
    """(level, element) ranked by how well two passes tell images from their own outliers, averaged over kinds.

    Row i of `outside` is the outlier of row i of `inside`, of kind i modulo the number of kinds.
    """
    found = []
    for level, timestep in enumerate(timesteps):
        for place, action in enumerate(method.group.moving, start=1):
            single = replace(method, group=Group.of((action,)))
            pair = [single.columns(_part(table, level, place)) for table in (inside, outside)]
            found.append(Trial(action.name, int(timestep), _separation(pair[0], pair[1], calibration)))
    return _ranked(found)


def _ranked(trials: list[Trial]) -> tuple[Trial, ...]:
    best = sorted(trials, key=lambda trial: -trial.value)
    if not np.isfinite(best[0].value):
        raise InputError("the backbone is exactly equivariant under all of these elements; compare under others")
    return tuple(best)


def _part(table: Table, level: int, place: int) -> Table:
    """The table of one level and one element."""
    return {
        name: values[:, [level]][:, :, [0, place]] if name in PER_ELEMENT else values[:, [level]]
        for name, values in table.items()
    }


def _separation(inside: Array, outside: Array, calibration: str) -> float:
    """AUROC averaged over kinds; each half is scored by a model of the other. NaN-free by construction."""
    kinds = np.arange(len(inside)) % len(KINDS)
    half = np.arange(len(inside)) // len(KINDS) % 2
    weights, together = np.ones(1), Aggregation()
    scores = np.empty((2, len(inside)))
    for side in (0, 1):
        mine = half == side
        model = create_calibrator(calibration).fit(inside[~mine])
        for row, columns in zip(scores, (inside, outside), strict=True):
            row[mine] = model.score(columns[mine], weights, together)
    return float(np.mean([auroc(scores[0], scores[1, kinds == kind]) for kind in range(len(KINDS))]))


def table_of(detector: Detector, method: GepcExtractor, images: Sequence[Image]) -> Table:
    """The table of preprocessed images, with the detector's backbone, noise and batches."""
    tables = []
    timesteps, size = method.timesteps(detector.backbone), detector.batch_size
    for start in range(0, len(images), size):
        part = np.stack(images[start : start + size])
        batch = Batch(part, [image_key(image) for image in part], detector.seed, size)
        tables.append(method.extract(detector.backbone, batch, timesteps))
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}

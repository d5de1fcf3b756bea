"""Which group elements and noise levels to use, from in-distribution images and the backbone alone.

`within_budget` spends a number of network passes. Every level costs one pass for the image itself and one for each
element, so `passes` pay for K levels of m elements with K (1 + m) <= passes: first as many levels as the detector
would keep, each with one element; the rest pays for more elements. Elements are ranked by violation, levels by the
coefficient of variation of s over the chosen elements.

`choose` compares single elements for the two-pass `gepc+` by one of two rules:

violation    An element is useful where the network breaks the symmetry strongly, and about equally for all images: if
             it hardly breaks it, s_g is noise; if it breaks it for some images only, s_g describes their content. The
             best element has the largest mean over levels of log(mean(s_g)^2 / std(s_g)).
             Costs (1 + |elements|) passes per level and image.

synthetic    Every image is turned into a synthetic outlier (`gepc.images.synthetic`). For every level and element, a
             two-pass detector is fitted on one half of the images and scores the other half and its outliers, and vice
             versa; the best has the highest AUROC averaged over kinds of outlier. Costs twice as much.

Both use some of the images that `fit` learns from and none that it holds out, so p-values stay valid.
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
from gepc.detector.registry import create_detector, options_of
from gepc.features.base import Table
from gepc.features.extraction import ExtractionSpec, concatenate, extract_chunks
from gepc.features.gepc import GepcExtractor
from gepc.features.gepc_plus import GepcPlus
from gepc.features.groups import Group
from gepc.features.residuals import ACTIVATIONS, PER_ELEMENT
from gepc.images.batches import Chunk
from gepc.images.sources import Image
from gepc.images.synthetic import KINDS, synthetic_outlier
from gepc.scoring.metrics import auroc
from gepc.scoring.scorer import Scorer, coefficient_of_variation

Array = npt.NDArray[np.float64]

RULES = ("violation", "synthetic")
MINIMUM_IMAGES = 8
MINIMUM_TO_CHOOSE = 2 * len(KINDS)


@dataclass(frozen=True)
class Trial:
    """The value of one element at one timestep (None: over all levels); higher is better."""

    element: str
    timestep: int | None
    value: float


@dataclass(frozen=True)
class Plan:
    """What a detector should evaluate.

    Attributes
    ----------
    elements : names of the group elements.
    timesteps : the noise levels; None leaves them as they are.
    passes : network passes that planning took.
    trials : every candidate that was compared, best first.
    """

    elements: tuple[str, ...]
    timesteps: tuple[int, ...] | None
    passes: int
    trials: tuple[Trial, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The options of `create_detector` that follow the plan."""
        chosen: dict[str, Any] = {"group": list(self.elements)}
        if self.timesteps is not None:
            chosen["levels"] = str(Levels.index(*self.timesteps))
            if not self.trials:
                chosen["keep"] = len(self.timesteps)
        return chosen

    def apply(self, detector: Detector) -> Detector:
        """An unfitted detector like the given one that follows the plan."""
        options = {**options_of(detector), **self.options}
        return create_detector(detector.extractor.name, detector.backbone, **options)


def within_budget(detector: Detector, images: Any, passes: int, count: int = 256) -> Plan:
    """Plan for at most `passes` network passes per image.

    Parameters
    ----------
    detector : an unfitted `gepc` or `gepc+` detector; its levels and elements are the candidates.
    images : the images that `fit` will be given afterwards.
    passes : network passes per image.
    count : how many of the images to use, at most. Each costs a pass at every level under every element, once.
    """
    method = detector.extractor
    if not isinstance(method, GepcExtractor) or "s" not in method.features:
        raise OptionError(f"a budget needs method gepc or gepc+ with the feature s; {method.name!r} cannot be planned")
    draws = passes // method.mc_samples
    if draws < 2:
        raise OptionError(
            f"{passes} passes with mc_samples={method.mc_samples} do not pay for one comparison; "
            f"the smallest budget is {2 * method.mc_samples}"
        )
    chosen = _fitting_images(detector, images, count, MINIMUM_IMAGES)
    group = method.group.for_size(*chosen[0].shape[1:])
    wide = GepcExtractor(levels=method.levels, pool=method.pool, topk=method.topk, window=method.window, group=group)
    before = detector.backbone.forward_count
    s = _table(detector, wide, chosen)["s"]
    elements, positions = spend(s, group, draws, detector.keep)
    timesteps = wide.timesteps(detector.backbone)
    used = detector.backbone.forward_count - before
    return Plan(elements, tuple(timesteps[position] for position in positions), used)


def spend(s: Array, group: Group, passes: int, keep: int | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Elements, in the group's order, and positions of levels, ascending, from s (N, levels, |G|) of ID images."""
    wanted = s.shape[1] if keep is None else keep
    levels = min(wanted, passes // 2)
    most = min(len(group.moving), passes // levels - 1)
    best = {trial.element for trial in by_violation(s, group)[:most]}
    names = tuple(action.name for action in group.moving if action.name in best)
    places = [group.names.index(name) for name in names]
    cv = coefficient_of_variation(s[:, :, places].mean(axis=2))
    return names, tuple(sorted(int(position) for position in np.argsort(cv, kind="stable")[:levels]))


def choose(
    detector: Detector,
    images: Any,
    rule: str = "violation",
    elements: Group | str | Sequence[str] = "paper",
    count: int = 128,
) -> Plan:
    """Compare the elements, and with the rule `synthetic` the levels too, for a two-pass `gepc+`.

    Parameters
    ----------
    detector : an unfitted `gepc+` detector; its levels are the candidates.
    images : the images that `fit` will be given afterwards.
    rule : `violation` or `synthetic`.
    elements : the candidate elements.
    count : how many of the images to use, at most.
    """
    check_choice("rule", rule, RULES)
    method = detector.extractor
    if not isinstance(method, GepcPlus) or "s" not in method.features:
        raise OptionError("choose needs the method 'gepc+' with the feature s among its features")
    if count < MINIMUM_TO_CHOOSE:
        raise OptionError(f"count must be at least {MINIMUM_TO_CHOOSE}, two images per kind of outlier; got {count}")
    chosen = _fitting_images(detector, images, count, MINIMUM_TO_CHOOSE)
    group = Group.of(elements).for_size(*chosen[0].shape[1:])
    # features of inner layers are means over the group: they say nothing about single elements
    features = tuple(name for name in method.features if name not in ACTIVATIONS)
    wide = replace(method, group=group, elements="each", features=features, mc_samples=1)
    wide = replace(wide, group_samples=None, level_samples=None)
    before = detector.backbone.forward_count
    if rule == "violation":
        found = _table(detector, replace(wide, features=("s",), map_part="sum"), chosen)
        trials = by_violation(found["s"], group)
    else:
        changed = [synthetic_outlier(image, KINDS[place % len(KINDS)]) for place, image in enumerate(chosen)]
        inside, outside = (_table(detector, wide, part) for part in (chosen, changed))
        trials = by_separation(inside, outside, wide, wide.calibration_name, wide.timesteps(detector.backbone))
    best = trials[0]
    timesteps = None if best.timestep is None else (best.timestep,)
    return Plan((best.element,), timesteps, detector.backbone.forward_count - before, trials)


def by_violation(s: Array, group: Group) -> tuple[Trial, ...]:
    """Elements ranked by the mean over levels of log(mean^2/std), from s (N, levels, |G|) of ID images."""
    mean, std = s[:, :, 1:].mean(axis=0), s[:, :, 1:].std(axis=0)
    broken = mean > 1e-12  # an exactly equivariant network leaves rounding errors only
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
        raise InputError("the backbone is exactly equivariant under all of these elements; choose others")
    return tuple(best)


def _part(table: Table, level: int, place: int) -> Table:
    """The table of one level and one element."""
    return {
        name: values[:, [level]][:, :, [0, place]] if name in PER_ELEMENT else values[:, [level]]
        for name, values in table.items()
    }


def _separation(inside: Array, outside: Array, calibration: str) -> float:
    """AUROC averaged over kinds; each half is scored by a model of the other."""
    kinds = np.arange(len(inside)) % len(KINDS)
    half = np.arange(len(inside)) // len(KINDS) % 2
    scores = np.empty((2, len(inside)))
    for side in (0, 1):
        mine = half == side
        model = Scorer(calibration, weights="uniform").fit(inside[~mine])
        for row, columns in zip(scores, (inside, outside), strict=True):
            row[mine] = model.score(columns[mine])
    return float(np.mean([auroc(scores[0], scores[1, kinds == kind]) for kind in range(len(KINDS))]))


def _fitting_images(detector: Detector, images: Any, count: int, minimum: int) -> list[Image]:
    chosen = detector.fitting_images(images, count)
    if len(chosen) < minimum:
        raise InputError(f"planning needs at least {minimum} different images to fit on; there are {len(chosen)}")
    return chosen


def _table(detector: Detector, method: GepcExtractor, images: Sequence[Image]) -> Table:
    """The table of preprocessed images, with the detector's backbone, noise and batches."""
    spec = ExtractionSpec(method, method.timesteps(detector.backbone), detector.seed, detector.batch_size)
    read = (Chunk.of(images[start : start + spec.rows]) for start in range(0, len(images), spec.rows))
    found = extract_chunks(detector.backbone, spec, read)
    return concatenate([features[0] for _, features in found if features is not None])

"""Fewer passes for the same answer: which levels and group elements to spend a given number of passes on.

Every level looked at costs one pass for the image as it is and one for each element, so `passes` buy K levels of m
elements with K (1 + m) <= passes. Levels come first: as many as the detector would keep, while each still gets one
element; what is left buys elements. Which ones, ID images and the backbone say:

    elements    those with the largest mean over levels of log(mean(s_g)^2 / std(s_g)), see `choice.by_violation`
    levels      those with the lowest CV of s over the chosen elements (the paper's rule, `gepc.scoring.scorer`)

Like `choice` it looks at some of the images that `fit` learns from and never at those it holds out, so p-values
stay valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.schedule import Levels
from gepc.core.errors import InputError, OptionError
from gepc.detector.choice import by_violation, table_of
from gepc.detector.detector import Detector
from gepc.detector.registry import create_detector, options_of
from gepc.features.gepc import GepcExtractor
from gepc.features.groups import Group
from gepc.scoring.scorer import coefficient_of_variation

Array = npt.NDArray[np.float64]
LEAST_IMAGES = 8


@dataclass(frozen=True)
class Plan:
    """What to look at: the elements, the timesteps, and the network passes that finding out took in all."""

    elements: tuple[str, ...]
    timesteps: tuple[int, ...]
    passes: int

    @property
    def options(self) -> dict[str, Any]:
        """What to give `create_detector` in place of the levels and the group."""
        levels = Levels.index(*self.timesteps)
        return {"group": list(self.elements), "levels": str(levels), "keep": len(self.timesteps)}

    def apply(self, detector: Detector) -> Detector:
        """An unfitted detector like this one that keeps to the plan."""
        options = {**options_of(detector), **self.options}
        return create_detector(detector.extractor.name, detector.backbone, **options)


def within_budget(detector: Detector, images: Any, passes: int, count: int = 256) -> Plan:
    """Plan for at most `passes` network passes per image, from at most `count` of the images to be fitted on.

    `detector` is an unfitted `gepc` or `gepc+`; its levels and elements are the candidates. Give `fit` the same images
    afterwards. Costs a pass for each of those images at every level under every element, once.
    """
    method = detector.extractor
    if not isinstance(method, GepcExtractor) or "s" not in method.features:
        raise OptionError(f"a budget is for gepc and gepc+ with the feature s; {method.name!r} has no passes to choose")
    draws = passes // method.mc_samples
    if draws < 2:
        raise OptionError(
            f"{passes} passes with mc_samples={method.mc_samples} do not buy one comparison; "
            f"the least budget is {2 * method.mc_samples}"
        )
    chosen = detector.fitting_images(images, count)
    if len(chosen) < LEAST_IMAGES:
        raise InputError(f"planning needs at least {LEAST_IMAGES} different images to learn from, got {len(chosen)}")
    group = method.group.for_size(*chosen[0].shape[1:])
    wide = GepcExtractor(levels=method.levels, pool=method.pool, topk=method.topk, window=method.window, group=group)
    before = detector.backbone.forward_count
    s = table_of(detector, wide, chosen)["s"]
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

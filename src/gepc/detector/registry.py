"""Detectors by name: `GEPC` with its parameters spelt out, and every registered method through `create_detector`."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError, check_names, nearest
from gepc.core.options import coerce, is_scalar, suggest_names
from gepc.detector.detector import Detector
from gepc.features.base import Extractor, find_method, methods
from gepc.features.gepc import PAPER_LEVELS, GepcExtractor
from gepc.features.groups import Action, Group


class GEPC(Detector):
    """Group-equivariant posterior consistency, the paper's detector.

    Parameters
    ----------
    levels : noise levels: sqrt(abar) as plain numbers, a `gepc.Levels`, or text such as `rho:0.05,0.17`.
    features : any of s, cos, pair, cycle, x0, b, d; see `gepc.features.gepc` for the formulas.
    pool, topk, window : `mean`, `topk` or `local` pooling over pixels; see `gepc.features.pooling.Pooling`.
    group : a ready-made group (`paper`, `c4`, `d4`, `flips`, `shifts`, `sign`), or a list of element names or actions.
    mc_samples, group_samples, level_samples : noise draws to average; random subsets of elements and levels per image.

    The other parameters are those of `gepc.Detector`.
    """

    @suggest_names
    def __init__(
        self,
        backbone: Backbone,
        levels: Levels | str | float | Iterable[float] = PAPER_LEVELS,
        keep: int | None = 2,
        features: Iterable[str] | str = ("s",),
        calibration: str = "kde",
        pool: str = "topk",
        topk: float = 0.3,
        window: int = 9,
        group: Group | str | Iterable[str | Action] = "paper",
        weights: str = "inv_cv",
        aggregate: str = "wmean",
        fuse: str = "sum",
        mc_samples: int = 1,
        group_samples: int | None = None,
        level_samples: int | None = None,
        sequential: float | None = None,
        value_range: tuple[float, float] | None = None,
        size: int | tuple[int, int] | None = None,
        resize: str = "stretch",
        magnitude: str = "linear",
        normalise: str = "fixed",
        calibration_share: float = 1 / 3,
        batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        extractor = GepcExtractor(
            levels=Levels.of(levels),
            features=(features,) if isinstance(features, str) else tuple(features),
            pool=pool,
            topk=topk,
            window=window,
            group=Group.of(group),
            mc_samples=mc_samples,
            group_samples=group_samples,
            level_samples=level_samples,
        )
        super().__init__(
            backbone,
            extractor,
            calibration=calibration,
            keep=keep,
            weights=weights,
            aggregate=aggregate,
            fuse=fuse,
            sequential=sequential,
            value_range=value_range,
            size=size,
            resize=resize,
            magnitude=magnitude,
            normalise=normalise,
            calibration_share=calibration_share,
            batch_size=batch_size,
            seed=seed,
        )


def list_detectors() -> list[str]:
    """Names that `create_detector` knows."""
    return list(methods())


def create_detector(method: str, backbone: Backbone, preset: str | None = None, **options: Any) -> Detector:
    """A detector by name. `options` are the method's own parameters and those of `gepc.Detector`, side by side.

    A preset is a named set of options of the method; what is given besides overrides it.
    """
    extractor_class = find_method(method)
    if preset is not None:
        if preset not in extractor_class.presets:
            raise OptionError(f"method {method!r} has no preset {preset!r}; {nearest(preset, extractor_class.presets)}")
        options = {**extractor_class.presets[preset], **options}
    own, shared = extractor_options(extractor_class), detector_options()
    check_names(f"method {method!r}", options, [*own, *shared])
    if method == GepcExtractor.name:
        return GEPC(backbone, **options)
    given = {name: value for name, value in options.items() if name in shared}
    for name in ("keep", "weights", "aggregate"):
        given.setdefault(name, getattr(extractor_class, name))
    checked = _checked(extractor_class, {name: value for name, value in options.items() if name in own})
    return Detector(backbone, extractor_class(**checked), **given)


def _checked(extractor_class: type[Extractor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, words and flags of the type that the method declares; the method itself checks all other options."""
    hints = typing.get_type_hints(extractor_class)
    return {
        name: coerce(hints[name], value, f"{extractor_class.name}: {name}") if is_scalar(hints[name]) else value
        for name, value in options.items()
    }


def extractor_options(extractor_class: type[Extractor]) -> list[str]:
    """Names of a method's own parameters."""
    return [field.name for field in dataclasses.fields(extractor_class)]  # type: ignore[arg-type]


def detector_options() -> list[str]:
    """Names of the parameters that every detector has."""
    return [
        parameter.name
        for parameter in inspect.signature(Detector.__init__).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]


def options_of(detector: Detector) -> dict[str, Any]:
    """All parameters as plain JSON values: `create_detector(method, backbone, **these)` builds the detector again."""
    own = {name: getattr(detector, name) for name in detector_options()}
    return plain_options({**detector.extractor.options(), **own})


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON values: levels as text, a group as the names of its elements, tuples as lists."""
    return {name: _plain(value) for name, value in options.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Levels):
        return str(value)
    if isinstance(value, Group):
        return list(value.names)
    if isinstance(value, tuple):
        return list(value)
    return value

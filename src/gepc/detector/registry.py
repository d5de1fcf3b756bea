"""Detectors by name: `GEPC` with its parameters spelt out, and every registered method through `create_detector`."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError, check_names, nearest
from gepc.core.options import coerce, is_scalar
from gepc.detector.detector import Detector, detector_options
from gepc.methods.base import Extractor, find_method, methods
from gepc.methods.extraction import plain_options
from gepc.methods.gepc import DEFAULT_LEVELS, GepcExtractor

Options = dict[str, Any]
DEFAULT_METHOD = "gepc+"


class GEPC(Detector):
    """Group-equivariant posterior consistency, the paper's detector.

    Parameters
    ----------
    backbone : the network that predicts noise.
    levels : noise levels: sqrt(abar) as plain numbers, a `gepc.Levels`, or text such as `rho:0.05,0.17`.
    keep : how many of the levels to keep; None keeps all.
    features : any of s, cos, pair, walk, x0, b, d, inner, cycle, var, var_g; see `gepc.methods.gepc` for the formulas.
    calibration : name of the calibrator; None is `kde`, or `parts` with the feature `inner`.
    pool : pooling over pixels: `mean`, `topk` or `local`.
    topk : the share of the largest pixels, for `topk` and `local`.
    window : side of the box filter, for `local`.
    group : a named group (`paper`, `c4`, `d4`, `flips`, `shifts`, `sign`), or a list of element names or actions.
    mc_samples : noise draws to average.
    group_samples : a random subset of this many elements per image and level; None uses all.
    level_samples : a random subset of this many levels per image when scoring; None uses all, as fitting does.
    layers : names of the layers that `inner` compares, with wildcards; None chooses them.
    **options : the other parameters of `gepc.Detector`.
    """

    def __init__(
        self,
        backbone: Backbone,
        levels: Levels | str | float | Iterable[float] = DEFAULT_LEVELS,
        keep: int | None = 2,
        features: Iterable[str] | str = ("s",),
        **options: Any,
    ) -> None:
        given = {"levels": levels, "keep": keep, "features": features, **options}
        own, shared = _divided(GepcExtractor, given, "GEPC")
        super().__init__(backbone, GepcExtractor(**own), **shared)


def list_detectors() -> list[str]:
    """Names that `create_detector` knows."""
    return list(methods())


def create_detector(
    method: str | Backbone | None, backbone: Backbone | None = None, preset: str | None = None, **options: Any
) -> Detector:
    """Create an unfitted detector by name: `create_detector(backbone)` or `create_detector("msma", backbone)`.

    Parameters
    ----------
    method : name of the method; see `list_detectors`. None, or the backbone in its place, is the default, `gepc+`.
    backbone : the network that predicts noise.
    preset : a named set of options of the method.
    **options : parameters of the method and of `gepc.Detector`; they take precedence over the preset.
    """
    if isinstance(method, Backbone):
        if backbone is not None:
            raise OptionError("create_detector takes the name of a method before the backbone")
        method, backbone = None, method
    if backbone is None:
        raise OptionError("create_detector needs a backbone; see gepc.load_backbone")
    extractor_class = find_method(DEFAULT_METHOD if method is None else method)
    method = extractor_class.name
    if preset is not None:
        if preset not in extractor_class.presets:
            raise OptionError(f"method {method!r} has no preset {preset!r}; {nearest(preset, extractor_class.presets)}")
        options = {**extractor_class.presets[preset], **options}
    own, shared = _divided(extractor_class, options, f"method {method!r}")
    if extractor_class is GepcExtractor:
        return GEPC(backbone, **options)
    defaults = {name: getattr(extractor_class, name) for name in ("keep", "weights", "aggregate")}
    return Detector(backbone, extractor_class(**own), **{**defaults, **shared})


def _divided(extractor_class: type[Extractor], options: Options, what: str) -> tuple[Options, Options]:
    """The options of the method, of the types that it declares, and those of every detector.

    The method itself checks its options other than numbers, words and flags.
    """
    own, shared = extractor_options(extractor_class), detector_options()
    check_names(what, options, [*own, *shared])
    hints, given = typing.get_type_hints(extractor_class), {}
    for name in (name for name in options if name in own):
        value, hint = options[name], hints[name]
        given[name] = tuple(value) if isinstance(value, list) else value
        if is_scalar(hint):
            given[name] = coerce(hint, value, f"{extractor_class.name}: {name}")
    return given, {name: value for name, value in options.items() if name in shared}


def extractor_options(extractor_class: type[Extractor]) -> set[str]:
    """Names of a method's own parameters."""
    return {field.name for field in dataclasses.fields(extractor_class)}  # type: ignore[arg-type]


def options_of(detector: Detector) -> dict[str, Any]:
    """All parameters as plain JSON values: `create_detector(method, backbone, **these)` builds the detector again."""
    own = {name: getattr(detector, name) for name in detector_options()}
    own["calibration"] = detector.calibration_name
    return plain_options({**detector.extractor.options(), **own})

"""The parameters of a detector, and what follows from them before any image is seen."""

import dataclasses
import typing
from dataclasses import KW_ONLY, dataclass
from typing import Any

from gepc.backbones.base import Backbone
from gepc.calibration.calibrators import create_calibrator
from gepc.calibration.scorer import Scorer
from gepc.conformal.p_values import check_rates
from gepc.core.errors import OptionError, check_least, check_names, nearest
from gepc.core.options import check_fields, checked, coerce, is_scalar, one_of
from gepc.images.batches import settled
from gepc.images.preprocessing import OWN_SIZE, Mask, Preprocessing
from gepc.images.sources import Images
from gepc.maps.statistics import CALIBRATION_IMAGES
from gepc.methods.base import Cost, Extractor, cost_of
from gepc.methods.extraction import plain_options

Options = dict[str, Any]


NOMINAL_SIZE = (32, 32)  # the size that costs are stated for before an image is known


@dataclass(eq=False, repr=False)
class Parameters:
    """The parameters of a detector, as they were given, and what follows from them before any image is seen."""

    backbone: Backbone
    extractor: Extractor
    _: KW_ONLY
    calibration: str | None = None
    keep: int | None = None
    weights: str = "inv_cv"
    aggregate: str = "wmean"
    fuse: str = "sum"
    value_range: tuple[float, float] | None = None
    size: int | tuple[int, int] | None = None
    resize: str = "stretch"
    magnitude: str = "linear"
    normalise: str = "fixed"
    ignore: Mask | None = None
    maps: str = one_of("calibrated", "raw")
    score_from: str = one_of("features", "map")
    calibration_share: float = 1 / 3
    contamination: float = checked(0.0, lambda value: 0.0 <= value < 0.5, "at least 0 and below 0.5")
    batch_size: int = 64
    seed: int = checked(0, lambda value: abs(value) <= 2**63, "at most 2**63")

    def __setattr__(self, name: str, value: Any) -> None:
        """Take a parameter in its own type, after creation too; a value of another type is an `OptionError`."""
        if name == "ignore" and value is not None and not isinstance(value, Mask | dict):
            value = Mask.of(value)
        field = Parameters.__dataclass_fields__.get(name)
        if field is not None and field.kw_only:
            value = coerce(field.type, value, name)
        if name == "batch_size":  # a fitted detector takes it at once
            check_least(1, batch_size=value)
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        """Refuse parameters that do not fit the method, the backbone or each other; `fit` calls it again."""
        if not isinstance(self.backbone, Backbone):
            kind = type(self.backbone).__name__
            raise OptionError(f"backbone must be a gepc.Backbone, got {kind}; see gepc.load_backbone")
        method = self.extractor
        if method.needs not in (None, self.backbone.gives):
            here = f"the backbone {self.backbone.source or self.backbone.family} gives {self.backbone.gives}"
            raise OptionError(f"the method {method.name!r} needs a network that gives {method.needs}, and {here}")
        self.scorer()
        self.preprocessing()
        if self.backbone.encoder is not None and method.pixels_only:
            raise OptionError(f"the method {method.name!r} does not run on a latent backbone: {method.pixels_only}")
        if self.resize in OWN_SIZE and method.square_only:
            raise OptionError("images may not be square; leave rot90 out of `group`", options=("group",))
        check_fields(self)
        if self.score_from == "map" and (self.maps == "raw" or not method.has_maps):
            raise OptionError("score_from='map' needs a method with maps, such as gepc+, and maps='calibrated'")
        check_rates(calibration_share=self.calibration_share)
        most = len(method.timesteps(self.backbone))
        if self.keep is not None and not 1 <= self.keep <= most:
            raise OptionError(f"keep must be between 1 and {most}, the number of distinct levels here; got {self.keep}")

    @property
    def calibration_name(self) -> str:
        """The calibrator in use."""
        return self.extractor.calibration_name if self.calibration is None else self.calibration

    def scorer(self) -> Scorer:
        """An unfitted scorer with these parameters."""
        return Scorer(self.calibration_name, self.keep, self.weights, self.aggregate, self.fuse)

    def preprocessing(self) -> Preprocessing:
        """The preprocessing that these parameters and the backbone ask for; the first image may set its size."""
        size = self.backbone.image_size if self.size is None else self.size
        if isinstance(size, int):
            size = (size, size)
        multiple = self.backbone.size_multiple if self.resize in OWN_SIZE else 1
        own = {name: getattr(self, name) for name in ("value_range", "resize", "magnitude", "normalise", "ignore")}
        preprocessing = Preprocessing(size=size, channels=self.backbone.channels, multiple=multiple, **own)
        if size is not None:
            self.backbone.check_size(*size)
        return preprocessing

    def options(self) -> dict[str, Any]:
        """All parameters as plain JSON values: `create_detector(backbone, method, **these)` builds the detector."""
        own = {name: getattr(self, name) for name in detector_options()}
        own["calibration"] = self.calibration_name
        return plain_options({**self.extractor.options(), **own})

    def network_size(self, images: Images) -> tuple[int, int] | None:
        """(H, W) of the network's input: as the parameters say, or that of the first readable image."""
        preprocessing = settled(self.preprocessing(), images)
        if preprocessing.size is not None:
            return preprocessing.size
        first = next((record.pixels for record in images.first(16) if record.pixels is not None), None)
        return None if first is None else preprocessing.network_size((first.shape[0], first.shape[1]))

    @property
    def fits_by_maps(self) -> bool:
        """Whether fitting needs no passes but those for maps: scores come from maps, and there is one level to keep."""
        return self.score_from == "map" and len(self.extractor.timesteps(self.backbone)) == 1

    def fit_cost(self, size: tuple[int, int] | None = None) -> Cost:
        """Network passes per image while fitting, at every candidate level, for images of (H, W)."""
        if self.fits_by_maps:
            return Cost()
        return cost_of(self.extractor.for_fitting(), self.backbone, size or NOMINAL_SIZE)

    def map_images(self, fitting: int, calibrating: int) -> int:
        """How many of the images to fit on and to calibrate with are evaluated again, as in scoring, for their maps."""
        if not self.extractor.has_maps:
            return 0
        again = calibrating if self.score_from == "map" else min(calibrating, CALIBRATION_IMAGES)
        return again if self.maps == "raw" else again + min(fitting, self.extractor.map_model.images)


def detector_options() -> list[str]:
    """Names of the parameters that every detector has."""
    return [parameter.name for parameter in dataclasses.fields(Parameters) if parameter.kw_only]


def extractor_options(extractor_class: type[Extractor]) -> set[str]:
    """Names of a method's own parameters."""
    dataclass_type: Any = extractor_class
    return {field.name for field in dataclasses.fields(dataclass_type)}


def divided(extractor_class: type[Extractor], options: Options, what: str) -> tuple[Options, Options]:
    """Divide options into those of the method, in the types that it declares, and those of every detector.

    The method itself checks options other than numbers, words and flags. `what` names the method in error messages.
    """
    own, shared = extractor_options(extractor_class), detector_options()
    check_names(what, options, [*own, *shared])
    hints = typing.get_type_hints(extractor_class)
    given = {}
    for name in own.intersection(options):
        value = options[name]
        given[name] = tuple(value) if isinstance(value, list) else value
        if is_scalar(hints[name]):
            given[name] = coerce(hints[name], value, f"{extractor_class.name}: {name}")
    return given, {name: value for name, value in options.items() if name in shared}


def with_preset(extractor_class: type[Extractor], preset: str | None, options: Options) -> Options:
    """The options with those of a preset of the method, over which they take precedence."""
    if preset is None:
        return options
    if preset not in extractor_class.presets:
        name = extractor_class.name
        raise OptionError(f"method {name!r} has no preset {preset!r}; {nearest(preset, extractor_class.presets)}")
    return {**extractor_class.presets[preset].options, **options}


def without_unused(options: Options) -> Options:
    """Stored options without those that the calibrator ignores, which creating a detector would refuse."""
    calibration = options.get("calibration")
    if calibration is None:
        return options
    calibrator = create_calibrator(calibration)
    used = {"aggregate": calibrator.uses_aggregate, "fuse": calibrator.uses_fuse}
    return {name: value for name, value in options.items() if used.get(name, True)}

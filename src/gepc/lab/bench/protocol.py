"""What a benchmark runs on, as plain data from a YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.calibration import create_calibrator
from gepc.calibration.scorer import WEIGHTINGS
from gepc.core.errors import OptionError, check_choice, nearest
from gepc.core.options import at_least, build, check_fields, one_of, positive, read_named, read_yaml, shipped_files
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import Images
from gepc.lab.bench.inspection import InspectionProtocol
from gepc.lab.datasets import open_dataset
from gepc.methods.base import find_method
from gepc.methods.features import find_feature
from gepc.methods.gepc import PAPER_LEVELS, GepcExtractor
from gepc.methods.groups import Group

LEAST_IMAGES = 20
PAPER_TOPK = 0.3
Place = tuple[str, str]  # the short name of a data set, and a split of it
Pair = tuple[str, str]  # the short names of an in-distribution and of an out-of-distribution set


@dataclass(frozen=True)
class BenchmarkDataset:
    """A data set of a benchmark."""

    dataset: str  # its name for `gepc.lab.datasets.open_dataset` (`cifar10`, `npz:svhn32.npz`)
    label: str = ""  # its name in tables; the short name by default
    value_range: tuple[float, float] | None = None  # of black and white; by default those of the array's type


@dataclass(frozen=True)
class MethodChoice:
    """How one of the compared methods is run."""

    preset: str | None = None  # a preset of the method; the command's default if left out
    # at most that many of ID-train and of each test set, for a costly method; by default the protocol's
    train_images: int | None = at_least(LEAST_IMAGES, None)
    test_images: int | None = at_least(LEAST_IMAGES, None)
    options: dict[str, Any] = field(default_factory=dict)  # its own, and those of `SCORING_OPTIONS`

    def __post_init__(self) -> None:
        check_fields(self, "protocol: ")


def split_name(name: str) -> tuple[str, str | None]:
    """Split `method:preset` into (method, preset), or `method` into (method, None); unknown names are an error."""
    method, colon, preset = name.partition(":")
    known = find_method(method).presets
    if colon and preset not in known:
        raise OptionError(f"the method {method!r} has no preset {preset!r}; {nearest(preset, known)}")
    return method, preset or None


@dataclass(frozen=True)
class Protocol:
    """A benchmark. ID-train selects levels and fits; ID-test and OOD-test are only evaluated."""

    datasets: dict[str, BenchmarkDataset]  # short name -> data set
    pairs: dict[str, tuple[str, ...]]  # short name of the ID set -> short names of its OOD sets
    backbone: str = "celeba32-small"  # what `gepc.load_backbone` takes
    # the network is asked for this multiple of a timestep; 1 is what it was trained on
    time_scale: float = positive(1.0)
    size: int = at_least(1, 32)  # images are resized to this height and width
    # short name of the ID set -> candidate levels; `default` for the others
    levels: dict[str, tuple[float, ...]] = field(default_factory=lambda: {"default": PAPER_LEVELS})
    train_images: int = at_least(LEAST_IMAGES, 2000)  # the number of ID-train images, selected by `subset_seed`
    test_images: int = at_least(LEAST_IMAGES, 1000)  # the number of images of each test set, selected by `subset_seed`
    # of GEPC; those not in `main_features` are for the ablations
    features: tuple[str, ...] = ("s", "cos", "pair")
    # those of the main detector, fused by their mean; or ID set -> features, `default` for the others
    main_features: dict[str, tuple[str, ...]] | tuple[str, ...] = ("s",)
    mc_samples: int = 1  # noise samples per image and level
    pool: str = "topk"  # how residuals are pooled over pixels
    # the share of pixels that `topk` pooling averages; or ID set -> share, `default` for the others
    topk: float | dict[str, float] = PAPER_TOPK
    group: str = "paper"  # the transforms, by the name of a group
    keep: int = at_least(1, 2)  # how many levels the main detector keeps
    weights: str = one_of(*WEIGHTINGS)  # the weights of the kept levels, `inv_cv` or `uniform`
    calibration: str = "kde"  # the calibrator of the main detector
    calibrations: tuple[str, ...] = ("kde", "zscore", "raw", "mvn")  # those that the ablation compares
    seeds: tuple[int, ...] = (0,)  # noise seeds; the main table gives the mean and the standard deviation over them
    subset_seed: int | None = 0  # seed of the draw of images; None takes the first ones
    batch_size: int = at_least(1, 64)  # images per network call
    methods: dict[str, MethodChoice] = field(default_factory=dict)  # `method` or `method:preset` -> how it is run

    def __post_init__(self) -> None:
        check_fields(self, "protocol: ")
        self._check_pairs()
        if "s" not in self.features or any(find_feature(name).layers for name in self.features):
            raise OptionError("protocol: features must include 's', and none of inner layers, which have many values")
        for values in (self.levels, self.topk, self.main_features):
            self._check_sets(values)
        for name in self.pairs:
            if not self.main_features_for(name):
                raise OptionError("protocol: main_features must name at least one feature")
            for feature in self.main_features_for(name):
                check_choice("main_features", feature, self.features)
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise OptionError(f"protocol: seeds must be different whole numbers from 0, got {list(self.seeds)}")
        for name in (self.calibration, *self.calibrations):
            create_calibrator(name)
        if any(split_name(name)[0] == GepcExtractor.name for name in self.methods):
            raise OptionError("protocol: methods cannot include gepc, whose settings are the protocol's own")
        for protocol in self.pooled_alike():
            protocol.extractor()

    def _check_pairs(self) -> None:
        if not self.pairs:
            raise OptionError("protocol: pairs names no in-distribution set")
        for name, others in self.pairs.items():
            for known in (name, *others):
                if known not in self.datasets:
                    raise OptionError(f"protocol: pairs names {known!r}; {nearest(known, self.datasets)}")
            if name in others:
                raise OptionError(f"protocol: {name!r} is its own out-of-distribution set")
            if not others or len(set(others)) < len(others):
                raise OptionError(f"protocol: pairs.{name} must name one or more different sets, got {list(others)}")
        if len(set(self.pair_labels)) < len(self.pair_labels):
            raise OptionError(f"protocol: data sets need different labels; the pairs are {', '.join(self.pair_labels)}")

    def _check_sets(self, values: object) -> None:
        """Check the names of ID sets in a value that may differ between them."""
        for name in values if isinstance(values, dict) else ():
            if name != "default" and name not in self.datasets:
                raise OptionError(f"protocol: {name!r} is not a data set; {nearest(name, ['default', *self.datasets])}")

    def extractor(self) -> GepcExtractor:
        """The extractor of all features when the first ID set is in-distribution; its levels are not used."""
        return GepcExtractor(
            features=self.features,
            pool=self.pool,
            topk=self.topk_for(next(iter(self.pairs))),
            group=Group.of(self.group),
            mc_samples=self.mc_samples,
        )

    def levels_for(self, name: str) -> Levels:
        """Candidate levels when `name` is in-distribution."""
        return Levels(self.levels.get(name, self.levels.get("default", PAPER_LEVELS)))

    def topk_for(self, name: str) -> float:
        """The share of pixels that is averaged when `name` is in-distribution."""
        return self.topk if isinstance(self.topk, float) else self.topk.get(name, self.topk.get("default", PAPER_TOPK))

    def main_features_for(self, name: str) -> tuple[str, ...]:
        """The features of the main detector when `name` is in-distribution."""
        features = self.main_features
        return features.get(name, features.get("default", ("s",))) if isinstance(features, dict) else features

    def pooled_alike(self) -> list[Protocol]:
        """The protocol in parts whose ID sets average the same share of pixels, and so have features in common."""
        shares: dict[float, dict[str, tuple[str, ...]]] = {}
        for name, others in self.pairs.items():
            shares.setdefault(self.topk_for(name), {})[name] = others
        if len(shares) == 1:
            return [self]
        return [replace(self, pairs=pairs, topk=share) for share, pairs in shares.items()]

    def timesteps(self, backbone: Backbone) -> dict[Place, tuple[int, ...]]:
        """(set, split) -> timesteps: ID-train at its own candidates, a test set at those of every ID set it meets."""
        found: dict[Place, set[int]] = {}
        for name, others in self.pairs.items():
            candidates = self.levels_for(name).timesteps(backbone.alphas_cumprod)
            for place in [(name, "train"), (name, "test"), *((other, "test") for other in others)]:
                found.setdefault(place, set()).update(candidates)
        return {place: tuple(sorted(timesteps)) for place, timesteps in found.items()}

    def images(self, split: str) -> int:
        """The requested number of images of a split."""
        return self.train_images if split == "train" else self.test_images

    def open(self, data: Path, place: Place) -> Images:
        """The images of one split, as many as requested or fewer."""
        name, split = place
        return open_dataset(self.datasets[name].dataset, data, split, self.images(split), self.subset_seed)

    def preprocessing(self, name: str, backbone: Backbone) -> Preprocessing:
        """How the images of a data set are prepared for the backbone."""
        return Preprocessing(self.datasets[name].value_range, (self.size, self.size), channels=backbone.channels)

    def label(self, *names: str) -> str:
        """Names of data sets as tables show them, with colons between."""
        return ":".join(self.datasets[name].label or name for name in names)

    @property
    def pair_list(self) -> list[Pair]:
        """All (ID, OOD) pairs in order."""
        return [(name, other) for name, others in self.pairs.items() for other in others]

    @property
    def representative(self) -> Pair:
        """The pair of the paper's runtime table and histograms, SVHN against CIFAR-100, or else the first pair."""
        labels = dict(zip(self.pair_labels, self.pair_list, strict=True))
        return labels.get("SVHN:C100", self.pair_list[0])

    @property
    def pair_labels(self) -> tuple[str, ...]:
        """`ID:OOD` of every pair, as tables show it."""
        return tuple(self.label(*pair) for pair in self.pair_list)


def builtin_protocols() -> dict[str, Path]:
    """The protocols that ship with the package, by name."""
    return shipped_files(Path(__file__).parents[1] / "configs")


def load_protocol(config: str | Path, overrides: dict[str, Any] | None = None, reading: str = "paper") -> Protocol:
    """Read a YAML file, or a protocol of the package by its name.

    Parameters
    ----------
    config : the file or the name.
    overrides : values that replace those of the file and of the reading.
    reading : a reading of the paper in `readings.yaml`: `paper`, its text, or `released`, the authors' code.
    """
    readings = read_yaml(Path(__file__).with_name("readings.yaml"))
    check_choice("reading", reading, readings)
    values = read_named(config, builtin_protocols(), "protocol")
    known = {"default", *values.get("datasets", ())}
    for option, value in readings[reading].items():
        by_set = isinstance(value, dict)  # for ID sets that the protocol may not have
        values[option] = {name: value[name] for name in value if name in known} if by_set else value
    return build(Protocol, {**values, **(overrides or {})}, "protocol")


def load_inspection(config: str | Path, overrides: dict[str, Any] | None = None) -> InspectionProtocol | None:
    """Read a protocol of a benchmark of inspection, one that has the key `defects`; None for any other.

    `overrides` replace its keys. Those that are not keys of a protocol are options of its method.
    """
    values = read_named(config, builtin_protocols(), "protocol")
    if "defects" not in values:
        return None
    keys = {one.name for one in fields(InspectionProtocol)}
    given = {name: value for name, value in (overrides or {}).items() if name in keys}
    protocol = build(InspectionProtocol, {**values, **given}, "protocol")
    others = {name: value for name, value in (overrides or {}).items() if name not in keys}
    return replace(protocol, options={**protocol.options, **others})

"""What a benchmark runs on, as plain data from a YAML file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from gepc.backbones.schedule import Levels
from gepc.core.errors import InputError, OptionError, check_choice, nearest
from gepc.core.options import build, read_yaml
from gepc.features.base import find_method
from gepc.features.gepc import PAPER_LEVELS, GepcExtractor
from gepc.scoring import create_calibrator
from gepc.scoring.scorer import WEIGHTINGS


@dataclass(frozen=True)
class Source:
    """A data set.

    Parameters
    ----------
    dataset : its name for `gepc.datasets.open_dataset` (`cifar10`, `npz:svhn32.npz`).
    label : its name in tables.
    value_range : the numbers that mean black and white, where the type of the pixels does not say it.
    """

    dataset: str
    label: str = ""
    value_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class MethodChoice:
    """How one of the compared methods is run.

    Parameters
    ----------
    preset : `paper` or `light`; None is `light` where the method has it.
    train_images, test_images : at most so many of each set, for a costly method; None is as many as the protocol's.
    options : the method's own parameters, and `calibration`, `keep`, `weights`, `aggregate`, `fuse`.
    """

    preset: str | None = None
    train_images: int | None = None
    test_images: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


def split_name(name: str) -> tuple[str, str | None]:
    """(method, preset) of `method:preset`, or (method, None); unknown ones are an error."""
    method, colon, preset = name.partition(":")
    known = find_method(method).presets
    if colon and preset not in known:
        raise OptionError(f"the method {method!r} has no preset {preset!r}; {nearest(preset, known)}")
    return method, preset or None


@dataclass(frozen=True)
class Protocol:
    """A benchmark. ID-train chooses levels and fits; ID-test and OOD-test are only evaluated.

    Parameters
    ----------
    datasets : short name -> source.
    pairs : ID short name -> OOD short names.
    levels : ID short name -> candidate levels; `default` for the others.
    train_images, test_images : how many of each set, drawn with `subset_seed`.
    features : computed in the one pass; the first is the main detector's.
    seeds : noise seeds; the main table gives the mean and the spread over them.
    methods : method, or method:preset -> how it is run where it is compared with GEPC; the others are run with their
        preset `light`.
    """

    datasets: dict[str, Source]
    pairs: dict[str, tuple[str, ...]]
    backbone: str = "celeba32-tiny"
    size: int = 32
    levels: dict[str, tuple[float, ...]] = field(default_factory=lambda: {"default": PAPER_LEVELS})
    train_images: int = 2000
    test_images: int = 1000
    features: tuple[str, ...] = ("s", "cos", "pair", "b")
    pool: str = "topk"
    topk: float = 0.3
    group: str = "paper"
    keep: int = 2
    weights: str = "inv_cv"
    calibration: str = "kde"
    seeds: tuple[int, ...] = (0,)
    subset_seed: int = 0
    batch_size: int = 64
    methods: dict[str, MethodChoice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_pairs()
        if "s" not in self.features:
            raise OptionError("protocol: features must hold 's'")
        if min(self.train_images, self.test_images) < 20:
            raise OptionError("protocol: train_images and test_images must be at least 20")
        if min(self.size, self.batch_size) < 1:
            raise OptionError("protocol: size and batch_size must be at least 1")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise OptionError(f"protocol: seeds must be different whole numbers from 0, got {list(self.seeds)}")
        check_choice("weights", self.weights, WEIGHTINGS)
        create_calibrator(self.calibration)
        self._check_levels()
        self._check_methods()
        self.extractor()

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

    def _check_levels(self) -> None:
        for name in self.levels:
            if name != "default" and name not in self.datasets:
                raise OptionError(f"protocol: levels names {name!r}; {nearest(name, ['default', *self.datasets])}")
        for name in self.pairs:
            count = len(self.levels_for(name).values)
            if not 1 <= self.keep <= count:
                raise OptionError(
                    f"protocol: keep must be between 1 and {count}, the levels of {name}; got {self.keep}"
                )

    def _check_methods(self) -> None:
        for full_name, choice in self.methods.items():
            name, _ = split_name(full_name)
            if name == GepcExtractor.name:
                raise OptionError("protocol: methods cannot hold gepc, whose settings are the protocol's own")
            if any(count is not None and count < 20 for count in (choice.train_images, choice.test_images)):
                raise OptionError(f"protocol: methods.{name}: at least 20 images of each kind are needed")

    def extractor(self) -> GepcExtractor:
        """The one-pass extractor; its own levels are not used."""
        return GepcExtractor(features=self.features, pool=self.pool, topk=self.topk, group=self.group)  # type: ignore[arg-type]

    def levels_for(self, name: str) -> Levels:
        """Candidate levels when `name` is in-distribution."""
        return Levels(self.levels.get(name, self.levels.get("default", PAPER_LEVELS)))

    def images(self, split: str) -> int:
        """How many images of a split are asked for."""
        return self.train_images if split == "train" else self.test_images

    def label(self, name: str) -> str:
        """The data set's name in tables."""
        return self.datasets[name].label or name

    @property
    def pair_list(self) -> list[tuple[str, str]]:
        """All (ID, OOD) pairs in order."""
        return [(name, other) for name, others in self.pairs.items() for other in others]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def builtin_protocols() -> dict[str, Path]:
    """The protocols that ship with the package, by name."""
    folder = Path(str(resources.files("gepc") / "configs"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_protocol(config: str | Path, overrides: dict[str, Any] | None = None) -> Protocol:
    """Read a protocol from a YAML file or by the name of one that ships with the package."""
    path, known = Path(config), builtin_protocols()
    if not path.is_file():
        if path.stem not in known:
            raise InputError(
                f"{config} is neither a YAML file nor a protocol of the package; {nearest(path.stem, known)}"
            )
        path = known[path.stem]
    return build(Protocol, {**read_yaml(path), **(overrides or {})}, "protocol")

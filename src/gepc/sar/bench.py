"""Radar: the preset of a detector, and the benchmark with its protocol, patches, features and scores."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import InputError, OptionError, check_choice
from gepc.features.extraction import ExtractionSpec, FeatureCache, extract_chunks
from gepc.features.gepc import GepcExtractor
from gepc.features.pooling import Map, combine
from gepc.images.batches import OnBadImage, chunks
from gepc.images.preprocessing import NORMALISATIONS, Preprocessing
from gepc.sar.annotations import detect_layout, divide, open_scenes
from gepc.sar.patches import Cut, Patch, PatchImages, PatchRules, cut, sample
from gepc.scoring import Scorer

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[np.float64]
OnProgress = Callable[[int], None]

TOPK = "topk 0.3"
TARGET_PIXELS = 200
SIDES = {"one": "z", "two": "kde"}
LEVEL = 0.99


@dataclass(frozen=True)
class SarProtocol:
    """What the benchmark compares. ID is sea clutter of HRSID; no parameter is tuned on ships.

    Parameters
    ----------
    rules : how scenes are cut.
    hold_out : fraction of the training images that detectors are fitted on; backbones are trained on the others.
    fit_limit : maximum number of patches to fit on; None uses all.
    limit : maximum number of patches in each test set; None uses all.
    levels : candidate noise levels, as sqrt(abar).
    keep : keep this many levels, those most stable on clutter; None keeps all.
    group : transformations of the group.
    target_pixels : area of a target in pixels, which sets the local pooling.
    other_targets : further areas for a sensitivity table; those too large for a patch are skipped.
    normalisations : normalisations to compare, see `gepc.images.preprocessing`.
    draws : bootstrap samples of source images for each confidence interval.
    seed : seed of the noise and of the patch selection.
    """

    rules: PatchRules = field(default_factory=PatchRules)
    hold_out: float = 0.35
    fit_limit: int | None = 200
    limit: int | None = 200
    levels: str = str(LEVEL)
    keep: int | None = None
    group: tuple[str, ...] = ("id", "rot180")
    target_pixels: float = TARGET_PIXELS
    other_targets: tuple[float, ...] = (50, 100, 400, 800)
    normalisations: tuple[str, ...] = NORMALISATIONS
    draws: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = set(self.normalisations) - set(NORMALISATIONS)
        if unknown or not self.normalisations:
            raise OptionError(f"normalisations are {', '.join(NORMALISATIONS)}; got {', '.join(self.normalisations)}")

    @property
    def local(self) -> str:
        """Name of the pooling at the target's size."""
        return f"local {self.target_pixels:g}"

    @property
    def window(self) -> int:
        """Side of the box filter of that pooling."""
        return self.extractors()[self.local].window

    def extractors(self) -> dict[str, GepcExtractor]:
        """Extractors by the name of their pooling, which is all they differ in; the first is `local`."""
        size = self.rules.size
        others = [other for other in self.other_targets if other != self.target_pixels and other <= size**2 / 4]
        pools = {f"local {target:g}": local_pooling(target, size) for target in (self.target_pixels, *others)}
        pools[TOPK] = {"pool": "topk", "topk": 0.3}
        shared: dict[str, Any] = {"levels": Levels.of(self.levels), "group": list(self.group)}
        return {name: GepcExtractor(**shared, **pool) for name, pool in pools.items()}


@dataclass(frozen=True)
class PatchSets:
    """Clutter to fit on, clutter to test on, ships by data set, and how each set was cut."""

    fit: list[Patch]
    clutter: list[Patch]
    ships: dict[str, list[Patch]]
    cuts: dict[str, Cut]

    @property
    def total(self) -> int:
        """Number of patches in all sets."""
        return len(self.fit) + len(self.clutter) + sum(map(len, self.ships.values()))


def gather(
    protocol: SarProtocol, data: Path, others: Sequence[Path], on_progress: OnProgress | None = None
) -> PatchSets:
    """Cut and sample the patches of a protocol.

    Parameters
    ----------
    protocol : the protocol.
    data : folder of HRSID. Detectors are fitted on training images held out from the backbone and tested on test
        images, which share no ground with them.
    others : folders of further data sets with ships.
    on_progress : called with 1 after each scene.
    """
    if detect_layout(data) != "hrsid":
        raise InputError(f"{data}: sea clutter comes from HRSID, which has a training split; give its folder")
    train, test = open_scenes(data, "train"), open_scenes(data, "test")
    _, held_out = divide(train, protocol.hold_out)
    cuts = {
        "fit": cut(held_out, protocol.rules, test.scenes, on_progress=on_progress),
        data.name: cut(test, protocol.rules, train.scenes, on_progress=on_progress),
    }
    for other in others:
        if other.name in cuts:
            raise InputError(f"two data sets are called {other.name}; rename one of the folders")
        cuts[other.name] = cut(open_scenes(other), protocol.rules, on_progress=on_progress)
    ships = {name: sample(found.ships, protocol.limit, protocol.seed) for name, found in cuts.items() if name != "fit"}
    for name, found in ships.items():
        if not found:
            raise InputError(f"{name} has no patch of {protocol.rules.size} pixels with a ship")
    fit = sample(cuts["fit"].clutter, protocol.fit_limit, protocol.seed)
    clutter = sample(cuts[data.name].clutter, protocol.limit, protocol.seed)
    if len(fit) < 8 or len(clutter) < 2:
        raise InputError(
            f"{data} has {len(fit)} clutter patches to fit on and {len(clutter)} to test; at least 8 and 2 are needed"
        )
    return PatchSets(fit, clutter, ships, cuts)


class MemoizedBackbone(Backbone):
    """Remembers predictions until `forget`, so that several extractors share the passes of one.

    Parameters
    ----------
    inner : the backbone that predicts, and counts the passes.
    """

    def __init__(self, inner: Backbone) -> None:
        super().__init__(inner.alphas_cumprod, inner.channels, inner.image_size, inner.size_multiple)
        self.inner = inner
        self.device, self.dtype = inner.device, inner.dtype
        self.encoder, self.factor, self.act_on = inner.encoder, inner.factor, inner.act_on
        self.network_channels = inner.network_channels
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}

    @property
    def fingerprint(self) -> str | None:
        """That of the inner backbone."""
        return self.inner.fingerprint

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        digest = hashlib.blake2b(x.detach().cpu().contiguous().numpy().tobytes(), digest_size=16).digest()
        key = (tuple(x.shape), tuple(t.tolist()), digest)
        if key not in self._known:
            self._known[key] = self.inner.eps(x, t)
        return self._known[key]

    def forget(self) -> None:
        """Drop all predictions; call it between batches to bound the memory."""
        self._known.clear()


@dataclass(frozen=True)
class PatchFeatures:
    """Patches with their columns (N, levels, features) by pooling and their maps (N, levels, H, W)."""

    patches: tuple[Patch, ...]
    columns: Mapping[str, Array]
    maps: Map

    @property
    def sources(self) -> list[str]:
        """The panorama or file that each patch was cut from."""
        return [patch.scene.source for patch in self.patches]


def extract_patches(
    patches: Sequence[Patch],
    backbone: Backbone,
    extractors: Mapping[str, GepcExtractor],
    preprocessing: Preprocessing,
    seed: int = 0,
    cache: FeatureCache | None = None,
    on_progress: OnProgress | None = None,
) -> PatchFeatures:
    """Extract features with extractors that differ in pooling only, at the cost of one of them.

    Parameters
    ----------
    patches : the patches.
    backbone : the network that predicts noise.
    extractors : extractors by name; the maps are those of the first.
    preprocessing : how patches become the network's input.
    seed : seed of the noise.
    cache : cache of the features; None computes all of them.
    on_progress : called with 1 after each patch.
    """
    shared = MemoizedBackbone(backbone)
    first = next(iter(extractors))
    steps = extractors[first].timesteps(backbone)
    # one row at a time: a patch has the same features, and the same cache entry, in a sample of any size
    specs = {name: ExtractionSpec(one, steps, seed, 1, with_maps=name == first) for name, one in extractors.items()}
    columns: dict[str, list[Array]] = {name: [] for name in specs}
    fields = []
    for chunk in chunks(PatchImages(patches), preprocessing, 1, OnBadImage.NONE):
        for name, spec in specs.items():
            ((_, found),) = extract_chunks(shared, spec, [chunk], cache)
            assert found is not None
            table, maps = found
            columns[name].append(spec.extractor.columns(table))
            if maps is not None:
                fields.append(maps)
        shared.forget()
        if on_progress is not None:
            on_progress(1)
    return PatchFeatures(
        tuple(patches), {name: np.concatenate(parts) for name, parts in columns.items()}, np.concatenate(fields)
    )


@dataclass(frozen=True)
class FeatureSets:
    """The features of all patch sets under one normalisation."""

    normalise: str
    fit: PatchFeatures
    clutter: PatchFeatures
    ships: dict[str, PatchFeatures]


@dataclass(frozen=True)
class SarBench:
    """A protocol, its patches, and their features by normalisation."""

    protocol: SarProtocol
    sets: PatchSets
    backbone: Backbone
    features: dict[str, FeatureSets]

    def scorer(self, found: FeatureSets, pooling: str, calibration: str = "z") -> Scorer:
        """A scorer fitted on clutter alone."""
        return Scorer(calibration, self.protocol.keep).fit(found.fit.columns[pooling])

    def scores(self, found: FeatureSets, pooling: str, calibration: str) -> tuple[Array, dict[str, Array]]:
        """Scores of the test clutter and of each set of ships."""
        scorer = self.scorer(found, pooling, calibration)
        ships = {name: scorer.score(part.columns[pooling]) for name, part in found.ships.items()}
        return scorer.score(found.clutter.columns[pooling]), ships

    def maps(self, found: FeatureSets, part: PatchFeatures) -> Map:
        """m = sum_t w_t mean_g mean_c r_g^2 / b_t over the levels that local pooling keeps."""
        selection = self.scorer(found, self.protocol.local).selection_
        return combine(part.maps[:, list(selection.kept)], selection.weights)


def measure(
    protocol: SarProtocol,
    sets: PatchSets,
    backbone: Backbone,
    cache: Path | None = None,
    on_progress: OnProgress | None = None,
) -> SarBench:
    """Compute the features of every patch under every normalisation.

    Parameters
    ----------
    protocol : the protocol.
    sets : its patches.
    backbone : the network that predicts noise.
    cache : folder of the feature cache; None caches nothing.
    on_progress : called with 1 after each patch.
    """
    size = (protocol.rules.size, protocol.rules.size)
    backbone.check_size(*size, what="patches")
    features, extractors = {}, protocol.extractors()
    for normalise in protocol.normalisations:
        preprocessing = Preprocessing(None, size, "exact", backbone.channels, "log", normalise)

        def extract(patches: Sequence[Patch], how: Preprocessing = preprocessing) -> PatchFeatures:
            return extract_patches(patches, backbone, extractors, how, protocol.seed, FeatureCache(cache), on_progress)

        ships = {name: extract(patches) for name, patches in sets.ships.items()}
        features[normalise] = FeatureSets(normalise, extract(sets.fit), extract(sets.clutter), ships)
    return SarBench(protocol, sets, backbone, features)


def local_pooling(target_pixels: float, size: int) -> dict[str, Any]:
    """The options `pool`, `window` and `topk` for targets of `target_pixels` pixels in patches of size x size."""
    if not 1 <= target_pixels <= size * size / 4:
        raise OptionError(f"target_pixels must be between 1 and a quarter of the patch, got {target_pixels}")
    window = 2 * round((2.0 / 3.0 * math.sqrt(target_pixels) - 1.0) / 2.0) + 1
    return {"pool": "local", "window": max(1, window), "topk": target_pixels / size**2}


def sar_options(
    target_pixels: float = TARGET_PIXELS, size: int = 256, sides: str = "one", normalise: str = "fixed"
) -> dict[str, Any]:
    """Options for `gepc.GEPC(backbone, **sar_options(...))`; change entries of the dictionary to override them.

    Parameters
    ----------
    target_pixels : area of a target in pixels.
    size : side of a patch in pixels.
    sides : `one` (only larger residuals are suspicious) or `two` (smaller ones too).
    normalise : `fixed` (one scale for all patches) or `patch` (mean and contrast of each patch removed).
    """
    check_choice("sides", sides, SIDES)
    return {
        "levels": str(LEVEL),
        "keep": None,
        "group": ["id", "rot180"],
        **local_pooling(target_pixels, size),
        "calibration": SIDES[sides],
        "size": size,
        "resize": "cut",
        "magnitude": "log",
        "normalise": normalise,
    }

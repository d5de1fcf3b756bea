"""One pass over each data set: the feature tables that every table and figure is arithmetic on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gepc.backbones.base import Backbone
from gepc.bench.protocol import Protocol
from gepc.core.errors import InputError, OptionError
from gepc.datasets import open_dataset
from gepc.features.base import Extractor, Table
from gepc.features.extraction import ExtractionSpec, FeatureCache, concatenate, extract_chunks
from gepc.images.batches import OnBadImage, chunks
from gepc.images.preprocessing import Preprocessing, warn_about_range
from gepc.images.sources import Images

Sizes = Mapping[tuple[str, str], int]
"""(set, split) -> how many images it has."""
Keys = Mapping[tuple[str, str, int], Sequence[bytes]]
"""(set, split, seed) -> the keys of images."""


@dataclass(frozen=True)
class Part:
    """The features of one split of one data set with one noise seed, over the timesteps it was looked at."""

    table: Table
    timesteps: tuple[int, ...]
    keys: tuple[bytes, ...]
    places: tuple[int, ...]
    """Where each image is in the split as it was opened: those that cannot be read have no row."""

    @property
    def count(self) -> int:
        """How many images it holds."""
        return len(self.keys)

    def at(self, timesteps: Sequence[int]) -> Table:
        """The table at some of its timesteps, in that order."""
        positions = [self.timesteps.index(t) for t in timesteps]
        return {name: values[:, positions] for name, values in self.table.items()}

    def of(self, keys: Sequence[bytes]) -> Part:
        """The rows of those images, in that order; equal images have equal rows."""
        place = {key: row for row, key in enumerate(self.keys)}
        rows = [place[key] for key in keys]
        table = {name: values[rows] for name, values in self.table.items()}
        return Part(table, self.timesteps, tuple(keys), tuple(self.places[row] for row in rows))


@dataclass
class Collection:
    """All features of a benchmark: (set, split, seed) -> part; how they were come by; what could not be read."""

    parts: dict[tuple[str, str, int], Part] = field(default_factory=dict)
    passes: int = 0
    cached_levels: int = 0
    computed_levels: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    """Image, with its set and split -> the reason."""

    @property
    def keys(self) -> Keys:
        """The images of every part."""
        return {place: part.keys for place, part in self.parts.items()}

    def of(self, keys: Keys) -> Collection:
        """Some of the images of every part alone."""
        return Collection({place: part.of(keys[place]) for place, part in self.parts.items()})

    @property
    def sizes(self) -> Sizes:
        """How many images of each split were looked at."""
        return {(name, split): part.count for (name, split, _), part in self.parts.items()}

    def count(self, split: str) -> int:
        """The most images of that split that a set gave."""
        return max(count for (_, kind), count in self.sizes.items() if kind == split)


def collect(
    protocol: Protocol,
    backbone: Backbone,
    data: Path,
    cache: FeatureCache,
    on_progress: Callable[[int], None] | None = None,
) -> Collection:
    """Features of every split that the pairs need, at every timestep that any pair needs there."""
    found = Collection()
    before = backbone.forward_count
    looking = SplitExtractor(protocol, backbone, protocol.extractor(), cache, found.skipped, on_progress)
    for (name, split), timesteps in needed(protocol, backbone).items():
        images = open_split(protocol, data, name, split)
        warn_about_range(images, protocol.datasets[name].value_range)
        for seed in protocol.seeds:
            found.parts[name, split, seed] = looking.at(name, split, images, timesteps, seed)
    found.passes = backbone.forward_count - before
    found.cached_levels, found.computed_levels = cache.hits, cache.misses
    return found


def open_split(protocol: Protocol, data: Path, name: str, split: str, limit: int | None = None) -> Images:
    """The images of one split, as many as the protocol wants or fewer: a smaller limit keeps some of the same ones."""
    wanted = protocol.images(split)
    limit = wanted if limit is None else min(limit, wanted)
    return open_dataset(protocol.datasets[name].dataset, data, split, limit, protocol.subset_seed)


def needed(protocol: Protocol, backbone: Backbone) -> dict[tuple[str, str], tuple[int, ...]]:
    """(set, split) -> timesteps: ID-train at its own candidates, a test set at those of every ID it meets."""
    found: dict[tuple[str, str], set[int]] = {}
    for name, others in protocol.pairs.items():
        candidates = protocol.levels_for(name).timesteps(backbone.alphas_cumprod)
        for place in [(name, "train"), (name, "test"), *((other, "test") for other in others)]:
            found.setdefault(place, set()).update(candidates)
    return {place: tuple(sorted(timesteps)) for place, timesteps in found.items()}


def check_ready(protocol: Protocol, backbone: Backbone, data: Path) -> dict[tuple[str, str], int]:
    """Raise what can be known to be wrong before the first pass: the size, the levels, the folders of all sets.

    Gives back how many images there are of each split: as many as the protocol asks for, or fewer.
    """
    backbone.check_size(protocol.size, protocol.size)
    for name in protocol.pairs:
        distinct = len(protocol.levels_for(name).timesteps(backbone.alphas_cumprod))
        if distinct < protocol.keep:
            raise OptionError(
                f"protocol: keep is {protocol.keep}, but the levels of {name} are {distinct} timesteps of this backbone"
            )
    return {place: len(open_split(protocol, data, *place)) for place in needed(protocol, backbone)}


def asked_for(protocol: Protocol, backbone: Backbone) -> dict[tuple[str, str], int]:
    """How many images of each split the protocol asks for."""
    return {(name, split): protocol.images(split) for name, split in needed(protocol, backbone)}


def passes_needed(protocol: Protocol, backbone: Backbone, sizes: Sizes | None = None) -> int:
    """Network passes of `collect` with an empty cache."""
    per_level = protocol.extractor().cost(backbone, (protocol.size, protocol.size), levels=1).forward
    sizes = asked_for(protocol, backbone) if sizes is None else sizes
    levels = sum(sizes[place] * len(timesteps) for place, timesteps in needed(protocol, backbone).items())
    return levels * per_level * len(protocol.seeds)


def naive_passes(protocol: Protocol, backbone: Backbone, sizes: Sizes | None = None) -> int:
    """What the pairs cost one by one as the paper counts: (1 + |G|) passes, ID-train again for every pair."""
    per_level = 1 + len(protocol.extractor().group)
    sizes = asked_for(protocol, backbone) if sizes is None else sizes
    total = 0
    for name, other in protocol.pair_list:
        candidates = len(protocol.levels_for(name).timesteps(backbone.alphas_cumprod))
        total += sizes[name, "train"] * candidates + (sizes[name, "test"] + sizes[other, "test"]) * protocol.keep
    return total * per_level * len(protocol.seeds)


def preprocessing(protocol: Protocol, backbone: Backbone, name: str) -> Preprocessing:
    """How the images of a set are brought to the backbone."""
    return Preprocessing(protocol.datasets[name].value_range, (protocol.size,) * 2, channels=backbone.channels)


@dataclass(frozen=True)
class SplitExtractor:
    """One method at work: images in, a part out; what cannot be read goes to `skipped`. Progress is told in passes."""

    protocol: Protocol
    backbone: Backbone
    extractor: Extractor
    cache: FeatureCache
    skipped: dict[str, str]
    on_progress: Callable[[int], None] | None = None

    def at(self, name: str, split: str, images: Images, timesteps: tuple[int, ...], seed: int) -> Part:
        """The features of all readable images of one split of a set."""
        size = self.protocol.batch_size
        cost = self.extractor.cost(self.backbone, (self.protocol.size,) * 2, len(timesteps))
        tables: list[Table] = []
        keys: list[bytes] = []
        places: list[int] = []
        unreadable: dict[str, str] = {}
        read = chunks(images, preprocessing(self.protocol, self.backbone, name), size, OnBadImage.ALL)
        spec = ExtractionSpec(self.extractor, timesteps, seed, size)
        for chunk, found in extract_chunks(self.backbone, spec, read, self.cache):
            unreadable |= {f"{name}, {split}: {image}": error for _, image, error in chunk.failures}
            if found is not None:
                tables.append(found[0])
                keys += chunk.keys
                places += chunk.indices
            if self.on_progress is not None:
                self.on_progress(len(chunk) * (cost.forward + cost.jvp))
        self.skipped.update(unreadable)
        if not tables:
            reason = f"the first: {next(iter(unreadable.values()))}" if unreadable else "there is none"
            raise InputError(f"no image of {name}, split {split}, could be read; {reason}")
        return Part(concatenate(tables), timesteps, tuple(keys), tuple(places))

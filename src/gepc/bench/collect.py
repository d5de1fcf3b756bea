"""One pass over each data set: the feature tables that every table and figure is arithmetic on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gepc.backbones.base import Backbone
from gepc.batching import Forgive, chunks
from gepc.bench.protocol import Protocol
from gepc.cache import FeatureCache
from gepc.datasets import open_dataset
from gepc.errors import InputError
from gepc.extractors.base import Batch, Table
from gepc.images import Images, Preprocessing


@dataclass(frozen=True)
class Part:
    """The features of one split of one data set with one noise seed, over the timesteps it was looked at."""

    table: Table
    timesteps: tuple[int, ...]
    count: int

    def at(self, timesteps: Sequence[int]) -> Table:
        """The table at some of its timesteps, in that order."""
        positions = [self.timesteps.index(t) for t in timesteps]
        return {name: values[:, positions] for name, values in self.table.items()}


@dataclass
class Collection:
    """All features of a benchmark: (set, split, seed) -> part; how they were come by; what could not be read."""

    parts: dict[tuple[str, str, int], Part] = field(default_factory=dict)
    passes: int = 0
    cached_levels: int = 0
    computed_levels: int = 0
    skipped: list[str] = field(default_factory=list)


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
    for (name, split), timesteps in needed(protocol, backbone).items():
        images = open_split(protocol, data, name, split)
        for seed in protocol.seeds:
            part = _look_at(protocol, backbone, images, timesteps, seed, cache, found.skipped, on_progress)
            found.parts[name, split, seed] = part
    found.passes = backbone.forward_count - before
    found.cached_levels, found.computed_levels = cache.hits, cache.misses
    found.skipped = sorted(set(found.skipped))
    return found


def open_split(protocol: Protocol, data: Path, name: str, split: str) -> Images:
    """The images of one split, as many as the protocol wants."""
    limit = protocol.train_images if split == "train" else protocol.test_images
    return open_dataset(protocol.datasets[name].dataset, data, split, limit, protocol.subset_seed)


def needed(protocol: Protocol, backbone: Backbone) -> dict[tuple[str, str], tuple[int, ...]]:
    """(set, split) -> timesteps: ID-train at its own candidates, a test set at those of every ID it meets."""
    found: dict[tuple[str, str], set[int]] = {}
    for name, others in protocol.pairs.items():
        candidates = protocol.levels_for(name).timesteps(backbone.alphas_cumprod)
        for place in [(name, "train"), (name, "test"), *((other, "test") for other in others)]:
            found.setdefault(place, set()).update(candidates)
    return {place: tuple(sorted(timesteps)) for place, timesteps in found.items()}


def passes_needed(protocol: Protocol, backbone: Backbone) -> int:
    """Network passes of `collect` with an empty cache."""
    per_level = protocol.extractor().cost(backbone, (protocol.size, protocol.size), levels=1).forward
    images = {"train": protocol.train_images, "test": protocol.test_images}
    levels = sum(images[split] * len(timesteps) for (_, split), timesteps in needed(protocol, backbone).items())
    return levels * per_level * len(protocol.seeds)


def naive_passes(protocol: Protocol, backbone: Backbone) -> int:
    """What the pairs cost one by one as the paper counts: (1 + |G|) passes, ID-train again for every pair."""
    per_level = 1 + len(protocol.extractor().group)
    total = 0
    for name, _ in protocol.pair_list:
        candidates = len(protocol.levels_for(name).timesteps(backbone.alphas_cumprod))
        total += protocol.train_images * candidates + 2 * protocol.test_images * protocol.keep
    return total * per_level * len(protocol.seeds)


def preprocessing(protocol: Protocol, backbone: Backbone) -> Preprocessing:
    """How every image of the benchmark is brought to the backbone."""
    return Preprocessing(size=(protocol.size, protocol.size), channels=backbone.channels)


def _look_at(
    protocol: Protocol,
    backbone: Backbone,
    images: Images,
    timesteps: tuple[int, ...],
    seed: int,
    cache: FeatureCache,
    skipped: list[str],
    on_progress: Callable[[int], None] | None,
) -> Part:
    extractor = protocol.extractor()
    tables: list[Table] = []
    for chunk in chunks(images, preprocessing(protocol, backbone), protocol.batch_size, Forgive.ALL):
        skipped += [f"{name}: {error}" for _, name, error in chunk.failures]
        if chunk.indices:
            batch = Batch(chunk.stacked(), chunk.keys, seed, protocol.batch_size)
            tables.append(cache.extract(backbone, extractor, batch, timesteps))
        if on_progress is not None:
            on_progress(len(chunk) * len(timesteps))
    if not tables:
        raise InputError(f"no image of a split could be read; the first reason: {skipped[-1] if skipped else 'empty'}")
    table = {name: np.concatenate([part[name] for part in tables]) for name in tables[0]}
    return Part(table, timesteps, len(next(iter(table.values()))))

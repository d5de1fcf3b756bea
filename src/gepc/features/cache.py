"""Feature tables on disk, so that a second run costs no network pass and an interrupted one goes on.

A file holds one timestep of some images, or all timesteps where a method cannot take them one by one. Its name is a
hash of everything that the numbers depend on: the backbone's weights and settings, the method and its parameters, the
seed, the timestep and the images' content. A method whose formula changes raises its `revision`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gepc.backbones.base import Backbone
from gepc.core.files import write_arrays
from gepc.features.base import Batch, Extractor, Table, complete_table, other_backbones_of, parts_of
from gepc.features.extraction import ExtractionJob, FeatureEngine
from gepc.images.batches import Chunk


@dataclass(frozen=True)
class ExtractionSpec:
    """What chunks are looked at with: the network, the method, where, with which noise, how many rows at once."""

    backbone: Backbone
    extractor: Extractor
    timesteps: tuple[int, ...]
    seed: int = 0
    rows: int = 64

    @property
    def method(self) -> Extractor:
        """The method whose table an engine makes: the only one that this one builds on, or itself."""
        parts = parts_of(self.extractor)
        return parts[0] if len(parts) == 1 else self.extractor

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The timesteps of each file."""
        return _groups(self.method, self.timesteps)

    def batch(self, chunk: Chunk) -> Batch:
        """The chunk's readable images."""
        return Batch(chunk.stacked(), chunk.keys, self.seed, self.rows)

    def complete(self, table: Table, batch: Batch) -> Table:
        """The method's own table from the kept one."""
        return table if self.method is self.extractor else complete_table(self.extractor, [table], batch)


class FeatureCache:
    """Tables of features under `folder`; with None nothing is kept.

    A backbone without a fingerprint (one made in Python) is not cached: nothing tells two of them apart. `engine` makes
    the passes for what is not known yet elsewhere (`gepc.runs.features`).
    """

    def __init__(self, folder: str | os.PathLike[str] | None, engine: FeatureEngine | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.engine = engine
        self.hits = 0
        self.misses = 0

    def tables(self, sight: ExtractionSpec, read: Iterable[Chunk]) -> Iterator[tuple[Chunk, Table | None]]:
        """Every chunk with its table, in order; None where no image of it could be read."""
        if self.engine is not None:
            yield from self._through(self.engine, sight, read)
            return
        for chunk in read:
            if chunk.indices:
                yield chunk, self.extract(sight.backbone, sight.extractor, sight.batch(chunk), sight.timesteps)
            else:
                yield chunk, None

    def _through(
        self, engine: FeatureEngine, sight: ExtractionSpec, read: Iterable[Chunk]
    ) -> Iterator[tuple[Chunk, Table | None]]:
        """Unknown tables come from the engine, which reads ahead; the others wait in line for their turn."""
        line: deque[tuple[Chunk, bool, Table | None]] = deque()

        def unknown() -> Iterator[Chunk]:
            for chunk in read:
                known = self._stored(sight, chunk) if chunk.indices else None
                settled = known is not None or not chunk.indices
                line.append((chunk, settled, known))
                if not settled:
                    yield chunk

        work = ExtractionJob(sight.method, sight.timesteps, sight.seed, sight.rows)
        for chunk, found in engine(sight.backbone, work, unknown()):
            while line[0][1]:
                yield line[0][0], line.popleft()[2]
            line.popleft()
            assert found is not None
            yield chunk, self._keep(sight, chunk, found[0])
        while line:
            yield line[0][0], line.popleft()[2]

    def _stored(self, sight: ExtractionSpec, chunk: Chunk) -> Table | None:
        """The chunk's table where every part of it is known."""
        if not self._keeps(sight.backbone, sight.extractor):
            return None
        batch = sight.batch(chunk)
        parts = [_read(self._path(sight.backbone, sight.method, batch, group)) for group in sight.groups]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        self.hits += len(found)
        return sight.complete(_side_by_side(found), batch)

    def _keep(self, sight: ExtractionSpec, chunk: Chunk, table: Table) -> Table:
        """Write a table that came from elsewhere, as `extract` would have."""
        batch, groups = sight.batch(chunk), sight.groups
        self.misses += len(groups)
        if self._keeps(sight.backbone, sight.extractor):
            for place, group in enumerate(groups):
                part = table if len(groups) == 1 else {name: values[:, [place]] for name, values in table.items()}
                write_arrays(self._path(sight.backbone, sight.method, batch, group), part)
        return sight.complete(table, batch)

    def _keeps(self, backbone: Backbone, extractor: Extractor) -> bool:
        return self.folder is not None and all(one.fingerprint for one in (backbone, *other_backbones_of(extractor)))

    def extract(self, backbone: Backbone, extractor: Extractor, batch: Batch, timesteps: Sequence[int]) -> Table:
        """`extractor.extract`, reading what is known and writing what is not, one timestep at a time where it can be.

        A method that builds on others' tables finds them here where those were extracted before.
        """
        parts = parts_of(extractor)
        if parts:
            tables = [self.extract(backbone, part, batch, part.timesteps(backbone)) for part in parts]
            return complete_table(extractor, tables, batch)
        if not self._keeps(backbone, extractor):
            self.misses += len(timesteps)
            return extractor.extract(backbone, batch, timesteps)
        groups = _groups(extractor, timesteps)
        return _side_by_side([self._known_or_new(backbone, extractor, batch, group) for group in groups])

    def _known_or_new(
        self, backbone: Backbone, extractor: Extractor, batch: Batch, timesteps: tuple[int, ...]
    ) -> Table:
        path = self._path(backbone, extractor, batch, timesteps)
        known = _read(path)
        if known is not None:
            self.hits += 1
            return known
        self.misses += 1
        table = extractor.extract(backbone, batch, timesteps)
        write_arrays(path, table)
        return table

    def _path(self, backbone: Backbone, extractor: Extractor, batch: Batch, timesteps: tuple[int, ...]) -> Path:
        assert self.folder is not None
        from gepc.detector.registry import plain_options

        options = plain_options(extractor.options())
        where: int | list[int] = list(timesteps)
        if extractor.by_level:
            options.pop("levels", None)  # the timestep says it
            (where,) = timesteps
        what = [backbone.fingerprint, extractor.name, options, batch.seed, where, list(batch.size)]
        what += [other.fingerprint for other in other_backbones_of(extractor)]
        if extractor.revision > 1:  # the first has no mark: what was kept before there were revisions stays valid
            what.append({"revision": extractor.revision})
        digest = hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=16)
        for key in batch.keys:
            digest.update(key)
        name = digest.hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"


def _groups(extractor: Extractor, timesteps: Sequence[int]) -> list[tuple[int, ...]]:
    """The timesteps of each file."""
    return [(t,) for t in timesteps] if extractor.by_level else [tuple(timesteps)]


def _side_by_side(parts: Sequence[Table]) -> Table:
    return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}


def _read(path: Path) -> Table | None:
    """The table in `path`, or None where there is none or it is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    with contextlib.suppress(OSError, SafetensorError, ValueError):
        return dict(load_file(path))
    return None

"""Feature tables on disk, so that a second run costs no network pass and an interrupted one goes on.

A file holds one timestep of some images, or all timesteps where a method cannot take them one by one. Its name is a
hash of everything that the numbers depend on: the backbone's weights and settings, the method and its parameters, the
seed, the timestep and the images' content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gepc.backbones.base import Backbone
from gepc.extractors.base import Batch, Extractor, Table
from gepc.files import write_arrays


class FeatureCache:
    """Tables of features under `folder`; with None nothing is kept.

    A backbone without a fingerprint (one made in Python) is not cached: nothing tells two of them apart.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.hits = 0
        self.misses = 0

    def extract(self, backbone: Backbone, extractor: Extractor, batch: Batch, timesteps: Sequence[int]) -> Table:
        """`extractor.extract`, reading what is known and writing what is not, one timestep at a time where it can be.

        A method that builds on another one's table finds it here where that one was extracted before.
        """
        base = extractor.builds_on()
        if base is not None:
            return extractor.complete(self.extract(backbone, base, batch, timesteps), batch)
        if self.folder is None or not all(one.fingerprint for one in (backbone, *extractor.other_backbones())):
            self.misses += len(timesteps)
            return extractor.extract(backbone, batch, timesteps)
        groups = [(t,) for t in timesteps] if extractor.by_level else [tuple(timesteps)]
        parts = [self._known_or_new(backbone, extractor, batch, group) for group in groups]
        return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}

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
        from gepc.methods import plain_options

        options = plain_options(extractor.options())
        where: int | list[int] = list(timesteps)
        if extractor.by_level:
            options.pop("levels", None)  # the timestep says it
            (where,) = timesteps
        what = [backbone.fingerprint, extractor.name, options, batch.seed, where, list(batch.size)]
        what += [other.fingerprint for other in extractor.other_backbones()]
        digest = hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=16)
        for key in batch.keys:
            digest.update(key)
        name = digest.hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"


def _read(path: Path) -> Table | None:
    """The table in `path`, or None where there is none or it is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    with contextlib.suppress(OSError, SafetensorError, ValueError):
        return dict(load_file(path))
    return None

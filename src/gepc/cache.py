"""Feature tables on disk, so that a second run costs no network pass and an interrupted one goes on.

A file holds one timestep of some images. Its name is a hash of everything that the numbers depend on: the backbone's
weights and settings, the method and its parameters, the seed, the timestep and the images' content.
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
        """`extractor.extract`, reading what is known and writing what is not, one timestep at a time."""
        if self.folder is None or backbone.fingerprint is None:
            self.misses += len(timesteps)
            return extractor.extract(backbone, batch, timesteps)
        parts = [self._level(backbone, extractor, batch, timestep) for timestep in timesteps]
        return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}

    def _level(self, backbone: Backbone, extractor: Extractor, batch: Batch, timestep: int) -> Table:
        path = self._path(backbone, extractor, batch, timestep)
        known = _read(path)
        if known is not None:
            self.hits += 1
            return known
        self.misses += 1
        table = extractor.extract(backbone, batch, (timestep,))
        write_arrays(path, table)
        return table

    def _path(self, backbone: Backbone, extractor: Extractor, batch: Batch, timestep: int) -> Path:
        assert self.folder is not None
        from gepc.methods import plain_options

        options = plain_options(extractor.options())
        options.pop("levels", None)  # the timestep says it
        what = [backbone.fingerprint, extractor.name, options, batch.seed, timestep, list(batch.size)]
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

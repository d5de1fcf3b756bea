"""Residuals of patches under several poolings from one pass each, kept on disk so that a stopped run goes on."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.core.errors import InputError
from gepc.core.files import write_arrays
from gepc.features.base import Batch
from gepc.features.gepc import GepcExtractor
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import Image, iterate
from gepc.sar.patches import Patch, PatchImages
from gepc.sar.remembering import MemoizedBackbone

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Columns (N, levels, features) by pooling, maps (N, levels, H, W) where asked for, and each patch's source."""

    patches: tuple[Patch, ...]
    columns: Mapping[str, Array]
    maps: npt.NDArray[np.float32] | None

    @property
    def sources(self) -> list[str]:
        """The panorama, or else the file, that each patch was cut from."""
        return [patch.scene.place[0] if patch.scene.place else patch.scene.path.name for patch in self.patches]


class PatchFeatures:
    """Measures patches with one backbone, one noise seed and several extractors that differ in pooling alone."""

    def __init__(
        self,
        backbone: Backbone,
        extractors: Mapping[str, GepcExtractor],
        preprocessing: Preprocessing,
        seed: int = 0,
        cache: Path | None = None,
    ) -> None:
        self.backbone, self.extractors, self.preprocessing, self.seed = backbone, extractors, preprocessing, seed
        self.cache = cache if backbone.fingerprint is not None else None
        self._memory = MemoizedBackbone(backbone)
        self._first = next(iter(extractors.values()))
        self._timesteps = self._first.timesteps(backbone)

    @property
    def passes(self) -> int:
        """Network passes for one patch."""
        return self._first.cost(self.backbone, self.preprocessing.size or (0, 0)).forward

    def measure(
        self, patches: Sequence[Patch], with_maps: bool, on_progress: Callable[[int], None] | None = None
    ) -> Measured:
        """Every patch by itself, so that a larger sample repeats none of the passes of a smaller one."""
        if not patches:
            raise InputError("there are no patches to measure")
        rows = []
        for record in iterate(PatchImages(patches)):
            assert record.pixels is not None
            rows.append(self._one(self.preprocessing(record.pixels, record.name), with_maps))
            if on_progress is not None:
                on_progress(1)
        columns = {name: np.stack([row[name] for row in rows]).astype(np.float64) for name in self.extractors}
        maps = np.stack([row["map"] for row in rows]).astype(np.float32) if with_maps else None
        return Measured(tuple(patches), columns, maps)

    def _one(self, image: Image, with_maps: bool) -> dict[str, npt.NDArray[Any]]:
        path = self._path(image)
        known = None if path is None else _read(path)
        if known is not None and set(self.extractors) <= set(known) and (not with_maps or "map" in known):
            return known
        batch = Batch(image[None], [image_key(image)], self.seed, 1)
        found: dict[str, npt.NDArray[Any]] = {}
        for name, extractor in self.extractors.items():
            if with_maps and extractor is self._first:
                table, maps = extractor.maps(self._memory, batch, self._timesteps)
                found["map"] = maps[0]
            else:
                table = extractor.extract(self._memory, batch, self._timesteps)
            found[name] = extractor.columns(table)[0]
        self._memory.forget()
        if path is not None:
            write_arrays(path, found)
        return found

    def _path(self, image: Image) -> Path | None:
        if self.cache is None:
            return None
        from gepc.features.extraction import plain_options

        options = {name: plain_options(extractor.options()) for name, extractor in self.extractors.items()}
        what = json.dumps([self.backbone.fingerprint, options, self.seed, self._timesteps], sort_keys=True)
        name = hashlib.blake2b(image_key(image) + what.encode(), digest_size=16).hexdigest()
        return self.cache / name[:2] / f"{name}.safetensors"


def _read(path: Path) -> dict[str, npt.NDArray[Any]] | None:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    with contextlib.suppress(OSError, SafetensorError, ValueError):
        return dict(load_file(path))
    return None

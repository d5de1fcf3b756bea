"""Feature tables of images, which are computed here alone, with a cache."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import InputError
from gepc.core.files import StrPath, digest, write_arrays
from gepc.core.parts import Part
from gepc.images.batches import Chunk, OnBadImage, chunks, settled
from gepc.images.preprocessing import Mask, Preprocessing, warn_about_range
from gepc.images.sources import Image, Images
from gepc.methods.base import Batch, Columns, Extractor, Table, extract_table
from gepc.methods.groups import Group

OnProgress = Callable[[int], None]
CACHE_VERSION = 3  # increased when the meaning of cached files changes: older ones are then not found


@dataclass(frozen=True)
class ExtractionSpec:
    """What to compute for every image."""

    extractor: Extractor  # the method, with its parameters
    timesteps: tuple[int, ...]  # the timesteps to evaluate, in order; with none, images are only read
    seed: int = 0  # the noise of an image is a function of this and of its content
    rows: int = 64  # the largest number of images per network call, and per chunk
    noise: npt.NDArray[Any] | None = field(default=None, compare=False)  # (levels, N, C, H, W), instead of drawn noise

    def batch(self, chunk: Chunk) -> Batch:
        """The readable images of a chunk, with the keys of their noise."""
        fixed = None
        if self.noise is not None:
            fixed = {(t, 0): noise[chunk.indices] for t, noise in zip(self.timesteps, self.noise, strict=True)}
        return Batch(chunk.stacked(), chunk.keys, self.seed, self.rows, fixed)

    def extract(self, backbone: Backbone, batch: Batch) -> Table:
        """The features of a batch, by network passes."""
        backbone.check_size(*batch.size)
        return extract_table(self.extractor, backbone, batch, self.timesteps)


@dataclass(frozen=True)
class FeatureTable:
    """The features of a collection of images."""

    spec: ExtractionSpec  # what was computed
    table: Table  # feature name -> array (N, levels[, ...])
    keys: tuple[bytes, ...]  # the key of every image, a hash of its content
    indices: npt.NDArray[np.int64]  # of every image in the collection; images that cannot be read have no row
    preprocessing: Preprocessing  # how the images were prepared, with the size of the first where none was given
    first_size: tuple[int, int]  # (H, W) of the first image, preprocessed
    sample: ImageSample = field(default_factory=lambda: ImageSample(0))  # some of the images, if asked for
    skipped: Mapping[str, str] = field(default_factory=dict)  # image name -> the reason why it could not be read

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def columns(self) -> Columns:
        """What calibration uses: (N, levels, features)."""
        return self.spec.extractor.columns(self.table)

    @property
    def stability(self) -> Columns:
        """The feature whose coefficient of variation selects levels: (N, levels)."""
        return self.spec.extractor.stability(self.table)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The columns that are calibrated together; empty: all of them."""
        return self.spec.extractor.parts(self.table)

    def rows(self, positions: npt.NDArray[np.int64]) -> FeatureTable:
        """The table of some of the images."""
        table = {name: values[positions] for name, values in self.table.items()}
        keys = tuple(self.keys[int(position)] for position in positions)
        return replace(self, table=table, keys=keys, indices=self.indices[positions])

    def warn_about_skipped(self) -> None:
        """Warn where images of the collection were left out."""
        if self.skipped:
            count, first = len(self) + len(self.skipped), next(iter(self.skipped.values()))
            warnings.warn(f"{len(self.skipped)} of {count} images left out; the first error: {first}", stacklevel=4)

    def at(self, timesteps: Sequence[int]) -> FeatureTable:
        """The same images at some of the timesteps, in that order."""
        positions = [self.spec.timesteps.index(t) for t in timesteps]
        table = {name: values[:, positions] for name, values in self.table.items()}
        return replace(self, spec=replace(self.spec, timesteps=tuple(timesteps)), table=table)

    def of(self, keys: Sequence[bytes]) -> FeatureTable:
        """The rows of the images with those keys, in that order; equal images have equal rows."""
        row_of = {key: row for row, key in enumerate(self.keys)}
        return self.rows(np.array([row_of[key] for key in keys], dtype=np.int64))


class ImageSample:
    """At most `size` images of a stream, within `max_bytes`: those with the smallest keys, whatever their order."""

    def __init__(self, size: int, max_bytes: int = 1 << 28) -> None:
        self._size, self._room = size, max_bytes
        self.images: dict[bytes, Image] = {}

    def add(self, key: bytes, image: Image) -> None:
        """Offer an image."""
        if self._size == 0 or key in self.images:
            return
        self.images[key] = image
        self._room -= image.nbytes
        while len(self.images) > self._size or (self._room < 0 and len(self.images) > 1):
            self._room += self.images.pop(max(self.images)).nbytes

    def of(self, keys: Iterable[bytes], most: int) -> dict[bytes, Image]:
        """At most `most` of the images with these keys, the smallest keys first."""
        return {key: self.images[key] for key in sorted(set(keys) & set(self.images))[:most]}


def extract_all(
    images: Images,
    preprocessing: Preprocessing,
    backbone: Backbone,
    spec: ExtractionSpec,
    *,
    cache: FeatureCache | None = None,
    on_progress: OnProgress | None = None,
    on_bad_image: OnBadImage = OnBadImage.UNREADABLE,
    sample_size: int = 0,
) -> FeatureTable:
    """Features of a whole collection. Images that cannot be used are left out, with their reasons in `skipped`.

    Known features are read from the cache and new ones are written to it. `on_progress` is called with the number of
    images of every finished chunk; `on_bad_image` says which images may be left out, and `sample_size` how many to keep
    for a second look at them.
    """
    warn_about_range(images, preprocessing.value_range)
    tables: list[Table] = []
    keys: list[bytes] = []
    indices: list[int] = []
    skipped: dict[str, str] = {}
    sample = ImageSample(sample_size)
    first_size: tuple[int, int] | None = None
    preprocessing = settled(preprocessing, images)
    cache = FeatureCache(None) if cache is None else cache
    most_pixels = spec.extractor.chunk_pixels
    for chunk in chunks(images, preprocessing, spec.rows, on_bad_image, most_pixels=most_pixels):
        skipped |= {name: error for _, name, error in chunk.failures}
        if chunk.indices:
            tables.append(cache.extract(backbone, spec, spec.batch(chunk)) if spec.timesteps else {})
            first_size = first_size or (chunk.images[0].shape[1], chunk.images[0].shape[2])
        if on_progress is not None:
            on_progress(len(chunk))
        for key, image in zip(chunk.keys, chunk.images, strict=True):
            sample.add(key, image)
        keys += chunk.keys
        indices += chunk.indices
    if first_size is None:
        if not skipped:
            raise InputError("there are no images")
        first = next(iter(skipped.values()))
        raise InputError(f"none of the {len(skipped)} images can be read; the first error: {first}")
    return FeatureTable(
        spec, concatenate(tables), tuple(keys), np.asarray(indices), preprocessing, first_size, sample, skipped
    )


def concatenate(tables: Sequence[Table], axis: int = 0) -> Table:
    """One table of the images of all tables, in order, or with `axis` 1 of their levels."""
    return {name: np.concatenate([table[name] for table in tables], axis) for name in tables[0]}


class FeatureCache:
    """Feature tables on disk, so that a second run needs no network pass and an interrupted one can resume.

    A file holds one timestep of some images, or all timesteps where a method cannot take them one by one. Its name is a
    hash of all that the numbers depend on: the backbone's weights and settings, the method, its parameters and its
    `revision`, the seed, the timestep and the images' content. A backbone without a fingerprint (one made from a Python
    function) is not cached: nothing tells two of them apart. Without a `folder` nothing is kept. `hits` and `misses`
    count files read and computed.
    """

    def __init__(self, folder: StrPath | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.hits = self.misses = 0

    def extract(self, backbone: Backbone, spec: ExtractionSpec, batch: Batch) -> Table:
        """The features of a batch: read where known, else computed and written."""
        others = spec.extractor.builds_on()
        if others and self.folder is not None:
            specs = [replace(spec, extractor=other, timesteps=other.timesteps(backbone)) for other in others]
            return spec.extractor.complete([self.extract(backbone, each, batch) for each in specs], batch)
        if self.folder is None or not backbone.fingerprint:
            self.misses += len(spec.timesteps)
            return spec.extract(backbone, batch)
        files = [replace(spec, timesteps=(t,)) for t in spec.timesteps] if spec.extractor.by_level else [spec]
        return concatenate([self._read_or_extract(backbone, file, batch) for file in files], axis=1)

    def _read_or_extract(self, backbone: Backbone, spec: ExtractionSpec, batch: Batch) -> Table:
        path = self._path(backbone, spec, batch)
        with contextlib.suppress(OSError, SafetensorError, ValueError):  # there is no such file, or it is damaged
            known = dict(load_file(path))
            self.hits += 1
            return known
        self.misses += 1
        table = spec.extract(backbone, batch)
        write_arrays(path, table)
        return table

    def _path(self, backbone: Backbone, spec: ExtractionSpec, batch: Batch) -> Path:
        assert self.folder is not None
        extractor = spec.extractor
        options = plain_options(extractor.options())
        if extractor.by_level:
            options.pop("levels", None)  # the timestep says it
        facts: list[Any] = [CACHE_VERSION, extractor.name, extractor.revision, options]
        facts += [spec.seed, list(spec.timesteps), list(batch.size), backbone.fingerprint]
        name = digest(facts, keys=batch.keys)
        return self.folder / name[:2] / f"{name}.safetensors"


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON values: levels as text, a group as the names of its elements, tuples as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Levels):
            return str(value)
        if isinstance(value, Group):
            return "auto" if value.auto else list(value.names)
        if isinstance(value, Mask):
            return {"size": list(value.size), "runs": list(value.runs)}
        return list(value) if isinstance(value, tuple) else value

    return {name: plain(value) for name, value in options.items()}

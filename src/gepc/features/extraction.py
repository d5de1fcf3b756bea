"""A whole collection through an extractor, here or on other machines: what fitting and the cache ask for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.core.errors import InputError
from gepc.detector.maps import Map, MapPool
from gepc.features.base import Batch, Extractor, Table, extract_with_maps
from gepc.images.batches import Chunk, OnBadImage, chunks
from gepc.images.preprocessing import Preprocessing, warn_about_range
from gepc.images.sources import Images

OnProgress = Callable[[int], None]
Found = tuple[Table, Map | None]


@dataclass(frozen=True)
class ExtractionJob:
    """What is asked of every chunk: the method's table at some levels and, where it has them, the maps."""

    method: Extractor
    levels: tuple[int, ...]
    seed: int
    rows: int
    with_maps: bool = False

    def __call__(self, backbone: Backbone, chunk: Chunk) -> Found | None:
        """The table and maps of the readable images; None where there are none."""
        if not chunk.indices:
            return None
        images = chunk.stacked()
        backbone.check_size(*images.shape[2:])
        batch = Batch(images, chunk.keys, self.seed, self.rows)
        if self.with_maps:
            return extract_with_maps(self.method, backbone, batch, self.levels)
        return self.method.extract(backbone, batch, self.levels), None


FeatureEngine = Callable[[Backbone, ExtractionJob, Iterable[Chunk]], Iterator[tuple[Chunk, Found | None]]]
"""Does the work on every chunk and gives them back in order."""


def look_here(backbone: Backbone, work: ExtractionJob, read: Iterable[Chunk]) -> Iterator[tuple[Chunk, Found | None]]:
    """The engine of this process: one chunk after the other."""
    for chunk in read:
        yield chunk, work(backbone, chunk)


@dataclass(frozen=True)
class Seen:
    """What is known of a collection: the table, the key and place of every image in it, and a sample of maps."""

    table: Table
    keys: list[bytes]
    indices: npt.NDArray[np.int64]
    preprocessing: Preprocessing
    maps: MapPool


def extract_all(
    images: Images,
    preprocessing: Preprocessing,
    backbone: Backbone,
    work: ExtractionJob,
    on_progress: OnProgress | None = None,
    engine: FeatureEngine | None = None,
) -> Seen:
    """The work on all images, `work.rows` at a time; files that cannot be read are left out with a warning."""
    if len(images) == 0:
        raise InputError("there are no in-distribution images to fit on")
    warn_about_range(images, preprocessing.value_range)
    tables: list[Table] = []
    keys: list[bytes] = []
    indices: list[int] = []
    unreadable: list[str] = []
    pool = MapPool()
    read = chunks(images, preprocessing, work.rows, OnBadImage.UNREADABLE)
    for chunk, found in (engine or look_here)(backbone, work, read):
        unreadable += [error for _, _, error in chunk.failures]
        if on_progress is not None:
            on_progress(len(chunk))
        if found is None:
            continue
        preprocessing = preprocessing.for_images_of(chunk.images[0].shape)
        table, maps = found
        tables.append(table)
        if maps is not None:
            for key, field in zip(chunk.keys, maps, strict=True):
                pool.add(key, field)
        keys += chunk.keys
        indices += chunk.indices
    _check_readable(len(images), unreadable)
    return Seen(concatenate(tables), keys, np.asarray(indices), preprocessing, pool)


def _check_readable(count: int, unreadable: Sequence[str]) -> None:
    if len(unreadable) == count:
        raise InputError(f"none of the {count} images can be read; the first: {unreadable[0]}")
    if unreadable:
        message = f"{len(unreadable)} of {count} images left out; the first: {unreadable[0]}"
        warnings.warn(message, UserWarning, stacklevel=4)


def concatenate(tables: Sequence[Table]) -> Table:
    """One table of the images of all of them, in order."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}

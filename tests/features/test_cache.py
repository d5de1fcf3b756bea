"""Feature tables from the cache, from this process and from an engine elsewhere are the same tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from toys import LEVELS, as_uint8, pictures, toy_backbone

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.features.base import Table, find_method
from gepc.features.cache import ExtractionSpec, FeatureCache
from gepc.features.extraction import ExtractionJob, Found
from gepc.images.batches import Chunk, OnBadImage, chunks
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import open_images

AHEAD = 3


class ReadsAhead:
    """An engine that takes some chunks before it gives the first back, as a cluster does."""

    def __init__(self) -> None:
        self.sent = 0

    def __call__(
        self, backbone: Backbone, work: ExtractionJob, read: Iterable[Chunk]
    ) -> Iterator[tuple[Chunk, Found | None]]:
        waiting: deque[Chunk] = deque()
        for chunk in read:
            self.sent += 1
            waiting.append(chunk)
            if len(waiting) > AHEAD:
                yield waiting[0], work(backbone, waiting.popleft())
        while waiting:
            yield waiting[0], work(backbone, waiting.popleft())


def backbone() -> Backbone:
    made = toy_backbone()
    made.sha256 = "a stand-in for weights"
    return made


def read(count: int = 40, broken: tuple[int, ...] = (), first: int = 0) -> Iterator[Chunk]:
    images: list[object] = list(as_uint8(pictures(count)))[first:]
    for index in broken:
        images[index] = np.full((8, 8, 3), np.nan)
    return chunks(open_images(images), Preprocessing(size=(8, 8)), 4, OnBadImage.ALL)


def sight(method: str = "gepc", **options: object) -> ExtractionSpec:
    extractor = find_method(method)(**options)
    net = backbone()
    return ExtractionSpec(net, extractor, extractor.timesteps(net), seed=3, rows=4)


def together(found: Iterable[tuple[Chunk, Table | None]]) -> tuple[Table, list[int]]:
    pairs = list(found)
    tables = [table for _, table in pairs if table is not None]
    joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    return joined, [index for chunk, _ in pairs for index in chunk.indices]


@pytest.mark.parametrize("method", ["gepc", "msma", "typicality", "diffpath"])
def test_an_engine_gives_the_same_tables_in_the_same_order(method: str, tmp_path: Path) -> None:
    here, order = together(FeatureCache(None).tables(sight(method), read(broken=(0, 1, 2, 3, 9))))
    engine = ReadsAhead()
    there, other = together(FeatureCache(tmp_path, engine).tables(sight(method), read(broken=(0, 1, 2, 3, 9))))
    assert order == other
    assert engine.sent == 9  # the first chunk has no image that can be read
    for name, values in here.items():
        np.testing.assert_allclose(there[name], values, rtol=1e-6)


def test_what_is_known_is_not_sent(tmp_path: Path) -> None:
    """Some chunks come from the cache, the others from the engine, all in order; afterwards all are known."""
    levels = {"levels": Levels(LEVELS)}
    expected, order = together(FeatureCache(None).tables(sight(**levels), read()))
    list(FeatureCache(tmp_path).tables(sight(**levels), read(first=16, count=28)))
    engine = ReadsAhead()
    cache = FeatureCache(tmp_path, engine)
    found, other = together(cache.tables(sight(**levels), read()))
    assert engine.sent == 7
    assert (cache.hits, cache.misses) == (3 * len(LEVELS), 7 * len(LEVELS))
    assert order == other
    np.testing.assert_allclose(found["s"], expected["s"], rtol=1e-6)
    afterwards = FeatureCache(tmp_path, engine)
    list(afterwards.tables(sight(**levels), read()))
    assert (engine.sent, afterwards.misses) == (7, 0)


def test_tables_of_an_engine_serve_this_process_too(tmp_path: Path) -> None:
    list(FeatureCache(tmp_path, ReadsAhead()).tables(sight("msma"), read()))
    cache, looked = FeatureCache(tmp_path), sight("msma")
    list(cache.tables(looked, read()))
    assert cache.misses == 0
    assert looked.backbone.forward_count == 0


def test_a_method_with_other_numbers_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list(FeatureCache(tmp_path).tables(sight("msma"), read()))
    monkeypatch.setattr(find_method("msma"), "revision", 2)
    cache = FeatureCache(tmp_path)
    list(cache.tables(sight("msma"), read()))
    assert cache.hits == 0

"""Feature tables from the cache, from this process and from an engine elsewhere are the same tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from toys import LEVELS, as_uint8, pictures, toy_backbone

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.images.batches import Chunk, OnBadImage, chunks
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import open_images
from gepc.methods.base import Batch, Derived, Extractor, Table, find_method
from gepc.methods.extraction import ExtractionSpec, FeatureCache, extract_all, extract_chunks

AHEAD = 3


class ReadsAhead:
    """An engine that takes some chunks before it gives the first back, as a cluster does."""

    def __init__(self) -> None:
        self.sent = 0

    def __call__(
        self, backbone: Backbone, work: ExtractionSpec, read: Iterable[Chunk]
    ) -> Iterator[tuple[Chunk, Table | None]]:
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


def spec(method: str = "gepc", **options: object) -> ExtractionSpec:
    extractor = find_method(method)(**options)
    return ExtractionSpec(extractor, extractor.timesteps(backbone()), seed=3, rows=4)


def extract(
    cache: FeatureCache,
    what: ExtractionSpec,
    images: Iterable[Chunk],
    net: Backbone | None = None,
    engine: ReadsAhead | None = None,
) -> list[tuple[Chunk, Table | None]]:
    return list(extract_chunks(net or backbone(), what, images, cache, engine))


def together(pairs: list[tuple[Chunk, Table | None]]) -> tuple[Table, list[int]]:
    tables = [found for _, found in pairs if found is not None]
    joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    return joined, [index for chunk, _ in pairs for index in chunk.indices]


@pytest.mark.parametrize("method", ["gepc", "msma", "typicality", "diffpath"])
def test_an_engine_gives_the_same_tables_in_the_same_order(method: str, tmp_path: Path) -> None:
    here, order = together(extract(FeatureCache(None), spec(method), read(broken=(0, 1, 2, 3, 9))))
    engine = ReadsAhead()
    there, other = together(extract(FeatureCache(tmp_path), spec(method), read(broken=(0, 1, 2, 3, 9)), engine=engine))
    assert order == other
    assert engine.sent == 9  # the first chunk has no image that can be read
    for name, values in here.items():
        np.testing.assert_allclose(there[name], values, rtol=1e-6)


@dataclass(frozen=True)
class Steepest(Derived):
    """The largest step between the levels of MSMA: a method of the whole image, from one at other timesteps."""

    name: ClassVar[str] = "steepest"

    def builds_on(self) -> tuple[Extractor]:
        return (find_method("msma")(),)

    def complete(self, tables: Sequence[Table], batch: Batch) -> Table:
        return {"steepest": np.abs(np.diff(tables[0]["msma"], axis=1)).max(axis=1, keepdims=True)}


def test_an_engine_evaluates_a_method_at_its_own_timesteps() -> None:
    """Not at the single entry that stands for the whole image in a method built on it."""
    what = ExtractionSpec(Steepest(), (0,), rows=4)
    here, _ = together(extract(FeatureCache(None), what, read()))
    there, _ = together(extract(FeatureCache(None), what, read(), engine=ReadsAhead()))
    assert here["steepest"].shape == (40, 1)
    np.testing.assert_allclose(there["steepest"], here["steepest"], rtol=1e-6)


def test_what_is_known_is_not_sent(tmp_path: Path) -> None:
    """Some chunks come from the cache, the others from the engine, all in order; afterwards all are known."""
    levels = {"levels": Levels(LEVELS)}
    expected, order = together(extract(FeatureCache(None), spec(**levels), read()))
    extract(FeatureCache(tmp_path), spec(**levels), read(first=16, count=28))
    engine = ReadsAhead()
    cache = FeatureCache(tmp_path)
    found, other = together(extract(cache, spec(**levels), read(), engine=engine))
    assert engine.sent == 7
    assert (cache.hits, cache.misses) == (3 * len(LEVELS), 7 * len(LEVELS))
    assert order == other
    np.testing.assert_allclose(found["s"], expected["s"], rtol=1e-6)
    afterwards = FeatureCache(tmp_path)
    extract(afterwards, spec(**levels), read(), engine=engine)
    assert (engine.sent, afterwards.misses) == (7, 0)


def test_tables_of_an_engine_serve_this_process_too(tmp_path: Path) -> None:
    extract(FeatureCache(tmp_path), spec("msma"), read(), engine=ReadsAhead())
    cache, net = FeatureCache(tmp_path), backbone()
    extract(cache, spec("msma"), read(), net)
    assert cache.misses == 0
    assert net.forward_count == 0


def test_a_table_of_some_images_and_levels() -> None:
    images = list(as_uint8(pictures(10)))
    images[3] = np.full((8, 8, 3), np.nan)
    what = spec(levels=Levels(LEVELS))
    found = extract_all(open_images(images), Preprocessing(size=(8, 8)), backbone(), what, on_bad_image=OnBadImage.ALL)
    assert (len(found), list(found.skipped)) == (9, ["3"])
    assert found.indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    part = found.of([found.keys[5], found.keys[0]]).at(what.timesteps[1:2])
    np.testing.assert_array_equal(part.table["s"], found.table["s"][[5, 0]][:, [1]])
    assert (part.indices.tolist(), part.spec.timesteps) == ([6, 0], what.timesteps[1:2])
    np.testing.assert_array_equal(part.columns, found.columns[[5, 0]][:, [1]])


def test_a_method_with_other_numbers_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extract(FeatureCache(tmp_path), spec("msma"), read())
    monkeypatch.setattr(find_method("msma"), "revision", 2)
    cache = FeatureCache(tmp_path)
    extract(cache, spec("msma"), read())
    assert cache.hits == 0

"""Feature tables from the cache and from the network are the same tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from toys import LEVELS, as_uint8, pictures, toy_backbone

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.images.batches import OnBadImage
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import open_images
from gepc.methods.base import Batch, Derived, Extractor, Table, find_method
from gepc.methods.extraction import ExtractionSpec, FeatureCache, FeatureTable, extract_all


def backbone() -> Backbone:
    made = toy_backbone()
    made.sha256 = "a stand-in for weights"
    return made


def spec(method: str = "gepc", **options: object) -> ExtractionSpec:
    extractor = find_method(method)(**options)
    return ExtractionSpec(extractor, extractor.timesteps(backbone()), seed=3, rows=4)


def extract(cache: FeatureCache, what: ExtractionSpec, count: int = 40, net: Backbone | None = None) -> FeatureTable:
    images = open_images(list(as_uint8(pictures(count))))
    return extract_all(images, Preprocessing(size=(8, 8)), net or backbone(), what, cache=cache)


@pytest.mark.parametrize("method", ["gepc", "msma", "typicality", "diffpath"])
def test_tables_from_the_cache_are_the_same_tables(method: str, tmp_path: Path) -> None:
    computed = extract(FeatureCache(None), spec(method))
    extract(FeatureCache(tmp_path), spec(method))
    cache, net = FeatureCache(tmp_path), backbone()
    known = extract(cache, spec(method), net=net)
    assert (cache.misses, net.forward_count) == (0, 0)
    for name, values in computed.table.items():
        np.testing.assert_array_equal(known.table[name], values)


@dataclass(frozen=True)
class Steepest(Derived):
    """The largest step between the levels of MSMA: a method of the whole image, from one at other timesteps."""

    name: ClassVar[str] = "steepest"

    def builds_on(self) -> tuple[Extractor]:
        return (find_method("msma")(),)

    def complete(self, tables: Sequence[Table], batch: Batch) -> Table:
        return {"steepest": np.abs(np.diff(tables[0]["msma"], axis=1)).max(axis=1, keepdims=True)}


def test_a_derived_method_evaluates_the_other_one_at_its_own_timesteps() -> None:
    """Not at the single entry that stands for the whole image in a method built on it."""
    found = extract(FeatureCache(None), ExtractionSpec(Steepest(), (0,), rows=4))
    assert found.table["steepest"].shape == (40, 1)


def test_only_unknown_chunks_are_computed(tmp_path: Path) -> None:
    levels = {"levels": Levels(LEVELS)}
    extract(FeatureCache(tmp_path), spec(**levels), count=12)
    cache = FeatureCache(tmp_path)
    extract(cache, spec(**levels))
    assert (cache.hits, cache.misses) == (3 * len(LEVELS), 7 * len(LEVELS))


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
    extract(FeatureCache(tmp_path), spec("msma"))
    monkeypatch.setattr(find_method("msma"), "revision", 2)
    cache = FeatureCache(tmp_path)
    extract(cache, spec("msma"))
    assert cache.hits == 0

"""The radar benchmark on small synthetic data: exact scores, shared network passes, and resuming from the cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from radar_files import write_hrsid, write_ssdd
from toys import toy_backbone

import gepc
from gepc.core.errors import InputError
from gepc.features.extraction import FeatureCache
from gepc.features.gepc import GepcExtractor
from gepc.images.preprocessing import Preprocessing
from gepc.sar.bench import SarBench, SarProtocol, extract_patches, gather, measure
from gepc.sar.patches import PatchImages, PatchRules
from gepc.sar.results import tables

PROTOCOL = SarProtocol(
    PatchRules(size=16),
    hold_out=0.5,
    fit_limit=10,
    limit=6,
    levels="0.99,0.9",
    target_pixels=9,
    other_targets=(16,),
    draws=10,
)
PREPROCESSING = Preprocessing(None, (16, 16), "exact", 1, "log")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("radar")
    train = {f"P{k:04d}_0_64_0_64.jpg": [] for k in range(4)}
    test = {f"P{k:04d}_0_64_0_64.jpg": [(5.0, 5.0, 4.0, 3.0), (37.0, 36.0, 5.0, 4.0)] for k in range(10, 13)}
    hrsid = write_hrsid(root / "HRSID", {"train": train, "test": test})
    return hrsid, write_ssdd(root / "SSDD", {"000001": [(20, 20, 25, 24)], "000002": [(36, 4, 40, 9)]})


@pytest.fixture(scope="module")
def bench(data: tuple[Path, Path]) -> SarBench:
    return measure(PROTOCOL, gather(PROTOCOL, data[0], [data[1]]), toy_backbone(1, None))


def test_scores_are_those_of_the_detector_itself(bench: SarBench) -> None:
    found = bench.features["fixed"]
    options = {"pool": "local", "window": 1, "topk": 9 / 256, "magnitude": "log", "normalise": "fixed"}
    detector = gepc.GEPC(
        bench.backbone, levels="0.99,0.9", keep=None, group=["id", "rot180"], calibration="z", size=16, **options
    )
    # p-values need other patches than those fitted on; the scores do not depend on them
    detector.fit(PatchImages(found.fit.patches), PatchImages(found.clutter.patches))
    inside, outside = bench.scores(found, PROTOCOL.local, "z")
    assert np.allclose(detector.score(PatchImages(found.clutter.patches)), inside, rtol=1e-4)
    assert np.allclose(detector.score(PatchImages(found.ships["SSDD"].patches)), outside["SSDD"], rtol=1e-4)
    maps = bench.maps(found, found.ships["HRSID"])
    assert np.allclose(detector.score_map(PatchImages(found.ships["HRSID"].patches)), maps, rtol=1e-4)


def test_all_poolings_cost_the_passes_of_one(data: tuple[Path, Path]) -> None:
    backbone = toy_backbone(1, None)
    sets = gather(PROTOCOL, data[0], [])
    extract_patches(sets.clutter, backbone, PROTOCOL.extractors(), PREPROCESSING)
    assert len(PROTOCOL.extractors()) == 3
    assert backbone.forward_count == 4 * len(sets.clutter)  # two levels, two elements of the group


def test_a_second_run_makes_no_pass_and_a_larger_one_only_the_new(data: tuple[Path, Path], tmp_path: Path) -> None:
    backbone = toy_backbone(1, None)
    backbone.sha256 = "0" * 64
    sets, cache = gather(PROTOCOL, data[0], []), FeatureCache(tmp_path)
    first = extract_patches(sets.clutter[:3], backbone, PROTOCOL.extractors(), PREPROCESSING, cache=cache)
    backbone.reset_counts()
    again = extract_patches(sets.clutter[:4], backbone, PROTOCOL.extractors(), PREPROCESSING, cache=cache)
    assert backbone.forward_count == 4
    assert np.array_equal(first.columns[PROTOCOL.local], again.columns[PROTOCOL.local][:3])
    assert np.array_equal(first.maps, again.maps[:3])


def test_a_changed_formula_is_not_read_from_the_cache(
    data: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = toy_backbone(1, None)
    backbone.sha256 = "0" * 64
    patches, cache = gather(PROTOCOL, data[0], []).clutter[:2], FeatureCache(tmp_path)
    extract_patches(patches, backbone, PROTOCOL.extractors(), PREPROCESSING, cache=cache)
    backbone.reset_counts()
    monkeypatch.setattr(GepcExtractor, "revision", GepcExtractor.revision + 1)
    extract_patches(patches, backbone, PROTOCOL.extractors(), PREPROCESSING, cache=cache)
    assert backbone.forward_count == 4 * len(patches)


def test_tables_name_both_normalisations_poolings_and_sides(bench: SarBench) -> None:
    found = {table.name: table for table in tables(bench)}
    assert set(found) == {"detection", "target_size", "localisation", "levels", "patches"}
    rows = found["detection"].rows
    assert len(rows) == 2 * 2 * 3 * 2 + 2 + 2
    assert {row[1] for row in rows} == {"fixed", "patch"}
    assert {row[2] for row in rows} == {"topk 0.3", "local 9", "published"}
    assert "cannot hold" in found["detection"].note
    for row in rows:
        assert 0.0 <= float(row[4] or 0.0) <= 1.0
    assert len(found["localisation"].rows) == 2 * 2 * 2
    bright = [row for row in rows if row[3] == "brightness, no network"]
    assert [row[4] for row in bright] == [1.0, 1.0]  # white ships on a dark sea


def test_nothing_is_fitted_on_what_is_tested(bench: SarBench) -> None:
    fitted = {patch.scene.path for patch in bench.sets.fit}
    assert not fitted & {patch.scene.path for patch in bench.sets.clutter}
    assert all(not patch.boxes for patch in bench.sets.fit)


def test_data_without_ships_or_a_training_split_are_refused(data: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sea clutter comes from HRSID"):
        gather(PROTOCOL, data[1], [])
    empty = write_ssdd(tmp_path / "calm", {"000001": []})
    with pytest.raises(InputError, match="calm has no patch of 16 pixels with a ship"):
        gather(PROTOCOL, data[0], [empty])

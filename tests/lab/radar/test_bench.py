"""The radar benchmark on small synthetic data: the detector's own scores, sets that share nothing, one table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from radar_files import write_folder, write_hrsid, write_ssdd
from toys import toy_backbone

from gepc.core.errors import InputError, OptionError
from gepc.core.tables import ResultTable
from gepc.lab.metrics import aupr, auroc
from gepc.lab.radar.bench import (
    PAPER,
    PatchSets,
    SarProtocol,
    fit_and_score,
    gather,
    patch_maps,
    radar_table,
    write_figures,
)
from gepc.lab.radar.patches import PatchImages
from gepc.methods.extraction import FeatureCache

METHODS = ("gepc+:radar", "ca_cfar", "rx")
PROTOCOL = SarProtocol(size=16, hold_out=0.5, fit_limit=16, limit=6, methods=METHODS, target_pixels=9, draws=10)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("radar")
    train = {f"P{k:04d}_0_64_0_64.jpg": [] for k in range(4)}
    test = {f"P{k:04d}_0_64_0_64.jpg": [(5.0, 5.0, 4.0, 3.0), (37.0, 36.0, 5.0, 4.0)] for k in range(10, 13)}
    hrsid = write_hrsid(root / "HRSID", {"train": train, "test": test})
    return hrsid, write_ssdd(root / "SSDD", {"000001": [(20, 20, 25, 24)], "000002": [(36, 4, 40, 9)]})


@pytest.fixture(scope="module")
def sets(data: tuple[Path, Path]) -> PatchSets:
    return gather(PROTOCOL, data[0], [data[1]])


@pytest.fixture(scope="module")
def table(sets: PatchSets) -> ResultTable:
    measured = [fit_and_score(PROTOCOL, method, sets, toy_backbone(1, None), FeatureCache(None)) for method in METHODS]
    return radar_table(PROTOCOL, sets, measured)


def test_the_table_has_a_row_for_every_method_and_set(table: ResultTable) -> None:
    assert [(row[0], row[2]) for row in table.rows] == [
        (f"{name} ships", method) for name in ("HRSID", "SSDD") for method in METHODS
    ]
    assert [row[3] for row in table.rows[:3]] == [1, 0, 0]
    for heading in ("AUROC", "FPR95", "AUPR", "pixel AUROC", "pointing game", "PRO"):
        assert all(0.0 <= value <= 1.0 for value in table.numbers(heading))
    assert "Fitted on 16 of " in table.note
    assert "tested on 6 of 42; ships: 6 of 6 HRSID, 2 of 2 SSDD" in table.note
    found = dict(zip([row[2] for row in table.rows], table.numbers("AUROC"), strict=True))
    assert found["ca_cfar"] == 1.0  # white ships on a dark sea


def test_the_figures_are_those_of_the_detector(sets: PatchSets, table: ResultTable) -> None:
    detector = PROTOCOL.detector("gepc+:radar", toy_backbone(1, None)).fit(PatchImages(sets.fit))
    inside, outside = (detector.score(PatchImages(patches)) for patches in (sets.clutter, sets.ships["HRSID"]))
    assert table.numbers("AUROC")[0] == pytest.approx(auroc(inside, outside))
    assert table.numbers("AUPR")[0] == pytest.approx(aupr(inside, outside))
    assert patch_maps(detector.fitted, sets.clutter).shape == (len(sets.clutter), 16, 16)


def test_the_paper_s_detector_has_its_values_beside_it_and_its_figures(
    sets: PatchSets, tmp_path: Path, tiny_net: object
) -> None:
    """Seven elements, two kept levels, the largest 30 % of the pixels, KDE; a second run makes no pass for features."""
    backbone = toy_backbone(3, None)
    backbone.sha256 = "toy"
    protocol = replace(PROTOCOL, methods=(PAPER,), normalise="patch", localise=False)
    options = protocol.detector(PAPER, backbone).options()
    assert (options["pool"], options["topk"], options["keep"], options["calibration"]) == ("topk", 0.3, 2, "kde")
    assert (options["magnitude"], options["normalise"]) == ("log", "patch")
    assert protocol.detector(PAPER, backbone).cost().forward == 14
    cache = FeatureCache(tmp_path / "cache")
    item = fit_and_score(protocol, PAPER, sets, backbone, cache)
    again = fit_and_score(protocol, PAPER, sets, backbone, known := FeatureCache(tmp_path / "cache"))
    assert (known.misses, known.hits) == (0, cache.misses)
    assert np.array_equal(item.scores["HRSID"], again.scores["HRSID"])
    table = radar_table(protocol, sets, [item])
    assert "PRO" not in table.header
    for metric, values in (("AUROC", [0.853, 1.0]), ("FPR95", [0.0, 0.0]), ("AUPR", [0.619, 1.0])):
        assert table.numbers(f"{metric}: paper") == values
    maps = patch_maps(item.detector, sets.clutter[:1])  # before any pooling, as the paper shows them
    image = item.detector.preprocessing.prepare(PatchImages(sets.clutter)[0])
    assert np.allclose(maps, item.detector.raw_map(item.detector.map_parts([image])[1]))
    write_figures(tmp_path, "toy", item, sets)
    for name in ("toy-main.png", "toy-appendix.png"):
        with Image.open(tmp_path / name) as picture:
            assert np.asarray(picture.convert("L")).std() > 10


def test_nothing_is_fitted_on_what_is_tested(sets: PatchSets) -> None:
    fitted = {patch.scene.path for patch in sets.fit}
    assert not fitted & {patch.scene.path for patch in sets.clutter}
    assert all(not patch.boxes for patch in sets.fit)


def test_data_without_a_training_split_are_divided_by_image(tmp_path: Path) -> None:
    write_folder(tmp_path / "sea", 6, [(20.0, 20.0, 9.0, 5.0)])
    sets = gather(PROTOCOL, tmp_path / "sea", [])
    assert not {patch.scene.path for patch in sets.fit} & {patch.scene.path for patch in sets.clutter}
    assert list(sets.ships) == ["sea"]
    write_folder(tmp_path / "calm", 4, [], first_seed=50)
    apart = gather(PROTOCOL, tmp_path / "calm", [tmp_path / "sea"])  # clutter alone, ships of another data set
    assert list(apart.ships) == ["sea"]
    with pytest.raises(InputError, match="calm has no patch of 16 pixels with a ship"):
        gather(PROTOCOL, tmp_path / "calm", [])


def test_data_without_ships_and_unknown_methods_are_refused(data: tuple[Path, Path], tmp_path: Path) -> None:
    empty = write_ssdd(tmp_path / "calm", {"000001": []})
    with pytest.raises(InputError, match="calm has no patch of 16 pixels with a ship"):
        gather(PROTOCOL, data[0], [empty])
    with pytest.raises(OptionError, match="cfar"):
        SarProtocol(methods=("cfar",))


@pytest.mark.parametrize("option", [{"draws": 0}, {"limit": 1}, {"fit_limit": 3}, {"target_pixels": 9000, "size": 64}])
def test_what_cannot_be_measured_is_refused(option):
    with pytest.raises(OptionError):
        SarProtocol(**option)

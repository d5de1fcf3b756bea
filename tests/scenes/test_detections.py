"""Detections: one for each blob of the stitched map, whatever the strips, with its peak, area and p-values."""

import csv
import json
import tracemalloc

import numpy as np
import pytest
import rasterio
from hypothesis import given
from hypothesis import strategies as st
from rasterio.transform import Affine
from toys import as_uint8, pictures, toy_backbone, toy_detector

import gepc
from gepc.maps.regions import map_regions
from gepc.scenes import regions as scene_regions
from gepc.scenes import scan
from gepc.scenes.folder import MapFile
from gepc.scenes.reading import PIXELS, Georeference
from gepc.scenes.regions import Detection, blobs
from gepc.scenes.tiling import Grid
from gepc.scenes.writing import geojson

pytestmark = [
    pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning"),
    pytest.mark.filterwarnings("ignore:with .* calibration images:UserWarning"),
]
EVERYTHING = ("score", "box", "area", "peak")


def facts(regions):
    return sorted(tuple(getattr(region, name) for name in EVERYTHING) for region in regions)


def rows(path):
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


@given(st.integers(1, 14), st.integers(1, 14), st.integers(1, 14), st.integers(0, 2**31), st.floats(0.1, 0.9))
def test_strips_give_the_blobs_of_the_whole_map(height, width, lines, seed, limit):
    """Rings, spirals and blobs that part and meet again across strips, against labels of the whole map at once."""
    field = np.random.default_rng(seed).random((height, width)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scene_regions, "STRIP_PIXELS", lines * width)
        found = list(blobs(field, limit))
    assert facts(found) == facts(map_regions({"sum": field}, "sum", limit))


@pytest.mark.parametrize("lines", [1, 2, 3, 5])
def test_a_blob_that_parts_and_meets_again_is_one(lines, monkeypatch):
    field = np.zeros((5, 9), np.float32)
    field[:, 0] = field[:, 4] = field[:, 8] = 2.0  # three legs
    field[0, :5] = field[4, 4:] = 2.0  # joined above and below
    field[3, 8] = 3.0
    field[2, 2] = np.nan
    monkeypatch.setattr(scene_regions, "STRIP_PIXELS", lines * 9)
    (blob,) = blobs(field, 1.0)
    assert (blob.box, blob.peak, blob.score, blob.area) == ((0, 0, 5, 9), (3, 8), 3.0, int((field > 1.0).sum()))


def test_the_first_of_equal_peaks_counts_and_a_map_below_its_limit_has_no_blob(monkeypatch):
    field = np.full((6, 3), 2.0, np.float32)
    monkeypatch.setattr(scene_regions, "STRIP_PIXELS", 6)
    (blob,) = blobs(field, 1.0)
    assert blob.peak == (0, 0)
    assert list(blobs(field, 2.0)) == []
    assert list(blobs(np.full((4, 4), np.nan, np.float32), 0.0)) == []


def test_memory_does_not_grow_with_the_height_of_the_map(tmp_path, monkeypatch):
    monkeypatch.setattr(scene_regions, "STRIP_PIXELS", 1 << 14)
    peaks = []
    for height in (512, 16384):
        field = np.zeros((height, 64), np.float32)
        field[:, 7] = 1.0  # one blob from the first line to the last
        np.save(tmp_path / "map.npy", field)
        del field
        tracemalloc.start()
        (blob,) = blobs(MapFile(tmp_path / "map.npy"), 0.5)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert blob.area == height
    assert peaks[1] < 1.5 * peaks[0]


@given(st.integers(0, 29), st.integers(0, 36))
def test_the_tiles_that_hold_a_pixel(line, column):
    grid = Grid.over(30, 37, (8, 10), (3, 7))
    found = [[top <= line < top + 8 and left <= column < left + 10 for left in grid.lefts] for top in grid.tops]
    mask = np.zeros((len(grid.tops), len(grid.lefts)), dtype=bool)
    mask[grid.holding(line, column)] = True
    assert np.array_equal(mask, found)


@pytest.mark.parametrize("place", [PIXELS, Georeference((10.0, 2.0, 500.0, 1.0, -10.0, 900.0), "WKT", 32631)])
def test_a_detection_lies_at_the_centre_of_its_peak(place):
    detection = Detection(1, 5.0, 0.02, (3, 4, 9, 8), 11, (5, 6), 0.4, True)
    x, y = (6.5, 5.5) if place == PIXELS else (10 * 6.5 + 2 * 5.5 + 500, 6.5 - 10 * 5.5 + 900)
    (feature,) = geojson([detection], place)["features"]
    assert feature["geometry"] == {"type": "Point", "coordinates": [x, y]}
    expected = (1, 5.0, 0.02, 0.4, 11, 5, 6, 3, 4, 9, 8, True, x, y)
    assert feature["properties"] == dict(zip(Detection.COLUMNS, expected, strict=True))


def test_a_detector_without_statistics_of_maps_has_no_detections_and_says_so(tmp_path, landscape):
    detector = toy_detector(toy_backbone(3, 16), levels=(0.9,), keep=1, maps="raw")
    detector.fit(as_uint8(pictures(40, 16, seed=1)))
    np.save(tmp_path / "s.npy", landscape)
    report = scan(detector, tmp_path / "s.npy", tmp_path / "out", control="tile", alpha=0.1)
    assert report.detections == []
    assert "no statistics of maps" in report.summary["detection_guarantee"]


def test_the_statement_counts_tiles_and_not_detections(two_patches):
    tiles = two_patches.counts["scored"]
    said = two_patches.summary["detection_guarantee"]
    assert f"The maps of at most {0.05 * tiles:.3g} of {tiles} such tiles are expected to exceed it by chance" in said
    assert "each of these can give several detections" in said


@pytest.fixture(scope="module")
def two_patches(tmp_path_factory, detector):
    """A georeferenced scene with two bright patches, far from each other, scanned."""
    folder = tmp_path_factory.mktemp("patches")
    scene = as_uint8(pictures(1, (72, 100), seed=7))[0]
    scene[12:22, 10:20] = scene[48:58, 70:80] = np.array([250, 250, 5], np.uint8)
    with rasterio.open(
        folder / "s.tif",
        "w",
        driver="GTiff",
        height=72,
        width=100,
        count=3,
        dtype="uint8",
        crs="EPSG:32631",
        transform=Affine(10, 0, 500, 0, -20, 900),
    ) as file:
        file.write(scene.transpose(2, 0, 1))
    return scan(detector, folder / "s.tif", folder / "out", control="tile", alpha=0.05)


def test_every_patch_has_a_detection_at_its_peak(two_patches, detector):
    field = np.load(two_patches.out / "map.npy")
    limit = detector.map_limit(0.05)
    assert facts(map_regions({"sum": field}, "sum", limit)) == sorted(
        (d["score"], (d["top"], d["left"], d["bottom"], d["right"]), d["area"], (d["line"], d["column"]))
        for d in two_patches.detections
    )
    for top, left in ((12, 10), (48, 70)):
        near = [
            d for d in two_patches.detections if top - 8 <= d["line"] < top + 18 and left - 8 <= d["column"] < left + 18
        ]
        assert near
        assert near[0]["flagged"]
        assert (near[0]["x"], near[0]["y"]) == (
            500 + 10 * (near[0]["column"] + 0.5),
            900 - 20 * (near[0]["line"] + 0.5),
        )


def test_p_values_are_those_of_a_tile_and_of_the_scene(two_patches, detector):
    maxima = detector.fitted.maps.maxima[0]
    scored = two_patches.counts["scored"]
    for found in two_patches.detections:
        p = (1 + (maxima >= np.float32(found["score"])).sum()) / (len(maxima) + 1)
        assert found["p_value"] == pytest.approx(p)
        assert found["p_value"] <= 0.05
        assert found["p_scene"] == pytest.approx(min(1.0, scored * p))


def test_the_files_and_scene_json_agree(two_patches):
    summary, out = two_patches.summary, two_patches.out
    table = rows(out / "detections.csv")
    collection = json.loads((out / "detections.geojson").read_text())
    assert len(table) == len(collection["features"]) == summary["counts"]["detections"] > 1
    assert collection["crs"]["properties"]["name"] == "urn:ogc:def:crs:EPSG::32631"
    assert [float(row["score"]) for row in table] == sorted((float(row["score"]) for row in table), reverse=True)
    for row, feature in zip(table, collection["features"], strict=True):
        assert float(row["x"]) == pytest.approx(feature["geometry"]["coordinates"][0])
        assert row["flagged"] == str(feature["properties"]["flagged"]).lower()
    assert f"min(1, {summary['counts']['scored']} p_value)" in summary["detection_guarantee"]


@pytest.mark.filterwarnings("ignore:nothing can be flagged:UserWarning")
def test_a_level_that_the_calibration_maps_do_not_allow_gives_no_detection_and_says_so(tmp_path, detector, landscape):
    np.save(tmp_path / "s.npy", landscape)
    report = scan(detector, tmp_path / "s.npy", tmp_path / "out", alpha=0.001)
    n = detector.fitted.maps.maxima.shape[1]
    assert report.detections == []
    assert f"needs at least 999 calibration maps, there are {n}" in report.summary["detection_guarantee"]


def test_a_method_without_maps_has_no_detections(tmp_path, landscape):
    detector = gepc.create_detector(toy_backbone(3, 16), "score_norm").fit(as_uint8(pictures(60, 16, seed=1)))
    np.save(tmp_path / "s.npy", landscape)
    report = scan(detector, tmp_path / "s.npy", tmp_path / "out", control="tile")
    assert (report.detections, report.counts["detections"]) == ([], 0)
    assert not (report.out / "detections.csv").exists()


def test_usual_scenes_have_detections_no_more_often_than_stated(tmp_path):
    """One tile, so that the level of a tile is that of the scene; the bound is three standard errors above alpha."""
    detector = toy_detector(toy_backbone(3, 16), levels=(0.9,), keep=1).fit(as_uint8(pictures(300, 16, seed=1)))
    maps = detector.score_map(as_uint8(pictures(300, 16, seed=2)))
    limit = detector.map_limit(0.1)
    share = np.mean([any(blobs(np.asarray(field), limit)) for field in maps])
    assert share <= 0.1 + 3 * np.sqrt(0.1 * 0.9 * (1 / 300 + 1 / detector.fitted.maps.maxima.shape[1]))

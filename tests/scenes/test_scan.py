"""A scene from file to folder: scores, map, regions, masks, interruption, refusals."""

import csv
import json
import tracemalloc
import warnings

import numpy as np
import pytest
import rasterio
import torch
from PIL import Image
from rasterio.transform import Affine
from toys import as_uint8, pictures, toy_backbone, toy_detector

import gepc
from gepc.core.errors import GepcError, InputError, NotFittedError, OptionError
from gepc.scenes import plan_scan, scan, scanning
from gepc.scenes.folder import ScanFolder
from gepc.scenes.writing import shrink

pytestmark = [
    pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning"),
    pytest.mark.filterwarnings("ignore:with .* calibration images:UserWarning"),
]
PLACE = Affine(10, 0, 500, 0, -20, 900)


def write_tiff(path, array, **options):
    height, width, count = array.shape
    with rasterio.open(
        path, "w", driver="GTiff", height=height, width=width, count=count, dtype=array.dtype, **options
    ) as file:
        file.write(array.transpose(2, 0, 1))
    return path


def rows(path):
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def field_of(out):
    return np.load(out / "map.npy")


@pytest.fixture
def geotiff(tmp_path, landscape):
    return write_tiff(tmp_path / "scene.tif", landscape, crs="EPSG:32631", transform=PLACE)


@pytest.fixture(scope="module")
def scanned(tmp_path_factory, detector, landscape):
    """One scan that several tests look at."""
    folder = tmp_path_factory.mktemp("scanned")
    path = write_tiff(folder / "scene.tif", landscape, crs="EPSG:32631", transform=PLACE)
    return scan(detector, path, folder / "out", control="tile", alpha=0.05)


def test_a_tile_has_the_score_of_the_same_crop_given_to_score(scanned, detector, landscape):
    found = rows(scanned.out / "tiles.csv")
    assert len(found) == 8 * 12 == scanned.counts["tiles"]
    crops = [landscape[(y := int(r["top"])) : y + 16, (x := int(r["left"])) : x + 16] for r in found]
    np.testing.assert_allclose([float(r["score"]) for r in found], detector.score(crops), rtol=1e-9)
    np.testing.assert_allclose([float(r["p_value"]) for r in found], detector.p_value(crops), rtol=1e-12)
    assert [r["alarm"] == "true" for r in found] == [float(r["p_value"]) <= 0.05 for r in found]


def test_the_map_is_the_blend_of_the_tiles_maps(scanned, detector, landscape):
    from gepc.scenes.tiling import weights

    total, share, w = np.zeros((72, 100)), np.zeros((72, 100)), np.outer(weights(16), weights(16))
    for row in rows(scanned.out / "tiles.csv"):
        y, x = int(row["top"]), int(row["left"])
        part = (slice(y, y + 16), slice(x, x + 16))
        total[part] += w * detector.score_map([landscape[part]])[0]
        share[part] += w
    np.testing.assert_allclose(field_of(scanned.out), total / share, rtol=1e-5, atol=1e-4)


def test_the_coordinates_of_the_map_are_in_the_report(scanned):
    """So the map can be written as a raster in the place of the scene."""
    assert scanned.summary["georeference"]["transform"] == list(PLACE)[:6]
    assert scanned.summary["georeference"]["epsg"] == 32631
    assert field_of(scanned.out).shape == (72, 100)
    assert field_of(scanned.out).dtype == np.float32


def test_the_patch_is_the_first_region_in_pixels_and_on_the_map(scanned):
    first = scanned.regions[0]
    assert first["top"] <= 40 < 56 <= first["bottom"]
    assert first["left"] <= 60 < 76 <= first["right"]
    scores = [region["score"] for region in scanned.regions]
    assert scores == sorted(scores, reverse=True)
    collection = json.loads((scanned.out / "regions.geojson").read_text())
    (ring,) = collection["features"][0]["geometry"]["coordinates"]
    assert ring[0] == [500 + 10 * first["left"], 900 - 20 * first["top"]]
    table = rows(scanned.out / "regions.csv")
    assert [float(row["score"]) for row in table] == pytest.approx(scores)
    assert len(table) == scanned.counts["regions"]


def test_scene_json_says_what_was_done(scanned, detector):
    summary = json.loads((scanned.out / "scene.json").read_text())
    assert summary == scanned.summary
    assert summary["options"]["tile"] == [16, 16]
    assert summary["options"]["stride"] == [8, 8]
    assert summary["network_passes"]["forward"] == 96 * detector.cost().forward
    assert summary["map_scale"] == detector.map_limit()
    assert "exchangeable" in summary["guarantee"]
    assert {"gepc", "torch", "rasterio"} <= set(summary["versions"])
    assert sorted(p.name for p in scanned.out.iterdir() if not p.name.startswith(".")) == sorted(
        [*summary["files"].values(), "scene.json", "run.json"]
    )


def test_the_overview_is_at_most_2000_pixels_and_shows_the_boxes(scanned, tmp_path, detector):
    with Image.open(scanned.out / "overview.png") as picture:
        assert max(picture.size) <= 2000
        pixels = np.asarray(picture)
    box, enlarge = scanned.regions[0], 900 // 100
    line = pixels[(box["top"] + box["bottom"]) // 2 * enlarge, box["left"] * enlarge]
    assert line.tolist() == [0x5C, 0xC4, 0xD2]
    wide = np.broadcast_to(np.uint8(100), (16, 5000))
    np.save(tmp_path / "wide.npy", wide)
    scan(detector, tmp_path / "wide.npy", tmp_path / "wide", overlap=0.0)
    with Image.open(tmp_path / "wide" / "overview.png") as picture:
        assert 1500 < picture.size[0] <= 2000


def test_the_overview_shrinks_by_block_means_without_what_is_missing(monkeypatch):
    monkeypatch.setattr("gepc.scenes.writing.WINDOW_PIXELS", 40)
    values = np.random.default_rng(0).random((23, 31))
    valid = np.random.default_rng(1).random((23, 31)) > 0.3
    valid[:4, :4] = False

    def read(top, left, height, width):
        part = (slice(top, top + height), slice(left, left + width))
        return values[part], valid[part]

    found = shrink(read, 23, 31, 4)[..., 0]
    assert found.shape == (6, 8)
    assert np.isnan(found[0, 0])
    assert found[5, 7] == pytest.approx(values[20:, 28:][valid[20:, 28:]].mean())


def test_no_data_is_left_out_filled_and_masked(tmp_path, detector, landscape):
    scene = landscape.copy()
    scene[:, 80:] = 0
    scene[3, 4] = 0
    path = write_tiff(tmp_path / "holes.tif", scene, nodata=0)
    report = scan(detector, path, tmp_path / "out", max_missing=0.2)
    found = rows(tmp_path / "out" / "tiles.csv")
    out = [row for row in found if row["error"].startswith("left out")]
    assert {row["left"] for row in out} == {"72", "80", "84"}
    assert report.counts["left_out"] == len(out) == 3 * 8
    assert report.counts["scored"] + len(out) == len(found)
    field = field_of(tmp_path / "out")
    assert np.array_equal(np.isnan(field), (scene == 0).all(axis=2))
    filled = landscape[:16, :16].copy()
    hole = next(row for row in found if (row["top"], row["left"]) == ("0", "0"))
    assert float(hole["missing"]) == pytest.approx(1 / 256)
    candidates = [filled[3 + dy, 4 + dx].copy() for dy, dx in ((-1, 0), (1, 0), (0, -1), (0, 1))]
    scores = []
    for value in candidates:
        filled[3, 4] = value
        scores.append(detector.score([filled])[0])
    assert min(abs(score - float(hole["score"])) for score in scores) < 1e-6


def test_nan_pixels_of_a_float_scene_are_no_data(tmp_path, landscape):
    detector = toy_detector(toy_backbone(3, 16), levels=(0.9,), keep=1, value_range=(0, 255))
    detector.fit(as_uint8(pictures(40, 16, seed=1)).astype(np.float32))
    scene = landscape[:32, :40].astype(np.float32)
    scene[0, 0, 1] = np.nan
    scene[20:, 30:] = np.inf
    report = scan(detector, write_tiff(tmp_path / "f.tif", scene), tmp_path / "out", control="tile", alpha=0.2)
    assert report.counts["left_out"] > 0
    missing, unseen = ~np.isfinite(scene).all(axis=2), np.isnan(field_of(tmp_path / "out"))
    assert unseen[missing].all()
    assert np.array_equal(unseen[:, :24], missing[:, :24])  # no tile is left out there


def test_resuming_repeats_nothing_and_gives_the_same_files(tmp_path, detector, geotiff, scanned, monkeypatch):
    """Stopped in the middle of a block, in the middle of a commit, and while the last files are written."""
    options = {"control": "tile", "alpha": 0.05, "on_progress": None}
    out, seen = tmp_path / "out", []
    monkeypatch.setattr(detector, "batch_size", 20)  # two rows in a block

    def stop_after(count):
        total = 0

        def advance(number):
            nonlocal total
            total += number
            if total > count:
                raise KeyboardInterrupt

        return advance

    for limit in (30, 70):
        with pytest.raises(KeyboardInterrupt):
            scan(detector, geotiff, out, **{**options, "on_progress": stop_after(limit)})
        seen.append(ScanFolder(out).state().rows)
        assert not (out / "scene.json").exists()
    assert seen == [2, 4]
    assert plan_scan(detector, geotiff, out, control="tile").done == 4 * 12

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # records appended, progress not yet replaced
        patch.setattr("gepc.scenes.folder.write_arrays", fail)
        with pytest.raises(KeyboardInterrupt):
            scan(detector, geotiff, out, **options)
    with open(out / "work" / "tiles.csv", "a") as handle:
        handle.write("4,0,32,0,0,1.")
    with monkeypatch.context() as patch:
        patch.setattr(scanning, "write_overview", fail)
        with pytest.raises(KeyboardInterrupt):
            scan(detector, geotiff, out, **options)
    before = detector.backbone.forward_count
    report = scan(detector, geotiff, out, **options)
    assert detector.backbone.forward_count == before
    assert report.resumed == 96
    assert report.summary["network_passes"]["forward"] == 96 * detector.cost().forward
    assert not (out / "work").exists()
    for mine, other in zip(rows(out / "tiles.csv"), rows(scanned.out / "tiles.csv"), strict=True):
        assert {**mine, "score": 0} == {**other, "score": 0}
        assert float(mine["score"]) == pytest.approx(float(other["score"]), rel=1e-9)
    np.testing.assert_allclose(field_of(out), field_of(scanned.out), rtol=1e-5, atol=1e-4)
    again = scan(detector, geotiff, out, **options)
    assert again.summary == report.summary
    assert detector.backbone.forward_count == before


def test_an_array_map_survives_a_stop_just_before_the_end(tmp_path, detector, geotiff, scanned, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    options = {"control": "tile"}
    with monkeypatch.context() as patch:
        patch.setattr(ScanFolder, "finish", fail)
        with pytest.raises(KeyboardInterrupt):
            scan(detector, geotiff, tmp_path / "out", **options)
    scan(detector, geotiff, tmp_path / "out", **options)
    np.testing.assert_allclose(np.load(tmp_path / "out" / "map.npy"), field_of(scanned.out), rtol=1e-5, atol=1e-4)


def test_a_folder_of_other_parameters_is_refused(tmp_path, detector, geotiff):
    scan(detector, geotiff, tmp_path / "out", overlap=0.0)
    content = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    other = toy_detector(toy_backbone(3, 16), levels=(0.9,), keep=1, seed=5).fit(as_uint8(pictures(40, 16)))
    for arguments, options, sentence in (
        ((detector, geotiff), {}, r"stride was \[16, 16\] and is \[8, 8\] now"),
        ((detector, geotiff), {"overlap": 0.0, "alpha": 0.1}, r"alpha was 0.05 and is 0.1 now"),
        ((other, geotiff), {"overlap": 0.0}, "detector was"),
    ):
        with pytest.raises(InputError, match=sentence):
            scan(*arguments, tmp_path / "out", **options)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == content
    (tmp_path / "out" / "regions.csv").unlink()
    with pytest.raises(InputError, match=r"finished run but regions.csv is missing"):
        scan(detector, geotiff, tmp_path / "out", overlap=0.0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty and contains no run"):
        scan(detector, geotiff, tmp_path / "full")


def digest_of(detector, path, **options):
    return plan_scan(detector, path, **options).identity["detector"]


def test_a_scan_begun_on_one_device_resumes_on_another(tmp_path, landscape, tiny_net, monkeypatch):
    """The identity of a scan does not hold the device, with a weights file and without one."""
    from diffusers import DDPMScheduler

    np.save(tmp_path / "s.npy", landscape)
    scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    for part in (tiny_net, scheduler):
        part.save_pretrained(tmp_path / "net")
    for weights_hash in (True, False):
        backbone = gepc.load_backbone(tmp_path / "net", device="cpu")
        if not weights_hash:
            backbone.sha256 = None
        detector = gepc.GEPC(backbone, levels=(0.9,), keep=1, group=("flip_x",)).fit(as_uint8(pictures(30, 16)))
        before = digest_of(detector, tmp_path / "s.npy")
        monkeypatch.setattr(backbone, "device", torch.device("cuda"))
        assert digest_of(detector, tmp_path / "s.npy") == before


def test_a_group_may_have_the_name_of_a_number_of_the_calibrator(tmp_path, landscape):
    """The calibrator `z` stores a mean, and so may a group be called."""
    np.save(tmp_path / "s.npy", landscape)
    detector = toy_detector(toy_backbone(3, 16), levels=(0.9,), keep=1, calibration="z")
    detector.fit(as_uint8(pictures(60, 16, seed=1)), groups=["mean", "night"] * 30)
    before = digest_of(detector, tmp_path / "s.npy", group="night")
    detector.fitted.scorer.calibrator_.mean_ = detector.fitted.scorer.calibrator_.mean_ + 1.0
    assert digest_of(detector, tmp_path / "s.npy", group="night") != before


def test_an_unfinished_scan_of_an_earlier_version_is_refused(tmp_path, detector, geotiff):
    (tmp_path / "out" / "work").mkdir(parents=True)
    (tmp_path / "out" / "run.json").write_text(json.dumps({"detector": "old", "tile": [16, 16]}))
    with pytest.raises(InputError, match=r"run\.json is not a run of this version; give another folder"):
        scan(detector, geotiff, tmp_path / "out")
    (tmp_path / "out" / "run.json").unlink()
    with pytest.raises(InputError, match=r"pieces of a run and no run\.json; give another folder"):
        scan(detector, geotiff, tmp_path / "out")


def test_two_processes_cannot_write_one_folder(tmp_path, detector, geotiff):
    with ScanFolder(tmp_path / "out").run.held(), pytest.raises(InputError, match="another process"):
        scan(detector, geotiff, tmp_path / "out")


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (lambda s: s[:10], {}, "10x100 pixels, less than one tile of 16x16"),
        (lambda s: np.full_like(s, 9), {"nodata": 9}, "no tile of .* can be scored; each has more than 10%"),
        (lambda s: s.astype(np.int32), {}, "no tile of .* can be scored; the first error: .*set `value_range`"),
        (lambda s: s[..., :2], {}, "2 bands and the detector's backbone takes 3"),
        (lambda s: s, {"tile": 20, "stride": 21}, "leaves gaps"),
        (lambda s: s, {"stride": 4, "overlap": 0.5}, "not both"),
        (lambda s: s, {"overlap": 1.0}, "less than 1"),
        (lambda s: s, {"max_missing": 1.0}, "max_missing must be a share of a tile"),
        (lambda s: s, {"controll": "bh"}, "did you mean 'control'"),
        (lambda s: s, {"group": "day"}, "fitted without groups"),
        (lambda s: s, {"control": "tile", "alpha": 0.001}, "needs at least 999 calibration images"),
        (lambda s: s, {"map_format": "tif"}, "has no option 'map_format'"),
    ],
)
def test_what_cannot_be_done_is_a_sentence_and_leaves_no_folder(tmp_path, detector, landscape, make, options, sentence):
    np.save(tmp_path / "s.npy", make(landscape))
    with pytest.raises(GepcError, match=sentence):
        scan(detector, tmp_path / "s.npy", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_detector_that_is_not_fitted_or_takes_one_size_says_so(tmp_path, landscape):
    np.save(tmp_path / "s.npy", landscape)
    with pytest.raises(NotFittedError):
        scan(toy_detector(), tmp_path / "s.npy", tmp_path / "out")
    exact = toy_detector(toy_backbone(3, None), levels=(0.9,), keep=1).fit(as_uint8(pictures(24, 8)))
    with pytest.raises(OptionError, match="tiles of 8x8 pixels only"):
        scan(exact, tmp_path / "s.npy", tmp_path / "out", tile=16)


def test_larger_tiles_are_shrunk_by_the_detector_and_their_map_is_enlarged(tmp_path, detector, landscape):
    np.save(tmp_path / "s.npy", landscape)
    report = scan(detector, tmp_path / "s.npy", tmp_path / "out", tile=32, stride=(20, 30))
    found = rows(report.out / "tiles.csv")
    assert {(row["top"], row["left"]) for row in found} == {
        (y, x) for y in ("0", "20", "40") for x in ("0", "30", "60", "68")
    }
    crops = [landscape[(y := int(r["top"])) : y + 32, (x := int(r["left"])) : x + 32] for r in found]
    np.testing.assert_allclose([float(r["score"]) for r in found], detector.score(crops), rtol=1e-9)
    field = np.load(report.out / "map.npy")
    assert field.shape == (72, 100)
    assert np.isfinite(field).all()


def test_a_method_without_maps_gives_tiles_and_regions_and_no_map(tmp_path, landscape):
    detector = gepc.create_detector(toy_backbone(3, 16), "score_norm").fit(as_uint8(pictures(60, 16, seed=1)))
    assert not detector.extractor.has_maps
    np.save(tmp_path / "s.npy", landscape)
    report = scan(detector, tmp_path / "s.npy", tmp_path / "out", control="tile")
    assert "map" not in report.summary["files"]
    assert report.counts["scored"] == 96
    assert report.regions[0]["tiles"] >= 1


def test_groups_are_compared_with_their_own_reference(tmp_path, landscape):
    images = as_uint8(pictures(60, 16, seed=1))
    detector = toy_detector(toy_backbone(3, 16), levels=(0.9,), keep=1)
    detector.fit(images, groups=["day", "night"] * 30)
    np.save(tmp_path / "s.npy", landscape[:16])
    with pytest.raises(OptionError, match="fitted with groups"):
        scan(detector, tmp_path / "s.npy", tmp_path / "out")
    scan(detector, tmp_path / "s.npy", tmp_path / "out", group="night", overlap=0.0, control="tile", alpha=0.2)
    found = [row for row in rows(tmp_path / "out" / "tiles.csv") if row["left"] == "0"]
    assert float(found[0]["p_value"]) == detector.p_value([landscape[:16, :16]], groups=["night"])[0]


def test_too_few_calibration_images_are_said_before_the_run(tmp_path, detector, landscape):
    np.save(tmp_path / "s.npy", landscape)
    plan = plan_scan(detector, tmp_path / "s.npy", control="holm")
    assert "at least 1,919 calibration images" in str(plan.shortfall)
    with pytest.warns(UserWarning, match="nothing can be flagged: with 40 calibration images"):
        report = scan(detector, tmp_path / "s.npy", tmp_path / "out", control="holm")
    assert report.counts["flagged"] == 0
    assert report.summary["warning"] == plan.shortfall


def test_a_float_scene_without_a_range_is_warned_about_once(tmp_path, landscape):
    images = pictures(40, 16, seed=1).transpose(0, 2, 3, 1)
    detector = toy_detector(toy_backbone(3, 16), levels=(0.9,), keep=1).fit(images)
    np.save(tmp_path / "s.npy", (landscape / 255).astype(np.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scan(detector, tmp_path / "s.npy", tmp_path / "out")
    assert sum("without a negative value" in str(warning.message) for warning in caught) == 1


def test_damaged_lines_are_rows_with_a_reason_and_the_rest_is_scored(tmp_path, detector, landscape):
    path = write_tiff(tmp_path / "cut.tif", landscape, tiled=True, blockxsize=16, blockysize=16)
    with open(path, "r+b") as handle:
        handle.truncate(path.stat().st_size * 2 // 3)
    report = scan(detector, path, tmp_path / "out")
    assert 0 < report.counts["failed"] < 96
    assert report.counts["scored"] == 96 - report.counts["failed"]
    failed = [row for row in rows(tmp_path / "out" / "tiles.csv") if not row["score"]]
    assert all("damaged or cut short" in row["error"] for row in failed)
    assert np.isnan(field_of(tmp_path / "out")).any()


def test_blocks_do_not_change_the_results(tmp_path, detector, geotiff, scanned, monkeypatch):
    monkeypatch.setattr(detector, "batch_size", 3)
    scan(detector, geotiff, tmp_path / "out", control="tile")
    mine, other = rows(tmp_path / "out" / "tiles.csv"), rows(scanned.out / "tiles.csv")
    np.testing.assert_allclose([float(r["score"]) for r in mine], [float(r["score"]) for r in other], rtol=1e-4)
    np.testing.assert_allclose(field_of(tmp_path / "out"), field_of(scanned.out), rtol=1e-5, atol=1e-4)


def test_memory_does_not_grow_with_the_number_of_lines(tmp_path, detector, monkeypatch):
    """A scene 16 times as long; the budget is lowered so that a small scene already fills it."""
    monkeypatch.setattr("gepc.scenes.writing.WINDOW_PIXELS", 1 << 14)
    monkeypatch.setattr("gepc.scenes.writing.LONGEST", 256)
    monkeypatch.setattr("gepc.scenes.regions.STRIP_PIXELS", 1 << 14)
    peaks = []
    for lines in (128, 2048):
        path = tmp_path / f"{lines}.tif"
        with rasterio.open(
            path,
            "w",
            driver="GTiff",
            width=96,
            height=lines,
            count=3,
            dtype="uint8",
            nodata=0,
            tiled=True,
            blockxsize=64,
            blockysize=64,
        ) as file:
            file.write(as_uint8(pictures(1, (48, 96)))[0].transpose(2, 0, 1).clip(1), window=((0, 48), (0, 96)))
        tracemalloc.start()
        scan(detector, path, tmp_path / f"out{lines}", overlap=0.0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
    assert peaks[1] - peaks[0] < 2048 * 96 * 4 / 2  # half of the map

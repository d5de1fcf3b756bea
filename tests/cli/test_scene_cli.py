"""`gepc scene` through the real command line: results, agreement with `gepc score`, interruption, bad input."""

import csv
import json
import os
import signal

import numpy as np
import processes
import pytest
import rasterio
from PIL import Image
from toys import as_uint8, pictures

# a warning is printed, as it is for a user
pytestmark = [
    pytest.mark.usefixtures("trusted"),
    pytest.mark.filterwarnings("always:.*calibration images:UserWarning"),
    pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning"),
]
WIDE = ("scene", "det", "wide.png", "--out", "killed", "--stride", "2", "--control", "tile", "--batch-size", "4")


def die_at_the_worst_moment():
    """Records of the second block of rows are appended, the word that they are done is not yet written."""
    import gepc.scenes.folder as folder

    write, calls = folder.write_arrays, []

    def write_or_die(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*arguments)

    folder.write_arrays = write_or_die


@pytest.fixture(scope="module")
def place(tmp_path_factory, plain_net):
    """A detector of 16x16 tiles and scenes: a GeoTIFF, a picture, and what is no scene."""
    from diffusers import DDPMScheduler

    import gepc

    root = tmp_path_factory.mktemp("scene")
    plain_net.save_pretrained(root / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(root / "net")
    detector = gepc.GEPC(gepc.load_backbone(str(root / "net")), levels=(0.97, 0.9), keep=1)
    detector.fit(as_uint8(pictures(60, 16))).save(root / "det")
    scene = as_uint8(pictures(1, (40, 48), seed=3))[0]
    scene[10:20, 20:30] = 255
    with rasterio.open(
        root / "scene.tif",
        "w",
        driver="GTiff",
        height=40,
        width=48,
        count=3,
        dtype="uint8",
        crs="EPSG:4326",
        transform=rasterio.Affine(0.1, 0, 5, 0, -0.1, 50),
    ) as file:
        file.write(scene.transpose(2, 0, 1))
    (root / "crops").mkdir()
    for top in (0, 16, 24):
        for left in (0, 16, 32):
            Image.fromarray(scene[top : top + 16, left : left + 16]).save(root / "crops" / f"{top:02d}_{left:02d}.png")
    Image.fromarray(as_uint8(pictures(1, (18, 64), seed=4))[0]).save(root / "wide.png")
    Image.fromarray(scene[:8]).save(root / "small.png")
    np.save(root / "bands.npy", np.zeros((20, 20, 7), np.uint8))
    (root / "cut.png").write_bytes((root / "wide.png").read_bytes()[:900])
    (root / "junk.tif").write_bytes(b"no image")
    return root


def _rows(path):
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def test_a_scene_gives_the_scores_that_gepc_score_gives_for_its_crops(place, gepc):
    run = gepc("scene", "det", "scene.tif", "--out", "out", "--overlap", "0", "--control", "tile", "--alpha", "0.1")
    assert run.returncode == 0, run.stderr
    assert "9 tiles scored, 0 left out for no-data, 0 failed" in run.stdout
    assert "guarantee: Each in-distribution tile is flagged with probability at most 0.1" in run.stderr
    assert gepc("score", "det", "crops", "--out", "crops.csv", "--alpha", "0.1").returncode == 0
    tiles, crops = _rows(place / "out" / "tiles.csv"), _rows(place / "crops.csv")
    assert len(tiles) == len(crops) == 9
    for tile, crop in zip(tiles, crops, strict=True):
        assert f"{int(tile['top']):02d}_{int(tile['left']):02d}.png" in crop["path"]
        assert float(tile["score"]) == pytest.approx(float(crop["score"]), rel=1e-6)
        assert float(tile["p_value"]) == pytest.approx(float(crop["p_value"]), rel=1e-8)
        assert tile["alarm"] == crop["alarm"]
    assert json.loads((place / "out" / "regions.geojson").read_text())["crs"]["properties"]["name"].endswith("4326")


def test_a_run_that_was_killed_goes_on_without_lost_or_repeated_tiles(place, gepc, tmp_path):
    killed = processes.gepc(place, *WIDE, outputs=tmp_path, before=die_at_the_worst_moment)
    assert killed.returncode == -signal.SIGKILL
    assert not (place / "killed" / "scene.json").exists()
    finished = gepc(*WIDE)
    assert finished.returncode == 0, finished.stderr
    assert "done by an earlier run: 25 of 50 tiles" in finished.stderr
    found = _rows(place / "killed" / "tiles.csv")
    assert [(int(row["top"]), int(row["left"])) for row in found] == [(y, x) for y in (0, 2) for x in range(0, 49, 2)]
    whole = gepc(*(part if part != "killed" else "whole" for part in WIDE))
    assert whole.returncode == 0
    for mine, other in zip(found, _rows(place / "whole" / "tiles.csv"), strict=True):
        assert float(mine["score"]) == pytest.approx(float(other["score"]), rel=1e-6)
    mine, other = (np.load(place / name / "map.npy") for name in ("killed", "whole"))
    np.testing.assert_allclose(mine, other, rtol=1e-5)


def test_before_many_passes_their_number_is_said_and_few_calibration_images_are_warned_about(place, gepc, monkeypatch):
    monkeypatch.setattr("gepc.cli.options.QUICK", 1)
    run = gepc("scene", "det", "wide.png", "--out", "estimated", "--control", "holm", "--overlap", "0.25")
    assert run.returncode == 0, run.stderr
    assert "at most 10 tiles x 7 passes = 70 network passes, about" in run.stderr
    assert "warning: nothing can be flagged: with 20 calibration images" in run.stderr
    assert "needs at least 199 calibration images" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["det", "gone.tif"], "gone.tif does not exist"),
        (["det", "junk.tif"], "junk.tif is not an image that can be read"),
        (["det", "cut.png"], "cut.png is damaged or cut short"),
        (["det", "small.png"], "8x48 pixels, less than one tile of 16x16"),
        (["det", "bands.npy"], "has 7 bands and the detector's backbone takes 3; choose with bands"),
        (["det", "bands.npy", "--bands", "1,9,2"], "there is no band 1, 9, 2"),
        (["det", "bands.npy", "--bands", "1;2"], "--bands takes whole numbers"),
        (["det", "bands.npy", "--bands", "1", "--nodata", "0"], "can be scored; each has more than 10% no-data"),
        (["det", "scene.tif", "--tile", "16x16x3"], "--tile takes 64 or 64x96"),
        (["det", "scene.tif", "--stride", "40"], "leaves gaps"),
        (["det", "scene.tif", "--stride", "8", "--overlap", "0.5"], "not both"),
        (["det", "scene.tif", "--control", "bhh"], "did you mean 'bh'"),
        (["det", "scene.tif", "--alpha", "7"], "between 0 and 1"),
        (["det", "scene.tif", "--control", "tile", "--alpha", "0.001"], "needs at least 999 calibration images"),
        (["net", "scene.tif"], "no detector.json"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(place, gepc, arguments, sentence):
    run = gepc("scene", *arguments, "--out", "refused")
    assert run.returncode == 2
    assert sentence in run.stderr
    assert "Traceback" not in run.stderr
    assert len([line for line in run.stderr.splitlines() if line.startswith("error:")]) == 1
    assert not (place / "refused").exists()


def test_a_folder_of_another_run_is_refused(place, gepc):
    assert gepc("scene", "det", "wide.png", "--out", "mine", "--overlap", "0", "--control", "tile").returncode == 0
    run = gepc("scene", "det", "wide.png", "--out", "mine", "--control", "tile")
    assert run.returncode == 2
    assert "mine holds a run with other parameters: stride was [16, 16] and is [8, 8] now" in run.stderr


def test_help_shows_an_example(gepc):
    run = gepc("scene", "--help")
    assert run.returncode == 0
    assert "gepc scene det harbour.tif" in " ".join(run.stdout.split())

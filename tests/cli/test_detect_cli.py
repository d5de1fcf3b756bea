"""fit, score, map, watch and selfcheck through the real command line."""

import csv
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import processes
import pytest
from PIL import Image
from toys import as_uint8, pictures

from gepc.cli.app import several

pytestmark = pytest.mark.usefixtures("trusted")

PAPER = ("--backbone", "net", "--method", "gepc", "--set", "levels=0.99,0.97,0.9")

# commands one after the other in one interpreter that has imported nothing before
FRESH = "import json, sys; from gepc.cli import run; sys.exit([run(line) for line in json.load(sys.stdin)] != [2, 0])"


@pytest.fixture(scope="module")
def place(tmp_path_factory, plain_net):
    """A folder with a backbone, ID images, new images (one damaged), and a detector fitted by the command line."""
    from diffusers import DDPMScheduler

    root = tmp_path_factory.mktemp("cli")
    plain_net.save_pretrained(root / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(root / "net")
    for folder, count, seed in (("normal", 66, 0), ("new", 6, 1)):
        (root / folder).mkdir()
        for index, picture in enumerate(as_uint8(pictures(count, 16, seed=seed))):
            Image.fromarray(picture).save(root / folder / f"{index:02d}.png")
    (root / "new" / "broken.png").write_bytes((root / "new" / "00.png").read_bytes()[:60])
    fitted = processes.gepc(root, "fit", "normal", "--out", "det", *PAPER, outputs=root / "printed")
    assert fitted.returncode == 0, fitted.stderr
    assert "14F+0J per image (F: forward passes" in fitted.stdout
    assert "guarantee" in fitted.stdout
    rates = "the smallest alpha is 0.043; alpha 0.05 needs 19 calibration images (57 images in all)"
    assert f"{rates} and alpha 0.01 needs 99 calibration images (297 images in all)" in fitted.stdout
    return root


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_score_writes_a_row_for_every_file_and_a_reason_for_the_damaged_one(place):
    """In a fresh process, which is given bad input first: that leaves one sentence and no traceback."""
    lines = [["score", "det", "nowhere"], ["score", "det", "new", "--out", "scores.csv", "--alpha", "0.1"]]
    run = subprocess.run(
        [sys.executable, "-c", FRESH],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    sentence = "error: nowhere does not exist; give a folder of images, an image file or an array\n"
    assert run.stderr.startswith(sentence)
    assert "7 images" in run.stderr.removeprefix(sentence)
    rows = _rows((place / "scores.csv").read_text())
    assert [Path(row["path"]).name for row in rows] == [*(f"{i:02d}.png" for i in range(6)), "broken.png"]
    for row in rows[:6]:
        assert (row["alarm"] == "true") == (float(row["p_value"]) <= 0.1)
    assert rows[6]["score"] == ""
    assert rows[6]["error"].startswith("is damaged")  # the path is in its own column


def test_standard_output_is_the_same_table(place, gepc):
    gepc("score", "det", "new", "--out", "again.csv")
    assert gepc("score", "det", "new").stdout == (place / "again.csv").read_text()


def test_the_python_library_gives_the_same_scores(place, gepc):
    import gepc as library

    rows = _rows(gepc("score", "det", "new", "--batch-size", "2").stdout)
    detector = library.load_detector(place / "det", str(place / "net"))
    found = detector.score([place / "new" / f"{i:02d}.png" for i in range(6)])
    assert np.allclose(found, [float(row["score"]) for row in rows[:6]], rtol=1e-5, atol=1e-5)  # a score may be near 0


def test_fdr_and_confidence_change_the_alarms_only(place, gepc):
    plain = _rows(gepc("score", "det", "new", "--alpha", "0.2").stdout)
    flagged = gepc("score", "det", "new", "--fdr", "0.3")
    assert "at most 0.3 of the flagged images are false alarms" in flagged.stderr
    assert [row["score"] for row in _rows(flagged.stdout)] == [row["score"] for row in plain]
    safe = gepc("score", "det", "new", "--alpha", "0.3", "--confidence", "0.9")
    assert safe.returncode == 0, safe.stderr
    assert "with probability 0.9" in safe.stderr


def test_groups_by_folder(place, gepc):
    for index, label in enumerate(["day", "night"] * 12):
        (place / "groups" / label).mkdir(parents=True, exist_ok=True)
        picture = as_uint8(pictures(1, 16, seed=50 + index))[0]
        Image.fromarray(picture).save(place / "groups" / label / f"{index}.png")
    options = ["--backbone", "net", "--set", "levels=0.99,0.9", "--groups", "folder"]
    assert gepc("fit", "groups", "--out", "grouped", *options).returncode == 0
    scored = gepc("score", "grouped", "groups", "--alpha", "0.5", "--groups", "folder")
    assert scored.returncode == 0, scored.stderr
    undecided = gepc("score", "grouped", "groups", "--alpha", "0.001", "--groups", "folder")
    assert "This is the smallest group: fit on more images of it, or give --alpha" in undecided.stderr
    refused = gepc("score", "grouped", "new")
    assert refused.returncode == 2
    assert "give `groups` (on the command line: --groups)" in refused.stderr
    unread = gepc("fit", "groups", "--out", "unread", *options[:-1], "nowhere.txt")
    assert unread.returncode == 2
    assert unread.stderr.endswith("; nowhere.txt cannot be read as text: No such file or directory\n")


def test_map_writes_pictures_arrays_and_metadata(place, gepc):
    run = gepc("map", "det", "new", "--out", "maps")
    assert run.returncode == 0, run.stderr
    metadata = json.loads((place / "maps" / "metadata.json").read_text())
    assert metadata["scale"] > 0
    good = [entry for entry in metadata["images"] if entry["error"] is None]
    assert len(good) == 6
    for entry in good:
        field = np.load(place / "maps" / entry["map"])
        assert field.shape == (16, 16)
        with Image.open(place / "maps" / entry["picture"]) as picture:
            assert picture.size == (512 + 64, 20 + 256)  # image, overlay and colour bar under a line of text
    regions = json.loads((place / "maps" / "regions.json").read_text())
    assert len(regions["annotations"]) == sum(entry["regions"] for entry in good)
    assert gepc("map", "det", "new", "--out", "new").returncode == 2


def test_map_refuses_an_unknown_scale_before_it_looks_at_images(place, gepc):
    run = gepc("map", "det", "new", "--out", "no-maps", "--scale", "bright")
    assert run.returncode == 2
    assert "unknown scale 'bright'" in run.stderr
    assert not (place / "no-maps").exists()


@pytest.mark.parametrize("method", ["pixel_stats", "lr"])
def test_a_method_without_noise_levels_has_no_timesteps(place, gepc, method):
    """Also one that calls the network at noise levels of its own."""
    run = gepc("fit", "normal", "--out", "pixels", "--backbone", "net", "--method", method)
    assert run.returncode == 0, run.stderr
    assert "timesteps" not in run.stdout
    described = gepc("info", "pixels").stdout
    assert "fitted on" in described
    assert "candidates" not in described
    assert "kept" not in described


def test_one_image_is_counted_in_the_singular(place, gepc):
    run = gepc("score", "det", "new/00.png", "--out", "one.csv")
    assert "1 image, 0 alarms, 0 could not be scored; one.csv" in run.stderr
    run = gepc("report", "one.csv", "--out", "one.png")
    assert run.stderr == "1 image, 0 alarms, 0 could not be scored; one.png\n"
    assert "\n1 image in 1 shard in parts;" in "\n" + gepc("score", "det", "new/00.png", "--shards", "parts").stderr
    run = gepc("score", "det", "new/00.png", "--shards", "parts")
    assert "resuming in parts: 1 of 1 shard is finished (1 image per shard)" in run.stderr
    run = gepc("score", "det", "new/broken.png")
    assert run.stderr.splitlines()[-1] == "error: the image could not be scored; the column error has the reasons"
    assert several(1, "network pass") == "1 network pass"
    assert several(1_000, "network pass") == "1,000 network passes"


def test_a_report_does_not_count_alarms_that_were_not_decided(place, gepc):
    assert gepc("score", "det", "new", "--out", "open.csv", "--alpha", "0.0001").returncode == 0
    assert gepc("report", "open.csv", "--out", "open.png").stderr == "7 images, 1 could not be scored; open.png\n"


def test_map_shows_the_parts_of_a_fitted_detector(place, gepc):
    fitting = ["--backbone", "net", "--method", "gepc+", "--preset", "fast"]
    assert gepc("fit", "normal", "--out", "plus", *fitting).returncode == 0
    found = {}
    for part in (None, "sum", "residual", "error"):
        options = ["--raw"] if part is None else ["--raw", "--part", part]
        run = gepc("map", "plus", "new/00.png", "--out", f"plus-{part}", *options)
        assert run.returncode == 0, run.stderr
        metadata = json.loads((place / f"plus-{part}" / "metadata.json").read_text())
        assert metadata["part"] == part or (part is None and metadata["part"] == "sum")
        found[part] = np.load(place / f"plus-{part}" / metadata["images"][0]["map"])
    np.testing.assert_array_equal(found[None], found["sum"])
    np.testing.assert_allclose(found["residual"] + found["error"], found["sum"], rtol=1e-4)


def test_watch_killed_and_started_again_has_every_file_once(place, gepc, tmp_path):
    folder, log = place / "incoming", place / "log.csv"
    folder.mkdir()
    command = ["watch", "det", "incoming", "--out", "log.csv", "--interval", "0.1"]
    process = processes.start(place, *command, outputs=tmp_path)
    try:
        for index, picture in enumerate(as_uint8(pictures(8, 16, seed=9))):
            Image.fromarray(picture).save(folder / f"{index}.png")
            os.utime(folder / f"{index}.png", (time.time() - 60 + index,) * 2)
        while process.is_alive() and (not log.exists() or len(_rows(log.read_text())) < 1):
            time.sleep(0.05)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    finished = gepc("watch", "det", "incoming", "--out", "log.csv", "--once")
    assert finished.returncode == 0, finished.stderr
    rows = _rows(log.read_text())
    assert sorted(Path(row["path"]).name for row in rows) == [f"{i}.png" for i in range(8)]


def test_score_without_enough_calibration_images_leaves_the_alarms_empty(gepc):
    """The scores are worth having, and the last line says what alarms would take."""
    run = gepc("score", "det", "new", "--alpha", "0.0001")
    assert run.returncode == 0
    rows = [row for row in csv.DictReader(io.StringIO(run.stdout)) if not row["error"]]
    assert all(float(row["score"]) and float(row["p_value"]) > 0.0 and row["alarm"] == "" for row in rows)
    assert "needs at least 9999 calibration images" in run.stderr
    assert "Fit on at least 29997 images, or give --alpha 0.05" in run.stderr
    run = gepc("score", "det", "new", "--confidence", "0.9999")
    alpha = re.search(r"or give --alpha (\S+);", run.stderr)
    assert alpha, run.stderr
    run = gepc("score", "det", "new", "--confidence", "0.9999", "--alpha", alpha[1])
    assert "no alarms were decided" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fit", "nowhere", "--out", "x", "--backbone", "net"], "nowhere does not exist"),
        (["fit", "normal", "--out", "x", "--backbone", "net", "--method", "gepx"], "did you mean 'gepc'"),
        (["fit", "normal", "--out", "x", "--backbone", "net", "--set", "kep=2"], "did you mean 'keep'"),
        (["fit", "normal", "--out", "x", "--backbone", "net", "--set", "keep"], "key=value"),
        (["fit", "normal", "--out", "x", "--backbone", "net", "--set", "device=cuda"], "on the command line: --device"),
        (["score", "normal", "new"], "no detector.json"),
        (["score", "det", "new", "--alpha", "2"], "between 0 and 1"),
        (["score", "det", "new", "--fdr", "0"], "between 0 and 1"),
        (["score", "det", "new", "--fdr", "0.1", "--alpha", "0.05"], "give either --alpha or --fdr, not both"),
        (["score", "det", "new", "--procedure", "storey"], "--procedure needs --fdr"),
        (["score", "det", "new", "--cpus-per-actor", "2"], "--address and the options of actors need --engine ray"),
        (["score", "det", "new", "--engine", "ray", "--workers", "2"], "--workers needs --engine local"),
        (
            ["watch", "det", "new", "--out", "l.csv", "--once", "--interval", "2"],
            "--interval has no effect with --once",
        ),
        (["score", "det", "new", "--alfa", "0.1"], "--alfa"),
        (["score", "det"], "IMAGES"),
        (["map", "det", "new", "--out", "x", "--part", "error"], "the maps of 'gepc' have no parts"),
        (["map", "det", "new", "--out", "det/detector.json"], "det/detector.json is a file; give a folder"),
        (["map", "det", "new", "--out", "det/detector.json/x"], "cannot write det/detector.json/x"),
        (["watch", "det", "nowhere", "--out", "l.csv"], "nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(place, gepc, arguments, sentence):
    before = sorted(path.name for path in place.iterdir())
    run = gepc(*arguments)
    assert run.returncode == 2
    assert sentence.lower() in run.stderr.lower()
    assert "Traceback" not in run.stderr
    assert sorted(path.name for path in place.iterdir()) == before


@pytest.mark.parametrize("command", [["fit", "normal"], ["sar", "fit", "normal"]])
def test_a_folder_of_something_else_is_refused_before_fitting(place, gepc, monkeypatch, command):
    monkeypatch.setattr("gepc.detector.detector.Detector.fit", None)
    run = gepc(*command, "--backbone", "net", "--out", "net")
    assert run.returncode == 2
    assert run.stderr == "error: net is not empty and contains no detector; give another folder for the results\n"


@pytest.mark.parametrize("command", [["score", "--help"], ["map", "det", "new/00.png", "--out", "short"]])
def test_standard_output_that_takes_no_more_is_one_sentence(place, monkeypatch, capsys, command):
    from gepc.cli.app import run

    monkeypatch.chdir(place)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(command) == 2
    assert "no space left on device" in capsys.readouterr().err.lower()


def test_selfcheck_passes(gepc):
    run = gepc("selfcheck")
    assert run.returncode == 0
    assert "0 failed" in run.stdout


def test_scripts_can_read_json(gepc, place):
    checks = json.loads(gepc("selfcheck", "--json").stdout)
    assert all(check["passed"] for check in checks)
    assert {"name", "found", "expected", "tolerance"} < set(checks[0])
    fitted = gepc("fit", "normal", "--out", "again", "--backbone", "net", "--method", "msma", "--json")
    assert json.loads(fitted.stdout) == json.loads((place / "again" / "detector.json").read_text())


def test_the_default_method_is_the_strongest_at_two_passes(gepc, place):
    """gepc+ with its preset fast, also where it is spelt out; help names every method and preset."""
    fitted = gepc("fit", "normal", "--out", "default", "--backbone", "net")
    assert fitted.returncode == 0, fitted.stderr
    spelt = gepc("fit", "normal", "--out", "spelt", "--backbone", "net", "--method", "gepcplus", "--preset", "fast")
    assert spelt.returncode == 0, spelt.stderr
    for run in (fitted, spelt):
        assert "gepc+ fitted on 44 images" in run.stdout
        assert "2F+0J per image" in run.stdout
    said = [json.loads((place / name / "detector.json").read_text()) for name in ("default", "spelt")]
    assert said[0]["options"] == said[1]["options"]
    assert {"s", "d", "inner", "h"} <= set(said[0]["options"]["features"])


PLUGIN = """
from dataclasses import dataclass
from gepc.methods.base import Cost, WholeImage, register

@register("brightness")
@dataclass(frozen=True)
class Brightness(WholeImage):
    def image_cost(self, backbone, size):
        return Cost(forward=0)

    def of_images(self, backbone, batch):
        return {"brightness": batch.clean(backbone).mean((1, 2, 3))}
"""


def test_a_method_of_ones_own_in_a_file(place, tmp_path):
    """Each command in a process of its own, since a method is registered once."""
    gepc = functools.partial(processes.gepc, place, outputs=tmp_path)
    (place / "mine.py").write_text(PLUGIN)
    (place / "wrong.py").write_text("raise RuntimeError('no licence')")
    words = ["fit", "normal", "--backbone", "net", "--method", "brightness", "--out", "bright"]
    unknown = gepc(*words)
    assert unknown.returncode == 2
    assert "unknown method 'brightness'" in unknown.stderr
    for plugin, sentence in (("nowhere.py", "is not a Python file"), ("wrong.py", "cannot be run: no licence")):
        refused = gepc(*words, "--plugin", plugin)
        assert refused.returncode == 2
        assert f"error: {plugin} {sentence}" in refused.stderr
    fitted = gepc(*words, "--plugin", "mine.py")
    assert fitted.returncode == 0, fitted.stderr
    scored = gepc("--plugin", "mine.py", "score", "bright", "new")
    assert scored.returncode == 0, scored.stderr
    assert len(scored.stdout.splitlines()) == 8


def test_a_picture_of_ones_own_scores(place, gepc):
    pytest.importorskip("matplotlib", reason="figures need gepc[report]")
    assert gepc("score", "det", "new", "--out", "scores.csv", "--alpha", "0.1").returncode == 0
    drawn = gepc("report", "scores.csv", "--out", "scores.png", "--most", "2")
    assert drawn.returncode == 0, drawn.stderr
    assert "7 images" in drawn.stderr
    assert "1 could not be scored; scores.png" in drawn.stderr
    assert len(drawn.stdout.splitlines()) == 3
    assert (place / "scores.png").read_bytes().startswith(b"\x89PNG")
    for words, sentence in (
        (["scores.csv", "--out", "scores.xlsx"], "unknown suffix of --out 'xlsx'"),
        (["new/00.png", "--out", "a.png"], "is not a table of scores"),
        (["nowhere.csv", "--out", "a.png"], "is not a table of scores (No such file or directory)"),
    ):
        refused = gepc("report", *words)
        assert refused.returncode == 2
        assert sentence in refused.stderr


def test_reasons_beside_the_scores(place, gepc):
    options = ["--backbone", "net", "--set", "levels=0.99"]
    assert gepc("fit", "normal", "--out", "reasons", *options, "--set", "maps=raw").returncode == 0
    scored = gepc("score", "reasons", "new", "--explain", "--alpha", "0.1")
    assert scored.returncode == 0, scored.stderr
    rows = list(csv.DictReader(io.StringIO(scored.stdout)))
    assert all(re.fullmatch(r"[a-z ]+ \([\d.e-]+\)", row["reason"]) for row in rows if not row["error"])
    assert gepc("fit", "normal", "--out", "mapped", *options, "--set", "score_from=map").returncode == 0
    refused = gepc("score", "mapped", "new", "--explain")
    assert refused.returncode == 2
    assert "the score of this detector is that of its map" in refused.stderr


def test_cameras_in_one_detector(place, gepc):
    """Groups by folder, from fitting over scoring to watching, with a guarantee for each."""
    for number, path in enumerate(sorted((place / "normal").iterdir())):
        target = place / "cameras" / ("left" if number % 2 else "right")
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / path.name)
    options = ["--backbone", "net", "--method", "pixel_stats", "--set", "calibration_share=0.5"]
    assert gepc("fit", "cameras", "--out", "both", "--groups", "folder", *options).returncode == 0
    scored = gepc("score", "both", "cameras", "--groups", "folder", "--alpha", "0.2", "--out", "both.csv")
    assert scored.returncode == 0, scored.stderr
    watched = gepc("watch", "both", "cameras", "--out", "watched.csv", "--alpha", "0.2", "--once")
    assert watched.returncode == 0, watched.stderr
    tables = []
    for name in ("both.csv", "watched.csv"):
        with open(place / name, newline="") as handle:
            tables.append({row["path"]: (row["p_value"], row["alarm"]) for row in csv.DictReader(handle)})
    assert tables[0] == tables[1]


def test_help_names_the_presets_of_the_default_method():
    from gepc.cli.detect import PRESET_HELP
    from gepc.methods.base import find_method

    assert set(find_method("gepc+").presets) <= set(re.findall(r"[\w-]+", PRESET_HELP))


@pytest.mark.parametrize("command", ["fit", "score", "map", "watch", "selfcheck", "info", "convert", "train", "export"])
def test_help_shows_an_example(gepc, command):
    run = gepc(command, "--help")
    assert run.returncode == 0
    assert f"gepc {command}" in " ".join(run.stdout.split("Example", 1)[1].split())

"""gepc sar through the command line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from radar_files import write_folder, write_hrsid, write_ssdd

from gepc.cli.app import run

pytestmark = pytest.mark.usefixtures("trusted")
SMALL = [part for text in ("size=16", "hold_out=0.5", "target_pixels=9", "draws=10") for part in ("--set", text)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_net: object) -> Path:
    from diffusers import DDPMScheduler

    root = tmp_path_factory.mktemp("sar")
    tiny_net.save_pretrained(root / "net")  # type: ignore[attr-defined]
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(root / "net")
    train = {f"P{k:04d}_0_64_0_64.jpg": [] for k in range(4)}
    test = {f"P{k:04d}_0_64_0_64.jpg": [(5.0, 5.0, 4.0, 3.0), (36.0, 36.0, 5.0, 4.0)] for k in range(10, 12)}
    write_hrsid(root / "HRSID", {"train": train, "test": test})
    write_ssdd(root / "SSDD", {"000001": [(20, 20, 25, 24)], "000002": [(36, 4, 40, 9)]})
    return root


@pytest.fixture
def call(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def invoke(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.chdir(place)
        capsys.readouterr()
        code = run(["sar", *map(str, arguments)])
        return code, *capsys.readouterr()

    return invoke


def test_patches_to_an_archive_with_counts(place: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    code, told, error = call("patches", "HRSID", "--out", "p.npz", "--size", 16, "--log")
    assert code == 0, error
    assert "train: 4 images; patches of clutter: 64, of ships: 0" in told
    assert "test: 2 images; patches of clutter: 28, of ships: 4" in told
    with np.load(place / "p.npz") as archive:
        assert archive["train_x"].shape == (64, 16, 16, 1)
        assert archive["train_x"].dtype == np.uint16
        assert archive["test_ship_x_source"][0] == "P0010_0_64_0_64.jpg@0,0"
        assert not set(archive["train_x_source"]) & set(archive["test_x_source"])
        assert "train_ship_x" not in archive
    code, told, _ = call("patches", "HRSID", "--out", "q.npz", "--size", 16, "--split", "train", "--hold-out", 0.5)
    assert code == 0
    assert "test" not in told
    with np.load(place / "q.npz") as archive:
        assert 0 < len(archive["train_x"]) < 64
        assert archive["train_x"].dtype == np.uint8


def test_patches_can_be_fitted_on_and_scored(place: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    assert call("patches", "HRSID", "--out", "cut.npz", "--size", 16)[0] == 0
    code, told, error = call("fit", "cut.npz:train_x", "--out", "det", "--backbone", "net", "--target-pixels", 9)
    assert code == 0, error
    assert "fitted on 43 patches, calibrated on 21" in told
    assert "smallest false-alarm rate: 0.045 per patch" in told
    stored = json.loads((place / "det" / "detector.json").read_text())
    assert stored["preprocessing"]["magnitude"] == "log"
    assert stored["options"]["window"] == 1
    assert run(["score", "det", "cut.npz:test_ship_x", "--out", "scores.csv"]) == 0
    with open(place / "scores.csv") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 4
    assert all(not row["error"] for row in rows)


def test_a_folder_of_images_with_boxes_can_be_cut(place: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    write_folder(place / "sea", 2, [(40.0, 30.0, 20.0, 10.0)], size=128)
    code, told, error = call("patches", "sea", "--out", "sea.npz", "--size", 32)
    assert code == 0, error
    assert "test: 2 images" in told
    with np.load(place / "sea.npz") as archive:
        assert set(archive) == {f"test_{name}" for name in ("x", "x_source", "ship_x", "ship_x_source")}


def test_bench_writes_one_table(place: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    options = ["--limit", 4, "--fit-limit", 16, *SMALL]
    methods = "gepc+:radar,ca_cfar"
    command = ["bench", "HRSID", "--ood", "SSDD", "--out", "out", "--backbone", "net", "--methods", methods, *options]
    command += ["--no-cache"]
    code, told, error = call(*command, "--dry-run")
    assert (code, told) == (0, "")
    assert "network passes, about" in error
    assert not (place / "out").exists()
    code, told, error = call(*command)
    assert code == 0, error
    assert "network passes" in error
    assert "### Ships against sea clutter, net, fixed scale" in told
    assert json.loads((place / "out" / "radar.json").read_text())["tables"][0]["name"] == "radar-net-fixed"
    with open(place / "out" / "radar-net-fixed.csv") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["method"] for row in rows] == ["gepc+:radar", "ca_cfar"] * 2


SMALL = ("--set", "size=16", "--set", "target_pixels=9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["patches", "nowhere", "--out", "x.npz"], "nowhere is not a folder"),
        (["patches", "HRSID", "--out", "x.txt"], "--out must be a file that ends in .npz"),
        (["patches", "SSDD", "--out", "x.npz", "--split", "train"], "no training split"),
        (["patches", "HRSID", "--out", "x.npz", "--size", "128"], "nothing was written"),
        (["fit", "nowhere", "--out", "x", "--backbone", "net"], "does not exist"),
        (
            ["bench", "SSDD", "--out", "x", "--backbone", "net", "--set", "size=16", "--set", "target_pixels=9"],
            "cannot be held out",
        ),
        (["patches", "SSDD", "--out", "x.npz", "--hold-out", "0.3"], "--hold-out leaves training images out"),
        (["patches", "HRSID", "--out", "x.npz", "--hold-out", "0.3", "--split", "test"], "but none are cut"),
        (["fit", "x", "--out", "x", "--method", "gepc:paper", "--target-pixels", "9"], "--target-pixels does not go"),
        (["fit", "x", "--out", "x", "--method", "ca_cfar", "--normalise", "patch"], "--normalise patch does not go"),
        (["bench", "HRSID", "--out", "x", "--limit", "4", "--set", "limit=8"], "give it without --set"),
        (["bench", "HRSID", "--out", "x", "--backbone", "net", "--normalise", "fixd"], "normalise"),
        (["bench", "HRSID", "--out", "x", "--backbone", "net", "--methods", "cfar"], "ca_cfar"),
        (["bench", "HRSID", "--out", "net", "--backbone", "net"], "contains no benchmark"),
        (["bench", "HRSID", "--out", "net/config.json", "--backbone", "net"], "is a file"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    place: Path, call: Callable[..., tuple[int, str, str]], arguments: list[str], message: str
) -> None:
    before = sorted(path.name for path in place.iterdir())
    code, _, error = call(*arguments)
    assert code == 2
    assert message in error
    assert "Traceback" not in error
    assert sorted(path.name for path in place.iterdir()) == before


@pytest.mark.parametrize("command", ["patches", "fit", "bench"])
def test_help_shows_an_example(call: Callable[..., tuple[int, str, str]], command: str) -> None:
    code, told, _ = call(command, "--help")
    assert code == 0
    assert f"gepc sar {command}" in told.split("Example", 1)[1]


def test_reproduce_runs_the_paper_s_detector_and_those_for_practice(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    command = ["reproduce", "radar", "--data", ".", "--out", "paper", "--backbone", "net", "--cache", "features"]
    few = [*SMALL, "--set", "limit=4", "--set", "fit_limit=16"]
    assert run([*command, *few, "--dry-run"]) == 0
    assert "network passes, about" in capsys.readouterr().err
    assert not (place / "paper").exists()
    assert run([*command, *few]) == 0
    tables = {
        table["name"]: table["rows"] for table in json.loads((place / "paper" / "radar.json").read_text())["tables"]
    }
    assert {row["method"] for row in tables["radar-net-patch"]} == {"gepc:paper"}
    assert [row["AUROC: paper"] for row in tables["radar-net-patch"]] == [0.853, 1.0]
    assert len({row["method"] for row in tables["radar-net-fixed"]}) == 4
    assert (place / "paper" / "radar-net-patch-appendix.png").is_file()
    capsys.readouterr()
    assert run([*command[:5], "other", *command[6:], "--set", "hold=1"]) == 2
    assert "did you mean 'hold_out'" in capsys.readouterr().err
    assert run([*command[:5], "other", *command[6:], "--set", "normalise=fixed"]) == 2
    assert "normalise does not go with the protocol radar" in capsys.readouterr().err
    assert run([*command[:5], "other", *command[6:], "--energy-minutes", "6"]) == 2
    assert "--energy-minutes do not go with the protocol radar" in capsys.readouterr().err
    (place / "empty").mkdir()
    assert run(["reproduce", "radar", "--data", "empty", "--out", "other", "--backbone", "net"]) == 2
    assert "get HRSID from" in capsys.readouterr().err


def test_complex_chips_are_fitted_on_scored_mapped_and_scanned_by_their_magnitude(
    place: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((2, 61, 16, 16))
    chips = (parts[0] + 1j * parts[1]).astype(np.complex64)
    targets = chips[60:].copy()
    targets[:, 6:10, 7:11] *= 30.0
    turned = (targets * np.exp(2j * np.pi * rng.random(targets.shape))).astype(np.complex64)
    np.savez(place / "chips.npz", sea=chips[:60], targets=np.concatenate([targets, turned]))
    np.save(place / "chip.npy", targets[0])
    fit = ("fit", "chips.npz:sea", "--backbone", "net", "--target-pixels", 16)
    code, _, error = call(*fit, "--out", "unknown")
    assert code != 0
    assert "complex64 pixels, whose range is not known" in error
    code, _, error = call(*fit, "--out", "negative", "--white", -1)
    assert code != 0
    assert "--white must be a positive magnitude, got -1" in error
    code, _, error = call(*fit, "--out", "complex", "--white", 60)
    assert code == 0, error
    assert run(["score", "complex", "chips.npz:targets", "--out", "complex.csv"]) == 0
    with open(place / "complex.csv") as handle:
        scores = [float(row["score"]) for row in csv.DictReader(handle)]
    assert run(["map", "complex", "chips.npz:targets", "--out", "complex-maps"]) == 0
    field = np.load(place / "complex-maps" / "000000_0.npy")
    line, column = np.unravel_index(field.argmax(), field.shape)
    assert 6 <= line < 10
    assert 7 <= column < 11
    assert run(["scene", "complex", "chip.npy", "--out", "complex-scene", "--control", "tile", "--alpha", "0.1"]) == 0
    with open(place / "complex-scene" / "tiles.csv") as handle:
        (tile,) = csv.DictReader(handle)
    # the magnitude counts, up to the noise, which depends on the bits of an image
    assert scores[1] == pytest.approx(scores[0], rel=0.02)
    assert float(tile["score"]) == pytest.approx(scores[0], rel=0.02)
    assert float(tile["p_value"]) == pytest.approx(1 / 21)  # the smallest with 20 calibration images


def test_vehicles_in_real_complex_chips_stand_out_from_their_surroundings(
    place: Path, call: Callable[..., tuple[int, str, str]], data_folder: Path
) -> None:
    path = data_folder / "sample_sar_complex.npz"
    if not path.is_file():
        pytest.skip("GEPC_DATA holds no complex chips")
    chips = np.load(path)["chips"]
    near, far = slice(0, 40), slice(-40, None)  # the vehicle is in the middle of 128x128 pixels
    corners = [chips[:, lines, columns] for lines in (near, far) for columns in (near, far)]
    np.savez(place / "ground.npz", ground=np.concatenate(corners), vehicles=chips[:, 44:84, 44:84])
    code, _, error = call(
        *("fit", "ground.npz:ground", "--out", "ground", "--method", "ca_cfar", "--white", 2),
        *("--target-pixels", 100),
    )
    assert code == 0, error
    assert run(["score", "ground", "ground.npz:vehicles", "--out", "vehicles.csv", "--alpha", "0.05"]) == 0
    with open(place / "vehicles.csv") as handle:
        alarms = [row["alarm"] for row in csv.DictReader(handle)]
    assert len(alarms) == 40
    assert alarms.count("true") >= 36

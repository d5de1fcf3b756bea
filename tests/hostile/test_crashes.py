"""Commands that end at any file operation: what is there is whole, and the same command completes.

The detector needs no network pass, so that a copy of this process can run it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from crashes import changes, crash, crashes, tree
from PIL import Image
from toys import as_uint8, pictures

import gepc
import gepc.cli
from gepc.backbones.onnx import OnnxBackbone
from gepc.cli.app import run

NETWORK = "photos-small"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images, one of them damaged, and a detector with maps but without passes."""
    monkeypatch.chdir(tmp_path)
    for name, count, seed in (("normal", 40, 0), ("new", 3, 1)):
        (tmp_path / name).mkdir()
        for number, pixels in enumerate(as_uint8(pictures(count, 16, seed=seed))):
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    (tmp_path / "new" / "3.png").write_bytes(b"not an image")
    gepc.create_detector(gepc.load_backbone(NETWORK, device="cpu"), "rx", size=16).fit("normal").save("det")
    return tmp_path


def test_score(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["score", "det", "new", "--out", "out/scores.csv", "--shard-size", "2", "--alpha", "0.1"]
    assert run(arguments) == 0
    expected = tree(place / "out")
    assert list(expected) == ["scores.csv"]
    shutil.rmtree("out")
    seen = 0
    for _ in crashes(lambda: run(arguments)):
        seen += 1
        table = place / "out" / "scores.csv"
        assert not table.exists() or table.read_bytes() == expected["scores.csv"]
        assert run(arguments) == 0
        assert tree(place / "out") == expected
        shutil.rmtree("out")
    assert seen > 8


def test_map(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`metadata.json` says whether the run is finished, and the same command writes over what a crash has left."""
    arguments = ["map", "det", "new/0.png", "--out", "out", "--alpha", "0.1"]
    assert run(arguments) == 0
    expected = tree(place / "out")
    shutil.rmtree("out")
    seen = 0
    for _ in crashes(lambda: run(arguments)):
        seen += 1
        left = tree(place / "out") if (place / "out").exists() else {}
        described = left.pop("metadata.json", None)
        assert all(expected[name] == content for name, content in left.items())
        if described == expected["metadata.json"]:
            assert {**left, "metadata.json": described} == expected
        else:
            assert described is None or json.loads(described) == {"finished": False, "images": []}
        assert run(arguments) == 0
        assert tree(place / "out") == expected
        shutil.rmtree("out")
    assert seen > 8


def test_watch(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every file gets one row, whenever the process ended."""
    arguments = ["watch", "det", "new", "--out", "out/log.csv", "--once", "--alpha", "0.1"]
    seen = 0
    for _ in crashes(lambda: run(arguments)):
        seen += 1
        assert run(arguments) == 0
        rows = (place / "out" / "log.csv").read_text().splitlines()[1:]
        assert sorted(row.split(",")[0] for row in rows) == [f"new/{number}.png" for number in range(4)]
        shutil.rmtree("out")
    assert seen > 3


def test_fit_over_an_existing_detector(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The old detector or the new one is there, whole, whenever the process ended."""
    arguments = ["fit", "normal", "--out", "det", "--method", "rx", "--set", "size=16", "--set", "seed=3"]
    old = tree(place / "det")
    assert run(arguments) == 0
    new = tree(place / "det")
    assert old != new
    write_tree(place / "det", old)
    seen = []
    for _ in crashes(lambda: run(arguments)):
        found = tree(place / "det")
        assert found in (old, new)
        seen.append(found == new)
        if len(seen) % 4 == 0:
            assert run(arguments) == 0
            assert tree(place / "det") == new
        write_tree(place / "det", old)
    assert len(seen) > 4
    assert seen == sorted(seen)


def write_tree(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_export_over_an_exported_detector(
    place: Path, plain_net: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Detector and network are replaced together. The network is traced once, and copied afterwards."""
    pytest.importorskip("onnxruntime", reason="exporting needs gepc[onnx]")
    from diffusers import DDPMScheduler

    plain_net.save_pretrained("net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained("net")
    network = gepc.load_backbone("net", device="cpu")
    for seed in (0, 1):
        gepc.GEPC(network, levels=(0.99,), keep=1, group=("flip_x",), seed=seed).fit("normal").save(f"det{seed}")
    arguments = ["export", "det0", "--out", "out/exported"]
    assert run(arguments) == 0
    old, traced = tree(place / "out"), (place / "out" / "exported" / "net.onnx").read_bytes()

    def copied(original: Any, path: Path, *_: Any) -> OnnxBackbone:
        path.write_bytes(traced)
        return OnnxBackbone(path)

    monkeypatch.setattr("gepc.detector.export.export_onnx", copied)
    arguments[1] = "det1"
    assert run(arguments) == 0
    new = tree(place / "out")
    assert old != new
    seen = []
    for number in range(1, changes(lambda: run(arguments)) + 1, 2):
        write_tree(place / "out", old)
        assert crash(lambda: run(arguments), number)
        found = tree(place / "out")
        assert found in (old, new)
        seen.append(found == new)
    assert run(arguments) == 0
    assert tree(place / "out") == new
    assert len(seen) > 4
    assert seen == sorted(seen)


def test_train(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The folder is always one that the same command completes. Steps are not computed, only what is written."""
    monkeypatch.setattr("gepc.lab.training.loop.TrainingRun._step", lambda _: 0.5)
    monkeypatch.setattr("gepc.lab.training.loop.LOG_EVERY", 1)
    monkeypatch.setattr("gepc.lab.training.evaluate.GRID", 1)
    fields = {"channels": "[4]", "checkpoint_every": 2, "diffusion_steps": 4, "held_out": 2, "image_size": 8}
    settings = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    arguments = ["train", "--data", "normal", "--out", "out/net", "--steps", "3", *settings]
    assert run(arguments) == 0
    expected = steady(place / "out")
    shutil.rmtree("out")
    count = changes(lambda: run(arguments))
    assert count > 30
    for number in range(1, count + 1, 4):
        shutil.rmtree("out", ignore_errors=True)
        assert crash(lambda: run(arguments), number)
        if (place / "out" / "net" / "diffusion_pytorch_model.safetensors").exists():
            gepc.load_backbone(place / "out" / "net", device="cpu")
        assert run(arguments) == 0
        assert steady(place / "out") == expected


def steady(folder: Path) -> dict[str, bytes]:
    """The files of a training run except those with times in them."""
    timed = ("loss.csv", "checkpoint.safetensors")
    return {name: content for name, content in tree(folder).items() if not name.endswith(timed)}

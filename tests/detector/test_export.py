"""The exported script scores images as the detector does, in a process that has neither torch nor gepc."""

from __future__ import annotations

import csv
import errno
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from toys import pictures

import gepc
from gepc.backbones.onnx import OnnxBackbone
from gepc.conformal.decision import DecisionRule
from gepc.core.errors import BackboneError, InputError, StorageError
from gepc.detector import export, standalone
from gepc.detector.export import export_detector, why_not_standalone, write_standalone
from gepc.detector.fitted import FittedDetector
from gepc.images.sources import open_images

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# runs a script in a process in which only the named packages, and what they need, can be imported
ALONE = """
import runpy, sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "gepc", "scipy", "sklearn", "diffusers", "safetensors", "onnx"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refusing())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> gepc.Backbone:
    """A small network with attention."""
    from diffusers import DDPMScheduler, UNet2DModel

    place = tmp_path_factory.mktemp("network")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = UNet2DModel(
            sample_size=16,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    net.save_pretrained(place)
    DDPMScheduler(num_train_timesteps=100).save_pretrained(place)
    return gepc.load_backbone(place, device="cpu")


def byte_images(count: int, seed: int) -> Any:
    """Pictures as 8-bit pixels (N, H, W, C)."""
    pixels = pictures(count, size=16, seed=seed).transpose(0, 2, 3, 1)
    return ((pixels + 1.0) * 127.5).round().astype(np.uint8)


@pytest.fixture(scope="module")
def fitted(backbone: gepc.Backbone) -> FittedDetector:
    return gepc.create_detector(backbone).fit(byte_images(60, 0)).fitted


@pytest.fixture(scope="module")
def exported(fitted: FittedDetector, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an exported detector."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    made = export_detector(fitted, folder, byte_images(3, 2))
    assert made.script is not None
    assert made.script <= 1e-4
    return folder


def test_a_disk_that_cannot_be_written_is_named(
    fitted: FittedDetector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch writes the network, and its error does not say where."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gepc.detector.export.export_onnx", full)
    with pytest.raises(StorageError, match=r"cannot write .*out: No space left on device"):
        export_detector(fitted, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("images", [[], (image for image in byte_images(3, 2))], ids=["none", "stream"])
def test_images_that_cannot_be_compared_are_refused(fitted: FittedDetector, tmp_path: Path, images: Any) -> None:
    with pytest.raises(InputError, match="images that are read twice"):
        export_detector(fitted, tmp_path / "out", images)
    assert not list(tmp_path.iterdir())


def test_another_folder_is_refused_before_the_network_is_exported(
    fitted: FittedDetector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gepc.detector.export.export_onnx", None)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="exists and is not a detector folder"):
        export_detector(fitted, tmp_path)


def test_the_network_of_an_export_is_found_from_any_folder(
    fitted: FittedDetector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export_detector(fitted, "out", byte_images(2, 2))
    named = json.loads(Path("out/detector.json").read_text())["backbone"]["source"]
    assert named == str(tmp_path / "out" / "net.onnx")
    monkeypatch.chdir(tmp_path.parent)
    assert gepc.load_detector(tmp_path / "out", trust=True).backbone.sha256 == gepc.load_backbone(named).sha256


def saved(images: Any, folder: Path) -> list[Path]:
    """PNG files: one as it is, one of another size, which is stretched, and one in grey."""
    paths = [folder / f"{place}.png" for place in range(3)]
    as_it_is, larger, grey = map(Image.fromarray, images)
    as_it_is.save(paths[0])
    larger.resize((24, 20)).save(paths[1])
    grey.convert("L").save(paths[2])
    return paths


@pytest.mark.parametrize("preset", ["fast", "full", "single"])
def test_the_script_scores_as_the_detector_does(
    preset: str, backbone: gepc.Backbone, exported: Path, tmp_path: Path
) -> None:
    detector = gepc.create_detector(backbone, "gepc+", preset).fit(byte_images(60, 0))
    assert why_not_standalone(detector.fitted, open_images(byte_images(1, 0))) is None
    folder = tmp_path / "out"
    folder.mkdir()
    shutil.copy(exported / "net.onnx", folder)  # the same network
    write_standalone(detector.fitted, folder)
    paths = saved(byte_images(3, 1), tmp_path)
    command = [sys.executable, "-c", ALONE, str(folder / "score.py"), *map(str, paths), "--alpha", "0.1"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    rows = list(csv.DictReader(io.StringIO(run.stdout)))
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    expected = detector.score(paths)
    unit = np.maximum(np.abs(expected), np.ptp(detector.calibration_scores_))
    assert (np.abs(np.array([float(row["score"]) for row in rows]) - expected) <= 1e-4 * unit).all()
    p_values = detector.p_value(paths)
    assert [float(row["p_value"]) for row in rows] == p_values.tolist()
    alarms = DecisionRule(0.1).alarms(p_values, detector.fitted.reference)
    assert [row["alarm"] == "true" for row in rows] == alarms.tolist()
    run = subprocess.run([*command[:4], str(tmp_path)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "")
    assert run.stdout.splitlines() == ["path,score,p_value,alarm,error", f"{tmp_path},,,,Is a directory"]


def test_the_script_compares_the_layers_that_the_detector_compares(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column of 4 cells is a grid of a 16x4 image; 20 tokens are not."""
    script = standalone.Detector(exported)
    layers = [np.ones((channels, *size)) for channels, size in ((5, (16, 4)), (3, (4, 1)), (7, (20, 1)))]
    monkeypatch.setattr(script, "network", lambda x, _: (x, layers))
    script.facts |= {"features": ["inner"], "elements": ["rot180"]}
    assert script.columns(np.zeros((3, 16, 4), dtype=np.float32), 10, 0.9).shape == (5 + 3,)


def test_thresholds_are_written_down(exported: Path) -> None:
    """An image is an alarm if its score is above the threshold; a rate that needs more images has none."""
    facts = json.loads((exported / "calibration.json").read_text())
    assert set(facts["thresholds"]) == {"0.05", "0.1"}
    script = standalone.Detector(exported)
    limit = facts["thresholds"]["0.1"]
    assert script.p_value(np.nextafter(limit, np.inf)) <= 0.1 < script.p_value(limit)
    with pytest.raises(ValueError, match="8 bits"):
        script.score(np.zeros((16, 16), dtype=np.uint16))


def test_a_script_that_differs_is_not_written(
    fitted: FittedDetector, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(_: Any, path: Path, *others: Any) -> OnnxBackbone:
        shutil.copy(exported / "net.onnx", path)
        return OnnxBackbone(path)

    monkeypatch.setattr(export, "export_onnx", copied)
    monkeypatch.setattr(standalone, "autocorrelation", lambda *_: np.float64(0.5))
    with pytest.raises(BackboneError, match=r"score\.py differ.*nothing was written"):
        export_detector(fitted, tmp_path / "wrong")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mc_samples": 2}, "default options of the features"),
        ({"features": ("s", "d", "h", "cos")}, "default features.*cos"),
        ({"group": ("transpose",)}, "rotations and flips.*transpose"),
        ({"calibration": "evidence:rule=minimum"}, "default calibration"),
        ({"score_from": "map"}, "by features"),
        ({"resize": "crop", "size": 16}, "stretched"),
    ],
)
def test_other_detectors_have_no_script(options: dict[str, Any], reason: str, backbone: gepc.Backbone) -> None:
    other = gepc.create_detector(backbone, **options).fit(byte_images(45, 0)).fitted
    told = why_not_standalone(other, open_images(byte_images(1, 0)))
    assert told is not None
    assert re.search(reason, told)


def test_other_images_have_no_script(fitted: FittedDetector) -> None:
    images = open_images(np.zeros((1, 16, 16, 3), dtype=np.float32))
    assert "8 bits" in (why_not_standalone(fitted, images) or "")

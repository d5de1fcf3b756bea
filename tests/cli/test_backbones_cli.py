"""`gepc info` and `gepc convert`, as a user calls them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gepc import load_backbone
from gepc.backbones.diffusers import DiffusersBackbone
from gepc.backbones.openai.convert import Architecture, expected_shapes
from gepc.cli.app import run
from gepc.core.errors import BackboneError

pytestmark = pytest.mark.usefixtures("trusted")

NET = Architecture(
    channels=3,
    out_channels=6,
    model_channels=32,
    widths=(32, 64),
    res_blocks=1,
    attention=(False, True),
    scale_shift=True,
    resampling="conv",
    classes=None,
)
SETTINGS = {
    "image_size": 16,
    "num_heads": 4,
    "noise_schedule": "cosine",
    "diffusion_steps": 4000,
    "rescale_timesteps": "true",
}


@pytest.fixture(autouse=True)
def _commands() -> None:
    import gepc.cli  # noqa: F401 - registers the commands


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "ema.pt"
    torch.save({name: 0.1 * torch.randn(shape) for name, shape in expected_shapes(NET).items()}, path)
    return path


def settings(**changes: Any) -> list[str]:
    return [word for key, value in {**SETTINGS, **changes}.items() for word in ("--set", f"{key}={value}")]


def test_convert_then_info(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "folder"
    assert run(["convert", str(checkpoint), "--out", str(out), *settings()]) == 0
    captured = capsys.readouterr()
    assert "called with t*1000/4000" in captured.err
    assert f"tensors in {out}" in captured.out
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
        "gepc.json",
        "scheduler_config.json",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["folder"]
    origin = json.loads((out / "gepc.json").read_text())["converted_from"]
    assert origin["file"] == "ema.pt"

    assert run(["info", str(out), "--time-scale", "4"]) == 0
    text = capsys.readouterr().out
    words = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "family openai",
        f"parameters {sum(math.prod(shape) for shape in expected_shapes(NET).values()):,}",
        "channels 3",
        "image_size 16, 16",
        "prediction_type epsilon",
        "learned_variance True",
        "schedule squaredcos_cap_v2",
        "timesteps 4,000",
        "rescale_timesteps True",
        "time_scale 4",
    ):
        assert line in words
    assert "2 passes per image, " in text


def test_info_as_json(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", str(checkpoint), "--json", *settings(diffusion_steps=1000)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["sha256"] == load_backbone(checkpoint, config={**SETTINGS, "rescale_timesteps": True}).sha256
    assert facts["cost"]["passes_per_image"] == 2
    assert facts["cost"]["seconds_per_image"] == pytest.approx(2 * facts["cost"]["seconds_per_pass"])
    assert facts["timesteps"] == 1000


def test_timing_is_not_counted(checkpoint: Path) -> None:
    from gepc.cli.options import seconds_per_pass

    backbone = load_backbone(checkpoint, config={**SETTINGS, "rescale_timesteps": True})
    assert seconds_per_pass(backbone, (16, 16), patience=0.0) > 0
    assert backbone.forward_count == 0


def test_convert_says_when_plain_diffusers_loads_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "folder"
    assert run(["convert", str(checkpoint), "--out", str(out), *settings(diffusion_steps=1000)]) == 0
    assert "plain diffusers loads it too" in capsys.readouterr().err


def test_options_from_a_file_and_from_settings(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("\n".join(f"{key}: {value}" for key, value in SETTINGS.items()))
    out = tmp_path / "folder"
    command = ["convert", str(checkpoint), "--out", str(out), "--config", str(tmp_path / "options.yaml")]
    assert run([*command, "--set", "num_heads=2"]) == 0
    assert json.loads((out / "config.json").read_text())["attention_head_dim"] == 32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--architecture", "improved-cifar"], "did you mean 'improved-cifar10'"),
        (["--architecture", "improved-cifar10"], "contradicts the tensors"),
        (["--architecture", "improved-cifar10", "--config", "x.yaml"], "either --architecture or --config"),
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--set", "num_haeds=4"], "did you mean 'num_heads'"),
        (["--set", "num_heads"], "--set takes key=value"),
        ([], "do not show image_size"),
    ],
)
def test_bad_options_are_one_sentence_and_no_folder(
    checkpoint: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(checkpoint), "--out", str(tmp_path / "folder"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ema.pt"]


def test_an_existing_folder_is_left_alone(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "folder"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert run(["convert", str(checkpoint), "--out", str(out), *settings()]) == 2
    assert "already exists" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_a_failure_leaves_nothing_behind(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import safetensors.torch

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert run(["convert", str(checkpoint), "--out", str(tmp_path / "folder"), *settings()]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ema.pt"]


def test_info_on_something_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "./nowhere"]) == 2
    assert capsys.readouterr().err == "error: ./nowhere does not exist\n"


@pytest.mark.parametrize("options", [["--set", "size=3"], ["--device", "cpu"], ["--architecture", "improved-cifar10"]])
@pytest.mark.parametrize("subject", ["det", "--methods"])
def test_info_refuses_the_options_of_a_backbone_where_none_is_loaded(
    subject: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "detector.json").write_text("{}")
    assert run(["info", str(tmp_path) if subject == "det" else subject, *options]) == 2
    assert capsys.readouterr().err.endswith("have no effect here: none is loaded\n")


def test_info_lists_the_methods_or_describes_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "photos-small", "--methods"]) == 2
    assert "give either --methods, or a detector or a backbone to describe" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["info", "convert"])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert f"Example: gepc {command}" in " ".join(capsys.readouterr().out.split())


def test_a_checkpoint_of_the_shape_of_diffpath_s_celeba_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """52.5 million random weights: described, fitted with, saved with its time scale, and loaded again."""
    import gepc

    monkeypatch.chdir(tmp_path)
    net = Architecture(3, 6, 128, (128, 256, 256, 256), 3, (False, True, True, False), True, "conv", None)
    random = torch.Generator().manual_seed(0)
    tensors = {name: 0.02 * torch.randn(shape, generator=random) for name, shape in expected_shapes(net).items()}
    torch.save({name: tensor.half() for name, tensor in tensors.items()}, "celeba_ema.pt")
    np.save("images.npy", np.random.default_rng(0).integers(0, 256, (14, 32, 32, 3), dtype=np.uint8))
    # a pass takes a second; what is tested here is everything around it
    monkeypatch.setattr(DiffusersBackbone, "_network", lambda _self, given, _t: torch.cat([given, given], dim=1))
    chosen = ["--architecture", "diffpath-celeba32", "--time-scale", "4"]
    fit = ["fit", "images.npy", "--out", "det", "--backbone", "celeba_ema.pt", "--method", "score_norm"]
    assert run([*fit, *chosen, "--set", "levels=rho:0.1", "--set", "keep=1"]) == 0, capsys.readouterr().err
    backbone = json.loads(Path("det/detector.json").read_text())["backbone"]
    assert backbone["load_options"] == {"config": {"preset": "diffpath-celeba32"}, "time_scale": 4.0}
    assert (backbone["time_scale"], backbone["rescale_timesteps"], backbone["timesteps"]) == (4.0, True, 4000)
    loaded = gepc.load_detector("det", trust=True).backbone
    assert loaded._times[136] == 136.0  # t/4 is what it was trained on
    capsys.readouterr()
    for command in ("bench", "reproduce"):
        dry = [command, "paper32", "--data", ".", "--out", "out", "--dry-run", "--backbone", "celeba_ema.pt"]
        assert run([*dry, "--methods", "msma", *chosen]) == 0, capsys.readouterr().err
    with pytest.raises(BackboneError, match=r"time_scale is 4\.0, this one has 1\.0"):
        gepc.load_detector("det", gepc.load_backbone("celeba_ema.pt", config="diffpath-celeba32"))


def test_bfloat16_at_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detector stores the precision of its network, and every command computes in it."""
    import gepc

    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (16, 16, 16, 3), dtype=np.uint8)
    np.save("images.npy", images)
    np.save("scene.npy", images[0])
    fit = ["fit", "images.npy", "--out", "det", "--backbone", "photos-small", "--set", "size=16", "--device", "cpu"]
    assert run([*fit, "--dtype", "bfloat16"]) == 0
    detector = gepc.load_detector("det", device="cpu")
    assert {parameter.dtype for parameter in detector.backbone.net.parameters()} == {torch.bfloat16}
    assert run(["score", "det", "images.npy", "--out", "scores.csv"]) == 0
    scores = np.loadtxt("scores.csv", delimiter=",", skiprows=1, usecols=1)
    np.testing.assert_allclose(scores, detector.score(images), rtol=0.05, atol=0.05)
    assert run(["map", "det", "images.npy", "--out", "maps"]) == 0
    assert run(["scene", "det", "scene.npy", "--out", "scene", "--tile", "16", "--alpha", "0.3"]) == 0
    assert run(["info", "det"]) == 0

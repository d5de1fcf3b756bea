from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage

from gepc.cli.app import run

pytestmark = pytest.mark.usefixtures("trusted")

RECIPE = """
channels: [8, 8]
norm_groups: 4
image_channels: 1
diffusion_steps: 16
batch_size: 4
steps: 40
warmup_steps: 2
checkpoint_every: 20
held_out: 8
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return tmp_path / "tiny.yaml"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(5).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", train_x=pixels)
    return tmp_path / "images.npz"


def test_train_from_start_to_end(
    recipe: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import DDPMScheduler, UNet2DModel

    out = tmp_path / "backbone"
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    assert run(["train", str(recipe), "--data", str(data), "--out", str(out), "--set", "channels=[8, 16]"]) == 0
    told = capsys.readouterr()
    assert "32 training images of 8x8, 8 held out" in told.err
    assert "step 40/40: loss" in told.err
    assert "noise MSE on 8 held-out images after 40 steps" in told.out
    assert "best linear" in told.out
    assert "no better than the best linear predictor" in told.err
    assert "more --steps or --minutes, use more images, or start from a trained network" in told.err
    assert "--init photos-small" in told.err
    assert f"backbone: {out}" in told.out
    assert list(UNet2DModel.from_pretrained(out).config.block_out_channels) == [8, 16]
    assert DDPMScheduler.from_pretrained(out).config.num_train_timesteps == 16
    names = {path.name for path in (out / "training").iterdir()}
    assert names == {"checkpoint.safetensors", "held_out.json", "loss.csv", "run.json", "samples.png"}
    assert len((out / "training" / "loss.csv").read_text().splitlines()) == 1 + 40 // 20


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs the command here and returns its one sentence; any exit code but 2 fails."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def of(*arguments: object) -> str:
        assert run([str(argument) for argument in arguments]) == 2
        out, text = capsys.readouterr()
        assert out == ""
        assert text.startswith("error: ")
        assert text.count("\n") == 1
        return text

    return of


def test_bad_options(complaint, recipe: Path, data: Path, tmp_path: Path) -> None:
    base = ("--data", data, "--out", tmp_path / "out")
    assert "did you mean 'quick'" in complaint("train", "quik", *base)
    assert "did you mean 'batch_size'" in complaint("train", recipe, *base, "--set", "batchsize=3")
    assert "takes key=value" in complaint("train", recipe, *base, "--set", "steps")
    assert "steps must be at least 1" in complaint("train", recipe, *base, "--steps", "0")
    assert "either --steps or --minutes" in complaint("train", recipe, *base, "--steps", "3", "--minutes", "1")
    assert "either --steps or --minutes" in complaint("train", recipe, *base, "--set", "steps=3", "--minutes", "1")
    assert "either --steps or --set steps" in complaint("train", recipe, *base, "--set", "steps=3", "--steps", "4")
    assert "minutes must be positive" in complaint("train", recipe, *base, "--minutes", "-1")
    assert "Missing option '--data'" in complaint("train", recipe, "--out", tmp_path / "out")
    assert "No such option: --step" in complaint("train", recipe, *base, "--step", "3")
    assert not (tmp_path / "out").exists()


def test_bad_data(complaint, recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for index in range(20):
        PILImage.new("L", (8 + index // 18, 8)).save(folder / f"{index}.png")
    few = tmp_path / "few.npz"
    np.savez(few, train_x=np.zeros((3, 8, 8, 1), np.uint8))
    out = ("--out", tmp_path / "out")
    assert "nowhere does not exist" in complaint("train", recipe, "--data", tmp_path / "nowhere", *out)
    assert "2 different sizes" in complaint("train", recipe, "--data", folder, *out)
    assert "image_size=32" in complaint("train", recipe, "--data", folder, *out)
    assert "too few images" in complaint("train", recipe, "--data", few, *out)
    assert "not a complete, plain .npz" in complaint("train", recipe, "--data", _text_file(tmp_path / "bad.npz"), *out)
    assert not (tmp_path / "out").exists()


def test_bad_output_folder(complaint, recipe: Path, data: Path, tmp_path: Path) -> None:
    assert "not a training run" in complaint("train", recipe, "--data", data, "--out", tmp_path)
    assert "is a file" in complaint("train", recipe, "--data", data, "--out", data)
    assert "cannot write" in complaint("train", recipe, "--data", data, "--out", "/proc/nothing")


def _text_file(path: Path) -> Path:
    path.write_text("no archive")
    return path


def test_resuming_says_so_and_a_finished_run_is_reported_again(
    recipe: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    command = ["train", str(recipe), "--data", str(data), "--out", str(tmp_path / "out"), "--set", "held_out=0"]
    assert run([*command, "--steps", "2"]) == 0
    assert "resuming" not in capsys.readouterr().err
    assert run([*command, "--steps", "4"]) == 0
    said = capsys.readouterr()
    assert "resuming after step 2" in said.err
    assert "no images are held out" in said.err
    assert "noise MSE" not in said.out


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert "gepc train quick --data photos/" in text
    assert "celeba32-tiny" in text


@pytest.fixture
def colour(tmp_path: Path) -> Path:
    folder = tmp_path / "colour"
    folder.mkdir()
    for index, pixels in enumerate(np.random.default_rng(8).integers(0, 256, (24, 12, 12, 3), dtype=np.uint8)):
        PILImage.fromarray(pixels).save(folder / f"{index:02d}.png")
    return folder


@pytest.mark.filterwarnings("always:.*used to train the backbone")
def test_train_without_a_recipe_then_fine_tune_then_fit(
    colour: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def said(*arguments: object) -> str:
        assert run([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().err

    tiny = [f"--set={value}" for value in ("image_size=8", "channels=[8, 8]", "norm_groups=4", "held_out=6")]
    tiny += ["--set=batch_size=4", "--set=diffusion_steps=50"]
    net, tuned = tmp_path / "net", tmp_path / "tuned"
    text = said("train", "--data", colour, "--out", net, "--steps", 2, *tiny)
    assert "chosen for the images; change a value with --set:\n  image_channels  3     images are in colour\n" in text
    assert "\n  crop            true  random crops keep the resolution of images of one size\n" in text
    assert "image_size" not in text
    assert "18 training images of 8x8, 6 held out" in text
    text = said("train", "--data", colour, "--out", net, "--steps", 3)
    assert "resuming after step 2" in text
    assert "chosen" not in text
    text = said("train", "--data", colour, "--out", tuned, "--init", net, "--set=image_size=8", "--minutes", "0.002")
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["crop", "18"]
    assert "no better than the best linear predictor" in text
    assert "a lower learning rate (--set learning_rate=5e-05)" in text
    assert "--init" not in text  # which was given
    text = said("fit", colour, "--backbone", net, "--out", tmp_path / "det", "--set=size=8")
    assert "warning: 18 of 24 images were used to train the backbone; the false-alarm guarantee does not hold" in text
    assert "(on the command line: --calibration-images)" in text


def test_contradictions_with_init(complaint, recipe: Path, data: Path, tmp_path: Path) -> None:
    base = ("--data", data, "--out", tmp_path / "out", "--init", "sar-tiny")
    assert "channels is (8, 8), but sar-tiny has (" in complaint("train", recipe, *base)
    assert "did you mean 'sar-tiny'" in complaint("train", *base[:-1], "sar-tny")

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, UNet2DModel
from safetensors.torch import load_file

from gepc.backbones.load import load_backbone
from gepc.backbones.weights import TRAINED_ON
from gepc.core.errors import InputError, OptionError
from gepc.lab.training import checkpoint
from gepc.lab.training.choices import recipe_for
from gepc.lab.training.loop import TrainingRun, train
from gepc.lab.training.recipe import Recipe, load_recipe


@pytest.fixture(scope="module")
def trained(data: Path, tiny: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "net"
    train(dataclasses.replace(tiny, steps=3, schedule="linear", diffusion_steps=100), data, out)
    return out


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("others") / "others.npz"
    np.savez(path, train_x=np.random.default_rng(6).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8))
    return path


SHORT = {"steps": 5, "batch_size": 4, "checkpoint_every": 2, "held_out": 4}


def test_architecture_and_schedule_come_from_init(trained: Path, tiny: Recipe) -> None:
    recipe = load_recipe(None, {"init": str(trained), "steps": 7})
    names = ("channels", "norm_groups", "scale_shift", "image_channels", "attention", "layers_per_block")
    assert all(getattr(recipe, name) == getattr(tiny, name) for name in names)
    assert (recipe.schedule, recipe.diffusion_steps, recipe.steps) == ("linear", 100, 7)
    assert (recipe.learning_rate, recipe.warmup_steps) == (2e-4, 50)
    faces = load_recipe(None, {"init": "celeba32-tiny"})
    assert (faces.diffusion_steps, faces.norm_groups, faces.scale_shift) == (4000, 8, False)


@pytest.mark.filterwarnings("ignore:images in colour")
def test_training_starts_from_the_weights(trained: Path, others: Path, tmp_path: Path) -> None:
    run = TrainingRun(load_recipe(None, {**SHORT, "init": str(trained)}), others, tmp_path / "out")
    start = load_file(trained / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(value, start[name]) for name, value in run.net.state_dict().items())
    run.loop()
    assert not all(torch.equal(value, start[name]) for name, value in run.net.state_dict().items())


@pytest.mark.filterwarnings("ignore:images in colour")
def test_a_run_remembers_its_init(trained: Path, others: Path, tiny: Recipe, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved)
    recipe = load_recipe(None, {**SHORT, "init": str(moved)})
    for name in ("whole", "parts"):
        run = TrainingRun(recipe, others, tmp_path / name)
        run.loop(None if name == "whole" else lambda tick: os.kill(os.getpid(), signal.SIGTERM))
    assert run.state.step == 1
    with pytest.raises(InputError, match=r"a run with another init \(.*moved, not celeba32-tiny\)"):
        TrainingRun(dataclasses.replace(recipe, init="celeba32-tiny"), others, tmp_path / "parts")
    shutil.rmtree(moved)
    resumed, choices = recipe_for(others, tmp_path / "parts")
    assert choices == []
    train(dataclasses.replace(resumed, init=None, image_channels=None), others, tmp_path / "parts")
    mine, theirs = (load_file(tmp_path / name / "training" / checkpoint.NAME) for name in ("whole", "parts"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_network_with_attention_keeps_its_size(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    train(dataclasses.replace(tiny, steps=1, attention=True), data, tmp_path / "net")
    recipe = load_recipe(None, {**SHORT, "steps": 1, "init": str(tmp_path / "net")})
    assert (recipe.attention, recipe.image_size) == (True, 8)
    assert train(recipe, data, tmp_path / "out").step == 1


def test_contradictions_are_refused(trained: Path, others: Path, tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"channels is \(16, 16\), but .*net has \(8, 8\); leave it out"):
        TrainingRun(load_recipe(None, {"init": str(trained), "channels": [16, 16]}), others, tmp_path / "out")
    with pytest.raises(OptionError, match=r"diffusion_steps is 16, but .* has 100"):
        train(dataclasses.replace(tiny, init=str(trained)), others, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:images in colour")
def test_networks_of_another_kind_are_refused(trained: Path, others: Path, tmp_path: Path) -> None:
    net = UNet2DModel.from_config({**UNet2DModel.load_config(trained), "act_fn": "relu"})
    net.save_pretrained(tmp_path / "other")
    DDPMScheduler(num_train_timesteps=100).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="schedule is neither"):
        load_recipe(None, {"init": str(tmp_path / "other")})
    shutil.copy(trained / "scheduler_config.json", tmp_path / "other")
    recipe = load_recipe(None, {"init": str(tmp_path / "other")})
    with pytest.raises(InputError, match=r"not one of a recipe \(act_fn\)"):
        TrainingRun(recipe, others, tmp_path / "out")
    DDPMScheduler(num_train_timesteps=100, prediction_type="v_prediction").save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="does not predict noise alone"):
        load_recipe(None, {"init": str(tmp_path / "other")})


@pytest.mark.filterwarnings("ignore:images in colour")
def test_images_of_both_runs_count_as_trained_on(trained: Path, data: Path, others: Path, tmp_path: Path) -> None:
    run = TrainingRun(load_recipe(None, {**SHORT, "init": str(trained)}), others, tmp_path / "out")
    run.loop()
    earlier, both = load_backbone(trained).trained_on, load_backbone(tmp_path / "out").trained_on
    assert earlier is not None
    assert both is not None
    assert len(earlier) == 32
    np.testing.assert_array_equal(both, np.union1d(earlier, run.data.hashes))
    assert len(both) == 32 + 20


def test_a_damaged_list_of_images_is_named(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "net")
    (tmp_path / "net" / TRAINED_ON).write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"trained_on\.safetensors is damaged .* delete it"):
        load_backbone(tmp_path / "net")
    (tmp_path / "net" / TRAINED_ON).unlink()
    assert load_backbone(tmp_path / "net").trained_on is None

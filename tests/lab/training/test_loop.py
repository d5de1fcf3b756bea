from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gepc.core.errors import InputError, OptionError, StorageError
from gepc.core.files import only_writer
from gepc.lab.training import checkpoint, loop
from gepc.lab.training.checkpoint import LOG_COLUMNS, loss_log
from gepc.lab.training.loop import Tick, TrainingRun, learning_rate, train
from gepc.lab.training.recipe import Recipe

WEIGHTS = "diffusion_pytorch_model.safetensors"


def at_step(step: int, action: Callable[[], object]) -> Callable[[Tick], None]:
    def on_tick(tick: Tick) -> None:
        if tick.step == step:
            action()

    return on_tick


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit: weights, averages, moments, exported folder; and the logged losses and learning rates."""
    for name in (f"training/{checkpoint.NAME}", WEIGHTS):
        mine, theirs = load_file(one / name), load_file(other / name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    logs = [loss_log(out / "training").rows() for out in (one, other)]
    rows = [[(row["step"], row["loss"], row["learning_rate"]) for row in log] for log in logs]
    assert rows[0] == rows[1]
    assert rows[0]


@pytest.fixture(scope="module", autouse=True)
def frequent_log() -> Iterator[None]:
    """Rows that do not fall on checkpoints, so that a run resumes between two of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "LOG_EVERY", 4)
        yield


@pytest.fixture(scope="module")
def whole(data: Path, tiny: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run, never interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(tiny, data, out)
    return out


def test_learning_rate_warms_up_and_falls_as_a_cosine() -> None:
    recipe = Recipe(learning_rate=1.0, final_learning_rate=0.2, warmup_steps=4)
    assert [learning_rate(recipe, step, 0.0) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(recipe, 50, 0.5) == pytest.approx(0.6)
    assert learning_rate(recipe, 100, 1.0) == learning_rate(recipe, 110, 1.1) == pytest.approx(0.2)


def test_the_result_is_a_plain_diffusers_folder_of_averaged_weights(whole: Path) -> None:
    net = UNet2DModel.from_pretrained(whole)
    state = load_file(whole / "training" / checkpoint.NAME)
    assert all(torch.equal(value, state[f"ema/{name}"]) for name, value in net.named_parameters())
    assert not all(torch.equal(value, state[f"net/{name}"]) for name, value in net.named_parameters())
    assert DDPMScheduler.from_pretrained(whole).config.num_train_timesteps == 16
    assert net(torch.zeros(1, 1, 12, 20), 3).sample.shape == (1, 1, 12, 20)


def test_files_have_the_mode_of_new_files(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    train(dataclasses.replace(tiny, steps=1), data, tmp_path / "out")
    modes = {path.stat().st_mode for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "plain").stat().st_mode}


@pytest.mark.parametrize("stop", [1, 5, 6])
def test_stopped_by_a_signal_and_resumed(whole: Path, data: Path, tiny: Recipe, tmp_path: Path, stop: int) -> None:
    first = TrainingRun(tiny, data, tmp_path / "parts")
    assert not first.loop(at_step(stop, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert first.state.step == stop
    second = TrainingRun(tiny, data, tmp_path / "parts")
    assert second.resumed_from == stop
    assert second.loop()
    assert_same_run(whole, tmp_path / "parts")


def test_a_second_ctrl_c_does_not_wait(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        TrainingRun(tiny, data, tmp_path / "out").loop(at_step(5, interrupt_twice))
    assert TrainingRun(tiny, data, tmp_path / "out").resumed_from == 3


@pytest.mark.parametrize("part", ["ema.step", "optimizer.step", "_save"])
def test_killed_in_the_middle_of_a_step_and_resumed(
    whole: Path, data: Path, tiny: Recipe, tmp_path: Path, part: str
) -> None:
    run = TrainingRun(tiny, data, tmp_path / "parts")
    *owner, name = part.split(".")
    target = getattr(run, owner[0]) if owner else run
    original = getattr(target, name)

    def fail_late(*args: Any) -> Any:
        if run.state.step >= 8 or (name == "_save" and run.state.step >= 6):
            raise RuntimeError("the power is gone")
        return original(*args)

    setattr(target, name, fail_late)
    with pytest.raises(RuntimeError, match="power"):
        run.loop()
    resumed = TrainingRun(tiny, data, tmp_path / "parts")
    assert resumed.resumed_from == (3 if name == "_save" else 6)
    assert resumed.loop()
    assert_same_run(whole, tmp_path / "parts")


def test_terminated_in_another_process_and_resumed(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(tiny, final_learning_rate=tiny.learning_rate, steps=10**6, checkpoint_every=2)
    settings = [f"--set={key}={json.dumps(value)}" for key, value in recipe.as_dict().items()]
    (tmp_path / "empty.yaml").write_text("{}")
    command = ["train", str(tmp_path / "empty.yaml"), "--data", str(data), "--out", str(tmp_path / "parts"), *settings]
    process = subprocess.Popen(
        [sys.executable, "-m", "gepc", *command], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    with process.stderr:
        while not (tmp_path / "parts" / "training" / checkpoint.NAME).exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.terminate()
        message = process.stderr.read().decode()
    assert process.wait() == 130, message
    assert "to resume:\n  gepc train" in message
    assert "Traceback" not in message
    stopped = TrainingRun(recipe, data, tmp_path / "parts")
    longer = dataclasses.replace(recipe, steps=stopped.resumed_from + 24)
    train(longer, data, tmp_path / "parts")
    train(longer, data, tmp_path / "whole")
    mine, theirs = (load_file(tmp_path / name / "training" / checkpoint.NAME) for name in ("whole", "parts"))
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_finished_run_does_nothing_more(whole: Path, data: Path, tiny: Recipe, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    again = TrainingRun(tiny, data, tmp_path / "out")
    assert again.loop()
    assert again.state.step == 10
    assert_same_run(whole, tmp_path / "out")


def test_minutes_count_in_all(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(tiny, steps=1)
    first = train(recipe, data, tmp_path / "out", minutes=0.01)
    assert first.seconds >= 0.6
    assert first.step > 1
    assert train(recipe, data, tmp_path / "out", minutes=0.01).step == first.step
    assert train(recipe, data, tmp_path / "out", minutes=0.015).seconds >= 0.9
    with pytest.raises(OptionError, match="minutes must be positive"):
        train(recipe, data, tmp_path / "out", minutes=0)


def test_minutes_include_what_comes_before_and_after(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    """A step of 4 images takes a second here, and so do 12 passes; at least half of the time is for training."""
    run = TrainingRun(dataclasses.replace(tiny, batch_size=4), data, tmp_path / "out", minutes=1.0)
    run.state.step, run.state.seconds = 10, 10.0
    for spent, passes, expected in ((0.0, 0, 60.0), (20.0, 0, 40.0), (0.0, 120, 50.0), (20.0, 1200, 30.0)):
        run._spent, run._passes_after = spent, passes
        assert run._fraction() == pytest.approx(10.0 / expected)


def test_a_checkpoint_of_an_earlier_version_is_refused(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    train(dataclasses.replace(tiny, steps=4), data, tmp_path / "out")
    path = tmp_path / "out" / "training" / checkpoint.NAME
    with safe_open(path, framework="pt") as archive:
        progress = json.loads(archive.metadata()["progress"])
    del progress["log_size"]
    save_file(load_file(path), path, metadata={"progress": json.dumps(progress)})
    with pytest.raises(InputError, match="is not a training checkpoint of this version"):
        train(tiny, data, tmp_path / "out")


def test_the_content_of_a_checkpoint(whole: Path) -> None:
    with safe_open(whole / "training" / "checkpoint.safetensors", framework="pt") as archive:
        stored = json.loads(archive.metadata()["progress"])
        kinds = {name.split("/")[0] for name in archive.keys()}  # noqa: SIM118 - not a mapping
    assert kinds == {"net", "ema", "exp_avg", "exp_avg_sq", "step"}
    assert set(stored) == {"log_size", "step", "seconds", "cpu_seconds", "ema_step", "scaler", "losses"}
    assert set(json.loads((whole / "training" / "run.json").read_text())) == {"recipe", "data"}


def test_a_folder_of_another_run_is_refused_and_left_alone(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(dataclasses.replace(tiny, steps=3), data, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    other_images = tmp_path / "others.npz"
    np.savez(other_images, train_x=np.zeros((40, 8, 8, 1), np.uint8))
    with pytest.raises(InputError, match=r"another seed \(0, not 1\); give another folder"):
        TrainingRun(dataclasses.replace(tiny, seed=1), data, out)
    with pytest.raises(InputError, match="a run on other images"):
        TrainingRun(tiny, other_images, out)
    (out / "training" / checkpoint.NAME).unlink()
    with pytest.raises(InputError, match="another learning_rate"):
        TrainingRun(dataclasses.replace(tiny, learning_rate=1.0), data, out)
    del before[out / "training" / checkpoint.NAME]
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_folder_that_is_no_run_is_refused(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not empty and not a training run"):
        TrainingRun(tiny, data, data.parent)
    with pytest.raises(InputError, match="is a file; give a folder"):
        TrainingRun(tiny, data, data)


def test_a_damaged_checkpoint_is_named(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    train(dataclasses.replace(tiny, steps=1), data, tmp_path / "out")
    (tmp_path / "out" / "training" / checkpoint.NAME).write_bytes(b"\x00" * 100)
    with pytest.raises(InputError, match=r"checkpoint\.safetensors is not a training checkpoint"):
        TrainingRun(tiny, data, tmp_path / "out")


def test_two_processes_do_not_write_into_one_folder(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    run = TrainingRun(tiny, data, tmp_path / "out")
    with only_writer(tmp_path / "out" / "training"), pytest.raises(InputError, match="another process is writing"):
        run.loop()
    assert run.loop()


def test_drafts_of_a_killed_process_are_removed(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    run = TrainingRun(tiny, data, tmp_path / "out")
    draft = tmp_path / "out" / "training" / f".{checkpoint.NAME}.0123abcd.part"
    draft.write_bytes(b"half")
    run.loop()
    assert not draft.exists()


@contextmanager
def small_files_only(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_last_good_state(data: Path, recipe: Recipe, out: Path, step: int) -> None:
    UNet2DModel.from_pretrained(out)
    DDPMScheduler.from_pretrained(out)
    assert not list(out.rglob("*.part"))
    resumed = TrainingRun(recipe, data, out)
    assert resumed.resumed_from == step
    resumed.loop()


def test_a_disk_that_takes_no_more_keeps_the_last_checkpoint(
    whole: Path, data: Path, tiny: Recipe, tmp_path: Path
) -> None:
    run = TrainingRun(tiny, data, tmp_path / "out")
    run.loop(at_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with small_files_only(10_000), pytest.raises(StorageError, match=r"cannot write .*checkpoint\.safetensors"):
        TrainingRun(tiny, data, tmp_path / "out").loop()
    assert_last_good_state(data, tiny, tmp_path / "out", 4)
    assert_same_run(whole, tmp_path / "out")


@pytest.mark.parametrize("victim", [checkpoint.NAME, WEIGHTS, "config.json", "scheduler_config.json"])
def test_a_full_disk_at_any_file(
    data: Path, tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    run = TrainingRun(tiny, data, tmp_path / "out")

    def disk_is_full() -> None:
        for writer in ("write_bytes", "write_text"):
            monkeypatch.setattr(Path, writer, _failing(getattr(Path, writer), victim))

    with pytest.raises(StorageError, match=f"{victim}: No space left on device; the file is as it was before"):
        run.loop(at_step(5, disk_is_full))
    monkeypatch.undo()
    assert_last_good_state(data, tiny, tmp_path / "out", 3 if victim == checkpoint.NAME else 6)


def _failing(write: Callable[..., int], victim: str) -> Callable[..., int]:
    def write_some(path: Path, content: Any, *args: Any, **kwargs: Any) -> int:
        if path.name.startswith(f".{victim}."):
            write(path, content[:7], *args, **kwargs)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content, *args, **kwargs)

    return write_some


def test_a_loss_that_is_no_number_stops_with_the_last_good_state(data: Path, tiny: Recipe, tmp_path: Path) -> None:
    run = TrainingRun(tiny, data, tmp_path / "out")

    def break_weights() -> None:
        with torch.no_grad():
            next(run.net.parameters()).fill_(float("nan"))

    with pytest.raises(OptionError, match=r"the loss became nan at step 5; .* lower learning_rate"):
        run.loop(at_step(5, break_weights))
    assert_last_good_state(data, tiny, tmp_path / "out", 3)


def test_precision_that_this_machine_has_not(whole: Path, data: Path, tiny: Recipe, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(OptionError, match="fp16 needs a GPU"):
        TrainingRun(dataclasses.replace(tiny, mixed_precision="fp16"), data, tmp_path / "out")
    train(dataclasses.replace(tiny, mixed_precision="auto"), data, tmp_path / "auto")
    assert_same_run(whole, tmp_path / "auto")


def test_the_scale_of_fp16_gradients_is_resumed(
    data: Path, tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_scaler(_: Recipe) -> Accelerator:
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu")
        return accelerator

    monkeypatch.setattr(loop, "_accelerator", with_scaler)
    run = TrainingRun(tiny, data, tmp_path / "out")
    run.accelerator.scaler.load_state_dict({**run.accelerator.scaler.state_dict(), "scale": 8.0, "_growth_tracker": 5})
    run._save()
    state = TrainingRun(tiny, data, tmp_path / "out").accelerator.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (8.0, 5)


def test_rows_after_the_checkpoint_are_written_again(whole: Path, data: Path, tiny: Recipe, tmp_path: Path) -> None:
    """As after a crash: the log has more rows than the checkpoint knows, and a row that was cut short."""
    TrainingRun(tiny, data, tmp_path / "out").loop(at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    log = loss_log(tmp_path / "out" / "training")
    log.append([[5] * len(LOG_COLUMNS)])
    with log.path.open("a") as handle:
        handle.write("4")
    train(tiny, data, tmp_path / "out")
    assert_same_run(whole, tmp_path / "out")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.npz"
    np.savez(path, train_x=np.random.default_rng(7).integers(0, 256, (24, 13, 17, 3), dtype=np.uint8))
    return path


def test_random_crops_resume_exactly(large: Path, tiny: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(tiny, image_channels=None, image_size=8, crop=True)
    train(recipe, large, tmp_path / "whole")
    first = TrainingRun(recipe, large, tmp_path / "parts")
    assert first.recipe.image_channels == 3
    first.loop(at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert TrainingRun(recipe, large, tmp_path / "parts").loop()
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_every_step_sees_the_windows_that_it_draws(large: Path, tiny: Recipe, tmp_path: Path) -> None:
    recipe = dataclasses.replace(tiny, image_channels=3, image_size=8, crop=True, flips="none")
    run = TrainingRun(recipe, large, tmp_path / "out")
    batch = loop.draw(run.recipe, len(run.images), (3, 8, 8), run.table, 2)
    run.state.step = 2
    inputs: list[Any] = []
    run.net.register_forward_pre_hook(lambda _net, given: inputs.extend(given))
    run._noise_loss()
    noisy, timesteps = (part.numpy() for part in inputs)
    abar, noise = run.abar[timesteps][:, None, None, None], batch.noise
    np.testing.assert_array_equal(timesteps, batch.timesteps)
    assert run.data.crops is not None
    seen = run.data.crops.cut(batch.indices, batch.places)
    np.testing.assert_allclose(noisy, np.sqrt(abar) * seen + np.sqrt(1 - abar) * noise, atol=1e-5)
    assert not np.array_equal(batch.places, loop.draw(run.recipe, 24, (3, 8, 8), run.table, 3).places)

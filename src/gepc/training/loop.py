"""The training loop: denoising loss, AdamW, cosine learning rate, an exponential average of the weights."""

from __future__ import annotations

import csv
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gepc.errors import InputError, OptionError
from gepc.files import read_json, write_json
from gepc.images import Image
from gepc.training import checkpoint
from gepc.training.checkpoint import Progress
from gepc.training.data import Draw, draw, fingerprint, load_training_images, low_noise_table
from gepc.training.net import alphas_cumprod, build_net, save_folder
from gepc.training.recipe import Recipe

if TYPE_CHECKING:
    import torch

RUN_FOLDER = "training"
LOG_EVERY = 20
LOG_FIELDS = ("step", "loss", "learning_rate", "images_per_second", "seconds", "cpu_seconds")


@dataclass(frozen=True)
class Tick:
    """What a progress display needs to know."""

    step: int
    total: int
    loss: float
    images_per_second: float
    seconds_left: float


def learning_rate(recipe: Recipe, step: int, fraction: float) -> float:
    """Linear warm-up, then half a cosine from `learning_rate` to `final_learning_rate` as `fraction` goes to 1."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    half = 0.5 * (1.0 + math.cos(math.pi * min(1.0, fraction)))
    return recipe.final_learning_rate + (recipe.learning_rate - recipe.final_learning_rate) * half


def train(
    recipe: Recipe,
    data: str | Path,
    out: str | Path,
    minutes: float | None = None,
    on_tick: Callable[[Tick], None] | None = None,
) -> Progress:
    """Train until `recipe.steps` steps (or `minutes` minutes, in all) are done; a run in `out` is taken up again.

    The batch of a step depends on (seed, step) alone, so an interrupted and resumed run equals an uninterrupted one
    bit for bit on one machine; with `minutes` the learning rate follows the clock, and only the weights are exact.
    """
    run = _Run(recipe, Path(data), Path(out), minutes)
    with _stop_on_signals() as stopping:
        run.loop(on_tick, stopping)
    return run.progress


class _Run:
    """One process of one run."""

    def __init__(self, recipe: Recipe, data: Path, out: Path, minutes: float | None) -> None:
        import torch
        from accelerate import Accelerator
        from diffusers.training_utils import EMAModel

        self.recipe, self.out, self.folder, self.minutes = recipe, out, out / RUN_FOLDER, minutes
        self.images, self.held_out = load_training_images(data, recipe)
        self.accelerator = Accelerator(mixed_precision=recipe.mixed_precision)
        torch.manual_seed(recipe.seed)
        self.net = build_net(recipe, self.images.shape[-1])
        self.net.to(memory_format=torch.channels_last)
        self.abar = alphas_cumprod(recipe)
        self.table = low_noise_table(recipe, self.abar)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
        self.model, self.optimizer = self.accelerator.prepare(self.net, optimizer)
        self.forward: Callable[..., Any] = torch.compile(self.model) if recipe.compile else self.model
        self.ema = EMAModel(self.net.parameters(), decay=recipe.ema_decay, foreach=True)
        self.progress = self._resume_or_start()

    def _resume_or_start(self) -> Progress:
        mark: dict[str, Any] = {"recipe": self.recipe.as_dict(), "data": fingerprint(self.images)}
        found = checkpoint.read_progress(self.folder)
        if found is None:
            if self.out.exists() and any(self.out.iterdir()) and not (self.folder / "run.json").exists():
                raise InputError(f"{self.out} is not empty and not a training run; give another --out folder")
            if (self.folder / "run.json").exists():
                self._check_same_run(read_json(self.folder / "run.json"), mark)
            if self.accelerator.is_main_process:
                write_json(self.folder / "run.json", mark)
            return Progress(**mark)
        self._check_same_run({"recipe": found.recipe, "data": found.data}, mark)
        found.recipe = mark["recipe"]
        checkpoint.restore(self.folder, self.net, self.ema, _plain(self.optimizer), found)
        if found.grad_scale is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.update(found.grad_scale)
        return found

    def _check_same_run(self, found: dict[str, Any], mark: dict[str, Any]) -> None:
        may_change = {"steps", "checkpoint_every", "compile"}
        changed = [
            name
            for name, value in mark["recipe"].items()
            if name not in may_change and found.get("recipe", {}).get(name) != value
        ]
        if changed:
            raise InputError(f"{self.out} holds a run with another {', '.join(changed)}; give another --out folder")
        if found.get("data") != mark["data"]:
            raise InputError(f"{self.out} holds a run on other images; give another --out folder")

    def loop(self, on_tick: Callable[[Tick], None] | None, stopping: list[bool]) -> None:
        """Steps until done or asked to stop; the last good state is on disk whatever happens."""
        start = time.monotonic() - self.progress.seconds
        cpu_start = time.process_time() - self.progress.cpu_seconds
        begun, first = time.monotonic(), self.progress.step
        log = _LossLog(self.folder / "loss.csv", self.progress.step) if self.accelerator.is_main_process else None
        window: list[float] = []
        self.model.train()
        while not stopping[0] and self._fraction() < 1.0:
            window.append(self._step())
            self.progress.step += 1
            self.progress.seconds = time.monotonic() - start
            self.progress.cpu_seconds = time.process_time() - cpu_start
            speed = (self.progress.step - first) / max(1e-9, time.monotonic() - begun)
            if self.progress.step % LOG_EVERY == 0:
                images_per_second = speed * self.recipe.batch_size * self.accelerator.num_processes
                loss = float(np.mean(window))
                window.clear()
                if log is not None:
                    log.row(self.progress, loss, self.optimizer.param_groups[0]["lr"], images_per_second)
                if on_tick is not None:
                    on_tick(self._tick(loss, images_per_second, speed))
            if self.progress.step % self.recipe.checkpoint_every == 0:
                self._save()
        self._save()

    def _fraction(self) -> float:
        if self.minutes is not None:
            return self.progress.seconds / (60.0 * self.minutes)
        return self.progress.step / self.recipe.steps

    def _tick(self, loss: float, images_per_second: float, speed: float) -> Tick:
        done = max(1e-9, self._fraction())
        total = self.recipe.steps if self.minutes is None else max(self.progress.step, round(self.progress.step / done))
        left = (total - self.progress.step) / max(1e-9, speed)
        return Tick(self.progress.step, total, loss, images_per_second, left)

    def _step(self) -> float:
        import torch

        rate = learning_rate(self.recipe, self.progress.step, self._fraction())
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = draw(
            self.recipe,
            len(self.images),
            self.images.shape[1:],
            self.table,
            self.progress.step,
            self.accelerator.process_index,
        )
        noisy, timesteps, noise = self._noised(batch)
        with self.accelerator.autocast():
            predicted = self.forward(noisy, timesteps, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(predicted.float(), noise)
        if not torch.isfinite(loss):
            raise OptionError(
                f"the loss became {loss.item()} at step {self.progress.step}; lower learning_rate and resume: "
                "the last good checkpoint is kept"
            )
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.net.parameters(), self.recipe.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.step(self.net.parameters())
        return float(loss.detach())

    def _noised(self, batch: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise."""
        import torch

        images: Image = self.images[batch.indices]
        images[batch.flip_x] = images[batch.flip_x][..., ::-1]
        images[batch.flip_y] = images[batch.flip_y][..., ::-1, :]
        abar = self.abar[batch.timesteps][:, None, None, None]
        noisy = (np.sqrt(abar) * images + np.sqrt(1.0 - abar) * batch.noise).astype(np.float32)
        device = self.accelerator.device
        return (
            torch.from_numpy(noisy).to(device, memory_format=torch.channels_last),
            torch.from_numpy(batch.timesteps).to(device),
            torch.from_numpy(batch.noise).to(device),
        )

    def _save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        self.progress.ema_step = self.ema.optimization_step
        if self.accelerator.scaler is not None:
            self.progress.grad_scale = float(self.accelerator.scaler.get_scale())
        checkpoint.save(self.folder, self.net, self.ema, _plain(self.optimizer), self.progress)
        self.ema.store(self.net.parameters())
        self.ema.copy_to(self.net.parameters())
        try:
            save_folder(self.net, self.recipe, self.out)
        finally:
            self.ema.restore(self.net.parameters())


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimiser itself, without accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


class _LossLog:
    """`loss.csv`, appended to; rows later than the checkpoint that a run resumes from are dropped first."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        kept: list[dict[str, str]] = []
        if path.exists():
            with open(path, newline="", encoding="utf-8") as handle:
                kept = [row for row in csv.DictReader(handle) if int(row["step"]) <= step]
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, LOG_FIELDS)
            writer.writeheader()
            writer.writerows(kept)

    def row(self, progress: Progress, loss: float, rate: float, images_per_second: float) -> None:
        values = (progress.step, loss, rate, images_per_second, progress.seconds, progress.cpu_seconds)
        with open(self._path, "a", newline="", encoding="utf-8") as handle:
            csv.writer(handle).writerow([values[0], *(f"{value:.6g}" for value in values[1:])])


@contextmanager
def _stop_on_signals() -> Iterator[list[bool]]:
    """Ctrl-C and SIGTERM end the run after the step under way, with a checkpoint."""
    stopping = [False]

    def stop(_signum: int, _frame: object) -> None:
        stopping[0] = True

    try:
        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: the caller keeps its own handlers
        yield stopping
        return
    try:
        yield stopping
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

"""The training loop: denoising loss, AdamW, cosine learning rate, an exponential average of the weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gepc.core.errors import GepcError, InputError, OptionError
from gepc.core.files import only_writer, read_json, remove_drafts, write_json
from gepc.images.sources import Image
from gepc.training import checkpoint
from gepc.training.checkpoint import Progress
from gepc.training.compiling import compiled_is_wrong
from gepc.training.data import Draw, draw, fingerprint, load_training_images, low_noise_table
from gepc.training.loss_log import LOG_EVERY, LossLog, Row
from gepc.training.net import alphas_cumprod, build_net, save_folder
from gepc.training.process import Clock, Speed, stop_on_signals
from gepc.training.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

RUN_FOLDER = "training"
MAY_CHANGE = ("steps", "checkpoint_every", "compile", "mixed_precision")


@dataclass(frozen=True)
class Tick:
    """What a progress display needs to know after a step; the loss is the mean since the last row of the log."""

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
    bit for bit on the same machine. With `minutes` the learning rate follows the clock, and no two runs are the same.
    """
    run = Run(recipe, data, out, minutes)
    run.loop(on_tick)
    return run.progress


class Run:
    """One process of one run: reads the images, builds the net, and takes up what `out` holds of the same run.

    Attributes
    ----------
    progress : where the run stands.
    resumed_from : the step that it was taken up at, 0 for a new run.
    images, held_out : the training and held-out images, (N, C, H, W) in [-1, 1].
    is_main : whether this is the process that writes and reports.
    """

    def __init__(self, recipe: Recipe, data: str | Path, out: str | Path, minutes: float | None = None) -> None:
        if minutes is not None and not minutes > 0:
            raise OptionError(f"minutes must be positive, got {minutes:g}")
        self.recipe, self.out, self.folder, self.minutes = recipe, Path(out), Path(out) / RUN_FOLDER, minutes
        self.images, self.held_out = load_training_images(data, recipe)
        mark: dict[str, Any] = {"recipe": recipe.as_dict(), "data": fingerprint(self.images)}
        found = self._find_run(mark)
        self._build()
        if found is None:
            self.progress = Progress(recipe=mark["recipe"], data=mark["data"])
        else:
            self.progress = found
            self._restore()
        self.resumed_from = self.progress.step
        self.accelerator.wait_for_everyone()
        if self.is_main:
            write_json(self.folder / "run.json", mark)

    @property
    def is_main(self) -> bool:
        """Whether this process writes and reports; the others only compute."""
        return bool(self.accelerator.is_main_process)

    def _find_run(self, mark: dict[str, Any]) -> Progress | None:
        """The progress of this run in the output folder; anything else that lies there is refused."""
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"{self.out} is a file; give a folder for --out")
        found = checkpoint.read_progress(self.folder)
        if found is not None:
            self._check_same_run({"recipe": found.recipe, "data": found.data}, mark)
            found.recipe = mark["recipe"]
        elif (self.folder / "run.json").exists():
            self._check_same_run(read_json(self.folder / "run.json"), mark)
        elif self.out.exists() and any(self.out.iterdir()):
            raise InputError(f"{self.out} is not empty and not a training run; give another --out folder")
        return found

    def _check_same_run(self, found: dict[str, Any], mark: dict[str, Any]) -> None:
        theirs = {**Recipe().as_dict(), **found.get("recipe", {})}
        changed = [
            f"{name} ({theirs[name]}, not {value})"
            for name, value in mark["recipe"].items()
            if name not in MAY_CHANGE and theirs[name] != value
        ]
        if changed:
            raise InputError(
                f"{self.out} holds a run with another {', '.join(changed)}; "
                "give another --out folder, or the recipe of that run to go on with it"
            )
        if found.get("data") != mark["data"]:
            raise InputError(f"{self.out} holds a run on other images; give another --out folder")

    def _build(self) -> None:
        import torch
        from diffusers.training_utils import EMAModel

        recipe = self.recipe
        self.accelerator = _accelerator(recipe)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.net = build_net(recipe, *self.images.shape[2:])
        self.net.to(memory_format=torch.channels_last)
        self.abar = alphas_cumprod(recipe)
        self.table = low_noise_table(recipe, self.abar)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
        self.model, self.optimizer = self.accelerator.prepare(self.net, optimizer)
        self.forward: Callable[..., Any] = torch.compile(self.model) if recipe.compile else self.model
        self.ema = EMAModel(self.net.parameters(), decay=recipe.ema_decay, foreach=True)

    def _restore(self) -> None:
        checkpoint.restore(self.folder, self.net, self.ema, _plain(self.optimizer), self.progress)
        scaler = self.accelerator.scaler
        if scaler is not None and self.progress.grad_scale is not None:
            scale = {"scale": self.progress.grad_scale, "_growth_tracker": self.progress.grad_scale_age}
            scaler.load_state_dict({**scaler.state_dict(), **scale})

    def loop(self, on_tick: Callable[[Tick], None] | None = None) -> bool:
        """Step until the run is finished (True) or a signal asks it to stop (False), and leave its state on disk.

        Whatever else ends it, the files of the last checkpoint stay. `on_tick` is called in the main process only.
        """
        with stop_on_signals() as stopping, only_writer(self.folder) if self.is_main else nullcontext():
            if self.is_main:
                remove_drafts(self.out, self.folder)
            finished = self._steps(on_tick, stopping)
            self._save()
        if self.accelerator.num_processes > 1:
            self.accelerator.end_training()
        return finished

    def _steps(self, on_tick: Callable[[Tick], None] | None, stopping: list[bool]) -> bool:
        log = LossLog(self.folder, self.progress.step) if self.is_main else None
        clock, speed = Clock(self.progress.seconds, self.progress.cpu_seconds), Speed()
        self.model.train()
        self._settle_compilation()
        while self._fraction() < 1.0:
            if any(self._agree(float(stopping[0]))):
                return False
            self.progress.losses.append(self._step())
            self.progress.step += 1
            (self.progress.seconds,) = self._agree(clock.seconds)
            self.progress.cpu_seconds = clock.cpu_seconds
            tick = self._tick(speed.after_step())
            if self.progress.step % LOG_EVERY == 0:
                self.progress.losses = []
                if log is not None:
                    log.append(self._row(tick))
            if on_tick is not None and self.is_main:
                on_tick(tick)
            if self.progress.step % self.recipe.checkpoint_every == 0 and self._fraction() < 1.0:
                self._save()
        return True

    def _fraction(self) -> float:
        if self.minutes is not None:
            return self.progress.seconds / (60.0 * self.minutes)
        return self.progress.step / self.recipe.steps

    def _agree(self, *values: float) -> list[float]:
        """The mean of each value over all processes, so that all of them decide alike."""
        import torch

        if self.accelerator.num_processes == 1:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        means: list[float] = self.accelerator.reduce(together, "mean").tolist()
        return means

    def _tick(self, steps_per_second: float) -> Tick:
        done = max(1e-9, self._fraction())
        step = self.progress.step
        total = self.recipe.steps if self.minutes is None else max(step, round(step / done))
        left = (total - step) / steps_per_second
        loss = float(np.mean(self.progress.losses))
        return Tick(step, total, loss, steps_per_second * self.recipe.batch_size, left)

    def _row(self, tick: Tick) -> Row:
        rate = self.optimizer.param_groups[0]["lr"]
        return Row(tick.step, tick.loss, rate, tick.images_per_second, self.progress.seconds, self.progress.cpu_seconds)

    def _step(self) -> float:
        rate = learning_rate(self.recipe, self.progress.step, self._fraction())
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        noisy, timesteps, noise = self._batch()
        loss = self._loss(self.forward, noisy, timesteps, noise)
        (mean_loss,) = self._agree(float(loss.detach()))
        if not math.isfinite(mean_loss):
            raise OptionError(
                f"the loss became {mean_loss} at step {self.progress.step}; start again in another folder with a "
                "lower learning_rate. The last good checkpoint is kept"
            )
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.net.parameters(), self.recipe.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.step(self.net.parameters())
        return mean_loss

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What this process sees of the batch of the current step."""
        batch = draw(self.recipe, len(self.images), self.images.shape[1:], self.table, self.progress.step)
        return self._noised(batch.part(self.accelerator.process_index, self.accelerator.num_processes))

    def _loss(
        self, forward: Callable[..., Any], noisy: torch.Tensor, timesteps: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """mean (eps(x_t, t) - noise)^2."""
        import torch

        with self.accelerator.autocast():
            predicted = forward(noisy, timesteps, return_dict=False)[0]
        return torch.nn.functional.mse_loss(predicted.float(), noise)

    def _settle_compilation(self) -> None:
        """Compilation only saves time: where it is not possible, or gets gradients wrong, the run goes on without."""
        if self.forward is self.model:
            return
        batch = self._batch()
        try:
            wrong = compiled_is_wrong(self.model, self.forward, lambda forward: self._loss(forward, *batch))
            reason = f"{len(wrong)} of its gradients come out wrong on this machine" if wrong else ""
        except RuntimeError as error:
            if not _is_compiler_error(error):
                raise
            reason = str(error).strip().splitlines()[0]
        if any(self._agree(float(bool(reason)))):
            warnings.warn(f"the net cannot be compiled and trains more slowly ({reason})", stacklevel=2)
            self.forward = self.model

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
        """The checkpoint, then the folder of averaged weights; each file is whole at any time."""
        if not self.is_main:
            return
        scaler = self.accelerator.scaler
        if scaler is not None:
            self.progress.grad_scale = float(scaler.get_scale())
            self.progress.grad_scale_age = int(scaler.state_dict().get("_growth_tracker", 0))
        checkpoint.save(self.folder, self.net, self.ema, _plain(self.optimizer), self.progress)
        save_folder(self.net, self.ema.shadow_params, self.recipe, self.out)


def _accelerator(recipe: Recipe) -> Accelerator:
    """The devices of this run, as `accelerate launch` or `torchrun` set them; alone, the GPU or else the CPU."""
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise GepcError("training needs accelerate; install it with: pip install 'gepc[train]'") from error
    import torch

    on_cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available())
    precision = recipe.mixed_precision
    if precision == "auto":
        precision = "fp16" if torch.cuda.is_available() else "no"
    if precision == "fp16" and on_cpu:
        raise OptionError("mixed_precision fp16 needs a GPU and there is none here; set it to auto or no")
    try:
        accelerator = Accelerator(cpu=on_cpu, mixed_precision=precision)
    except ValueError as error:
        raise OptionError(f"mixed_precision {precision} cannot be used here: {error}") from error
    if recipe.batch_size % accelerator.num_processes:
        raise OptionError(
            f"batch_size={recipe.batch_size} cannot be shared evenly by {accelerator.num_processes} processes; "
            "set it to a multiple"
        )
    return accelerator


def _is_compiler_error(error: RuntimeError) -> bool:
    from torch._dynamo.exc import BackendCompilerFailed  # slow to import, and rarely needed

    return isinstance(error, BackendCompilerFailed)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimiser itself, without accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner

"""The training loop: an objective's loss, AdamW, cosine learning rate, exponential moving average of the weights."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from diffusers import UNet2DModel
from diffusers.training_utils import EMAModel

from gepc.backbones.diffusers import DiffusersBackbone
from gepc.backbones.load import list_backbones
from gepc.backbones.weights import TRAINED_ON, Patches
from gepc.core.errors import GepcError, InputError, OptionError, raising
from gepc.core.files import only_writer, read_json, remove_drafts, write_arrays, write_json
from gepc.images.sources import Image
from gepc.lab.training import checkpoint
from gepc.lab.training import recipe as recipes
from gepc.lab.training.checkpoint import LOG_EVERY, RUN_FOLDER, TrainingState, loss_log
from gepc.lab.training.choices import saved_recipe
from gepc.lab.training.data import Draw, draw, fingerprint, load_training_images, low_noise_table
from gepc.lab.training.energy_losses import LOSSES
from gepc.lab.training.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

MAY_CHANGE = ("steps", "checkpoint_every", "mixed_precision")


@dataclass(frozen=True)
class Tick:
    """The progress after a step, for a display; `loss` is the mean since the last row of the loss log."""

    step: int
    total: int
    loss: float
    images_per_second: float
    seconds_left: float


def learning_rate(recipe: Recipe, step: int, fraction: float) -> float:
    """Linear warm-up, then a cosine decay to `final_learning_rate` as `fraction`, the finished part, goes to 1."""
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
) -> TrainingState:
    """Train a network, or resume the run in `out`.

    The batch of a step depends on (seed, step) only, so an interrupted and resumed run equals an uninterrupted one bit
    for bit on the same machine. With `minutes` the learning rate follows the clock, and runs are not reproducible.

    Parameters
    ----------
    recipe : parameters of the run.
    data : a folder of images, or an `.npz` file with an array `train_x`.
    out : folder of the result, a diffusers model; state, loss and evaluation are in its subfolder `training`.
    minutes : train for this time in all, instead of `recipe.steps` steps.
    on_tick : called after each step.
    """
    run = TrainingRun(recipe, data, out, minutes)
    if not run.loop(on_tick):
        raise KeyboardInterrupt  # the state is saved
    return run.state


class TrainingRun:
    """A training run: reads the images, builds the network, and restores the run in `out` if any.

    Its parameters are those of `train`. `recipe` is completed by the number of image channels and the network to start
    from; `resumed_from` is the step at which the run was resumed, 0 for a new run.
    """

    def __init__(self, recipe: Recipe, data: str | Path, out: str | Path, minutes: float | None = None) -> None:
        if minutes is not None and not minutes > 0:
            raise OptionError(f"minutes must be positive, got {minutes:g}")
        self.out, self.folder, self.minutes = Path(out), Path(out) / RUN_FOLDER, minutes
        self._spent, self._passes_after = 0.0, 0
        recipe, start = self._start(recipe)
        self.data = load_training_images(data, recipe)
        self.images, self.held_out = self.data.images, self.data.held_out
        self.recipe = dataclasses.replace(recipe, image_channels=self.images.shape[1])
        identity: dict[str, Any] = {"recipe": self.recipe.as_dict(), "data": fingerprint(self.images)}
        found = self._find_run(identity)
        self._build(start)
        self.state = found or TrainingState(log_size=0)
        if found is not None:
            checkpoint.restore(self.folder, self.net, self.ema, self.adamw, self.state)
            scaler = self.accelerator.scaler
            if scaler is not None and self.state.scaler:
                scaler.load_state_dict(self.state.scaler)
        self.resumed_from = self.state.step
        write_json(self.folder / "run.json", identity)
        if found is None:
            earlier = None if start is None else start.trained_on
            hashes = self.data.hashes if earlier is None else np.union1d(earlier, self.data.hashes)
            write_arrays(self.out / TRAINED_ON, {"hashes": hashes})

    def _start(self, recipe: Recipe) -> tuple[Recipe, DiffusersBackbone | None]:
        """The recipe, completed by the network to start from; and this network, unless there is a checkpoint."""
        saved = saved_recipe(self.out) or {}
        name = recipe.init or saved.get("init")
        if name is None:
            return recipe, None
        is_path = name not in list_backbones() and Path(name).exists()
        recipe = dataclasses.replace(recipe, init=str(Path(name).resolve()) if is_path else name)
        if (self.folder / checkpoint.NAME).exists():
            channels = recipe.image_channels or saved.get("image_channels")
            return dataclasses.replace(recipe, image_channels=channels), None
        start = recipes.load_init(name)
        wanted = recipes.init_fields(start)
        for field, value in wanted.items():
            if getattr(recipe, field) not in (None, value):
                raise OptionError(f"recipe: {field} is {getattr(recipe, field)}, but {name} has {value}; leave it out")
        missing = {field: value for field, value in wanted.items() if getattr(recipe, field) is None}
        return dataclasses.replace(recipe, **missing), start

    def _find_run(self, identity: dict[str, Any]) -> TrainingState | None:
        """The state of this run in the output folder; other content of the folder is an error."""
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"{self.out} is a file; give a folder")
        if not (self.folder / "run.json").exists():
            # an interrupted start leaves folders and drafts, whose names begin with a dot
            if any(path.is_file() and not path.name.startswith(".") for path in self.out.rglob("*")):
                raise InputError(f"{self.out} is not empty and not a training run; give another folder")
            return None
        stored = read_json(self.folder / "run.json")
        old = stored.get("recipe", {})
        fixed = {name: value for name, value in identity["recipe"].items() if name not in MAY_CHANGE}
        changed = [f"{name} ({old.get(name)}, not {value})" for name, value in fixed.items() if old.get(name) != value]
        if changed:
            raise InputError(f"{self.out} holds a run with another {', '.join(changed)}; give another folder")
        if stored.get("data") != identity["data"]:
            raise InputError(f"{self.out} holds a run on other images; give another folder")
        return checkpoint.read_state(self.folder)

    def _build(self, start: DiffusersBackbone | None) -> None:
        recipe = self.recipe
        self.accelerator = _accelerator(recipe)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.net = cast("Any", recipes.build_net(recipe, *self.images.shape[2:]))
        if start is not None:
            _check_same_architecture(self.net, start)
            self.net.load_state_dict(start.net.state_dict())
        self.net.to(memory_format=torch.channels_last)
        self.abar = recipes.alphas_cumprod(recipe)
        self.table = low_noise_table(recipe, self.abar)
        self.adamw = torch.optim.AdamW(self.net.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
        self.model, self.optimizer = self.accelerator.prepare(self.net, self.adamw)
        self.ema = EMAModel(self.net.parameters(), decay=recipe.ema_decay, foreach=True)

    def loop(self, on_tick: Callable[[Tick], None] | None = None, spent: float = 0.0, passes_after: int = 0) -> bool:
        """Train until the run is finished (True) or a signal stops it (False), and save the state.

        On any error, the files of the last checkpoint remain. The `minutes` of the run include the seconds `spent`
        before and the network passes that follow; at least half of them are for training.
        """
        self._spent, self._passes_after = spent, passes_after
        with _stop_on_signals() as stopping, only_writer(self.folder):
            remove_drafts(self.out, self.folder)
            finished = self._steps(on_tick, stopping)
            self._save()
        return finished

    def _steps(self, on_tick: Callable[[Tick], None] | None, stopping: list[bool]) -> bool:
        log = loss_log(self.folder)
        log.recover(self.state.log_size)
        start, cpu_start = time.monotonic() - self.state.seconds, time.process_time() - self.state.cpu_seconds
        begun = time.monotonic()
        self.model.train()
        while self._fraction() < 1.0:
            if stopping[0]:
                return False
            self.state.losses.append(self._step())
            self.state.step += 1
            self.state.seconds = time.monotonic() - start
            self.state.cpu_seconds = time.process_time() - cpu_start
            tick = self._tick((self.state.step - self.resumed_from) / max(1e-9, time.monotonic() - begun))
            if self.state.step % LOG_EVERY == 0:
                self.state.losses = []
                rate, state = self.adamw.param_groups[0]["lr"], self.state
                row = (tick.step, tick.loss, rate, tick.images_per_second, state.seconds, state.cpu_seconds)
                state.log_size = log.append([row])
            if on_tick is not None:
                on_tick(tick)
            if self.state.step % self.recipe.checkpoint_every == 0 and self._fraction() < 1.0:
                self._save()
        return True

    def _fraction(self) -> float:
        if self.minutes is None:
            return self.state.step / self.recipe.steps
        total, step_seconds = 60.0 * self.minutes, self.state.seconds / max(1, self.state.step)
        # a training step costs about three passes of its batch
        after = self._passes_after * step_seconds / (3 * self.recipe.batch_size)
        return self.state.seconds / max(total / 2, total - self._spent - after)

    def _tick(self, steps_per_second: float) -> Tick:
        done = max(1e-9, self._fraction())
        step = self.state.step
        total = self.recipe.steps if self.minutes is None else max(step, round(step / done))
        left = (total - step) / steps_per_second
        loss = float(np.mean(self.state.losses))
        return Tick(step, total, loss, steps_per_second * self.recipe.batch_size, left)

    def _step(self) -> float:
        """Minimise mean (eps(x_t, t) - noise)^2, or the loss of an energy network; the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.state.step, self._fraction())
        loss = self._noise_loss() if self.recipe.objective == "noise" else self._energy_loss()
        value = float(loss.detach())
        if not math.isfinite(value):
            advice = "start a new run in another folder with a lower learning_rate. The last good checkpoint is kept"
            raise OptionError(f"the loss became {value} at step {self.state.step}; {advice}")
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.net.parameters(), self.recipe.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.step(self.net.parameters())
        return value

    def _noise_loss(self) -> torch.Tensor:
        """x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise, with the t and noise of the step."""
        batch, images = self._batch()
        abar = self.abar[batch.timesteps][:, None, None, None]
        noisy = (np.sqrt(abar) * images + np.sqrt(1.0 - abar) * batch.noise).astype(np.float32)
        device = self.accelerator.device
        x_t = torch.from_numpy(noisy).to(device, memory_format=torch.channels_last)
        with self.accelerator.autocast():
            predicted = self.model(x_t, torch.from_numpy(batch.timesteps).to(device), return_dict=False)[0]
        return torch.nn.functional.mse_loss(predicted.float(), torch.from_numpy(batch.noise).to(device))

    def _energy_loss(self) -> torch.Tensor:
        images = torch.from_numpy(np.ascontiguousarray(self._batch()[1])).to(self.accelerator.device)
        seed = int(np.random.default_rng([self.recipe.seed, self.state.step, 0, 4]).integers(2**62))
        generator = torch.Generator().manual_seed(seed)
        return LOSSES[self.recipe.objective](self.recipe, self.net, images, generator)

    def _batch(self) -> tuple[Draw, Image]:
        """The random choices of the step, and its images."""
        batch = draw(self.recipe, len(self.images), self.images.shape[1:], self.table, self.state.step)
        crops = self.data.crops
        images = self.images[batch.indices] if crops is None else crops.cut(batch.indices, batch.places)
        images[batch.flip_x] = images[batch.flip_x][..., ::-1]
        images[batch.flip_y] = images[batch.flip_y][..., ::-1, :]
        return batch, images

    def _save(self) -> None:
        """Write the checkpoint, then the averaged weights; each file is replaced as a whole."""
        scaler = self.accelerator.scaler
        if scaler is not None:
            self.state.scaler = scaler.state_dict()
        checkpoint.save(self.folder, self.net, self.ema, self.adamw, self.state)
        recipes.save_folder(self.net, self.ema.shadow_params, self.recipe, self.out)


def _check_same_architecture(net: UNet2DModel, start: DiffusersBackbone) -> None:
    mine, theirs = (json.loads(one.to_json_string()) for one in (net, start.net))
    names = [name for name in mine if not name.startswith("_") and name != "sample_size"]
    other = [name for name in names if mine[name] != theirs.get(name)]
    if other or start.patches != Patches():
        raise recipes.cannot_start_from(start.source, f"its architecture is not one of a recipe ({', '.join(other)})")


def _accelerator(recipe: Recipe) -> Accelerator:
    """The GPU or else the CPU, with the precision of the recipe."""
    with raising(GepcError, "training needs accelerate; install it with: pip install 'gepc[train]'", ImportError):
        from accelerate import Accelerator
    on_cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available())
    precision = recipe.mixed_precision
    if precision == "auto":
        precision = "fp16" if torch.cuda.is_available() else "no"
    if precision == "fp16" and on_cpu:
        raise OptionError("mixed_precision fp16 needs a GPU; set it to auto or no")
    with raising(OptionError, f"mixed_precision {precision} is not available: {{error}}", ValueError):
        return Accelerator(cpu=on_cpu, mixed_precision=precision)


@contextmanager
def _stop_on_signals() -> Iterator[list[bool]]:
    """Yield a flag that Ctrl-C and SIGTERM set; a second Ctrl-C interrupts immediately."""
    stopping = [False]

    def stop(number: int, _frame: object) -> None:
        if stopping[0] and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopping[0] = True

    previous = {}
    with suppress(ValueError):  # outside the main thread, the caller keeps its own handlers
        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

"""What a training run keeps on disk to resume: one safetensors checkpoint, and the loss log `loss.csv`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gepc.core.errors import InputError, raising
from gepc.core.files import write_bytes
from gepc.core.run_folder import RowLog
from gepc.core.tables import write_rows

if TYPE_CHECKING:
    import torch
    from diffusers.training_utils import EMAModel
    from torch.nn import Module
    from torch.optim import Optimizer

RUN_FOLDER = "training"
NAME = "checkpoint.safetensors"
LOG_NAME = "loss.csv"
LOG_EVERY = 20


@dataclass
class TrainingState:
    """The state of a run after `step` steps, except for its tensors."""

    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the main process
    ema_step: int = 0
    grad_scale: float | None = None  # of fp16 gradients
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: str = ""  # fingerprint of the training images
    losses: list[float] = dataclasses.field(default_factory=list)  # since the last row of the loss log
    optimizer_step: int | None = None  # below `step` after a skipped update in fp16
    grad_scale_age: int = 0


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write torch tensors as a safetensors file, whole or not at all."""
    from safetensors.torch import save

    # not save_file: its own error for a failed write does not name the cause
    write_bytes(path, save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, metadata))


def _tensors(net: Module, ema: EMAModel, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of a run by their names in a checkpoint: weights, their average, buffers, the optimiser's moments."""
    tensors = {f"buffer/{name}": value for name, value in net.named_buffers()}
    for (name, parameter), average in zip(net.named_parameters(), ema.shadow_params, strict=True):
        own = {"net": parameter, "ema": average, **optimizer.state[parameter]}
        tensors |= {f"{kind}/{name}": value for kind, value in own.items() if kind != "step"}
    return tensors


def save(folder: Path, net: Module, ema: EMAModel, optimizer: Optimizer, state: TrainingState) -> None:
    """Replace the checkpoint in `folder` by the tensors and the state of the run."""
    tensors = _tensors(net, ema, optimizer)
    for moments in optimizer.state.values():
        if moments:
            state.optimizer_step = int(moments["step"])
    state.ema_step = ema.optimization_step
    write_tensors(folder / NAME, tensors, {"progress": json.dumps(dataclasses.asdict(state))})


def read_state(folder: Path) -> TrainingState | None:
    """The state of the run in `folder`, or None if there is no checkpoint."""
    from safetensors import SafetensorError, safe_open

    path = folder / NAME
    if not path.exists():
        return None
    reason = f"{path} is not a training checkpoint of this library: {{error}}"
    failing = raising(InputError, reason, SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError)
    with failing, safe_open(path, framework="np") as archive:
        return TrainingState(**json.loads(archive.metadata()["progress"]))


def restore(folder: Path, net: Module, ema: EMAModel, optimizer: Optimizer, state: TrainingState) -> None:
    """Load the tensors of the checkpoint, bit for bit."""
    import torch
    from safetensors.torch import load_file

    stored = load_file(folder / NAME)
    updates = state.step if state.optimizer_step is None else state.optimizer_step
    for name, parameter in net.named_parameters():
        if f"exp_avg/{name}" in stored:
            moments = {moment: torch.empty_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(float(updates)), **moments}
    with torch.no_grad():
        for name, value in _tensors(net, ema, optimizer).items():
            value.copy_(stored[name])
    ema.optimization_step = state.ema_step


class LossRow(NamedTuple):
    """One row of the loss log: the mean loss since the previous row, and the state at its step."""

    step: int
    loss: float
    learning_rate: float
    images_per_second: float
    seconds: float
    cpu_seconds: float


def read_loss_rows(folder: Path) -> list[LossRow]:
    """The rows of the loss log; lines cut short by a crash or a full disk are skipped."""
    path, rows = folder / LOG_NAME, []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines[1:]:
        step, *values = line.split(",")
        with contextlib.suppress(ValueError, TypeError):
            rows.append(LossRow(int(step), *map(float, values)))
    return rows


def resume_log(folder: Path, step: int) -> RowLog:
    """The loss log of a run that resumes after `step`; rows of later steps are removed."""
    rows = [row for row in read_loss_rows(folder) if row.step <= step]
    write_rows(folder / LOG_NAME, LossRow._fields, rows)
    return RowLog(folder / LOG_NAME, LossRow._fields)

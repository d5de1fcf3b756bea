"""What a training run keeps on disk to resume: one safetensors checkpoint, and the loss log `loss.csv`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc.core.errors import InputError, raising
from gepc.core.files import write_bytes
from gepc.core.run_folder import RowLog

if TYPE_CHECKING:
    import torch
    from diffusers.training_utils import EMAModel
    from torch.nn import Module
    from torch.optim import Optimizer

RUN_FOLDER = "training"
NAME = "checkpoint.safetensors"
LOG_NAME = "loss.csv"
LOG_COLUMNS = ("step", "loss", "learning_rate", "images_per_second", "seconds", "cpu_seconds")
LOG_EVERY = 20


@dataclass
class TrainingState:
    """The state of a run after `step` steps, except for its tensors."""

    log_size: int  # of the loss log in bytes; rows after it are of steps that are computed again
    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the main process
    ema_step: int = 0
    scaler: dict[str, Any] = dataclasses.field(default_factory=dict)  # of fp16 gradients
    losses: list[float] = dataclasses.field(default_factory=list)  # since the last row of the loss log


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write torch tensors as a safetensors file, whole or not at all."""
    from safetensors.torch import save

    # not save_file: its own error for a failed write does not name the cause
    write_bytes(path, save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, metadata))


def _tensors(net: Module, ema: EMAModel, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of a run by their names in a checkpoint: weights, their average, buffers, the optimiser's state."""
    tensors = {f"buffer/{name}": value for name, value in net.named_buffers()}
    for (name, parameter), average in zip(net.named_parameters(), ema.shadow_params, strict=True):
        own = {"net": parameter, "ema": average, **optimizer.state[parameter]}
        tensors |= {f"{kind}/{name}": value for kind, value in own.items()}
    return tensors


def save(folder: Path, net: Module, ema: EMAModel, optimizer: Optimizer, state: TrainingState) -> None:
    """Replace the checkpoint in `folder` by the tensors and the state of the run."""
    state.ema_step = ema.optimization_step
    progress = json.dumps(dataclasses.asdict(state))
    write_tensors(folder / NAME, _tensors(net, ema, optimizer), {"progress": progress})


def read_state(folder: Path) -> TrainingState | None:
    """The state of the run in `folder`, or None if there is no checkpoint."""
    from safetensors import SafetensorError, safe_open

    path = folder / NAME
    if not path.exists():
        return None
    reason = f"{path} is not a training checkpoint of this version: {{error}}"
    failing = raising(InputError, reason, SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError)
    with failing, safe_open(path, framework="np") as archive:
        return TrainingState(**json.loads(archive.metadata()["progress"]))


def restore(folder: Path, net: Module, ema: EMAModel, optimizer: Optimizer, state: TrainingState) -> None:
    """Load the tensors of the checkpoint, bit for bit."""
    import torch
    from safetensors.torch import load_file

    stored = load_file(folder / NAME)
    for name, parameter in net.named_parameters():
        if f"exp_avg/{name}" in stored:
            moments = {moment: torch.empty_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    with torch.no_grad():
        for name, value in _tensors(net, ema, optimizer).items():
            value.copy_(stored[name])
    ema.optimization_step = state.ema_step


def loss_log(folder: Path) -> RowLog:
    """The loss log: in each row the mean loss since the previous one, and the state at its step."""
    return RowLog(folder / LOG_NAME, LOG_COLUMNS)

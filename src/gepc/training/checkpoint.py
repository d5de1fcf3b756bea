"""Everything a run needs to go on, in one safetensors file that is replaced whole."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc.core.errors import InputError
from gepc.core.files import write_bytes

if TYPE_CHECKING:
    import torch
    from diffusers.training_utils import EMAModel

NAME = "checkpoint.safetensors"


@dataclass
class Progress:
    """Where a run stands.

    `losses` are those since the last row of the loss log; `cpu_seconds` is the CPU time of the main process.
    `optimizer_step` falls behind `step` when fp16 overflows and an update is skipped; None means that it did not.
    """

    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    ema_step: int = 0
    grad_scale: float | None = None
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    optimizer_step: int | None = None
    grad_scale_age: int = 0


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file of torch tensors, whole or not at all."""
    from safetensors.torch import save

    # not save_file: it reports a failed write as an error of its own, which says nothing of the disk
    write_bytes(path, save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, metadata))


def save(
    folder: Path, net: torch.nn.Module, ema: EMAModel, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Write weights, their average, the optimiser's moments and the progress; the previous file stays until then."""
    tensors: dict[str, torch.Tensor] = {}
    for (name, parameter), average in zip(net.named_parameters(), ema.shadow_params, strict=True):
        tensors[f"net/{name}"] = parameter
        tensors[f"ema/{name}"] = average
        state = optimizer.state[parameter]
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in state:
                tensors[f"{moment}/{name}"] = state[moment]
                progress.optimizer_step = int(state["step"])
    progress.ema_step = ema.optimization_step
    write_tensors(folder / NAME, tensors, {"progress": json.dumps(dataclasses.asdict(progress))})


def read_progress(folder: Path) -> Progress | None:
    """The progress of the run in `folder`, or None where there is none."""
    from safetensors import SafetensorError, safe_open

    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="np") as archive:
            return Progress(**json.loads(archive.metadata()["progress"]))
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not a training checkpoint of this library: {error}") from error


def restore(
    folder: Path, net: torch.nn.Module, ema: EMAModel, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Put the tensors of the checkpoint back, bit for bit."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / NAME)
    updates = progress.step if progress.optimizer_step is None else progress.optimizer_step
    with torch.no_grad():
        for (name, parameter), average in zip(net.named_parameters(), ema.shadow_params, strict=True):
            parameter.copy_(tensors[f"net/{name}"])
            average.copy_(tensors[f"ema/{name}"])
            if f"exp_avg/{name}" in tensors:
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(updates)),
                    "exp_avg": torch.empty_like(parameter).copy_(tensors[f"exp_avg/{name}"]),
                    "exp_avg_sq": torch.empty_like(parameter).copy_(tensors[f"exp_avg_sq/{name}"]),
                }
    ema.optimization_step = progress.ema_step

"""Everything a run needs to go on, in one safetensors file that is replaced whole."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc.errors import InputError
from gepc.files import replacing

if TYPE_CHECKING:
    import torch
    from diffusers.training_utils import EMAModel

NAME = "checkpoint.safetensors"


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    ema_step: int = 0
    grad_scale: float | None = None
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: str = ""


def save(
    folder: Path, net: torch.nn.Module, ema: EMAModel, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Write weights, their average, the optimiser's moments and the progress; the previous file stays until then."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for (name, parameter), average in zip(net.named_parameters(), ema.shadow_params, strict=True):
        tensors[f"net/{name}"] = parameter.detach().contiguous().cpu()
        tensors[f"ema/{name}"] = average.contiguous().cpu()
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment in optimizer.state[parameter]:
                tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment].contiguous().cpu()
    with replacing(folder / NAME) as draft:
        save_file(tensors, draft, metadata={"progress": json.dumps(dataclasses.asdict(progress))})


def read_progress(folder: Path) -> Progress | None:
    """The progress of the run in `folder`, or None where there is none."""
    from safetensors import SafetensorError, safe_open

    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as archive:
            return Progress(**json.loads(archive.metadata()["progress"]))
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not a training checkpoint of this library: {error}") from error


def restore(
    folder: Path, net: torch.nn.Module, ema: EMAModel, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Put the tensors of the checkpoint back, bit for bit."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / NAME)
    with torch.no_grad():
        for (name, parameter), average in zip(net.named_parameters(), ema.shadow_params, strict=True):
            parameter.copy_(tensors[f"net/{name}"])
            average.copy_(tensors[f"ema/{name}"])
            if f"exp_avg/{name}" in tensors:
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(progress.step)),
                    "exp_avg": torch.empty_like(parameter).copy_(tensors[f"exp_avg/{name}"]),
                    "exp_avg_sq": torch.empty_like(parameter).copy_(tensors[f"exp_avg_sq/{name}"]),
                }
    ema.optimization_step = progress.ema_step

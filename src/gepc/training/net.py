"""The network and schedule of a recipe as diffusers objects, and a check of its compiled form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.schedule import cosine_alphas_cumprod, linear_alphas_cumprod
from gepc.core.files import write_text
from gepc.training.checkpoint import write_tensors
from gepc.training.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from diffusers import DDPMScheduler, UNet2DModel

TOLERANCE = 0.05  # of a parameter's gradient: reduced precision changes less, a faulty compiler loses all of it


def build_net(recipe: Recipe, height: int, width: int) -> UNet2DModel:
    """A UNet2DModel for images of height x width; without attention it is fully convolutional."""
    from diffusers import UNet2DModel

    deep = len(recipe.channels) - 1
    down = ["AttnDownBlock2D" if recipe.attention and level == deep else "DownBlock2D" for level in range(deep + 1)]
    up = [name.replace("Down", "Up") for name in reversed(down)]
    return UNet2DModel(
        sample_size=width if height == width else (height, width),
        in_channels=recipe.image_channels,
        out_channels=recipe.image_channels,
        block_out_channels=recipe.channels,
        layers_per_block=recipe.layers_per_block,
        down_block_types=tuple(down),
        up_block_types=tuple(up),
        norm_num_groups=recipe.norm_groups,
        add_attention=recipe.attention,
        attention_head_dim=min(32, recipe.channels[-1]),
    )


def build_scheduler(recipe: Recipe) -> DDPMScheduler:
    """The scheduler with the schedule of `alphas_cumprod`."""
    from diffusers import DDPMScheduler

    if recipe.schedule == "cosine":
        return DDPMScheduler(num_train_timesteps=recipe.diffusion_steps, beta_schedule="squaredcos_cap_v2")
    scale = 1000.0 / recipe.diffusion_steps
    return DDPMScheduler(
        num_train_timesteps=recipe.diffusion_steps,
        beta_schedule="linear",
        beta_start=scale * 1e-4,
        beta_end=scale * 0.02,
    )


def alphas_cumprod(recipe: Recipe) -> npt.NDArray[np.float64]:
    """abar_t of the recipe's schedule in float64."""
    make = cosine_alphas_cumprod if recipe.schedule == "cosine" else linear_alphas_cumprod
    return make(recipe.diffusion_steps)


def save_folder(net: UNet2DModel, averages: Iterable[torch.Tensor], recipe: Recipe, out: Path) -> None:
    """Write a diffusers folder.

    Files are replaced as a whole and the configuration does not change during a run, so the folder can be loaded at any
    time, even after a failed write.

    Parameters
    ----------
    net : the network.
    averages : the weights to write in place of its own, in the order of its parameters.
    recipe : the recipe of the run.
    out : the folder.
    """
    weights = dict(net.state_dict())
    weights.update((name, average) for (name, _), average in zip(net.named_parameters(), averages, strict=True))
    write_text(out / "config.json", net.to_json_string())
    write_text(out / "scheduler_config.json", build_scheduler(recipe).to_json_string())
    write_tensors(out / "diffusion_pytorch_model.safetensors", weights, {"format": "pt"})


def compilation_fault(net: torch.nn.Module, compiled: Any, loss_of: Callable[[Any], torch.Tensor]) -> str:
    """Why the compiled network must not be trained, or an empty string.

    A faulty compiler can return wrong gradients without an error; training then continues with parts of the network
    unchanged. So the gradients of one batch are compared with those of the network itself.

    Parameters
    ----------
    net : the network.
    compiled : its compiled form.
    loss_of : the loss of one batch as a function of either.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # slow to import, and rarely needed

    try:
        found, expected = _gradients(net, lambda: loss_of(compiled)), _gradients(net, lambda: loss_of(net))
    except BackendCompilerFailed as error:
        return str(error).strip().splitlines()[0]
    rounding = 1e-4 * max(float(gradient.norm()) for gradient in expected.values())
    wrong = [
        name
        for name, right in expected.items()
        if name not in found or float((found[name] - right).norm()) > TOLERANCE * float(right.norm()) + rounding
    ]
    return f"{len(wrong)} of its gradients are wrong on this machine" if wrong else ""


def _gradients(net: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    net.zero_grad(set_to_none=True)
    loss().backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.detach().clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    return found

"""The network and schedule that a recipe asks for, as plain diffusers objects."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gepc.backbones.schedule import cosine_alphas_cumprod, linear_alphas_cumprod
from gepc.core.files import write_text
from gepc.training.checkpoint import write_tensors
from gepc.training.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from diffusers import DDPMScheduler, UNet2DModel


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
    """The scheduler whose schedule equals `alphas_cumprod`."""
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
    """Write a plain diffusers folder with `averages` (in the order of the net's parameters) for weights.

    Each file is replaced whole and the configurations never change during a run, so the folder can be loaded at any
    time, also after a write that failed.
    """
    weights = dict(net.state_dict())
    weights.update((name, average) for (name, _), average in zip(net.named_parameters(), averages, strict=True))
    write_text(out / "config.json", net.to_json_string())
    write_text(out / "scheduler_config.json", build_scheduler(recipe).to_json_string())
    write_tensors(out / "diffusion_pytorch_model.safetensors", weights, {"format": "pt"})

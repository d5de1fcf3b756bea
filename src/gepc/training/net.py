"""The network and schedule that a recipe asks for, as plain diffusers objects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gepc.backbones.schedule import cosine_alphas_cumprod, linear_alphas_cumprod
from gepc.training.recipe import Recipe

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, UNet2DModel


def build_net(recipe: Recipe, image_size: int) -> UNet2DModel:
    """A UNet2DModel; without attention it is fully convolutional."""
    from diffusers import UNet2DModel

    deep = len(recipe.channels) - 1
    down = ["AttnDownBlock2D" if recipe.attention and level == deep else "DownBlock2D" for level in range(deep + 1)]
    up = [name.replace("Down", "Up") for name in reversed(down)]
    return UNet2DModel(
        sample_size=image_size,
        in_channels=recipe.image_channels,
        out_channels=recipe.image_channels,
        block_out_channels=recipe.channels,
        layers_per_block=recipe.layers_per_block,
        down_block_types=tuple(down),
        up_block_types=tuple(up),
        norm_num_groups=recipe.norm_groups,
        add_attention=recipe.attention,
        attention_head_dim=32,
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


def save_folder(net: UNet2DModel, recipe: Recipe, out: Path) -> None:
    """Write a plain diffusers folder: `config.json`, the weights, `scheduler_config.json`. Weights come last, whole."""
    from safetensors.torch import save_file

    from gepc.files import replacing

    out.mkdir(parents=True, exist_ok=True)
    net.save_config(out)
    build_scheduler(recipe).save_pretrained(out)
    with replacing(out / "diffusion_pytorch_model.safetensors") as draft:
        save_file(
            {name: tensor.contiguous() for name, tensor in net.state_dict().items()}, draft, metadata={"format": "pt"}
        )

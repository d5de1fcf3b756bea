"""Fine-tuning: training that starts from the weights of another network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gepc.backbones.load import list_backbones, load_backbone
from gepc.backbones.schedule import cosine_alphas_cumprod, linear_alphas_cumprod
from gepc.core.errors import InputError

if TYPE_CHECKING:
    from gepc.backbones.diffusers import DiffusersBackbone

FINE_TUNING = {"learning_rate": 2e-4, "warmup_steps": 50}
"""Fields of a recipe whose defaults are different in fine-tuning."""
SCHEDULES = {"cosine": cosine_alphas_cumprod, "linear": linear_alphas_cumprod}


def init_name(init: str) -> str:
    """How a run stores `init`: the name of an embedded backbone, or an absolute path."""
    return init if init in list_backbones() or not Path(init).exists() else str(Path(init).resolve())


def load_init(init: str) -> DiffusersBackbone:
    """Load the network to start from; `InputError` if its answer is not one that the training loss is defined for."""
    from gepc.backbones.diffusers import DiffusersBackbone

    backbone = load_backbone(init, device="cpu")
    assert isinstance(backbone, DiffusersBackbone)
    scheduler = backbone.scheduler
    if scheduler.prediction_type != "epsilon" or backbone.learned_variance:
        raise cannot_start_from(init, "it does not predict noise alone")
    if scheduler.rescale_timesteps or scheduler.timestep_respacing:
        raise cannot_start_from(init, "it is called with rescaled timesteps")
    return backbone


def init_fields(backbone: DiffusersBackbone) -> dict[str, Any]:
    """The fields of a recipe that the network to start from determines: its architecture and its noise schedule."""
    config, steps = backbone.net.config, backbone.n_steps
    schedules = [name for name, make in SCHEDULES.items() if np.allclose(make(steps), backbone.alphas_cumprod)]
    if not schedules:
        raise cannot_start_from(backbone.source, "its noise schedule is neither `cosine` nor `linear`")
    fields: dict[str, Any] = {
        "channels": tuple(config.block_out_channels),
        "layers_per_block": config.layers_per_block,
        "norm_groups": config.norm_num_groups,
        "attention": config.add_attention,
        "image_channels": config.in_channels,
        "diffusion_steps": steps,
        "schedule": schedules[0],
    }
    if backbone.image_size is not None and len(set(backbone.image_size)) == 1:  # with attention
        fields["image_size"] = backbone.image_size[0]
    return fields


def cannot_start_from(init: object, reason: str) -> InputError:
    """The error for a network that cannot be fine-tuned."""
    return InputError(
        f"{init} cannot be fine-tuned: {reason}. Give the folder of a network that was trained with gepc, "
        f"or an embedded backbone ({', '.join(list_backbones())})"
    )

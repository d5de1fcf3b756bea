"""Published checkpoints and the options they were trained with, as their authors' read-me files give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A published net: which file, and the options that its tensors do not show or that must agree with them."""

    checkpoint: str
    options: Mapping[str, Any]


_COSINE_4000 = {"noise_schedule": "cosine", "diffusion_steps": 4000, "rescale_timesteps": True}
_LINEAR_1000 = {"noise_schedule": "linear", "diffusion_steps": 1000, "rescale_timesteps": False}

_IMPROVED_32 = {
    "image_size": 32,
    "num_channels": 128,
    "num_res_blocks": 3,
    "channel_mult": "",
    "num_heads": 4,
    "attention_resolutions": "16,8",
    "learn_sigma": True,
    "use_scale_shift_norm": True,
    "class_cond": False,
    **_COSINE_4000,
}
_IMPROVED_64 = {**_IMPROVED_32, "image_size": 64}

_GUIDED = {
    "num_channels": 256,
    "num_res_blocks": 2,
    "channel_mult": "",
    "num_head_channels": 64,
    "attention_resolutions": "32,16,8",
    "learn_sigma": True,
    "use_scale_shift_norm": True,
    "resblock_updown": True,
    "class_cond": False,
    **_LINEAR_1000,
}

PRESETS: dict[str, Preset] = {
    "diffpath-celeba32": Preset("DiffPath's CelebA-32 net", _IMPROVED_32),
    "improved-cifar10": Preset("cifar10_uncond_50M_500K.pt, cifar10_uncond_vlb_50M_500K.pt", _IMPROVED_32),
    "improved-imagenet64": Preset("imagenet64_uncond_100M_1500K.pt, imagenet64_uncond_vlb_100M_1500K.pt", _IMPROVED_64),
    "improved-imagenet64-cond": Preset(
        "imagenet64_cond_270M_250K.pt",
        {**_IMPROVED_64, "num_channels": 192, "class_cond": True, "rescale_timesteps": False},
    ),
    "improved-lsun256": Preset(
        "lsun_uncond_100M_1200K_bs128.pt, lsun_uncond_100M_2400K_bs64.pt",
        {
            **_IMPROVED_64,
            **_LINEAR_1000,
            "image_size": 256,
            "num_res_blocks": 2,
            "num_heads": 1,
            "use_scale_shift_norm": False,
            "attention_resolutions": "16",
        },
    ),
    "guided-imagenet64-cond": Preset(
        "64x64_diffusion.pt",
        {
            **_GUIDED,
            "image_size": 64,
            "noise_schedule": "cosine",
            "num_channels": 192,
            "num_res_blocks": 3,
            "class_cond": True,
            "use_new_attention_order": True,
        },
    ),
    "guided-imagenet128-cond": Preset(
        "128x128_diffusion.pt",
        {**_GUIDED, "image_size": 128, "class_cond": True, "num_heads": 4, "num_head_channels": -1},
    ),
    "guided-imagenet256": Preset("256x256_diffusion_uncond.pt", {**_GUIDED, "image_size": 256}),
    "guided-imagenet256-cond": Preset("256x256_diffusion.pt", {**_GUIDED, "image_size": 256, "class_cond": True}),
    "guided-imagenet512": Preset("512x512 nets fine-tuned without classes", {**_GUIDED, "image_size": 512}),
    "guided-imagenet512-cond": Preset("512x512_diffusion.pt", {**_GUIDED, "image_size": 512, "class_cond": True}),
    "guided-lsun256": Preset("lsun_bedroom.pt, lsun_cat.pt, lsun_horse.pt", {**_GUIDED, "image_size": 256}),
}

"""One tiny random network of every family, saved as its users save it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIDE = 16
"""Pixels a side of the images of every family."""
WIDTH, TOKENS = 8, 5
"""Of the embeddings of text-conditional families."""


def _unet(**options: Any) -> Any:
    from diffusers import UNet2DModel

    given: dict[str, Any] = {
        "sample_size": SIDE,
        "block_out_channels": (4, 8),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D"),
        "add_attention": False,
        "norm_num_groups": 2,
    }
    return UNet2DModel(**{**given, **options})


def _conditional_unet(**options: Any) -> Any:
    from diffusers import UNet2DConditionModel

    given: dict[str, Any] = {
        "sample_size": SIDE // 4,
        "block_out_channels": (4, 8),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 2,
        "norm_num_groups": 2,
    }
    return UNet2DConditionModel(**{**given, **options})


def _vae(channels: int = 4, **options: Any) -> Any:
    """Images of SIDE to latents of SIDE/4."""
    from diffusers import AutoencoderKL

    given: dict[str, Any] = {
        "block_out_channels": (4, 4, 4),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "latent_channels": channels,
        "norm_num_groups": 2,
    }
    return AutoencoderKL(**{**given, **options})


def text_encoder(folder: Path, width: int = WIDTH, projection: int | None = None) -> dict[str, Any]:
    """A tiny CLIP text model, with a projection if that has a width, and its tokenizer of letters."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    letters = [chr(code) for code in range(97, 123)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: place for place, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=TOKENS)
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        projection_dim=projection or WIDTH,
        bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
    )
    kind = CLIPTextModelWithProjection if projection else CLIPTextModel
    return {"text_encoder": kind(config).eval(), "tokenizer": tokenizer}


def embeddings(*names: str) -> dict[str, Any]:
    """Random embeddings of one text."""
    rng = np.random.default_rng(0)
    shapes = {
        "prompt_embeds": (1, TOKENS, WIDTH),
        "pooled_prompt_embeds": (1, WIDTH),
        "prompt_attention_mask": (1, TOKENS),
    }
    found = {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in names}
    if "prompt_attention_mask" in found:
        found["prompt_attention_mask"] = np.array([[1, 1, 1, 0, 0]], dtype=np.float32)
    return found


def _save(folder: Path, **parts: Any) -> None:
    """A pipeline folder in diffusers' layout."""
    index = {"_class_name": "SomePipeline", "_diffusers_version": "0.30.0"}
    for name, part in parts.items():
        part.save_pretrained(folder / name)
        index[name] = ["diffusers", type(part).__name__]  # type: ignore[assignment]
    (folder / "model_index.json").write_text(json.dumps(index))


def _pixel(folder: Path) -> dict[str, Any]:
    from diffusers import DDPMScheduler

    _save(folder, unet=_unet(), scheduler=DDPMScheduler(100))
    return {}


def _many_bands(folder: Path) -> dict[str, Any]:
    from diffusers import DDPMScheduler

    _save(folder, unet=_unet(in_channels=5, out_channels=5), scheduler=DDPMScheduler(100))
    return {}


def _edm(folder: Path) -> dict[str, Any]:
    from diffusers import EDMEulerScheduler

    _save(folder, unet=_unet(), scheduler=EDMEulerScheduler(num_train_timesteps=100))
    return {}


def _ve(folder: Path) -> dict[str, Any]:
    from diffusers import ScoreSdeVeScheduler

    net = _unet(time_embedding_type="fourier")
    _save(folder, unet=net, scheduler=ScoreSdeVeScheduler(num_train_timesteps=100, sigma_max=50.0))
    return {}


def _consistency(folder: Path) -> dict[str, Any]:
    from diffusers import CMStochasticIterativeScheduler

    _save(folder, unet=_unet(), scheduler=CMStochasticIterativeScheduler())
    return {}


def _flow(folder: Path) -> dict[str, Any]:
    from diffusers import FlowMatchEulerDiscreteScheduler

    _save(folder, unet=_unet(), scheduler=FlowMatchEulerDiscreteScheduler())
    return {}


def _ldm(folder: Path) -> dict[str, Any]:
    from diffusers import DDIMScheduler, VQModel

    vqvae = VQModel(
        block_out_channels=(4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=3,
        norm_num_groups=2,
        num_vq_embeddings=16,
    )
    _save(folder, unet=_unet(sample_size=SIDE // 4), vqvae=vqvae, scheduler=DDIMScheduler(num_train_timesteps=100))
    return {}


def _stable_diffusion(folder: Path) -> dict[str, Any]:
    from diffusers import PNDMScheduler

    scheduler = PNDMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    _save(folder, unet=_conditional_unet(), vae=_vae(), scheduler=scheduler)
    return {"embeddings": embeddings("prompt_embeds")}


def _stable_diffusion_xl(folder: Path) -> dict[str, Any]:
    from diffusers import EulerDiscreteScheduler

    net = _conditional_unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=WIDTH + 6 * 4,
    )
    scheduler = EulerDiscreteScheduler(prediction_type="v_prediction")
    _save(folder, unet=net, vae=_vae(force_upcast=True), scheduler=scheduler)
    return {"embeddings": embeddings("prompt_embeds", "pooled_prompt_embeds")}


def _dit(folder: Path) -> dict[str, Any]:
    from diffusers import DDIMScheduler, DiTTransformer2DModel

    net = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        out_channels=8,
        num_layers=1,
        sample_size=SIDE // 4,
        num_embeds_ada_norm=10,
        norm_num_groups=2,
    )
    _save(folder, transformer=net, vae=_vae(), scheduler=DDIMScheduler(num_train_timesteps=100))
    return {}


def _pixart(folder: Path) -> dict[str, Any]:
    from diffusers import DPMSolverMultistepScheduler, PixArtTransformer2DModel

    net = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        num_layers=1,
        sample_size=SIDE // 4,
        cross_attention_dim=8,
        caption_channels=WIDTH,
        norm_num_groups=2,
        use_additional_conditions=False,
    )
    _save(folder, transformer=net, vae=_vae(), scheduler=DPMSolverMultistepScheduler())
    return {"embeddings": embeddings("prompt_embeds", "prompt_attention_mask")}


def _sana(folder: Path) -> dict[str, Any]:
    from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaTransformer2DModel

    net = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=4,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=WIDTH,
        sample_size=SIDE // 4,
    )
    vae = AutoencoderDC(
        latent_channels=4,
        encoder_block_types=("ResBlock",) * 3,
        decoder_block_types=("ResBlock",) * 3,
        encoder_block_out_channels=(4, 4, 4),
        decoder_block_out_channels=(4, 4, 4),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        scaling_factor=0.4,
    )
    _save(folder, transformer=net, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    return {"embeddings": embeddings("prompt_embeds", "prompt_attention_mask")}


def _sd3(folder: Path) -> dict[str, Any]:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

    net = SD3Transformer2DModel(
        sample_size=SIDE // 4,
        in_channels=16,
        out_channels=16,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        caption_projection_dim=8,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=8,
    )
    vae = _vae(16, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False)
    _save(folder, transformer=net, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    return {"embeddings": embeddings("prompt_embeds", "pooled_prompt_embeds")}


def _flux(folder: Path) -> dict[str, Any]:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    net = FluxTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )
    vae = _vae(16, scaling_factor=0.3611, shift_factor=0.1159)
    _save(folder, transformer=net, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True))
    return {"embeddings": embeddings("prompt_embeds", "pooled_prompt_embeds")}


def _tiny_autoencoder(folder: Path) -> dict[str, Any]:
    from diffusers import AutoencoderTiny, DDPMScheduler

    vae = AutoencoderTiny(
        encoder_block_out_channels=(4, 4, 4),
        decoder_block_out_channels=(4, 4, 4),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
    )
    net = _unet(sample_size=SIDE // 4, in_channels=4, out_channels=4)
    _save(folder, unet=net, vae=vae, scheduler=DDPMScheduler(100, prediction_type="v_prediction"))
    return {}


FAMILIES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "pixels": _pixel,
    "five bands": _many_bands,
    "EDM": _edm,
    "variance exploding": _ve,
    "consistency": _consistency,
    "flow": _flow,
    "LDM": _ldm,
    "tiny autoencoder": _tiny_autoencoder,
    "Stable Diffusion": _stable_diffusion,
    "Stable Diffusion XL": _stable_diffusion_xl,
    "DiT": _dit,
    "PixArt": _pixart,
    "Sana": _sana,
    "SD3": _sd3,
    "Flux": _flux,
}
LATENT = [
    name
    for name in FAMILIES
    if name not in ("pixels", "five bands", "EDM", "variance exploding", "consistency", "flow")
]


def make(name: str, folder: Path) -> dict[str, Any]:
    """Save the family's network with random weights in `folder`; returns the options to load it with."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FAMILIES[name](folder)


def energy_net(folder: Path, side: int = 8) -> Any:
    """Save a tiny energy network for colour images; returns the network."""
    from safetensors.torch import save_file

    from gepc.lab.energy.network import EnergyNet

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = EnergyNet(3, (side, side), (4, 8)).eval()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(net.to_json_string())
    save_file(net.state_dict(), folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    return net

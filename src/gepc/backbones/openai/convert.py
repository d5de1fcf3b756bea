"""From OpenAI's tensors to a diffusers `UNet2DModel`: every tensor placed, none left over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gepc.backbones.openai.agreement import check_options
from gepc.backbones.openai.architecture import (
    ATTENTION,
    DOWN,
    GROUPS,
    RESBLOCK,
    UP,
    Architecture,
    expected_shapes,
    parts,
    read_architecture,
)
from gepc.backbones.openai.options import Options, read_options
from gepc.backbones.patches import MARK, Patches
from gepc.backbones.scheduler import Scheduler
from gepc.backbones.weights import check_shapes, read_tensors, unwrap

if TYPE_CHECKING:
    from diffusers import UNet2DModel

LANDMARKS = ("time_embed.0.weight", "input_blocks.0.0.weight")


@dataclass(frozen=True)
class Converted:
    """A checkpoint in diffusers' terms. The tensors are the file's own memory, those of the attention apart."""

    path: Path
    options: Options
    architecture: Architecture
    config: dict[str, Any]
    patches: Patches
    scheduler: Scheduler
    tensors: dict[str, torch.Tensor]

    def build(self) -> UNet2DModel:
        """The network; its parameters are the converted tensors themselves."""
        from gepc.backbones.diffusers import build_net
        from gepc.backbones.weights import place

        net = build_net(self.config, self.patches)
        place(net, self.tensors)
        return net

    @property
    def caveats(self) -> list[str]:
        """What someone must know who loads the converted folder with plain diffusers; empty where there is nothing."""
        notes = []
        if self.patches.reasons:
            notes.append(
                f"plain diffusers cannot build this net ({', '.join(self.patches.reasons)}) and refuses the folder; "
                "gepc loads it"
            )
        steps = self.scheduler.n_train
        if self.scheduler.rescale_timesteps and steps != 1000:
            notes.append(f"the net is called with t*1000/{steps}: gepc does it, with plain diffusers do it yourself")
        if self.scheduler.timestep_respacing:
            notes.append("the respaced timesteps are kept for gepc; plain diffusers sees the whole schedule")
        return notes


def convert(path: Path, config: str | Path | Mapping[str, Any] | None) -> Converted:
    """Read the checkpoint at `path` with the options `config`: a mapping, a preset's name or a file."""
    options = read_options(config)
    tensors = unwrap(read_tensors(path), LANDMARKS, path)
    net = read_architecture({name: tuple(tensor.shape) for name, tensor in tensors.items()}, path)
    check_shapes(path, tensors, expected_shapes(net))
    check_options(net, options, path)
    patches = find_patches(net, options)
    return Converted(
        path=path,
        options=options,
        architecture=net,
        config=unet_config(net, options, patches),
        patches=patches,
        scheduler=options.scheduler(learned_variance=net.learned_variance),
        tensors=dict(_renamed(net, options, tensors)),
    )


_ENDS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_INSIDE = {
    RESBLOCK: {
        "in_layers.0": "norm1",
        "in_layers.2": "conv1",
        "emb_layers.1": "time_emb_proj",
        "out_layers.0": "norm2",
        "out_layers.3": "conv2",
        "skip_connection": "conv_shortcut",
    },
    ATTENTION: {"norm": "group_norm", "proj_out": "to_out.0"},
    DOWN: {"op": "conv"},
    UP: {"conv": "conv"},
}


def _renamed(
    net: Architecture, options: Options, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under diffusers' name. Names and shapes were checked before: none is missing, none is left over."""
    if net.classes is not None:
        yield "class_embedding.weight", tensors["label_emb.weight"]
    for ending in ("weight", "bias"):
        for source, target in _ENDS.items():
            yield f"{target}.{ending}", tensors[f"{source}.{ending}"]
        for part in parts(net):
            for source, target in _INSIDE[part.kind].items():
                tensor = tensors.get(f"{part.source}.{source}.{ending}")
                if tensor is not None:
                    yield f"{part.target}.{target}.{ending}", tensor[:, :, 0] if tensor.ndim == 3 else tensor
            if part.kind == ATTENTION:
                heads = options.heads(part.outward, decoder=part.in_decoder)
                qkv = split_qkv(tensors[f"{part.source}.qkv.{ending}"], heads, options.use_new_attention_order)
                for name, tensor in zip(("to_q", "to_k", "to_v"), qkv, strict=True):
                    yield f"{part.target}.{name}.{ending}", tensor


def split_qkv(qkv: torch.Tensor, heads: int, new_order: bool) -> tuple[torch.Tensor, ...]:
    """q, k and v of a joint projection (3C, ...), each (C, ...) with one head after the other.

    The 3C rows are ordered [heads, (q, k, v), C/heads]; in the new attention order [(q, k, v), heads, C/heads].
    """
    width = len(qkv) // 3
    rows = qkv.reshape(len(qkv), -1)
    if not new_order:
        rows = rows.reshape(heads, 3, width // heads, -1).transpose(0, 1)
    rows = rows.reshape(3, width, *qkv.shape[1:2])
    return rows[0], rows[1], rows[2]


def find_patches(net: Architecture, options: Options) -> Patches:
    """What this net needs beyond a `UNet2DModel`'s config."""
    heads, sizes = _heads(net, options)
    fixed = len(sizes) > 1 and heads != {1}
    patches = Patches(
        encoder_heads=options.num_heads if fixed else None,
        decoder_heads=options.decoder_heads if fixed else None,
        time_channels=net.model_channels if net.model_channels != net.widths[0] else None,
        plain_resampling=net.resampling == "plain",
    )
    by_width = patches.reasons and not fixed and heads != {1}
    return replace(patches, head_channels=min(sizes)) if by_width else patches


def _heads(net: Architecture, options: Options) -> tuple[set[int], set[int]]:
    """The numbers of heads, and of channels per head, that occur in the net."""
    attentions = [part for part in parts(net) if part.kind == ATTENTION]
    heads = [options.heads(part.outward, decoder=part.in_decoder) for part in attentions]
    return set(heads), {part.outward // count for part, count in zip(attentions, heads, strict=True)}


def unet_config(net: Architecture, options: Options, patches: Patches) -> dict[str, Any]:
    """The network's `config.json`. One that needs patches is marked so that plain diffusers refuses to build it."""
    resblock = net.resampling == "resblock"
    down, up = ("ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D") if resblock else ("DownBlock2D", "UpBlock2D")
    heads, sizes = _heads(net, options)
    head_dim: str | int | None = None if heads == {1} else min(sizes)
    if patches.reasons:
        head_dim = MARK + ", ".join(patches.reasons)
    return {
        "_class_name": "UNet2DModel",
        "sample_size": options.image_size,
        "in_channels": net.channels,
        "out_channels": net.out_channels,
        "block_out_channels": list(net.widths),
        "layers_per_block": net.res_blocks,
        "down_block_types": ["AttnDownBlock2D" if attention else down for attention in net.attention],
        "up_block_types": ["AttnUpBlock2D" if attention else up for attention in reversed(net.attention)],
        "downsample_type": "resnet" if resblock else "conv",
        "upsample_type": "resnet" if resblock else "conv",
        "resnet_time_scale_shift": "scale_shift" if net.scale_shift else "default",
        "attention_head_dim": head_dim,
        "norm_num_groups": GROUPS,
        "attn_norm_num_groups": GROUPS,
        "norm_eps": 1e-5,
        "act_fn": "silu",
        "add_attention": True,
        "dropout": options.dropout,
        "time_embedding_type": "positional",
        "time_embedding_dim": net.time_channels,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "num_class_embeds": net.classes,
    }

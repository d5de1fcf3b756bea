"""The architecture of OpenAI's UNet, read from its tensors, and where diffusers has the same layers.

    input_blocks.0.0                  first convolution
    input_blocks.i.0 [.1]             residual block [attention], `num_res_blocks` per level, then a downsampler
    middle_block.0 .1 .2              residual block, attention, residual block
    output_blocks.i.0 [.1] [.1 or .2] residual block on (input, skip), [attention], [upsampler]
    out.0, out.2                      norm, last convolution

A level ends with a strided convolution (`op`) or with a residual block that pools (`resblock_updown`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gepc.core.errors import BackboneError

Shape = tuple[int, ...]
GROUPS = 32
# layers outside of the blocks: the name in diffusers -> the name at OpenAI
_OUTSIDE = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "class_embedding": "label_emb",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
# layers inside a residual block and inside an attention block
_INSIDE = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
    "group_norm": "norm",
    "to_q": "qkv",
    "to_k": "qkv",
    "to_v": "qkv",
    "to_out.0": "proj_out",
}


@dataclass(frozen=True)
class Architecture:
    """Everything about a net that its tensors show."""

    channels: int
    out_channels: int
    model_channels: int
    widths: tuple[int, ...]  # channels of each level, finest first
    res_blocks: int
    attention: tuple[bool, ...]  # which levels have it
    scale_shift: bool
    resampling: str  # "conv" or "resblock"
    classes: int | None  # None for an unconditional net

    @property
    def learned_variance(self) -> bool:
        """Whether the net predicts a variance as well."""
        return self.out_channels == 2 * self.channels

    @property
    def attentions(self) -> list[tuple[int, bool]]:
        """The width of every kind of attention block, and whether it is in the decoder; the middle is not."""
        levels = [width for width, present in zip(self.widths, self.attention, strict=True) if present]
        return [(self.widths[-1], False), *((width, decoder) for width in levels for decoder in (False, True))]


def layer_names(net: Architecture) -> dict[str, str]:
    """The name of every layer in diffusers -> its name at OpenAI. Some of these layers a net may not have."""
    names = dict(_OUTSIDE)
    for target, source in _block_names(net).items():
        names |= {f"{target}.{layer}": f"{source}.{name}" for layer, name in _INSIDE.items()}
        names[f"{target}.conv"] = f"{source}.op" if source.startswith("input") else f"{source}.conv"
    return names


def _block_names(net: Architecture) -> dict[str, str]:
    """The name of every block in diffusers -> its name at OpenAI."""
    names = {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1"}
    names["mid_block.resnets.1"] = "middle_block.2"
    for level, attention in enumerate(net.attention):
        start, home = 1 + level * (net.res_blocks + 1), f"down_blocks.{level}"
        for layer in range(net.res_blocks):
            names[f"{home}.resnets.{layer}"] = f"input_blocks.{start + layer}.0"
            if attention:
                names[f"{home}.attentions.{layer}"] = f"input_blocks.{start + layer}.1"
        names[f"{home}.downsamplers.0"] = f"input_blocks.{start + net.res_blocks}.0"
        position = len(net.attention) - 1 - level
        start, home = position * (net.res_blocks + 1), f"up_blocks.{position}"
        for layer in range(net.res_blocks + 1):
            names[f"{home}.resnets.{layer}"] = f"output_blocks.{start + layer}.0"
            if attention:
                names[f"{home}.attentions.{layer}"] = f"output_blocks.{start + layer}.1"
        names[f"{home}.upsamplers.0"] = f"output_blocks.{start + net.res_blocks}.{2 if attention else 1}"
    return names


def read_architecture(shapes: Mapping[str, Shape], path: Path) -> Architecture:
    """Read the architecture from a few tensors; `expected_shapes` then says what the others must be."""
    indices = [int(match[1]) for match in map(re.compile(r"output_blocks\.(\d+)\.").match, shapes) if match]
    if not indices:
        raise BackboneError(f"{path} has no output_blocks: it is an encoder (a classifier), not a noise predictor")

    def size_of(name: str, axis: int = 0) -> int:
        if len(shapes.get(name, ())) <= axis:
            raise BackboneError(f"{path} is not an OpenAI UNet: tensor {name} is missing or has no shape")
        return shapes[name][axis]

    def has(index: int, layers: tuple[str, ...]) -> bool:
        return any(f"output_blocks.{index}.{layer}.weight" in shapes for layer in layers)

    count = 1 + max(indices)
    pooled = any(has(index, ("1.in_layers.2", "2.in_layers.2")) for index in range(count))
    upsampler = ("1.in_layers.2", "2.in_layers.2") if pooled else ("1.conv", "2.conv")
    ends = [index for index in range(count) if has(index, upsampler)]
    levels = len(ends) + 1
    res_blocks = count // levels - 1
    if count % levels or res_blocks < 1 or ends != [(i + 1) * (res_blocks + 1) - 1 for i in range(levels - 1)]:
        raise BackboneError(
            f"{path} is not an OpenAI UNet: its {count} output_blocks do not fall into {levels} levels of equal depth "
            f"(sizes change after output_blocks {', '.join(map(str, ends)) or 'none'})"
        )
    finest_first = [count - 1, *reversed(ends)]
    widths = tuple(size_of(f"output_blocks.{index}.0.out_layers.0.bias") for index in finest_first)
    for width in widths:
        if width % GROUPS:
            raise BackboneError(f"{path}: a level has {width} channels, not a multiple of {GROUPS}")
    return Architecture(
        channels=size_of("input_blocks.0.0.weight", 1),
        out_channels=size_of("out.2.bias"),
        model_channels=size_of("time_embed.0.weight", 1),
        widths=widths,
        res_blocks=res_blocks,
        attention=tuple(has(index, ("1.qkv",)) for index in finest_first),
        scale_shift=size_of("middle_block.0.emb_layers.1.bias") == 2 * size_of("middle_block.0.out_layers.0.bias"),
        resampling="resblock" if pooled else "conv",
        classes=size_of("label_emb.weight") if "label_emb.weight" in shapes else None,
    )

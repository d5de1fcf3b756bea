"""The architecture of OpenAI's UNet, from the names and shapes of its tensors.

    input_blocks.0.0                  first convolution
    input_blocks.i.0 [.1]             residual block [attention], `num_res_blocks` per level, then a downsampler
    middle_block.0 .1 .2              residual block, attention, residual block
    output_blocks.i.0 [.1] [.1 or .2] residual block on (input, skip), [attention], [upsampler]
    out.0, out.2                      norm, last convolution

A level ends with a strided convolution (`op`) or with a residual block that pools (`resblock_updown`).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gepc.core.errors import BackboneError

T = TypeVar("T")
Shape = tuple[int, ...]
GROUPS = 32
RESBLOCK, ATTENTION, DOWN, UP = "resblock", "attention", "op", "conv_up"
_KINDS = {
    **dict.fromkeys(("norm", "qkv", "proj_out"), ATTENTION),
    **dict.fromkeys(("in_layers", "emb_layers", "out_layers", "skip_connection"), RESBLOCK),
    "op": DOWN,
    "conv": UP,
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
    def time_channels(self) -> int:
        """Width of the embedded timestep."""
        return 4 * self.model_channels

    @property
    def learned_variance(self) -> bool:
        """Whether the net predicts a variance as well."""
        return self.out_channels == 2 * self.channels


@dataclass(frozen=True)
class UNetBlock:
    """One block of the network: its name at OpenAI and in diffusers, its kind, channels in and out."""

    source: str
    target: str
    kind: str
    inward: int
    outward: int

    @property
    def in_decoder(self) -> bool:
        """Whether it comes after the middle."""
        return self.source.startswith("output_blocks")


def blocks_of(net: Architecture) -> Iterator[UNetBlock]:
    """The blocks in the order of computation, without first and last convolution and time embedding."""
    skips = [net.widths[0]]
    width, index, last = net.widths[0], 1, len(net.widths) - 1
    for level, out in enumerate(net.widths):
        home = f"down_blocks.{level}"
        for layer in range(net.res_blocks):
            yield UNetBlock(f"input_blocks.{index}.0", f"{home}.resnets.{layer}", RESBLOCK, width, out)
            width = out
            if net.attention[level]:
                yield UNetBlock(f"input_blocks.{index}.1", f"{home}.attentions.{layer}", ATTENTION, out, out)
            skips.append(out)
            index += 1
        if level < last:
            kind = RESBLOCK if net.resampling == "resblock" else DOWN
            yield UNetBlock(f"input_blocks.{index}.0", f"{home}.downsamplers.0", kind, out, out)
            skips.append(out)
            index += 1
    yield UNetBlock("middle_block.0", "mid_block.resnets.0", RESBLOCK, width, width)
    yield UNetBlock("middle_block.1", "mid_block.attentions.0", ATTENTION, width, width)
    yield UNetBlock("middle_block.2", "mid_block.resnets.1", RESBLOCK, width, width)
    index = 0
    for level in range(last, -1, -1):
        home, out = f"up_blocks.{last - level}", net.widths[level]
        for layer in range(net.res_blocks + 1):
            yield UNetBlock(f"output_blocks.{index}.0", f"{home}.resnets.{layer}", RESBLOCK, width + skips.pop(), out)
            width = out
            if net.attention[level]:
                yield UNetBlock(f"output_blocks.{index}.1", f"{home}.attentions.{layer}", ATTENTION, out, out)
            if level and layer == net.res_blocks:
                position = 2 if net.attention[level] else 1
                kind = RESBLOCK if net.resampling == "resblock" else UP
                yield UNetBlock(f"output_blocks.{index}.{position}", f"{home}.upsamplers.0", kind, out, out)
            index += 1


def expected_shapes(net: Architecture) -> dict[str, Shape]:
    """The name and shape of every tensor of such a net, in the order of computation."""
    time, width = net.time_channels, net.widths[0]
    shapes = _layer("time_embed.0", time, net.model_channels) | _layer("time_embed.2", time, time)
    if net.classes is not None:
        shapes["label_emb.weight"] = (net.classes, time)
    shapes |= _layer("input_blocks.0.0", width, net.channels, 3, 3)
    for block in blocks_of(net):
        shapes |= {f"{block.source}.{name}": shape for name, shape in _block_shapes(block, net).items()}
    return shapes | _layer("out.0", width) | _layer("out.2", net.out_channels, width, 3, 3)


def _block_shapes(block: UNetBlock, net: Architecture) -> dict[str, Shape]:
    a, b = block.inward, block.outward
    if block.kind == ATTENTION:
        return _layer("norm", b) | _layer("qkv", 3 * b, b, 1) | _layer("proj_out", b, b, 1)
    if block.kind in (DOWN, UP):
        return _layer("op" if block.kind == DOWN else "conv", b, b, 3, 3)
    shapes = _layer("in_layers.0", a) | _layer("in_layers.2", b, a, 3, 3)
    shapes |= _layer("emb_layers.1", (1 + net.scale_shift) * b, net.time_channels)
    shapes |= _layer("out_layers.0", b) | _layer("out_layers.3", b, b, 3, 3)
    return shapes if a == b else shapes | _layer("skip_connection", b, a, 1, 1)


def _layer(name: str, *shape: int) -> dict[str, Shape]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def read_architecture(shapes: Mapping[str, Shape], path: Path) -> Architecture:
    """Read the architecture. Most tensors must agree on a number, so that a single wrong tensor does not decide it."""
    if not any(name.startswith("output_blocks.") for name in shapes):
        raise BackboneError(f"{path} has no output_blocks: it is an encoder (a classifier), not a noise predictor")
    shapes = {name: shape for name, shape in shapes.items() if shape}
    matches = (re.match(r"((?:input_blocks|output_blocks)\.\d+\.\d+)\.(\w+)", name) for name in shapes)
    kinds = {match[1]: _KINDS.get(match[2], "other") for match in matches if match}
    levels, res_blocks, resampling = _levels(kinds, path)
    widths, attention = [], []
    for level in range(levels):
        down, up = 1 + level * (res_blocks + 1), (levels - 1 - level) * (res_blocks + 1)
        encoder = [f"input_blocks.{down + layer}" for layer in range(res_blocks)]
        decoder = [f"output_blocks.{up + layer}" for layer in range(res_blocks + 1)]
        tensors = ("in_layers.2.weight", "in_layers.2.bias", "out_layers.0.weight", "out_layers.3.bias")
        names = [f"{block}.0.{tensor}" for block in encoder + decoder for tensor in tensors]
        lengths = [shapes[name][0] for name in names if name in shapes]
        widths.append(_vote(lengths, f"the width of level {level}", path))
        attention.append(any(kinds.get(f"{block}.1") == ATTENTION for block in encoder + decoder))
    embeddings = [shape[0] for name, shape in shapes.items() if re.fullmatch(r"time_embed\.[02]\.(bias|weight)", name)]
    norms = {name: name.replace("emb_layers.1", "out_layers.0") for name in shapes if ".emb_layers.1.bias" in name}
    doubled = (shapes[name][0] == 2 * shapes[norm][0] for name, norm in norms.items() if norm in shapes)
    channels, out_channels = _image_channels(shapes, path)
    return Architecture(
        channels=channels,
        out_channels=out_channels,
        model_channels=_vote(embeddings, "num_channels", path) // 4,
        widths=tuple(widths),
        res_blocks=res_blocks,
        attention=tuple(attention),
        scale_shift=_vote(doubled, "use_scale_shift_norm", path),
        resampling=resampling,
        classes=shapes["label_emb.weight"][0] if "label_emb.weight" in shapes else None,
    )


def _vote(values: Iterable[T], what: str, path: Path) -> T:
    ranked = Counter(values).most_common(1)
    if not ranked:
        raise BackboneError(f"{path} is not an OpenAI UNet: no tensor shows {what}")
    return ranked[0][0]


def _levels(kinds: Mapping[str, str], path: Path) -> tuple[int, int, str]:
    """The number of levels, the residual blocks per level, and how sizes change."""
    blocks: set[int] = set()
    ups: dict[int, str] = {}
    for name, kind in kinds.items():
        section, index, position = name.split(".")
        if section == "output_blocks":
            blocks.add(int(index))
            if position != "0" and kind in (UP, RESBLOCK):
                ups[int(index)] = kind
    ends, resampling = sorted(ups), "resblock" if RESBLOCK in ups.values() else "conv"
    count, levels = 1 + max(blocks, default=0), len(ends) + 1
    res_blocks = count // levels - 1
    if count % levels or res_blocks < 1 or ends != [(i + 1) * (res_blocks + 1) - 1 for i in range(levels - 1)]:
        raise BackboneError(
            f"{path} is not an OpenAI UNet: its {count} output_blocks do not fall into {levels} levels of equal depth "
            f"(sizes change after output_blocks {', '.join(map(str, ends)) or 'none'})"
        )
    return levels, res_blocks, resampling


def _image_channels(shapes: Mapping[str, Shape], path: Path) -> tuple[int, int]:
    first, last = shapes.get("input_blocks.0.0.weight"), shapes.get("out.2.bias") or shapes.get("out.2.weight")
    if last is None:
        width = shapes.get("out.0.bias", ("M",))[0]
        raise BackboneError(f"{path}: tensor out.2.weight is missing, expected shape (C or 2C, {width}, 3, 3)")
    if first is None or len(first) != 4:
        width = shapes.get("input_blocks.0.0.bias", ("M",))[0]
        problem = "is missing" if first is None else f"has shape {first}"
        raise BackboneError(f"{path}: tensor input_blocks.0.0.weight {problem}, expected shape ({width}, C, 3, 3)")
    if first[1] == last[0] == 6 or last[0] not in (first[1], 2 * first[1]):
        raise BackboneError(
            f"{path}: input_blocks.0.0.weight takes {first[1]} channels and out.2.weight answers {last[0]}; a noise "
            "predictor answers C or 2C channels to C (an upsampler takes a second image and cannot serve)"
        )
    return first[1], last[0]

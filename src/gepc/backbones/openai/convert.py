"""From OpenAI's tensors to a diffusers `UNet2DModel`, and to a folder that diffusers can load.

The architecture is read from the tensors:

    input_blocks.0.0                  first convolution
    input_blocks.i.0 [.1]             residual block [attention], `num_res_blocks` per level, then a downsampler
    middle_block.0 .1 .2              residual block, attention, residual block
    output_blocks.i.0 [.1] [.1 or .2] residual block on (input, skip), [attention], [upsampler]
    out.0, out.2                      norm, last convolution

A level ends with a strided convolution (`op`) or with a residual block that pools (`resblock_updown`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import safetensors.torch
import torch

from gepc.backbones import weights
from gepc.backbones.openai.options import PRESETS, Options, read_options
from gepc.backbones.schedule import Scheduler
from gepc.backbones.weights import Patches, Shape
from gepc.core.errors import BackboneError, InputError, OptionError, StorageError, raising
from gepc.core.files import replacing, replacing_folder, sha256, write_json
from gepc.core.options import read_yaml

LANDMARKS = ("time_embed.0.weight", "input_blocks.0.0.weight")
PROJECTIONS = ("to_q", "to_k", "to_v")
GROUPS = 32
LAYERS: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_name("layers.yaml"))


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
    names = dict(LAYERS["outside"])
    for target, source in _block_names(net).items():
        names |= {f"{target}.{layer}": f"{source}.{name}" for layer, name in LAYERS["inside"].items()}
        names[f"{target}.conv"] = f"{source}.op" if source.startswith("input") else f"{source}.conv"
    return names


def _block_names(net: Architecture) -> dict[str, str]:
    """The name of every block in diffusers -> its name at OpenAI."""
    names = {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1"}
    names["mid_block.resnets.1"] = "middle_block.2"
    count = net.res_blocks
    for level, attention in enumerate(net.attention):
        kinds = ("resnets", "attentions") if attention else ("resnets",)
        position = len(net.attention) - 1 - level
        down, up = 1 + level * (count + 1), position * (count + 1)
        for place, kind in enumerate(kinds):
            names |= {f"down_blocks.{level}.{kind}.{i}": f"input_blocks.{down + i}.{place}" for i in range(count)}
            names |= {f"up_blocks.{position}.{kind}.{i}": f"output_blocks.{up + i}.{place}" for i in range(count + 1)}
        names[f"down_blocks.{level}.downsamplers.0"] = f"input_blocks.{down + count}.0"
        names[f"up_blocks.{position}.upsamplers.0"] = f"output_blocks.{up + count}.{len(kinds)}"
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
        ends_text = ", ".join(map(str, ends)) or "none"
        reason = f"its {count} output_blocks do not fall into {levels} equal levels (sizes change after {ends_text})"
        raise BackboneError(f"{path} is not an OpenAI UNet: {reason}")
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


@dataclass(frozen=True)
class Converted:
    """A checkpoint in diffusers' terms. The tensors are the file's own memory, except those of the attention."""

    path: Path
    architecture: Architecture
    config: dict[str, Any]
    patches: Patches
    scheduler: Scheduler
    tensors: dict[str, torch.Tensor]

    def build(self) -> diffusers.UNet2DModel:
        """The network; its parameters are the converted tensors themselves."""
        return weights.assign_weights(weights.build_net(self.config, self.patches), self.tensors)

    @property
    def caveats(self) -> list[str]:
        """Notes for users of plain diffusers about the converted folder; often empty."""
        notes = []
        if self.patches.reasons:
            notes.append(
                f"plain diffusers cannot build this net ({', '.join(self.patches.reasons)}) and refuses the folder; "
                "gepc loads it"
            )
        steps = self.scheduler.n_train
        if self.scheduler.rescale_timesteps and steps != 1000:
            notes.append(f"the net is called with t*1000/{steps}: gepc does it, with plain diffusers do it yourself")
        return notes


def convert(path: Path, config: str | Path | Mapping[str, Any] | None) -> Converted:
    """Read the checkpoint at `path` with the options `config`: a mapping, a preset's name or a file."""
    options = read_options(config)
    tensors = weights.unwrap(weights.read_tensors(path), LANDMARKS, path)
    net = read_architecture({name: tuple(tensor.shape) for name, tensor in tensors.items()}, path)
    weights.check_shapes(path, tensors, expected_shapes(net))
    with raising(OptionError, f"{path}: {{error}}", OptionError):
        check_options(net, options)
    patches = find_patches(net, options)
    return Converted(
        path=path,
        architecture=net,
        config=unet_config(net, options, patches),
        patches=patches,
        scheduler=options.scheduler(learned_variance=net.learned_variance),
        tensors=dict(_renamed(net, options, tensors)),
    )


def expected_shapes(net: Architecture) -> dict[str, Shape]:
    """The name and shape of every tensor of such a net at OpenAI, from the network that diffusers builds."""
    options = Options(num_heads=1)  # heads change no shape
    patches = find_patches(net, options)
    names, shapes = layer_names(net), dict[str, Shape]()
    for target, tensor in weights.build_net(unet_config(net, options, patches), patches).state_dict().items():
        layer, _, ending = target.rpartition(".")
        shape = tuple(tensor.shape)
        if ".attentions." in layer and len(shape) == 2:  # a linear layer here, a convolution of width 1 at OpenAI
            shape = (*shape, 1)
        if layer.endswith(PROJECTIONS):
            shape = (3 * shape[0], *shape[1:])
        shapes[f"{names[layer]}.{ending}"] = shape
    return shapes


def _renamed(
    net: Architecture, options: Options, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under diffusers' name. Names and shapes were checked before: none is missing, none is left over."""
    for target, source in layer_names(net).items():
        for ending in ("weight", "bias"):
            tensor = tensors.get(f"{source}.{ending}")
            if tensor is None:
                continue
            if target.endswith(PROJECTIONS):
                heads = options.heads(len(tensor) // 3, decoder=source.startswith("output_blocks"))
                part = PROJECTIONS.index(target[-4:])
                tensor = split_qkv(tensor, part, heads, new_order=options.use_new_attention_order)
            yield f"{target}.{ending}", tensor[:, :, 0] if tensor.ndim == 3 else tensor


def split_qkv(qkv: torch.Tensor, part: int, heads: int, *, new_order: bool) -> torch.Tensor:
    """q, k or v (part 0, 1 or 2) of a joint projection (3C, ...), as (C, ...) with one head after the other.

    The 3C rows are ordered [heads, (q, k, v), C/heads]; in the new attention order [(q, k, v), heads, C/heads].
    """
    groups = 1 if new_order else heads
    width = len(qkv) // 3
    rows = qkv.reshape(groups, 3, width // groups, *qkv.shape[1:])
    return rows[:, part].reshape(width, *qkv.shape[1:])


def find_patches(net: Architecture, options: Options) -> Patches:
    """The changes that this network needs in addition to the config of a `UNet2DModel`."""
    time_channels = net.model_channels if net.model_channels != net.widths[0] else None
    per_head = _channels_per_head(net, options)
    if per_head is not None and len(per_head) > 1:
        return Patches(options.num_heads, options.decoder_heads, time_channels)
    if per_head is not None and time_channels is not None:
        return Patches(time_channels=time_channels, head_channels=min(per_head))
    return Patches(time_channels=time_channels)


def _channels_per_head(net: Architecture, options: Options) -> set[int] | None:
    """The numbers of channels per head that occur in the net; None if every attention has one head."""
    heads = {place: options.heads(place[0], decoder=place[1]) for place in net.attentions}
    if set(heads.values()) == {1}:
        return None
    return {width // count for (width, _), count in heads.items()}


def unet_config(net: Architecture, options: Options, patches: Patches) -> dict[str, Any]:
    """The network's `config.json`. One that needs patches is marked so that plain diffusers refuses to build it."""
    resblock = net.resampling == "resblock"
    down, up = ("ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D") if resblock else ("DownBlock2D", "UpBlock2D")
    per_head = _channels_per_head(net, options)
    head_dim: str | int | None = min(per_head) if per_head else None
    if patches.reasons:
        head_dim = weights.MARK + ", ".join(patches.reasons)
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
        "time_embedding_type": "positional",
        "time_embedding_dim": 4 * net.model_channels,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "num_class_embeds": net.classes,
    }


def save_folder(converted: Converted, out: Path) -> None:
    """Write `config.json`, `scheduler_config.json`, the weights in float32 and `gepc.json`; all of them or none.

    `gepc.json` has what only gepc reads: patches, OpenAI's timesteps, and the origin of the weights.

    If plain diffusers computes the same function there is a `model_index.json` too, and `DDPMPipeline` can load it.
    """
    version = {"_diffusers_version": diffusers.__version__}
    tensors = {name: tensor.float().contiguous() for name, tensor in converted.tensors.items()}
    extras = {
        "family": "openai",
        "patches": converted.patches.to_dict(),
        "scheduler": {"rescale_timesteps": converted.scheduler.rescale_timesteps},
        "converted_from": {"file": converted.path.name, "sha256": sha256(converted.path)},
    }
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} already exists; choose another folder, or remove it first")
    with replacing_folder(out) as folder:
        write_json(folder / "config.json", {**converted.config, **version})
        scheduler = {"_class_name": "DDPMScheduler", **version, **converted.scheduler.to_config()}
        write_json(folder / "scheduler_config.json", scheduler)
        write_json(folder / weights.EXTRAS, extras)
        if not converted.caveats and converted.architecture.classes is None:
            parts = {"scheduler": ["diffusers", "DDPMScheduler"], "unet": ["diffusers", "UNet2DModel"]}
            write_json(folder / "model_index.json", {"_class_name": "DDPMPipeline", **version, **parts})
        path = folder / "diffusion_pytorch_model.safetensors"
        with (
            raising(StorageError, f"cannot write {path}: {{error}}", safetensors.SafetensorError),
            replacing(path) as draft,
        ):
            safetensors.torch.save_file(tensors, draft, metadata={"format": "pt"})


def check_options(net: Architecture, options: Options) -> None:
    """Raise `OptionError` for an option that is missing or that the tensors contradict."""
    if options.missing:
        missing, presets = ", ".join(options.missing), ", ".join(PRESETS)
        raise OptionError(f"the tensors do not show {missing}; give them in config, or name a preset ({presets})")
    shown = {
        "num_channels": net.model_channels,
        "num_res_blocks": net.res_blocks,
        "multipliers": tuple(width / net.model_channels for width in net.widths),
        "class_cond": net.classes is not None,
        "learn_sigma": net.learned_variance,
        "use_scale_shift_norm": net.scale_shift,
    }
    halvings = len(net.widths) - 1
    if halvings:
        shown["resblock_updown"] = net.resampling == "resblock"
    for name, value in shown.items():
        said = getattr(options, name)
        if said not in (None, value):
            option = name.replace("multipliers", "channel_mult")
            raise OptionError(f"{option}={said} contradicts the tensors, which say {value}")
    if (options.image_size or 0) % 2**halvings:
        raise OptionError(f"image_size={options.image_size} cannot be halved {halvings} times, once per level")
    for width, decoder in net.attentions:
        options.heads(width, decoder=decoder)

"""From OpenAI's tensors to a diffusers `UNet2DModel`, and to a folder that diffusers can load."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import safetensors.torch
import torch

from gepc.backbones.openai import architecture as unet
from gepc.backbones.openai.architecture import ATTENTION, DOWN, GROUPS, RESBLOCK, UP, Architecture, UNetBlock
from gepc.backbones.openai.options import PRESETS, Options, read_options
from gepc.backbones.schedule import Scheduler
from gepc.backbones.weights import EXTRAS, MARK, Patches, assign_weights, build_net, check_shapes, read_tensors, unwrap
from gepc.core.errors import BackboneError, InputError, OptionError, StorageError, raising
from gepc.core.files import replacing, replacing_folder, sha256, write_json

LANDMARKS = ("time_embed.0.weight", "input_blocks.0.0.weight")


@dataclass(frozen=True)
class Converted:
    """A checkpoint in diffusers' terms. The tensors are the file's own memory, except those of the attention."""

    path: Path
    options: Options
    architecture: Architecture
    config: dict[str, Any]
    patches: Patches
    scheduler: Scheduler
    tensors: dict[str, torch.Tensor]

    def build(self) -> diffusers.UNet2DModel:
        """The network; its parameters are the converted tensors themselves."""
        return assign_weights(build_net(self.config, self.patches), self.tensors)

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
    tensors = unwrap(read_tensors(path), LANDMARKS, path)
    net = unet.read_architecture({name: tuple(tensor.shape) for name, tensor in tensors.items()}, path)
    check_shapes(path, tensors, unet.expected_shapes(net))
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
        for block in unet.blocks_of(net):
            for source, target in _INSIDE[block.kind].items():
                tensor = tensors.get(f"{block.source}.{source}.{ending}")
                if tensor is not None:
                    yield f"{block.target}.{target}.{ending}", tensor[:, :, 0] if tensor.ndim == 3 else tensor
            if block.kind == ATTENTION:
                heads = options.heads(block.outward, decoder=block.in_decoder)
                qkv = split_qkv(tensors[f"{block.source}.qkv.{ending}"], heads, options.use_new_attention_order)
                for name, tensor in zip(("to_q", "to_k", "to_v"), qkv, strict=True):
                    yield f"{block.target}.{name}.{ending}", tensor


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
    """The changes that this network needs in addition to the config of a `UNet2DModel`."""
    heads, sizes = _heads(net, options)
    fixed = len(sizes) > 1 and heads != {1}
    patches = Patches(
        encoder_heads=options.num_heads if fixed else None,
        decoder_heads=options.decoder_heads if fixed else None,
        time_channels=net.model_channels if net.model_channels != net.widths[0] else None,
    )
    by_width = patches.reasons and not fixed and heads != {1}
    return replace(patches, head_channels=min(sizes)) if by_width else patches


def _heads(net: Architecture, options: Options) -> tuple[set[int], set[int]]:
    """The numbers of heads, and of channels per head, that occur in the net."""
    attentions = [block for block in unet.blocks_of(net) if block.kind == ATTENTION]
    heads = [options.heads(block.outward, decoder=block.in_decoder) for block in attentions]
    return set(heads), {block.outward // count for block, count in zip(attentions, heads, strict=True)}


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


def save_folder(converted: Converted, out: Path) -> None:
    """Write `config.json`, `scheduler_config.json`, the weights in float32 and `gepc.json`; all of them or none.

    If plain diffusers computes the same function there is a `model_index.json` too, and `DDPMPipeline` can load it.
    """
    version = {"_diffusers_version": diffusers.__version__}
    tensors = {name: tensor.float().contiguous() for name, tensor in converted.tensors.items()}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} already exists; choose another folder, or remove it first")
    with replacing_folder(out) as folder:
        write_json(folder / "config.json", {**converted.config, **version})
        scheduler = {"_class_name": "DDPMScheduler", **version, **converted.scheduler.to_config()}
        write_json(folder / "scheduler_config.json", scheduler)
        write_json(folder / EXTRAS, _extras(converted))
        if not converted.caveats and converted.architecture.classes is None:
            parts = {"scheduler": ["diffusers", "DDPMScheduler"], "unet": ["diffusers", "UNet2DModel"]}
            write_json(folder / "model_index.json", {"_class_name": "DDPMPipeline", **version, **parts})
        path = folder / "diffusion_pytorch_model.safetensors"
        with (
            raising(StorageError, f"cannot write {path}: {{error}}", safetensors.SafetensorError),
            replacing(path) as draft,
        ):
            safetensors.torch.save_file(tensors, draft, metadata={"format": "pt"})


def _extras(converted: Converted) -> dict[str, Any]:
    """The values that only gepc reads: patches, OpenAI's timesteps, and the origin of the weights."""
    scheduler, options = converted.scheduler, converted.options
    defaults = dataclasses.asdict(Options())
    said = {name: value for name, value in dataclasses.asdict(options).items() if value != defaults[name]}
    return {
        "family": "openai",
        "patches": converted.patches.to_dict(),
        "scheduler": {"rescale_timesteps": scheduler.rescale_timesteps},
        "converted_from": {"file": converted.path.name, "sha256": sha256(converted.path), "options": said},
    }


def check_options(net: Architecture, options: Options, path: Path) -> None:
    """Raise `OptionError` for an option that is missing or that the tensors contradict."""
    if options.missing:
        fitting = ", ".join(fitting_presets(net)) or "none of them"
        raise OptionError(
            f"{path}: the tensors do not show {', '.join(options.missing)}; give them in config, or name a preset "
            f"(its tensors fit {fitting})"
        )
    check_agreement(net, options, path)


def fitting_presets(net: Architecture) -> list[str]:
    """The presets that the tensors do not contradict."""
    fitting = []
    for name in PRESETS:
        with contextlib.suppress(OptionError, BackboneError):
            check_agreement(net, read_options(name), Path(name))
            fitting.append(name)
    return fitting


def check_agreement(net: Architecture, options: Options, path: Path) -> None:
    """Raise `OptionError` for an option that the tensors contradict."""
    for option, shown, said in _facts(net, options):
        if said is not None and said != shown:
            given = getattr(options, option)
            raise OptionError(f"{path}: {option}={given!r} contradicts the tensors, which say {_text(shown)}")
    halvings = len(net.widths) - 1
    if (options.image_size or 0) % 2**halvings:
        raise OptionError(f"{path}: image_size={options.image_size} cannot be halved {halvings} times, once per level")
    for block in unet.blocks_of(net):
        if block.outward % GROUPS:
            raise BackboneError(f"{path}: {block.source} has {block.outward} channels, not a multiple of {GROUPS}")
        if block.kind == ATTENTION:
            _check_heads(block, options, path)


def _facts(net: Architecture, options: Options) -> list[tuple[str, Any, Any]]:
    """Options as the tensors show them, and as the user says them (None: unsaid)."""
    size = options.image_size or 0
    sizes = {size // 2**level for level, present in enumerate(net.attention) if present}
    said = None
    if size and options.attention_sizes is not None:  # as OpenAI's scripts take them: by the factors image_size // r
        factors = {size // int(resolution) for resolution in options.attention_sizes if resolution >= 1}
        said = {size // 2**level for level in range(len(net.widths)) if 2**level in factors}
    facts: list[tuple[str, Any, Any]] = [
        ("num_channels", net.model_channels, options.num_channels),
        ("num_res_blocks", net.res_blocks, options.num_res_blocks),
        ("channel_mult", tuple(width / net.model_channels for width in net.widths), options.multipliers),
        ("attention_resolutions", sizes, said),
        ("class_cond", net.classes is not None, options.class_cond),
        ("learn_sigma", net.learned_variance, options.learn_sigma),
        ("use_scale_shift_norm", net.scale_shift, options.use_scale_shift_norm),
    ]
    if len(net.widths) > 1:
        facts.append(("resblock_updown", net.resampling == "resblock", options.resblock_updown))
    return facts


def _check_heads(block: UNetBlock, options: Options, path: Path) -> None:
    width = block.outward
    if options.head_channels is not None:
        name, value = "num_head_channels", options.head_channels
    else:
        own = block.in_decoder and options.decoder_heads != options.num_heads
        name, value = "num_heads_upsample" if own else "num_heads", options.heads(width, decoder=block.in_decoder)
    if value < 1 or width % value:
        raise OptionError(
            f"{path}: {name}={value} does not divide the {width} channels of {block.source}.qkv.weight, "
            f"shape {(3 * width, width, 1)}"
        )


def _text(shown: Any) -> str:
    if isinstance(shown, set):
        shown = tuple(sorted(shown, reverse=True))
    if isinstance(shown, tuple):
        return ",".join(f"{value:g}" for value in shown) or "none"
    return str(shown)

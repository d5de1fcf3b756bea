"""Whether what a user says about a checkpoint agrees with its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gepc.backbones.openai.architecture import ATTENTION, GROUPS, Architecture, UNetBlock, blocks_of, expected_shapes
from gepc.backbones.openai.options import PRESETS, Options, read_options
from gepc.core.errors import BackboneError, OptionError


def check_options(net: Architecture, options: Options, path: Path) -> None:
    """Raise `OptionError` for an option that is missing or that the tensors contradict, naming the tensor."""
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
        try:
            check_agreement(net, read_options(name), Path(name))
        except (OptionError, BackboneError):
            continue
        fitting.append(name)
    return fitting


def check_agreement(net: Architecture, options: Options, path: Path) -> None:
    """Raise `OptionError` for an option that the tensors contradict."""
    for option, shown, said, witness in _facts(net, options):
        if said is not None and said != shown:
            shape = expected_shapes(net).get(witness)
            seen = f"{witness} has shape {shape}" if shape else f"there is no {witness}"
            raise OptionError(
                f"{path}: {option}={getattr(options, option)!r} contradicts the tensors, "
                f"which say {_text(shown)}: {seen}"
            )
    halvings = len(net.widths) - 1
    if (options.image_size or 0) % 2**halvings:
        raise OptionError(f"{path}: image_size={options.image_size} cannot be halved {halvings} times, once per level")
    for block in blocks_of(net):
        if block.outward % GROUPS:
            raise BackboneError(f"{path}: {block.source} has {block.outward} channels, not a multiple of {GROUPS}")
        if block.kind == ATTENTION:
            _check_heads(block, options, path)


def _facts(net: Architecture, options: Options) -> list[tuple[str, Any, Any, str]]:
    """Options as the tensors show them, as the user says them (None: unsaid), and a tensor that shows them."""
    size = options.image_size or 0
    first = "input_blocks.1.0"
    deepest = f"input_blocks.{len(net.widths) * (net.res_blocks + 1) - 1}.0.out_layers.3.weight"
    inside = "in_layers.2" if net.resampling == "resblock" else "op"
    resampler = f"input_blocks.{net.res_blocks + 1}.0.{inside}.weight"
    attention = next(block.source for block in blocks_of(net) if block.kind == ATTENTION)
    sizes = {size // 2**level for level, present in enumerate(net.attention) if present}
    several = len(net.widths) > 1
    facts: list[tuple[str, Any, Any, str]] = [
        ("num_channels", net.model_channels, options.num_channels, "time_embed.0.weight"),
        ("num_res_blocks", net.res_blocks, options.num_res_blocks, resampler if several else deepest),
        ("channel_mult", tuple(width / net.model_channels for width in net.widths), options.multipliers, deepest),
        ("attention_resolutions", sizes, _attention_sizes(net, options), f"{attention}.qkv.weight"),
        ("class_cond", net.classes is not None, options.class_cond, "label_emb.weight"),
        ("learn_sigma", net.learned_variance, options.learn_sigma, "out.2.weight"),
        ("use_scale_shift_norm", net.scale_shift, options.use_scale_shift_norm, f"{first}.emb_layers.1.weight"),
    ]
    if several:
        facts.append(("resblock_updown", net.resampling == "resblock", options.resblock_updown, resampler))
    if several and net.resampling != "resblock":
        facts.append(("conv_resample", net.resampling == "conv", options.conv_resample, resampler))
    return facts


def _attention_sizes(net: Architecture, options: Options) -> set[int] | None:
    """The given resolutions as OpenAI's scripts take them: a level has attention if its factor is image_size // r."""
    if options.attention_sizes is None or options.image_size is None:
        return None
    factors = {options.image_size // int(size) for size in options.attention_sizes if size >= 1}
    return {options.image_size // 2**level for level in range(len(net.widths)) if 2**level in factors}


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

"""What a user says of a checkpoint against what its tensors show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gepc.backbones.openai.architecture import ATTENTION, GROUPS, Architecture, Part, expected_shapes, parts
from gepc.backbones.openai.options import Options, read_options
from gepc.backbones.openai.presets import PRESETS
from gepc.core.errors import BackboneError, OptionError


@dataclass(frozen=True)
class Fact:
    """An option as the tensors show it, as the user says it (None: unsaid), and the tensor that witnesses it."""

    option: str
    shown: Any
    said: Any
    witness: str


def check_options(net: Architecture, options: Options, path: Path) -> None:
    """Refuse an option that is missing or that the tensors contradict, naming the tensor and its shape."""
    if options.missing:
        raise OptionError(
            f"{path}: the tensors do not show {', '.join(options.missing)}; give them in config, or name a preset "
            f"({_fitting_presets(net)})"
        )
    check_agreement(net, options, path)


def check_agreement(net: Architecture, options: Options, path: Path) -> None:
    """Refuse an option that the tensors contradict."""
    for fact in _facts(net, options):
        if fact.said is not None and fact.said != fact.shown:
            shape = expected_shapes(net).get(fact.witness)
            seen = f"{fact.witness} has shape {shape}" if shape else f"there is no {fact.witness}"
            raise OptionError(
                f"{path}: {fact.option}={getattr(options, fact.option)!r} contradicts the tensors, "
                f"which say {_text(fact.shown)}: {seen}"
            )
    halvings = len(net.widths) - 1
    if (options.image_size or 0) % 2**halvings:
        raise OptionError(f"{path}: image_size={options.image_size} cannot be halved {halvings} times, once per level")
    for part in parts(net):
        if part.outward % GROUPS:
            raise BackboneError(f"{path}: {part.source} has {part.outward} channels, not a multiple of {GROUPS}")
        if part.kind == ATTENTION:
            _check_heads(part, options, path)


def _facts(net: Architecture, options: Options) -> list[Fact]:
    size = options.image_size or 0
    first = "input_blocks.1.0"
    deepest = f"input_blocks.{len(net.widths) * (net.res_blocks + 1) - 1}.0.out_layers.3.weight"
    inside = "in_layers.2" if net.resampling == "resblock" else "op"
    resampler = f"input_blocks.{net.res_blocks + 1}.0.{inside}.weight"
    attention = next(part.source for part in parts(net) if part.kind == ATTENTION)
    sizes = {size // 2**level for level, present in enumerate(net.attention) if present}
    several = len(net.widths) > 1
    facts = [
        Fact("num_channels", net.model_channels, options.num_channels, "time_embed.0.weight"),
        Fact("num_res_blocks", net.res_blocks, options.num_res_blocks, resampler if several else deepest),
        Fact("channel_mult", tuple(width / net.model_channels for width in net.widths), options.multipliers, deepest),
        Fact("attention_resolutions", sizes, _attention_sizes(net, options), f"{attention}.qkv.weight"),
        Fact("class_cond", net.classes is not None, options.class_cond, "label_emb.weight"),
        Fact("learn_sigma", net.learned_variance, options.learn_sigma, "out.2.weight"),
        Fact("use_scale_shift_norm", net.scale_shift, options.use_scale_shift_norm, f"{first}.emb_layers.1.weight"),
    ]
    if several:
        facts.append(Fact("resblock_updown", net.resampling == "resblock", options.resblock_updown, resampler))
    if several and net.resampling != "resblock":
        facts.append(Fact("conv_resample", net.resampling == "conv", options.conv_resample, resampler))
    return facts


def _attention_sizes(net: Architecture, options: Options) -> set[int] | None:
    """The given resolutions as OpenAI's scripts take them: a level has attention if its factor is image_size // r."""
    if options.attention_sizes is None or options.image_size is None:
        return None
    factors = {options.image_size // int(size) for size in options.attention_sizes if size >= 1}
    return {options.image_size // 2**level for level in range(len(net.widths)) if 2**level in factors}


def _check_heads(part: Part, options: Options, path: Path) -> None:
    width = part.outward
    if options.head_channels is not None:
        name, value = "num_head_channels", options.head_channels
    else:
        own = part.in_decoder and options.decoder_heads != options.num_heads
        name, value = "num_heads_upsample" if own else "num_heads", options.heads(width, decoder=part.in_decoder)
    if value < 1 or width % value:
        raise OptionError(
            f"{path}: {name}={value} does not divide the {width} channels of {part.source}.qkv.weight, "
            f"shape {(3 * width, width, 1)}"
        )


def _text(shown: Any) -> str:
    if isinstance(shown, set):
        shown = tuple(sorted(shown, reverse=True))
    if isinstance(shown, tuple):
        return ",".join(f"{value:g}" for value in shown) or "none"
    return str(shown)


def _fitting_presets(net: Architecture) -> str:
    fitting = [name for name in PRESETS if _fits(net, name)]
    return f"its tensors fit {', '.join(fitting)}" if fitting else "its tensors fit none of them"


def _fits(net: Architecture, preset: str) -> bool:
    try:
        check_agreement(net, read_options({"preset": preset}), Path(preset))
    except (OptionError, BackboneError):
        return False
    return True

"""The options of improved-diffusion's and guided-diffusion's scripts, under their own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gepc.backbones.openai.presets import PRESETS
from gepc.backbones.scheduler import Scheduler
from gepc.core.errors import OptionError, check_choice
from gepc.core.options import build, read_yaml

DEFAULT_CHANNEL_MULT = {
    512: (0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0),
    256: (1.0, 1.0, 2.0, 2.0, 4.0, 4.0),
    128: (1.0, 1.0, 2.0, 3.0, 4.0),
    64: (1.0, 2.0, 3.0, 4.0),
    32: (1.0, 2.0, 2.0, 2.0),
}
SCHEDULES = ("linear", "cosine")


@dataclass(frozen=True)
class Options:
    """What a user says of a checkpoint. None means unsaid: the tensors decide, or it must be asked for.

    Only the first block is needed: the tensors do not show it. The second block is read off the tensors, and what is
    said here must agree with them. The third changes nothing in the network's answers and is accepted as it comes in
    OpenAI's own option lists.
    """

    image_size: int | None = None
    num_heads: int | None = None
    num_heads_upsample: int | None = None
    num_head_channels: int | None = None
    use_new_attention_order: bool = False
    noise_schedule: str | None = None
    diffusion_steps: int | None = None
    timestep_respacing: str | int = ""
    rescale_timesteps: bool | None = None
    predict_xstart: bool = False

    num_channels: int | None = None
    num_res_blocks: int | None = None
    channel_mult: str | int | tuple[float, ...] | None = None
    attention_resolutions: str | int | tuple[int, ...] | None = None
    class_cond: bool | None = None
    learn_sigma: bool | None = None
    use_scale_shift_norm: bool | None = None
    resblock_updown: bool | None = None
    conv_resample: bool | None = None

    dropout: float = 0.0
    sigma_small: bool = False
    use_kl: bool = False
    rescale_learned_sigmas: bool | None = None
    use_checkpoint: bool = False
    use_fp16: bool = False

    def __post_init__(self) -> None:
        if self.noise_schedule is not None:
            check_choice("noise_schedule", self.noise_schedule, SCHEDULES)
        for name in ("image_size", "num_heads", "diffusion_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, got {value}")

    @property
    def missing(self) -> list[str]:
        """What the tensors do not show and nobody has said."""
        missing = [name for name in ("image_size", "noise_schedule", "diffusion_steps") if getattr(self, name) is None]
        if self.num_heads is None and not self.head_channels:
            missing.append("num_heads (or num_head_channels)")
        if self.rescale_timesteps is None and self.diffusion_steps != 1000:
            missing.append("rescale_timesteps")
        return missing

    @property
    def head_channels(self) -> int | None:
        """Channels per attention head; None where the number of heads is fixed instead (OpenAI writes -1)."""
        return self.num_head_channels if self.num_head_channels not in (None, -1) else None

    @property
    def decoder_heads(self) -> int | None:
        """The number of heads in the decoder: that of the encoder, unless said otherwise (OpenAI writes -1)."""
        return self.num_heads_upsample if self.num_heads_upsample not in (None, -1) else self.num_heads

    def heads(self, width: int, *, decoder: bool) -> int:
        """The number of heads of an attention over `width` channels."""
        if self.head_channels is not None:
            return width // self.head_channels
        heads = self.decoder_heads if decoder else self.num_heads
        if heads is None:
            raise OptionError("num_heads or num_head_channels must be given")
        return heads

    @property
    def multipliers(self) -> tuple[float, ...] | None:
        """`channel_mult` as numbers; "" stands for the default of that image size; None where nothing was said."""
        if self.channel_mult is None:
            return None
        if self.channel_mult == "":
            return DEFAULT_CHANNEL_MULT.get(self.image_size or 0)
        return _numbers("channel_mult", self.channel_mult)

    @property
    def attention_sizes(self) -> tuple[float, ...] | None:
        """The resolutions with attention; None where nothing was said."""
        if self.attention_resolutions is None:
            return None
        return _numbers("attention_resolutions", self.attention_resolutions)

    def scheduler(self, *, learned_variance: bool) -> Scheduler:
        """The noise, in diffusers' names. Linear betas run from 1e-4 to 0.02, times 1000/T."""
        steps = self.diffusion_steps or 1000
        fixed = "fixed_small" if self.sigma_small else "fixed_large"
        return Scheduler(
            num_train_timesteps=steps,
            beta_start=1000.0 / steps * 1e-4,
            beta_end=1000.0 / steps * 0.02,
            beta_schedule="squaredcos_cap_v2" if self.noise_schedule == "cosine" else "linear",
            prediction_type="sample" if self.predict_xstart else "epsilon",
            variance_type="learned_range" if learned_variance else fixed,
            rescale_timesteps=bool(self.rescale_timesteps),
            timestep_respacing=str(self.timestep_respacing),
        )


def _numbers(name: str, value: str | int | tuple[float, ...]) -> tuple[float, ...]:
    if isinstance(value, tuple):
        return value
    try:
        return tuple(float(part) for part in str(value).split(","))
    except ValueError as error:
        raise OptionError(f"{name} must be numbers such as 16,8; got {value!r}") from error


def read_options(config: str | Path | Mapping[str, Any] | None) -> Options:
    """Options from a mapping, the name of a preset, or a YAML or JSON file; a mapping may build on `preset: name`."""
    if config is None:
        return Options()
    if isinstance(config, Mapping):
        values = dict(config)
        preset = values.pop("preset", None)
        return build(Options, {**(_preset(preset) if preset is not None else {}), **values}, "the checkpoint's config")
    if Path(config).is_file():
        return read_options(read_yaml(config))
    return build(Options, _preset(config), "the preset")


def _preset(name: object) -> Mapping[str, Any]:
    check_choice("preset", name, PRESETS)
    return PRESETS[str(name)].options

"""The options of improved-diffusion's and guided-diffusion's scripts, under their own names, and published presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gepc.backbones.schedule import Scheduler
from gepc.core.errors import OptionError, check_choice, check_least, raising
from gepc.core.options import build, read_yaml

PRESETS: dict[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_name("presets.yaml"))["presets"]


@dataclass(frozen=True)
class Options:
    """What a user says about a checkpoint; None means unsaid.

    The tensors do not show the first block, so it is needed. They do show the second block: what is said there must
    agree with them. The third is accepted because OpenAI's option lists have it, and is not used: the tensors show the
    attention, and the others concern training and sampling.
    """

    image_size: int | None = None
    num_heads: int | None = None
    num_heads_upsample: int | None = None
    num_head_channels: int | None = None
    use_new_attention_order: bool = False
    noise_schedule: str | None = None
    diffusion_steps: int | None = None
    rescale_timesteps: bool | None = None
    predict_xstart: bool = False
    sigma_small: bool = False

    num_channels: int | None = None
    num_res_blocks: int | None = None
    channel_mult: str | int | tuple[float, ...] | None = None
    class_cond: bool | None = None
    learn_sigma: bool | None = None
    use_scale_shift_norm: bool | None = None
    resblock_updown: bool | None = None

    attention_resolutions: str | int | tuple[int, ...] | None = None
    timestep_respacing: str | int = ""
    dropout: float = 0.0
    use_kl: bool = False
    rescale_learned_sigmas: bool | None = None
    use_checkpoint: bool = False
    use_fp16: bool = False

    def __post_init__(self) -> None:
        if self.noise_schedule is not None:
            check_choice("noise_schedule", self.noise_schedule, ("linear", "cosine"))
        check_least(1, image_size=self.image_size, num_heads=self.num_heads, diffusion_steps=self.diffusion_steps)

    @property
    def missing(self) -> list[str]:
        """Needed options that are unsaid."""
        missing = [name for name in ("image_size", "noise_schedule", "diffusion_steps") if getattr(self, name) is None]
        if self.num_heads is None and not self.head_channels:
            missing.append("num_heads (or num_head_channels)")
        if self.rescale_timesteps is None and self.diffusion_steps != 1000:
            missing.append("rescale_timesteps")
        return missing

    @property
    def head_channels(self) -> int | None:
        """Channels per attention head; None if the number of heads is fixed instead (OpenAI writes -1)."""
        return None if self.num_head_channels == -1 else self.num_head_channels

    @property
    def decoder_heads(self) -> int | None:
        """The number of heads in the decoder: that of the encoder, unless said otherwise (OpenAI writes -1)."""
        return self.num_heads if self.num_heads_upsample in (None, -1) else self.num_heads_upsample

    def heads(self, width: int, *, decoder: bool) -> int:
        """The number of heads of an attention over `width` channels."""
        heads = self.decoder_heads if decoder else self.num_heads
        if self.head_channels is not None:
            heads = width // self.head_channels
        assert heads is not None  # `missing` says so
        if heads < 1 or width % heads or self.head_channels not in (None, width // heads):
            raise OptionError(
                f"num_heads={self.num_heads}, num_heads_upsample={self.num_heads_upsample} and "
                f"num_head_channels={self.num_head_channels} do not divide {width} channels"
            )
        return heads

    @property
    def multipliers(self) -> tuple[float, ...] | None:
        """`channel_mult` as numbers; None if unsaid, or "", which stands for OpenAI's default of that image size."""
        if self.channel_mult is None or self.channel_mult == "":
            return None
        if isinstance(self.channel_mult, tuple):
            return self.channel_mult
        with raising(OptionError, f"channel_mult must be numbers such as 1,2,2; got {self.channel_mult!r}", ValueError):
            return tuple(float(part) for part in str(self.channel_mult).split(","))

    def scheduler(self, *, learned_variance: bool) -> Scheduler:
        """The noise schedule under diffusers' names. Linear betas run from 1e-4 to 0.02, times 1000/T."""
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
        )


def read_options(config: str | Path | Mapping[str, Any] | None) -> Options:
    """Options from a mapping, the name of a preset, or a YAML or JSON file; a mapping may build on `preset: name`."""
    if config is not None and not isinstance(config, Mapping):
        config = read_yaml(config) if Path(config).is_file() else {"preset": str(config)}
    values = dict(config or {})
    preset = values.pop("preset", None)
    if preset is not None:
        check_choice("preset", preset, PRESETS)
        values = {**PRESETS[preset], **values}
    return build(Options, values, "the checkpoint's config")

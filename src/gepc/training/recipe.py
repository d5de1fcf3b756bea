"""Recipes: the parameters of training runs, from YAML files."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gepc.core.errors import InputError, OptionError, check_choice, nearest
from gepc.core.options import build, read_yaml


@dataclass(frozen=True)
class Recipe:
    """Parameters of a training run.

    Parameters
    ----------
    channels : width of the network at each resolution; the resolution halves from one to the next.
    layers_per_block : residual blocks at each resolution.
    norm_groups : groups of the group normalisation.
    attention : self-attention at the lowest resolution.
    image_channels : 1 or 3.
    image_size : resize every image to a square of this side; None requires images of one size.
    diffusion_steps : number of timesteps of the schedule.
    schedule : `cosine` or `linear`.
    batch_size : images per step, over all devices.
    steps : number of training steps.
    learning_rate : learning rate after the warm-up.
    final_learning_rate : learning rate at the end of the cosine decay.
    warmup_steps : steps of the linear warm-up.
    weight_decay : weight decay of AdamW.
    gradient_clip : largest norm of the gradient.
    ema_decay : decay of the averaged weights.
    low_noise_share : fraction of a batch whose noise level is log-uniform in rho over `rho_range`, the levels that
        detection uses; the rest is uniform in t, so that the network can also generate samples.
    rho_range : smallest and largest rho = sqrt(1/abar - 1) of that fraction.
    flips : random flips: `none`, `horizontal`, `vertical` or `both`.
    mixed_precision : `no`, `fp16`, `bf16` or `auto`, which is fp16 on an NVIDIA or AMD GPU and `no` elsewhere: the
        eight bits of bf16 are too few for the lowest noise levels, and most CPUs emulate it.
    compile : compile the network with `torch.compile`.
    checkpoint_every : steps between checkpoints.
    held_out : images to hold out from training, at most a quarter.
    seed : seed of the weights, the batches and the held-out images.
    value_range : values of black and white in float images; None is (-1, 1).
    """

    channels: tuple[int, ...] = (32, 64, 96)
    layers_per_block: int = 1
    norm_groups: int = 8
    attention: bool = False
    image_channels: int = 3
    image_size: int | None = None
    diffusion_steps: int = 1000
    schedule: str = "cosine"
    batch_size: int = 32
    steps: int = 5000
    learning_rate: float = 8e-4
    final_learning_rate: float = 1e-6
    warmup_steps: int = 250
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    ema_decay: float = 0.9995
    low_noise_share: float = 0.7
    rho_range: tuple[float, float] = (0.0075, 2.0)
    flips: str = "horizontal"
    mixed_precision: str = "no"
    compile: bool = False
    checkpoint_every: int = 250
    held_out: int = 512
    seed: int = 0
    value_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, ("cosine", "linear"))
        check_choice("flips", self.flips, ("none", "horizontal", "vertical", "both"))
        check_choice("mixed_precision", self.mixed_precision, ("no", "auto", "fp16", "bf16"))
        for name, (valid, wanted) in self._requirements().items():
            if not valid:
                raise OptionError(f"recipe: {name} must be {wanted}, got {getattr(self, name)}")

    def _requirements(self) -> dict[str, tuple[bool, str]]:
        """For each field, whether its value is valid and what is; NaN is never valid."""
        groups = max(1, self.norm_groups)
        low, high = self.rho_range
        return {
            "norm_groups": (self.norm_groups >= 1, "at least 1"),
            "channels": (
                bool(self.channels) and all(width > 0 and width % groups == 0 for width in self.channels),
                f"a list of widths that are multiples of norm_groups={self.norm_groups}",
            ),
            "layers_per_block": (self.layers_per_block >= 1, "at least 1"),
            "image_channels": (self.image_channels in (1, 3), "1 or 3"),
            "image_size": (
                self.image_size is None or (self.image_size > 0 and self.image_size % self.stride == 0),
                f"a multiple of {self.stride}, the stride of the network",
            ),
            "diffusion_steps": (self.diffusion_steps >= 2, "at least 2"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "steps": (self.steps >= 1, "at least 1"),
            "learning_rate": (0 < self.learning_rate < math.inf, "positive"),
            "final_learning_rate": (0 <= self.final_learning_rate < math.inf, "0 or more"),
            "warmup_steps": (self.warmup_steps >= 0, "0 or more"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more"),
            "gradient_clip": (self.gradient_clip > 0, "positive"),
            "ema_decay": (0 <= self.ema_decay < 1, "at least 0 and below 1"),
            "low_noise_share": (0 <= self.low_noise_share <= 1, "between 0 and 1"),
            "rho_range": (0 < low < high < math.inf, "two positive numbers, the smaller first"),
            "checkpoint_every": (self.checkpoint_every >= 1, "at least 1"),
            "held_out": (self.held_out >= 0, "0 or more"),
            "seed": (self.seed >= 0, "0 or more"),
        }

    @property
    def stride(self) -> int:
        """The sides of an image must be multiples of this, since each resolution but the last is halved."""
        return int(2 ** (len(self.channels) - 1))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON and YAML."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def builtin_recipes() -> dict[str, Path]:
    """The recipes of the package, by name."""
    folder = Path(str(resources.files("gepc") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(config: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe.

    Parameters
    ----------
    config : a YAML file, or the name of a recipe of the package.
    overrides : values that replace those of the file.
    """
    path = Path(config)
    if not path.is_file():
        known = builtin_recipes()
        if str(config) not in known:
            raise InputError(f"{config} is neither a YAML file nor a recipe of the package; {nearest(config, known)}")
        path = known[str(config)]
    return build(Recipe, {**read_yaml(path), **(overrides or {})}, "recipe")

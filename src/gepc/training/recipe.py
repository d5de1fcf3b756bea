"""A training run, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gepc.errors import InputError, OptionError, check_choice, nearest
from gepc.options import build, read_yaml


@dataclass(frozen=True)
class Recipe:
    """What `gepc train` does. Every field can be set in the recipe's YAML file or with `--set key=value`.

    The noise levels of a batch are a mixture: a share `low_noise_share` is log-uniform in rho over `rho_range`
    (where the method looks), the rest uniform in t (so that the net also samples).
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

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, ("cosine", "linear"))
        check_choice("flips", self.flips, ("none", "horizontal", "vertical", "both"))
        check_choice("mixed_precision", self.mixed_precision, ("no", "fp16", "bf16"))
        low, high = self.rho_range
        problems = {
            "channels": not self.channels or any(width % self.norm_groups for width in self.channels),
            "batch_size": self.batch_size < 1,
            "steps": self.steps < 1,
            "learning_rate": self.learning_rate <= 0,
            "low_noise_share": not 0 <= self.low_noise_share <= 1,
            "rho_range": not 0 < low < high,
            "ema_decay": not 0 <= self.ema_decay < 1,
            "image_channels": self.image_channels not in (1, 3),
            "checkpoint_every": self.checkpoint_every < 1,
            "held_out": self.held_out < 0,
        }
        for name, wrong in problems.items():
            if wrong:
                extra = (
                    f" (each width must be a multiple of norm_groups={self.norm_groups})" if name == "channels" else ""
                )
                raise OptionError(f"recipe: {name}={getattr(self, name)} makes no sense{extra}")

    @property
    def stride(self) -> int:
        """The image's sides must be multiples of this: one halving per level but the last."""
        return int(2 ** (len(self.channels) - 1))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON and YAML."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def builtin_recipes() -> dict[str, Path]:
    """The recipes that ship with the package, by name."""
    folder = Path(str(resources.files("gepc") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(config: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe from a YAML file or by the name of one that ships with the package."""
    path = Path(config)
    if not path.is_file():
        known = builtin_recipes()
        if str(config) not in known:
            raise InputError(f"{config} is neither a YAML file nor a recipe of the package; {nearest(config, known)}")
        path = known[str(config)]
    return build(Recipe, {**read_yaml(path), **(overrides or {})}, "recipe")

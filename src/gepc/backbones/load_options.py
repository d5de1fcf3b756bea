"""The options of `load_backbone`. Every source uses some of them and refuses the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc.core.errors import OptionError

if TYPE_CHECKING:
    import torch

NOT_STORED = ("scheduler", "vae", "embeddings", "device")


@dataclass(frozen=True)
class LoadOptions:
    """What a caller asks `gepc.load_backbone` for, which documents each option."""

    scheduler: Any = None
    vae: Any = None
    config: str | Mapping[str, Any] | None = None
    device: str | torch.device = "auto"
    dtype: str = "float32"
    class_label: int | None = None
    prompt: str | None = None
    embeddings: str | Path | Mapping[str, Any] | None = None
    rescale_timesteps: bool | None = None
    time_scale: float = 1.0
    variant: str | None = None
    use_safetensors: bool = True
    act_on: str = "latents"

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value is not default and value != default}

    def check_usable(self, usable: Collection[str], reason: str) -> None:
        """Raise `OptionError` if an option is given that is not among the `usable` ones."""
        for name in self.given():
            if name not in usable:
                raise OptionError(f"{reason}; leave out `{name}`", options=(name,))

    def stored(self) -> dict[str, Any]:
        """The plain values with which a saved detector loads the same backbone again."""
        values = {name: value for name, value in self.given().items() if name not in NOT_STORED}
        if isinstance(self.config, Mapping):
            values["config"] = dict(self.config)
        return values

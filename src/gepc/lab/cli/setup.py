"""Options that the commands of the laboratory share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from gepc.backbones.openai.options import Options as CheckpointOptions
from gepc.cli import options as opt
from gepc.core.errors import OptionError

if TYPE_CHECKING:
    from gepc.backbones.base import Backbone


@dataclass(frozen=True)
class Setup:
    """How a command changes a protocol, loads its network and keeps features."""

    backbone: Annotated[str | None, Option(help="Backbone instead of the protocol's: a name, folder or file.")] = None
    settings: Annotated[list[str] | None, opt.setting("Option of the protocol (`--set keep=3`) or checkpoint")] = None
    cache: Annotated[Path | None, Option(help="Folder of features to reuse; in the user's cache by default.")] = None
    no_cache: Annotated[bool, Option("--no-cache", help="Compute all features again and do not store them.")] = False

    def values(self) -> dict[str, Any]:
        """The values of `--set` that are not options of a checkpoint."""
        given = opt.parse_settings(self.settings)
        return {name: value for name, value in given.items() if name not in CheckpointOptions.__annotations__}

    def overrides(self) -> dict[str, Any]:
        """The values that replace those of the protocol."""
        values = self.values()
        if self.backbone is None:
            return values
        if "backbone" in values:
            raise OptionError("give either --backbone or --set backbone, not both")
        return {**values, "backbone": self.backbone}

    def load(self, loading: opt.Loading, source: str) -> Backbone:
        """Load the backbone at `source` with the options of its checkpoint, if any are given."""
        mine = [one for one in self.settings or () if one.partition("=")[0].strip() not in self.values()]
        return loading.load(source, mine)

    def cache_folder(self) -> Path | None:
        """The folder of known features; None with `--no-cache`."""
        if self.no_cache:
            if self.cache is not None:
                raise OptionError("give either --cache or --no-cache, not both")
            return None
        user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return self.cache or user / "gepc" / "features"


DEFAULT_SETUP = Setup()

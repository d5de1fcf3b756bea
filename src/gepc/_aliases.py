"""Module names of version 0.1, kept as deprecated aliases: `from gepc.conformal import threshold` still works."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "gepc.allocator": "gepc.core.allocator",
    "gepc.calibrators": "gepc.scoring",
    "gepc.conformal": "gepc.verdicts.conformal",
    "gepc.discovery": "gepc.verdicts.decision",
    "gepc.errors": "gepc.core.errors",
    "gepc.groups": "gepc.features.groups",
    "gepc.metrics": "gepc.scoring.metrics",
    "gepc.monitor": "gepc.verdicts.monitor",
    "gepc.noise": "gepc.images.noise",
    "gepc.preprocessing": "gepc.images.preprocessing",
}


class _Aliases:
    """A finder and loader; without the base classes of `importlib.abc`, which are slow to import."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        import warnings

        warnings.warn(f"{spec.name} is deprecated; import {MOVED[spec.name]}", DeprecationWarning, stacklevel=2)
        module = import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__  # importing sets it anew
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and isinstance(spec.loader_state, ModuleSpec):
            module.__spec__ = spec.loader_state


def install() -> None:
    """Make the old names importable."""
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.append(_Aliases())

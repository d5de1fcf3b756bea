"""Which images has a diffusion model never seen: how sure, and where.

    import gepc

    backbone = gepc.load_backbone("celeba32-tiny")
    detector = gepc.GEPC(backbone).fit(id_images)
    detector.score(images), detector.p_value(images), detector.score_map(images)

Everything below loads when it is first used, so that `import gepc` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gepc._version import __version__

if TYPE_CHECKING:
    from gepc.backbones.base import Backbone as Backbone
    from gepc.backbones.load import list_backbones as list_backbones
    from gepc.backbones.load import load_backbone as load_backbone
    from gepc.backbones.schedule import Levels as Levels

_HOME = {
    "Backbone": "gepc.backbones.base",
    "Levels": "gepc.backbones.schedule",
    "list_backbones": "gepc.backbones.load",
    "load_backbone": "gepc.backbones.load",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'gepc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

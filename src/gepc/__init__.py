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
    from gepc.datasets import list_datasets as list_datasets
    from gepc.datasets import open_dataset as open_dataset
    from gepc.detector import Detector as Detector
    from gepc.errors import GepcError as GepcError
    from gepc.groups import Action as Action
    from gepc.groups import Group as Group
    from gepc.groups import register_action as register_action
    from gepc.methods import GEPC as GEPC
    from gepc.methods import create_detector as create_detector
    from gepc.methods import list_detectors as list_detectors
    from gepc.monitor import Monitor as Monitor
    from gepc.preprocessing import Preprocessing as Preprocessing
    from gepc.storage import load_detector as load_detector

_HOME = {
    "Action": "gepc.groups",
    "Backbone": "gepc.backbones.base",
    "Detector": "gepc.detector",
    "GEPC": "gepc.methods",
    "GepcError": "gepc.errors",
    "Group": "gepc.groups",
    "Levels": "gepc.backbones.schedule",
    "Preprocessing": "gepc.preprocessing",
    "create_detector": "gepc.methods",
    "list_datasets": "gepc.datasets",
    "open_dataset": "gepc.datasets",
    "Monitor": "gepc.monitor",
    "list_backbones": "gepc.backbones.load",
    "list_detectors": "gepc.methods",
    "load_backbone": "gepc.backbones.load",
    "load_detector": "gepc.storage",
    "register_action": "gepc.groups",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'gepc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

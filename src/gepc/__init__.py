"""Out-of-distribution detection with diffusion models: scores, p-values with a guarantee, and maps.

    import gepc

    backbone = gepc.load_backbone("celeba32-tiny")
    detector = gepc.create_detector(backbone).fit(id_images)
    detector.score(images), detector.p_value(images), detector.score_map(images)

Everything below is loaded on first use, so that `import gepc` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gepc._aliases import install as _install_aliases
from gepc._version import __version__

if TYPE_CHECKING:
    from gepc.backbones.base import Backbone as Backbone
    from gepc.backbones.load import list_backbones as list_backbones
    from gepc.backbones.load import load_backbone as load_backbone
    from gepc.backbones.schedule import Levels as Levels
    from gepc.core.errors import GepcError as GepcError
    from gepc.datasets import list_datasets as list_datasets
    from gepc.datasets import open_dataset as open_dataset
    from gepc.detector.detector import Detector as Detector
    from gepc.detector.registry import GEPC as GEPC
    from gepc.detector.registry import create_detector as create_detector
    from gepc.detector.registry import list_detectors as list_detectors
    from gepc.detector.storage import load_detector as load_detector
    from gepc.features.groups import Action as Action
    from gepc.features.groups import Group as Group
    from gepc.features.groups import register_action as register_action
    from gepc.images.preprocessing import Preprocessing as Preprocessing
    from gepc.scoring.scorer import Scorer as Scorer
    from gepc.verdicts.decision import DecisionRule as DecisionRule
    from gepc.verdicts.monitor import Monitor as Monitor

_HOME = {
    "Action": "gepc.features.groups",
    "Backbone": "gepc.backbones.base",
    "DecisionRule": "gepc.verdicts.decision",
    "Detector": "gepc.detector.detector",
    "GEPC": "gepc.detector.registry",
    "GepcError": "gepc.core.errors",
    "Group": "gepc.features.groups",
    "Levels": "gepc.backbones.schedule",
    "Preprocessing": "gepc.images.preprocessing",
    "Scorer": "gepc.scoring.scorer",
    "create_detector": "gepc.detector.registry",
    "list_datasets": "gepc.datasets",
    "open_dataset": "gepc.datasets",
    "Monitor": "gepc.verdicts.monitor",
    "list_backbones": "gepc.backbones.load",
    "list_detectors": "gepc.detector.registry",
    "load_backbone": "gepc.backbones.load",
    "load_detector": "gepc.detector.storage",
    "register_action": "gepc.features.groups",
}

__all__ = ["__version__", *_HOME]

_install_aliases()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'gepc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

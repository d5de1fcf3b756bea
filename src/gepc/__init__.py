"""Out-of-distribution detection with diffusion models: scores, p-values with a guarantee, and maps.

    import gepc

    backbone = gepc.load_backbone("photos-tiny")
    detector = gepc.create_detector(backbone).fit(id_images)
    detector.score(images), detector.p_value(images), detector.score_map(images)

Everything below is loaded on first use, so that `import gepc` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gepc._version import __version__

if TYPE_CHECKING:
    from gepc.backbones.base import Backbone as Backbone
    from gepc.backbones.devices import deterministic as deterministic
    from gepc.backbones.encoders import Encoder as Encoder
    from gepc.backbones.load import list_backbones as list_backbones
    from gepc.backbones.load import load_backbone as load_backbone
    from gepc.backbones.schedule import Levels as Levels
    from gepc.calibration.scorer import Scorer as Scorer
    from gepc.conformal.decision import DecisionRule as DecisionRule
    from gepc.conformal.monitor import Monitor as Monitor
    from gepc.core.errors import GepcError as GepcError
    from gepc.detector.detector import Detector as Detector
    from gepc.detector.fitted import FittedDetector as FittedDetector
    from gepc.detector.registry import GEPC as GEPC
    from gepc.detector.registry import create_detector as create_detector
    from gepc.detector.registry import list_detectors as list_detectors
    from gepc.detector.registry import load_detector as load_detector
    from gepc.images.preprocessing import Preprocessing as Preprocessing
    from gepc.lab.datasets import list_datasets as list_datasets
    from gepc.lab.datasets import open_dataset as open_dataset
    from gepc.methods.groups import Action as Action
    from gepc.methods.groups import Group as Group
    from gepc.methods.groups import register_action as register_action

_HOME = {
    "gepc.backbones.base": ("Backbone",),
    "gepc.backbones.devices": ("deterministic",),
    "gepc.backbones.encoders": ("Encoder",),
    "gepc.backbones.load": ("list_backbones", "load_backbone"),
    "gepc.backbones.schedule": ("Levels",),
    "gepc.core.errors": ("GepcError",),
    "gepc.lab.datasets": ("list_datasets", "open_dataset"),
    "gepc.detector.detector": ("Detector",),
    "gepc.detector.fitted": ("FittedDetector",),
    "gepc.detector.registry": ("GEPC", "create_detector", "list_detectors", "load_detector"),
    "gepc.methods.groups": ("Action", "Group", "register_action"),
    "gepc.images.preprocessing": ("Preprocessing",),
    "gepc.calibration.scorer": ("Scorer",),
    "gepc.conformal.decision": ("DecisionRule",),
    "gepc.conformal.monitor": ("Monitor",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'gepc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

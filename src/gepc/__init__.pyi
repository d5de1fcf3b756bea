"""The public names of the package. `__init__.py` reads this list and imports a name on first use."""

from gepc._version import __version__ as __version__
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

"""From features to one score per image, fitted on in-distribution features. Higher means more out of distribution.

A column calibrator models each (level, feature) by itself; the results are aggregated over features, then over levels.
A vector calibrator models all of them together. The calibrator `evidence` combines calibrators of several parts.
"""

from gepc.calibration.calibrators import Aggregation, create_calibrator, list_calibrators, register
from gepc.calibration.evidence import Evidence, Parts, combine_parts
from gepc.calibration.joint import GMM
from gepc.calibration.memory import LevelMemory
from gepc.calibration.per_column import KDE
from gepc.calibration.scorer import Scorer

__all__ = [
    "GMM",
    "KDE",
    "Aggregation",
    "Evidence",
    "LevelMemory",
    "Parts",
    "Scorer",
    "combine_parts",
    "create_calibrator",
    "list_calibrators",
    "register",
]

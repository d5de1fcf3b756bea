"""From features to one score, knowing in-distribution features alone. Higher means more out of distribution.

A column calibrator looks at each (level, feature) by itself and says how surprising it is there; the results are
aggregated over features, then over levels. A vector calibrator looks at all of them together.
"""

from gepc.scoring.aggregation import AGGREGATIONS, FUSIONS, Aggregation
from gepc.scoring.calibrators import Calibrator, create_calibrator, list_calibrators, register
from gepc.scoring.columns import KDE, AbsZ, ColumnCalibrator, Raw, Z, ZScore, log_density, silverman
from gepc.scoring.vectors import GMM, KNN, MVN, LevelMahalanobis, Mahalanobis, VectorCalibrator

__all__ = [
    "AGGREGATIONS",
    "FUSIONS",
    "GMM",
    "KDE",
    "KNN",
    "MVN",
    "AbsZ",
    "Aggregation",
    "Calibrator",
    "ColumnCalibrator",
    "LevelMahalanobis",
    "Mahalanobis",
    "Raw",
    "VectorCalibrator",
    "Z",
    "ZScore",
    "create_calibrator",
    "list_calibrators",
    "log_density",
    "register",
    "silverman",
]

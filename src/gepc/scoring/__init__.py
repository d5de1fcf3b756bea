"""From features to one score per image, fitted on in-distribution features. Higher means more out of distribution.

A column calibrator models each (level, feature) by itself; the results are aggregated over features, then over levels.
A vector calibrator models all of them together. The calibrator `parts` combines calibrators of several parts.
"""

from gepc.scoring.calibrators import (
    AGGREGATIONS,
    FUSIONS,
    Aggregation,
    Calibrator,
    create_calibrator,
    list_calibrators,
    register,
)
from gepc.scoring.columns import KDE, AbsZ, ColumnCalibrator, Raw, Z, ZScore, log_density, silverman
from gepc.scoring.parts import Parts
from gepc.scoring.scorer import Scorer, Selection, select
from gepc.scoring.vectors import GMM, KNN, MVN, LevelMahalanobis, LevelPCA, Mahalanobis, VectorCalibrator

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
    "LevelPCA",
    "Mahalanobis",
    "Parts",
    "Raw",
    "Scorer",
    "Selection",
    "VectorCalibrator",
    "Z",
    "ZScore",
    "create_calibrator",
    "list_calibrators",
    "log_density",
    "register",
    "select",
    "silverman",
]

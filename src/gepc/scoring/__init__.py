"""From features to one score per image, fitted on in-distribution features. Higher means more out of distribution.

A column calibrator models each (level, feature) by itself; the results are aggregated over features, then over levels.
A vector calibrator models all of them together. The calibrator `parts` combines calibrators of several parts.
"""

from gepc.scoring.calibrators import Aggregation, create_calibrator, list_calibrators, register
from gepc.scoring.columns import KDE
from gepc.scoring.parts import Parts
from gepc.scoring.scorer import Scorer
from gepc.scoring.vectors import GMM

__all__ = ["GMM", "KDE", "Aggregation", "Parts", "Scorer", "create_calibrator", "list_calibrators", "register"]

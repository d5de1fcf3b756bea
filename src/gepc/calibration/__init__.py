"""From features to one score per image, fitted on in-distribution features. Higher means more out of distribution.

A column calibrator models each (level, feature) by itself; the results are aggregated over features, then over levels.
A vector calibrator models all of them together. The calibrator `evidence` combines calibrators of several parts.
"""

# importing these modules registers their calibrators
from gepc.calibration import joint as joint
from gepc.calibration import memory as memory
from gepc.calibration import per_column as per_column
from gepc.calibration.calibrators import Aggregation as Aggregation
from gepc.calibration.calibrators import create_calibrator as create_calibrator
from gepc.calibration.evidence import Evidence as Evidence
from gepc.calibration.scorer import Scorer as Scorer

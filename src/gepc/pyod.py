"""A detector with PyOD's conventions: 1 is out-of-distribution, 0 is not, and a higher score is more anomalous."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from gepc.sklearn import ImageEstimator


@dataclass(eq=False, repr=False)
class OODDetector(ImageEstimator):
    """Out-of-distribution detector with the interface of PyOD's detectors; PyOD itself is not needed.

    Parameters
    ----------
    backbone, method, preset, size, image_shape, options : as in `gepc.sklearn.OODDetector`.
    contamination : the false-alarm rate. The threshold comes from calibration images that fitting does not use, so the
        images of `fit` should be in-distribution; PyOD's detectors assume that this share of them is not.

    Attributes
    ----------
    decision_scores_ : the scores of the images of `fit`.
    threshold_ : scores above it are alarms.
    labels_ : 1 for the images of `fit` that are alarms, 0 for the others.
    """

    contamination: float = 0.05

    @property
    def _false_alarm_rate(self) -> float:
        return self.contamination

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit on in-distribution images and score them; `y` is ignored. A stream that is read once cannot be scored."""
        super().fit(X)
        self.threshold_ = -self.offset_
        self.decision_scores_ = self.decision_function(X)
        self.labels_ = (self.decision_scores_ > self.threshold_).astype(np.int64)
        return self

    def decision_function(self, X: Any) -> npt.NDArray[np.float64]:
        """The detector's score, higher = more out of distribution."""
        return -self.score_samples(X)

    def predict(self, X: Any) -> npt.NDArray[np.int64]:
        """1 for out-of-distribution images, 0 for others."""
        return (self.decision_function(X) > self.threshold_).astype(np.int64)

    def fit_predict(self, X: Any, y: Any = None) -> npt.NDArray[np.int64]:
        """Fit, and return `labels_`."""
        return self.fit(X).labels_

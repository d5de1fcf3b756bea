"""Attributes of a fitted detector under scikit-learn's convention: their names end in an underscore."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from gepc.calibration.calibrators import Calibrator
from gepc.calibration.scorer import Scorer
from gepc.conformal.p_values import CalibrationScores
from gepc.detector.fitted import FittedDetector
from gepc.images.preprocessing import Preprocessing
from gepc.maps.statistics import MapStatistics

Array = npt.NDArray[np.float64]


class FittedAttributes(ABC):
    """Read access to the fitted state; every attribute raises `NotFittedError` before `fit`."""

    @property
    @abstractmethod
    def fitted(self) -> FittedDetector:
        """The fitted state."""

    @property
    def levels_(self) -> npt.NDArray[np.int64]:
        """The candidate timesteps."""
        return np.asarray(self.fitted.levels)

    @property
    def kept_(self) -> npt.NDArray[np.int64]:
        """The timesteps that selection kept."""
        return np.asarray(self.fitted.kept)

    @property
    def weights_(self) -> Array:
        """The weights of the kept levels."""
        return self.fitted.weights

    @property
    def cv_(self) -> Array:
        """The coefficient of variation at every candidate level."""
        return self.fitted.scorer.selection_.cv

    @property
    def scorer_(self) -> Scorer:
        """The fitted scorer."""
        return self.fitted.scorer

    @property
    def calibrator_(self) -> Calibrator:
        """The fitted calibrator."""
        return self.fitted.scorer.calibrator_

    @property
    def reference_(self) -> CalibrationScores:
        """The calibration scores, by group."""
        return self.fitted.reference

    @property
    def calibration_scores_(self) -> Array:
        """The scores of all calibration images, sorted."""
        return self.fitted.reference.scores

    @property
    def maps_(self) -> MapStatistics | None:
        """The statistics of calibrated maps; None without them."""
        return self.fitted.maps

    @property
    def map_scale_(self) -> float | None:
        """v_global, the common scale of raw maps; None for a method without maps."""
        return self.fitted.map_scale

    @property
    def n_fit_(self) -> int:
        """How many images levels and calibrator were fitted on."""
        return self.fitted.fit_images

    @property
    def preprocessing_(self) -> Preprocessing:
        """How images are prepared."""
        return self.fitted.preprocessing

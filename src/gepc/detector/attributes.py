"""What a fitted detector says and does without looking at an image: attributes, guarantee, saving.

The names of the attributes end in an underscore, which is scikit-learn's convention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.calibration.calibrators import Calibrator
from gepc.calibration.scorer import Scorer
from gepc.conformal.p_values import CalibrationScores, Guarantee
from gepc.core.files import StrPath
from gepc.detector.fitted import FittedDetector
from gepc.detector.hub import push
from gepc.detector.storage import save_detector
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

    def guarantee(self, alpha: float = 0.05) -> Guarantee:
        """What is guaranteed at this false-alarm rate with the calibration images (of the smallest group)."""
        return self.fitted.guarantee(alpha)

    def map_limit(self, alpha: float = 0.05, raw: bool = False) -> float:
        """The end of the colour scale of maps, the same for all images; see `FittedDetector.map_limit`."""
        return self.fitted.map_limit(alpha, raw)

    def save(self, folder: StrPath) -> None:
        """Write `detector.json` and `state.safetensors` into a folder; a detector that is there is replaced whole."""
        save_detector(self.fitted, folder)

    save_pretrained = save

    def push_to_hub(
        self,
        repo_id: str,
        fitted_on: str,
        figures: Mapping[str, object] | None = None,
        licence: str | None = None,
        **options: Any,
    ) -> str:
        """Upload the detector to the Hugging Face hub with a model card; `gepc.load_detector(repo_id)` loads it.

        Parameters
        ----------
        repo_id : "org/name".
        fitted_on : the in-distribution images in words, for the card.
        figures : name -> value of measured results to show on the card.
        licence : of the detector, such as "apache-2.0".
        **options : of `huggingface_hub.HfApi.create_repo`, such as `private=True`.

        Returns
        -------
        The address of the repository.
        """
        card = {"fitted_on": fitted_on, "figures": figures or {}, "licence": licence}
        return push(self.fitted, repo_id, card, **options)

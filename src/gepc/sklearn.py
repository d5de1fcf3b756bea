"""A detector with scikit-learn's conventions: +1 is in-distribution, -1 is not, and a higher score is more normal."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from typing_extensions import Self

import gepc
from gepc.conformal.p_values import Array, threshold
from gepc.core.errors import InputError
from gepc.core.options import DEFAULT_BACKBONE


@dataclass(eq=False, repr=False)
class OODDetector(OutlierMixin, BaseEstimator):  # type: ignore[misc]
    """Out-of-distribution detector as a scikit-learn estimator, for pipelines, grid searches and cross-validation.

    X may be anything that `gepc.Detector.fit` takes (a folder, an array, a Dataset ...), or a 2-D array with one
    flattened image per row.

    Parameters
    ----------
    backbone : a `gepc.Backbone`, which clones share, or what `gepc.load_backbone` takes.
    method : name of the method; None takes the default of `gepc.create_detector`.
    preset : a named set of options of the method.
    size : size of the images that the network sees; see `gepc.Detector`.
    image_shape : shape of a flattened image; None takes (channels, height, width) of the backbone.
    options : further options of `gepc.create_detector`, such as {"keep": 2}.
    alpha : false-alarm rate of `predict`.

    Attributes
    ----------
    detector_ : the fitted `gepc.Detector`.
    offset_ : `decision_function` is `score_samples` minus this number, so that it is negative for alarms.

    See Also
    --------
    gepc.Detector : the detector with conventions of its own, for p-values and maps.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> from gepc.sklearn import OODDetector
    >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8)).clip(-1.0, 1.0)
    >>> detector = OODDetector(GaussianBackbone(0.0, 0.04, (1, 8, 8)), "pixel_stats", alpha=0.1).fit(images)
    >>> detector.predict(-np.ones((2, 1, 8, 8)))
    array([-1, -1])
    """

    backbone: Any = DEFAULT_BACKBONE
    method: str | None = None
    preset: str | None = None
    size: int | tuple[int, int] | None = None
    image_shape: tuple[int, ...] | None = None
    options: Mapping[str, Any] | None = None
    alpha: float = 0.05

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit on in-distribution images.

        Parameters
        ----------
        X : images in any form that `gepc.Detector.fit` takes, or a 2-D array with one flattened image per row.
        y : ignored.

        Returns
        -------
        The estimator itself.

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> from gepc.sklearn import OODDetector
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = OODDetector(GaussianBackbone.fitted(images), "pixel_stats", alpha=0.1).fit(images)
        >>> len(detector.detector_.calibration_scores_)
        20
        """
        backbone = gepc.load_backbone(self.backbone)
        images = self._images(X, backbone, reset=True)
        options = {**(self.options or {})}
        if self.size is not None:
            options["size"] = self.size
        detector = gepc.create_detector(backbone, self.method, self.preset, **options).fit(images)
        self.offset_ = -threshold(detector.calibration_scores_, self.alpha)
        self.detector_ = detector
        return self

    def score_samples(self, X: Any) -> Array:
        """Compute one number per image, higher = more in-distribution: the detector's score times -1.

        Parameters
        ----------
        X : images, as in `fit`.

        Returns
        -------
        A float64 array (N,).

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> from gepc.sklearn import OODDetector
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = OODDetector(GaussianBackbone.fitted(images), "pixel_stats", alpha=0.1).fit(images)
        >>> detector.score_samples(images[:3]).shape
        (3,)
        """
        check_is_fitted(self)
        return -self.detector_.score(self._images(X, self.detector_.backbone, reset=False))

    def decision_function(self, X: Any) -> Array:
        """`score_samples` minus `offset_`: negative for images whose p-value is at most `alpha`.

        Parameters
        ----------
        X : images, as in `fit`.

        Returns
        -------
        A float64 array (N,).

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> from gepc.sklearn import OODDetector
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = OODDetector(GaussianBackbone.fitted(images), "pixel_stats", alpha=0.1).fit(images)
        >>> bool(detector.decision_function(-np.ones((1, 1, 8, 8)))[0] < 0)
        True
        """
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> npt.NDArray[np.int64]:
        """Decide at the false-alarm rate `alpha`.

        Parameters
        ----------
        X : images, as in `fit`.

        Returns
        -------
        An array (N,): -1 for out-of-distribution images, +1 for all others.

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> from gepc.sklearn import OODDetector
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = OODDetector(GaussianBackbone.fitted(images), "pixel_stats", alpha=0.1).fit(images)
        >>> detector.predict(-np.ones((2, 1, 8, 8)))
        array([-1, -1])
        """
        return np.where(self.decision_function(X) < 0, -1, 1)

    def _images(self, X: Any, backbone: gepc.Backbone, reset: bool) -> Any:
        """X as images: rows of a 2-D array, also of nested lists, in their shape; anything else as it is."""
        first = X[0] if isinstance(X, list) and X else None
        shape = (getattr(X, "shape", None) or np.asarray(X).shape) if hasattr(X, "__array__") else ()
        is_column = len(shape) == 1 and np.asarray(X).dtype.kind in "OUT"  # of paths
        is_table = hasattr(X, "__array__") and len(shape) <= 2 and not is_column
        if not (is_table or issparse(X) or isinstance(first, (list, int, float)) or getattr(first, "ndim", 0) == 1):
            return X
        return self._reshaped(validate_data(self, X, reset=reset, ensure_min_samples=2 if reset else 1), backbone)

    def _reshaped(self, rows: npt.NDArray[Any], backbone: gepc.Backbone) -> npt.NDArray[Any]:
        shape = self.image_shape or (backbone.image_size and (backbone.channels, *backbone.image_size))
        if shape is None or np.prod(shape) != rows.shape[1]:
            raise InputError(f"rows of {rows.shape[1]} features are not images of shape {shape}; set `image_shape`")
        return rows.reshape(-1, *shape)

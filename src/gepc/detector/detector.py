"""The detector: parameters, `fit`, and one method for every question that a user asks of images."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.conformal.decision import DecisionRule
from gepc.conformal.p_values import Array, Guarantee, group_labels
from gepc.core.errors import NotFittedError, OptionError, raising
from gepc.core.files import StrPath
from gepc.core.progress import Progress
from gepc.detector.fitted import FittedDetector
from gepc.detector.fitting import Groups, feature_table, fit_detector
from gepc.detector.parameters import NOMINAL_SIZE, Parameters, detector_options
from gepc.detector.plots import plot_results
from gepc.detector.storage import load_fitted, save_detector
from gepc.detector.stream import Result, scores_of, stream
from gepc.images.sources import open_images
from gepc.methods.base import Cost, Table, cost_of
from gepc.methods.pooling import Map

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Alarms = npt.NDArray[np.bool_]


class FittedAttributes(Parameters):
    """What a fitted detector says and does without looking at an image; `NotFittedError` before `fit`.

    The names of the attributes end in an underscore, which is scikit-learn's convention. `fitted` has everything else.
    """

    fitted_: FittedDetector | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "batch_size" and self.fitted_ is not None:
            self.fitted_ = replace(self.fitted_, batch_size=self.batch_size)
        elif name in self.__dataclass_fields__:
            self.__dict__.pop("fitted_", None)

    @property
    def is_fitted(self) -> bool:
        """Whether `fit` has been called, and no parameter was changed since."""
        return self.fitted_ is not None

    @property
    def fitted(self) -> FittedDetector:
        """The fitted state, a `FittedDetector`. Reading it before `fit` raises `NotFittedError`."""
        if self.fitted_ is None:
            raise NotFittedError("this detector is not fitted yet; call fit(id_images) first")
        return self.fitted_

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
    def calibration_scores_(self) -> Array:
        """The scores of all calibration images as an array (n,), in ascending order."""
        return self.fitted.reference.scores

    @property
    def map_scale_(self) -> float | None:
        """v_global, the common scale of raw maps; None for a method without maps."""
        return self.fitted.map_scale

    def guarantee(self, alpha: float = 0.05) -> Guarantee:
        """State what is guaranteed at this false-alarm rate with the calibration images (of the smallest group).

        Parameters
        ----------
        alpha : the false-alarm rate.

        Returns
        -------
        Guarantee
            The range in which the realised rate lies, and a sentence for people.

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> detector.guarantee(0.1).n
        20
        """
        return self.fitted.guarantee(alpha)

    def map_limit(self, alpha: float = 0.05, raw: bool = False) -> float:
        """Compute the end of the colour scale of maps, the same for all images; see `FittedDetector.map_limit`.

        Parameters
        ----------
        alpha : the false-alarm rate of the regions of a map.
        raw : whether the maps are raw.

        Returns
        -------
        float

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> detector.map_limit(0.1) > 0.0
        True
        """
        return self.fitted.map_limit(alpha, raw)

    def save(self, folder: StrPath) -> None:
        """Write `detector.json` and `state.safetensors` into a folder; a detector that is there is replaced whole.

        Parameters
        ----------
        folder : a new folder, or one that holds a detector. `save_pretrained` is another name of this method.

        Examples
        --------
        >>> import os, tempfile
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> with tempfile.TemporaryDirectory() as place:
        ...     detector.save(os.path.join(place, "det"))
        ...     sorted(os.listdir(os.path.join(place, "det")))
        ['detector.json', 'state.safetensors']
        """
        save_detector(self.fitted, folder)

    save_pretrained = save

    @property
    def input_size(self) -> tuple[int, int]:
        """(H, W) of the network's input: that of the first image where it is not fixed, and 32x32 before `fit`."""
        if self.fitted_ is not None:
            return self.fitted_.input_size
        return self.preprocessing().size or NOMINAL_SIZE

    def cost(self) -> Cost:
        """Count the network passes per image: at the kept levels once fitted, at `keep` levels before.

        Returns
        -------
        Cost

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> print(detector.cost())
        2F+0J
        """
        if self.fitted_ is not None:
            return self.fitted_.cost()
        return cost_of(self.extractor, self.backbone, self.input_size, self.keep)

    def __repr__(self) -> str:
        state = "not fitted"
        if self.fitted_ is not None:
            state = f"fitted on {self.fitted_.fit_images}+{len(self.calibration_scores_)}"
        return f"<{type(self).__name__} {self.extractor.name}, {self.calibration_name}, {state}, {self.backbone!r}>"


class Answers(FittedAttributes):
    """What a fitted detector says about images: scores, p-values, decisions, tables, plots and maps."""

    def results(
        self,
        images: Any,
        on_error: str = "row",
        groups: Groups = None,
        ties: str = "conservative",
        on_progress: Progress = None,
    ) -> Iterator[Result]:
        """Score images one by one, in order, in constant memory.

        Parameters
        ----------
        images : the images to score, see `gepc.images.sources.open_images`.
        on_error : `row` gives a result with an `error` for an image that cannot be read or scored, as on the command
            line; `raise` raises `InputError` at the first of them.
        groups : a label for each image, or "folder"; required by a detector fitted with groups.
        ties : `conservative`, or `random` to order equal scores by a number drawn from the image's content, which makes
            p exactly uniform for in-distribution images.
        on_progress : True shows a progress bar on the terminal; a function is called with the number of images of every
            finished chunk.

        Returns
        -------
        An iterator of `Result`. Wrong arguments are refused at once.

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> [result.name for result in detector.results(images[:2])]
        ['0', '1']
        """
        opened = open_images(images)
        labels = group_labels(groups, opened)
        scored = stream(self.fitted, opened, labels=labels, ties=ties, on_error=on_error, on_progress=on_progress)
        return (result for chunk in scored for result in chunk.results)

    def explain(self, images: Any, on_error: str = "row", groups: Groups = None) -> list[Result]:
        """Score images, and state in plain words which part of each score is most unusual.

        Each `Result` has `evidence`, the tail probability of every part among in-distribution images, and `reason`, the
        part with the smallest. These probabilities are estimates; the guarantee holds for `p_value`.

        Parameters
        ----------
        images, on_error, groups : as in `results`.

        Returns
        -------
        list of Result

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> sorted(detector.explain(images[:1])[0].evidence)
        ['orientation', 'output', 'texture and noise']
        """
        return list(self.results(images, on_error, groups))

    def score(self, images: Any, on_error: str = "raise", on_progress: Progress = None) -> Array:
        """Compute one score per image. A higher score is more out of distribution.

        Parameters
        ----------
        images, on_progress : as in `results`.
        on_error : as in `results`; with `row`, an image that cannot be scored is NaN.

        Returns
        -------
        A float64 array (N,).

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> detector.score(images[:3]).shape
        (3,)
        """
        return scores_of(self.fitted, open_images(images), on_error, on_progress=on_progress)

    def p_value(
        self,
        images: Any,
        groups: Groups = None,
        ties: str = "conservative",
        on_error: str = "raise",
        on_progress: Progress = None,
    ) -> Array:
        """Compute p-values, p = (1 + #{calibration >= score})/(n + 1). A small p means out of distribution.

        Parameters
        ----------
        images, groups, ties, on_progress : as in `results`.
        on_error : as in `results`; with `row`, an image that cannot be scored is NaN.

        Returns
        -------
        A float64 array (N,).

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> detector.p_value(-np.ones((1, 1, 8, 8))).round(3)
        array([0.048])
        """
        results = self.results(images, on_error, groups, ties, on_progress)
        return np.array([result.p_value for result in results], dtype=np.float64)

    def predict(
        self,
        images: Any,
        alpha: float = 0.05,
        confidence: float | None = None,
        groups: Groups = None,
        on_error: str = "raise",
        fdr: float | None = None,
        procedure: str = "bh",
        on_progress: Progress = None,
    ) -> Alarms:
        """Decide which images raise an alarm.

        Parameters
        ----------
        images, groups, on_progress : as in `results`.
        on_error : as in `results`; with `row`, an image that cannot be scored raises no alarm.
        alpha : the largest probability that an in-distribution image raises an alarm, on average over calibration sets.
        confidence : if given, the rate holds for the calibration set at hand with this probability.
        fdr : if given, control the false-discovery rate instead of `alpha`: on average at most this share of the
            alarms is false.
        procedure : `bh` (Benjamini-Hochberg) or `storey`, with `fdr`; `storey` warns if images repeat.

        Returns
        -------
        A boolean array (N,), True for an alarm.

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> detector.predict(-np.ones((1, 1, 8, 8)), alpha=0.1)
        array([ True])
        """
        rule = DecisionRule(alpha, confidence, fdr, procedure)
        return self._decided(rule, images, groups, on_error=on_error, on_progress=on_progress)[1]

    def _decided(self, rule: DecisionRule, images: Any, groups: Groups, **options: Any) -> tuple[list[Result], Alarms]:
        """The results of all images and their alarms; a rate that cannot be guaranteed is refused at once."""
        opened = open_images(images)
        labels = group_labels(groups, opened)
        reference = self.fitted.reference
        rule.check(reference, labels)
        results = list(self.results(opened, groups=groups, **options))
        p_values, scores = np.array([(r.p_value, r.score) for r in results], dtype=np.float64).reshape(-1, 2).T
        return results, rule.decide(reference, labels, p_values, scores)

    def results_frame(
        self, images: Any, alpha: float = 0.05, on_error: str = "row", groups: Groups = None
    ) -> pandas.DataFrame:
        """Return the table of `gepc score` as a pandas DataFrame: path, score, p_value, alarm, error.

        Parameters
        ----------
        images, on_error, groups : as in `results`.
        alpha : the false-alarm rate of the alarms.

        Returns
        -------
        pandas.DataFrame

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> list(detector.results_frame(images[:2], alpha=0.1))
        ['path', 'score', 'p_value', 'alarm', 'error']
        """
        with raising(OptionError, "a data frame needs pandas; install it with: pip install 'gepc[frame]'", ImportError):
            import pandas
        results, alarms = self._decided(DecisionRule(alpha), images, groups, on_error=on_error)
        rows = [(r.name, r.score, r.p_value, a, r.error) for r, a in zip(results, alarms.tolist(), strict=True)]
        return pandas.DataFrame(rows, columns=["path", "score", "p_value", "alarm", "error"])

    def plot(self, images: Any, alpha: float = 0.05, groups: Groups = None, on_progress: Progress = None) -> Figure:
        """Score images and plot their scores, p-values and alarms; see `gepc.detector.plots.plot_results`.

        Parameters
        ----------
        images : as in `results`; images that cannot be scored are left out.
        groups, on_progress : as in `results`.
        alpha : the false-alarm rate of the alarms.

        Returns
        -------
        matplotlib.figure.Figure

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> len(detector.plot(images[:5], alpha=0.1).axes)
        2
        """
        results, alarms = self._decided(DecisionRule(alpha), images, groups, on_progress=on_progress)
        return plot_results([r.score for r in results], [r.p_value for r in results], alarms)

    def score_map(self, images: Any, raw: bool = False, on_progress: Progress = None) -> Map:
        """Compute anomaly maps, in standard deviations of in-distribution maps; see `gepc.maps.statistics`.

        A detector without the statistics of maps, saved by version 0.1 or fitted with `maps="raw"`, gives raw maps.

        Parameters
        ----------
        images : the images.
        raw : return m = sum_t w_t mean_g mean_c r_g^2 / b_t instead (for `gepc+` also the denoising error), to be
            divided by `map_scale_`. With mean pooling and raw calibration, the mean of a raw map is the score.
        on_progress : as in `results`.

        Returns
        -------
        A float32 array (N, H, W).

        Raises
        ------
        NotFittedError
            Before `fit`.
        OptionError
            If the method has no maps, or if the images have several sizes and keep them.
        InputError
            If an image cannot be read.

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> detector.score_map(images[:2]).shape
        (2, 8, 8)
        """
        fitted = self.fitted.without_groups()
        scored = stream(fitted, open_images(images), maps=True, raw=raw, on_error="raise", on_progress=on_progress)
        maps = [chunk.fields[fitted.map_part] for chunk in scored if chunk.fields is not None]
        if len({field.shape[1:] for field in maps}) > 1:
            raise OptionError("images of several sizes have maps of several sizes; give one image at a time")
        return np.concatenate(maps) if maps else np.empty((0, *(fitted.preprocessing.size or (0, 0))), np.float32)


class Detector(Answers):
    """Out-of-distribution detector: scores, p-values with a false-alarm guarantee, decisions and maps.

    `fit` stores everything that it learns in one immutable object, `fitted_`, at its end: a failed `fit` changes
    nothing. Assigning a parameter after `fit` discards `fitted_`, except for `batch_size`, which changes no score.

    Parameters
    ----------
    backbone : Backbone
        The network that predicts noise, or an energy network for the method `energy`.
    extractor : Extractor
        The method, with its parameters.
    calibration : str, optional
        Name of the calibrator; None takes the method's default.
    keep : int, optional
        How many noise levels to keep; None keeps all.
    weights : {"inv_cv", "uniform"}
        Weights of the kept levels.
    aggregate : {"wmean", "mean", "max", "min", "trimmed"}
        How the scores of the kept levels become one; see `gepc.calibration.Aggregation`.
    fuse : {"sum", "mean", "max"}
        How the scores of several features become one.
    value_range : tuple of float, optional
        The numbers that mean black and white; see `gepc.Preprocessing`.
    size : int or (int, int), optional
        The height and width that images are resized to. By default it is the size of a backbone with a fixed size, and
        otherwise the size of the first image.
    resize : {"stretch", "crop", "cut", "exact", "native", "half"}
        How images of another size are treated; see `gepc.Preprocessing`.
    magnitude : {"linear", "log"}
        Whether the network sees the pixels as they are, or the log-magnitude of radar pixels.
    normalise : {"fixed", "patch"}
        Whether the log-magnitude has one scale for all images, or a scale for each.
    ignore : bool array (H, W) or path of a picture, optional
        Pixels that count neither for scores nor for maps nor for calibration; see `gepc.Preprocessing`.
    maps : {"calibrated", "raw"}
        `calibrated` learns what is usual in maps from some of the images, for maps in standard deviations and with
        p-values. `raw` learns the common scale of maps alone, with fewer passes.
    score_from : {"features", "map"}
        `map` takes the mean of the highest 0.3 % of the calibrated map as the score, for small defects in images that
        are usual otherwise.
    calibration_share : float
        Share of the in-distribution images that is held out for p-values.
    contamination : float
        Share of the calibration images that may be outliers: their highest scores are left out. The guarantee that
        remains is stated by `guarantee`.
    batch_size : int
        The largest number of images per network call. It bounds the memory and does not change a score.
    seed : int
        The noise is a function of this seed and of each image's content.

    Attributes
    ----------
    fitted_ : FittedDetector
        The fitted state; None before `fit`.
    levels_ : ndarray
        The candidate timesteps.
    kept_ : ndarray
        The timesteps that selection kept.
    weights_ : ndarray
        The weights of the kept timesteps.
    cv_ : ndarray
        The coefficient of variation at every candidate timestep.
    calibration_scores_ : ndarray
        The scores of all calibration images, sorted.

    See Also
    --------
    gepc.create_detector : build a detector by the name of its method.

    Examples
    --------
    >>> import gepc, numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
    >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
    >>> detector.predict(-np.ones((1, 1, 8, 8)), alpha=0.1)
    array([ True])
    """

    def fit(
        self, images: Any, calibration_images: Any = None, groups: Groups = None, on_progress: Progress = None
    ) -> Detector:
        """Select levels, fit the calibrator and compute calibration scores from in-distribution images alone.

        Parameters
        ----------
        images : a folder, a list of files, an array, a tensor, a Dataset or an iterable of in-distribution images.
            Files that cannot be read are left out with a warning.
        calibration_images : separate images for the p-values. By default a share `calibration_share` of `images`,
            chosen by the images' content and the seed, is held out. If the backbone is known to be trained on some of
            the calibration images, a warning gives their number.
        groups : a label for each calibration image, or "folder" for the name of its folder: p-values are then valid
            within every group (Mondrian calibration).
        on_progress : True shows a progress bar on the terminal; a function is called with the number of images of every
            finished chunk.

        Returns
        -------
        The detector itself.

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> len(detector.calibration_scores_)
        20
        """
        self.__post_init__()
        self.fitted_ = fit_detector(self, images, calibration_images, groups, on_progress)
        return self

    def features(self, images: Any, noise: npt.ArrayLike | None = None) -> Table:
        """Compute the features at every candidate level: name -> (N, levels[, g]). The detector need not be fitted.

        The mean over the axes after the levels is the paper's scalar feature.

        Parameters
        ----------
        images : the images.
        noise : noise (levels, N, C, H, W) that replaces the drawn noise; that of latents has the latents' shape.

        Returns
        -------
        A dictionary of arrays.

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> detector.features(images[:2])["d"].shape
        (2, 1)
        """
        preprocessing = self.preprocessing() if self.fitted_ is None else self.fitted_.preprocessing
        return feature_table(self, preprocessing, open_images(images), noise)

    @classmethod
    def of(cls, fitted: FittedDetector) -> Detector:
        """Make a detector with that fitted state, and with the parameters that it was fitted with.

        Parameters
        ----------
        fitted : the fitted state.

        Returns
        -------
        Detector

        Examples
        --------
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> gepc.Detector.of(detector.fitted).is_fitted
        True
        """
        options = {name: fitted.options[name] for name in detector_options()}
        detector = cls.__new__(cls)  # a subclass may have a constructor with other arguments
        Parameters.__init__(detector, fitted.backbone, fitted.method, **{**options, "batch_size": fitted.batch_size})
        detector.fitted_ = fitted
        return detector

    @classmethod
    def from_pretrained(cls, folder: StrPath, *arguments: Any, **options: Any) -> Detector:
        """Load a saved detector; the name that users of diffusers expect.

        Parameters
        ----------
        folder, *arguments, **options : as in `gepc.load_detector`.

        Returns
        -------
        Detector

        Examples
        --------
        >>> import tempfile
        >>> import gepc, numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
        >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
        >>> with tempfile.TemporaryDirectory() as place:
        ...     detector.save_pretrained(f"{place}/det")
        ...     gepc.Detector.from_pretrained(f"{place}/det", detector.backbone).is_fitted
        True
        """
        return cls.of(load_fitted(folder, *arguments, **options))

    def predict_fdr(
        self, images: Any, fdr: float = 0.1, procedure: str = "bh", groups: Groups = None, on_error: str = "raise"
    ) -> Alarms:
        """Deprecated: call `predict(images, fdr=...)`."""
        warnings.warn("predict_fdr is deprecated; call predict(images, fdr=...)", DeprecationWarning, stacklevel=2)
        return self.predict(images, groups=groups, on_error=on_error, fdr=fdr, procedure=procedure)

    flag = predict_fdr

    def decision_function(self, images: Any) -> Array:
        """Deprecated: call `score`. `gepc.sklearn` has scikit-learn's `decision_function`, with the other sign."""
        warnings.warn("Detector.decision_function is deprecated; call score", DeprecationWarning, stacklevel=2)
        return self.score(images)

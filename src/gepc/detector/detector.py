"""A detector: features, scoring and conformal calibration behind one small interface."""

from __future__ import annotations

import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.calibration.calibrators import Calibrator
from gepc.calibration.scorer import Scorer
from gepc.conformal.decision import DecisionRule
from gepc.conformal.p_values import CalibrationScores, Guarantee, Labels, check_rates, group_labels
from gepc.core.errors import InputError, NotFittedError, OptionError, check_choice, raising
from gepc.core.files import StrPath
from gepc.core.options import at_least, check_fields, coerce, one_of
from gepc.images.batches import Chunk, OnBadImage, chunks
from gepc.images.noise import generator, image_key
from gepc.images.preprocessing import OWN_SIZE, Preprocessing, warn_about_range
from gepc.images.sources import Image, Images, ObservedImages, Record, open_images
from gepc.maps.statistics import CALIBRATION_IMAGES, FIT_IMAGES, TOGETHER, Fields, MapStatistics, map_scores
from gepc.methods.base import Batch, Cost, Extractor, MapParts, Table, cost_of, extract_map_parts, extract_table
from gepc.methods.extraction import Engine, ExtractionSpec, FeatureTable, OnProgress, concatenate, extract_all
from gepc.methods.pooling import Map, combine, v_global

if TYPE_CHECKING:
    import pandas

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
Alarms = npt.NDArray[np.bool_]
Groups = Sequence[str] | str | None
MINIMUM_FIT = 8
SAMPLE_IMAGES, SCORE_IMAGES, MAP_WINDOW = 600, 199, 9
_ON_ERROR = {"raise": OnBadImage.NONE, "row": OnBadImage.ALL}


@dataclass(frozen=True)
class Result:
    """The result for one image.

    Attributes
    ----------
    index : position of the image in the collection.
    name : its path, or its number.
    score : higher = more out of distribution; NaN where the image could not be scored.
    p_value : the conformal p-value of the score; NaN where the image could not be scored.
    error : why the image could not be scored, or None.
    """

    index: int
    name: str
    score: float
    p_value: float
    error: str | None = None


@dataclass(eq=False, repr=False)
class Detector:
    """Out-of-distribution detector: scores, p-values with a false-alarm guarantee, decisions and maps.

    Parameters
    ----------
    backbone : the network that predicts noise, or an energy network for the method `energy`.
    extractor : the method, with its parameters.
    calibration : name of the calibrator; None takes the method's default.
    keep : how many noise levels to keep; None keeps all.
    weights : weights of the kept levels: `inv_cv` or `uniform`.
    aggregate : how levels are combined; see `gepc.calibration.Aggregation`.
    fuse : how features are combined; see `gepc.calibration.Aggregation`.
    value_range : the values that mean black and white in float images; see `gepc.Preprocessing`.
    size : size of the images that the network sees; defaults to that of a backbone with a fixed size, otherwise to
        that of the first image.
    resize : how images of another size are brought to `size`; see `gepc.Preprocessing`.
    magnitude : `linear`, or `log` for radar; see `gepc.Preprocessing`.
    normalise : `fixed` or `patch` scale of log-magnitudes; see `gepc.Preprocessing`.
    maps : `calibrated` learns what is usual in maps from some of the images, for maps in standard deviations and with
        p-values; `aligned` learns it for every position, where the same pixel shows the same thing in all images;
        `raw` learns their common scale alone, with fewer passes.
    score_from : `features`, or `map`: the score is the mean of the highest 0.3 % of the calibrated map, for small
        defects in images that are usual otherwise.
    calibration_share : share of the in-distribution images held out for p-values.
    batch_size : the largest number of images per network call; bounds the memory and does not change a score.
    seed : the noise is a function of this seed and of each image's content.

    Attributes
    ----------
    levels_ : candidate timesteps.
    kept_ : the timesteps that selection kept.
    weights_ : their weights.
    cv_ : coefficient of variation at every candidate.
    scorer_ : the fitted `gepc.calibration.Scorer`.
    reference_ : the calibration scores, by group.
    map_scale_ : v_global, the common scale of raw maps; None for a method without maps.
    maps_ : the statistics of calibrated maps; None without them.
    n_fit_ : how many images levels and calibrator were fitted on.
    preprocessing_ : how images are prepared.
    """

    backbone: Backbone
    extractor: Extractor
    _: KW_ONLY
    calibration: str | None = None
    keep: int | None = None
    weights: str = "inv_cv"
    aggregate: str = "wmean"
    fuse: str = "sum"
    value_range: tuple[float, float] | None = None
    size: int | tuple[int, int] | None = None
    resize: str = "stretch"
    magnitude: str = "linear"
    normalise: str = "fixed"
    maps: str = one_of("calibrated", "aligned", "raw")
    score_from: str = one_of("features", "map")
    calibration_share: float = 1 / 3
    batch_size: int = at_least(1, 64)
    seed: int = 0
    levels_: npt.NDArray[np.int64] = field(init=False)
    kept_: npt.NDArray[np.int64] = field(init=False)
    scorer_: Scorer = field(init=False)
    reference_: CalibrationScores = field(init=False)
    map_scale_: float | None = field(init=False)
    maps_: MapStatistics | None = field(init=False)
    n_fit_: int = field(init=False)
    preprocessing_: Preprocessing = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.backbone, Backbone):
            kind = type(self.backbone).__name__
            raise OptionError(f"backbone must be a gepc.Backbone, got {kind}; see gepc.load_backbone")
        hints = typing.get_type_hints(Detector.__init__)
        for name in detector_options():
            setattr(self, name, coerce(hints[name], getattr(self, name), name))
        method = self.extractor
        if method.needs not in (None, self.backbone.gives):
            raise OptionError(
                f"the method {method.name!r} needs a network that gives {method.needs}, and the backbone "
                f"{self.backbone.source or self.backbone.family} gives {self.backbone.gives}; energies go with the "
                "method 'energy', noise predictions with the others"
            )
        self._scorer()
        self._preprocessing()
        if self.backbone.encoder is not None and method.pixels_only:
            raise OptionError(f"the method {method.name!r} does not run on a latent backbone: {method.pixels_only}")
        if self.resize in OWN_SIZE and any(action.square_only for action in getattr(method, "group", ())):
            raise OptionError("images that keep their size need not be square; leave rot90 out of `group`")
        check_fields(self)
        if self.score_from == "map" and (self.maps == "raw" or not method.has_maps):
            raise OptionError("score_from='map' needs a method with maps, and calibrated ones")
        check_rates(calibration_share=self.calibration_share)
        most = len(method.timesteps(self.backbone))
        if self.keep is not None and not 1 <= self.keep <= most:
            raise OptionError(f"keep must be between 1 and {most}, the number of distinct levels here; got {self.keep}")

    @property
    def calibration_name(self) -> str:
        """The calibrator in use."""
        return self.extractor.calibration_name if self.calibration is None else self.calibration

    def _scorer(self) -> Scorer:
        return Scorer(self.calibration_name, self.keep, self.weights, self.aggregate, self.fuse)

    def _preprocessing(self) -> Preprocessing:
        size = self.backbone.image_size if self.size is None else self.size
        if isinstance(size, int):
            size = (size, size)
        multiple = self.backbone.size_multiple if self.resize in OWN_SIZE else 1
        preprocessing = Preprocessing(
            self.value_range, size, self.resize, self.backbone.channels, self.magnitude, self.normalise, multiple
        )
        if size is not None:
            self.backbone.check_size(*size)
        return preprocessing

    # --- fitting -------------------------------------------------------------------------------------------------

    def fit(
        self,
        images: Any,
        calibration_images: Any = None,
        groups: Groups = None,
        on_progress: OnProgress | None = None,
        engine: Engine | None = None,
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
        on_progress : called with the number of images of every finished chunk.
        engine : makes the network passes elsewhere; see `gepc.runs`.
        """
        levels = self.extractor.timesteps(self.backbone)
        spec = ExtractionSpec(self.extractor.for_fitting(), levels, self.seed, self.batch_size)
        opened = open_images(images)
        found = self._extract(opened, self._preprocessing(), spec, on_progress, engine, calibration_images is None)
        fitting, held_out = self._split(found.keys, calibration_images is None)
        _check_enough(len(fitting), found.keys)
        _warn_about_copies(found.keys)
        scorer = self._scorer().fit(found.rows(fitting))
        kept = list(scorer.selection_.kept)
        timesteps = tuple(levels[position] for position in kept)
        if calibration_images is None:
            source, again = opened, found.rows(held_out)
            reference = self.extractor.as_scored(again.columns[:, kept], again.keys, self.seed)
        else:
            source = open_images(calibration_images)
            spec = replace(spec, extractor=self.extractor, timesteps=timesteps)
            again = self._extract(source, found.preprocessing, spec, on_progress, engine, calibrating=True)
            _warn_about_copies(again.keys)
            again = again.rows(self._split(again.keys, hold_out=False)[0])
            reference = again.columns
            _warn_about_shared(found.keys, again.keys)

        self.scorer_ = scorer
        scores, places = scorer.score_kept(reference), again.indices
        self.preprocessing_ = found.preprocessing
        self.levels_, self.kept_ = np.asarray(levels), np.asarray(timesteps)
        self.n_fit_ = len(fitting)
        calibrating = again.sample.of(again.keys, self._most_calibrating)
        self._fit_maps(found.sample.of((found.keys[row] for row in fitting), FIT_IMAGES), calibrating)
        if self.score_from == "map" and self.maps_ is not None:
            scores, places = self.maps_.scores, again.of(list(calibrating)).indices
        self.reference_ = CalibrationScores.of(scores, group_labels(groups, source, places))
        return self

    @property
    def _most_calibrating(self) -> int:
        return SCORE_IMAGES if self.score_from == "map" else CALIBRATION_IMAGES

    def map_images(self, fitting: int, calibrating: int) -> int:
        """How many of the images to fit on and to calibrate with are evaluated again, as in scoring, for their maps."""
        if not self.extractor.has_maps:
            return 0
        return (0 if self.maps == "raw" else min(fitting, FIT_IMAGES)) + min(calibrating, self._most_calibrating)

    def _fit_maps(self, fitting: Mapping[bytes, Image], calibrating: Mapping[bytes, Image]) -> None:
        """The statistics of calibrated maps and the scale of raw ones, from some of the images."""
        self.maps_, self.map_scale_ = None, None
        if not self.extractor.has_maps:
            return
        raw: list[Map] = []

        def read(images: Sequence[Image]) -> MapParts:
            _, parts, levels = self._map_parts(self._batch(images))
            raw.extend(combine(levels, self.weights_))
            return parts

        if self.maps == "raw":
            read(list(calibrating.values()))
        else:
            images = list(fitting.values()), list(calibrating.values())
            self.maps_ = MapStatistics.fit(read, *images, self.weights_, self.map_window, self.maps == "aligned")
        self.map_scale_ = v_global(raw)

    def _extract(
        self,
        images: Images,
        preprocessing: Preprocessing,
        spec: ExtractionSpec,
        on_progress: OnProgress | None,
        engine: Engine | None,
        calibrating: bool,
    ) -> FeatureTable:
        if next(images.first(1), None) is None:
            raise InputError("there are no in-distribution images to fit on")
        trained_on = self.backbone.trained_on if calibrating else None
        if trained_on is not None:
            images = observed = ObservedImages(images, Record.content_hash)
        size = SAMPLE_IMAGES if self.extractor.has_maps else 0
        found = extract_all(
            images, preprocessing, self.backbone, spec, engine=engine, on_progress=on_progress, sample_size=size
        )
        found.warn_about_skipped()
        if trained_on is not None:
            _warn_about_trained_on([observed.seen[index] for index in found.indices.tolist()], trained_on)
        return found

    def _split(self, keys: Sequence[bytes], hold_out: bool) -> tuple[Rows, Rows]:
        """Positions to fit on and to hold out, ranked by a hash of each image: shuffling the images changes nothing."""
        first = {key: place for place, key in reversed(list(enumerate(keys)))}  # equal images count once
        rank = sorted((generator(self.seed, key, "split").random(), key) for key in first)
        order = [first[key] for _, key in rank]
        held_out = max(1, round(len(order) * self.calibration_share)) if hold_out else 0
        return np.sort(order[held_out:]).astype(np.int64), np.sort(order[:held_out]).astype(np.int64)

    # --- scoring -------------------------------------------------------------------------------------------------

    def score(self, images: Any, on_error: str = "raise") -> Array:
        """One number per image, float64, higher = more out of distribution.

        Parameters
        ----------
        images, on_error : as in `results`; with `row`, an image that cannot be scored is NaN.
        """
        return np.asarray([result.score for result in self.results(images, on_error)], dtype=np.float64)

    decision_function = score

    def p_value(self, images: Any, groups: Groups = None, ties: str = "conservative", on_error: str = "raise") -> Array:
        """Conformal p-values, p = (1 + #{calibration >= score})/(n + 1); a small p means out of distribution.

        Parameters
        ----------
        images, groups, on_error : as in `results`; with `row`, an image that cannot be scored is NaN.
        ties : `conservative`, or `random` to order equal scores by a number drawn from the image's content, which makes
            p exactly uniform for in-distribution images.
        """
        return np.asarray([one.p_value for one in self.results(images, on_error, groups, ties)], dtype=np.float64)

    def predict(
        self,
        images: Any,
        alpha: float = 0.05,
        confidence: float | None = None,
        groups: Groups = None,
        on_error: str = "raise",
    ) -> Alarms:
        """True where an image is out of distribution at false-alarm rate `alpha`.

        Parameters
        ----------
        images, groups, on_error : as in `results`; with `row`, an image that cannot be scored raises no alarm.
        alpha : the largest probability that an in-distribution image raises an alarm, on average over calibration sets.
        confidence : if given, the rate holds for the calibration set at hand with this probability.
        """
        return self._decide(DecisionRule(alpha, confidence), images, groups, on_error)

    def predict_fdr(
        self, images: Any, fdr: float = 0.1, procedure: str = "bh", groups: Groups = None, on_error: str = "raise"
    ) -> Alarms:
        """True for images of a batch such that, on average, at most a share `fdr` of the alarms is false.

        Parameters
        ----------
        images, groups, on_error : as in `results`; with `row`, an image that cannot be scored raises no alarm.
        fdr : false-discovery rate.
        procedure : `bh` (Benjamini-Hochberg) or `storey`.
        """
        return self._decide(DecisionRule(fdr=fdr, procedure=procedure), images, groups, on_error)

    flag = predict_fdr

    def _decide(self, rule: DecisionRule, images: Any, groups: Groups, on_error: str) -> Alarms:
        source = open_images(images)
        labels = group_labels(groups, source)
        rule.check(self._fitted().reference_, labels)
        return rule.alarms(self.p_value(source, groups, on_error=on_error), self.reference_, labels)

    def guarantee(self, alpha: float = 0.05) -> Guarantee:
        """What is guaranteed at this false-alarm rate with the calibration images (of the smallest group)."""
        return Guarantee.at(alpha, self._fitted().reference_.smallest)

    @property
    def calibration_scores_(self) -> Array:
        """The scores of all calibration images, sorted."""
        return self._fitted().reference_.scores

    def results(
        self,
        images: Any,
        on_error: str = "row",
        groups: Groups = None,
        ties: str = "conservative",
        on_progress: OnProgress | None = None,
        paths: Iterable[object] | None = None,
    ) -> Iterator[Result]:
        """Results one by one, in order, in constant memory.

        Parameters
        ----------
        images : the images to score, see `gepc.images.sources.open_images`.
        on_error : `row` gives a result with an `error` for an image that cannot be read or scored, as on the command
            line; `raise` raises `InputError` at the first of them.
        groups : a label for each image, or "folder"; required by a detector fitted with groups.
        ties : as in `p_value`.
        on_progress : called with the number of images of every finished chunk.
        paths : names of the images, in order, instead of their own.
        """
        check_choice("ties", ties, ("conservative", "random"))
        check_choice("on_error", on_error, _ON_ERROR)
        opened = open_images(images)
        labels = group_labels(groups, opened)
        self._fitted().reference_.check(labels)
        names = None if paths is None else map(str, paths)
        for chunk in self._chunks(opened, self.preprocessing_, _ON_ERROR[on_error]):
            results = self.score_chunk(chunk, None if labels is None else labels[chunk.indices], ties)
            yield from results if names is None else _renamed(results, names)
            if on_progress is not None:
                on_progress(len(chunk))
        if names is not None and next(names, None) is not None:
            raise InputError("`paths` has more names than there are images")

    def results_frame(
        self,
        images: Any,
        alpha: float = 0.05,
        on_error: str = "row",
        groups: Groups = None,
        paths: Iterable[object] | None = None,
    ) -> pandas.DataFrame:
        """The table of `gepc score` as a pandas DataFrame: path, score, p_value, alarm, error.

        Parameters
        ----------
        images, on_error, groups, paths : as in `results`.
        alpha : false-alarm rate of the alarms; see `predict`.
        """
        with raising(OptionError, "a data frame needs pandas; install it with: pip install 'gepc[frame]'", ImportError):
            import pandas
        opened, rule = open_images(images), DecisionRule(alpha)
        labels = group_labels(groups, opened)
        rule.check(self._fitted().reference_, labels)
        rows = [(r.name, r.score, r.p_value, r.error) for r in self.results(opened, on_error, groups, paths=paths)]
        frame = pandas.DataFrame(rows, columns=["path", "score", "p_value", "error"])
        frame.insert(3, "alarm", rule.alarms(frame["p_value"].to_numpy(float), self.reference_, labels))
        return frame

    def score_chunk(self, chunk: Chunk, labels: Labels | None = None, ties: str = "conservative") -> list[Result]:
        """Results of a chunk of images, in order; `labels` are the groups of those that can be scored."""
        results = [
            Result(index, name, np.nan, np.nan, error.removeprefix(f"{name} "))  # a row has the name already
            for index, name, error in chunk.failures
        ]
        if chunk.indices:
            scores, uniform = self._score(self._batch(chunk.images, chunk.keys)), None
            if ties == "random":
                uniform = np.array([generator(self.seed, key, "ties").random() for key in chunk.keys])
            p_values = self._fitted().reference_.p_values(scores, labels, uniform)
            results += map(Result, chunk.indices, chunk.names, scores.tolist(), p_values.tolist())
        return sorted(results, key=lambda result: result.index)

    def score_batch(
        self, images: Sequence[Image], with_maps: bool = False, raw: bool = False
    ) -> tuple[Array, Fields | None]:
        """Scores of preprocessed images, (C, H, W) each, and their maps from the same passes if asked for.

        The maps are those of all parts together and of each part by name; raw if asked for, or without statistics.
        """
        batch = self._fitted()._batch(images)
        return self._score_with_maps(batch, raw) if with_maps else (self._score(batch), None)

    def _score(self, batch: Batch) -> Array:
        if self.score_from == "map":
            return self._score_with_maps(batch)[0]
        table = extract_table(self.extractor, self.backbone, batch, tuple(self.kept_.tolist()))
        return self.scorer_.score_kept(self.extractor.columns(table))

    def _map_parts(self, batch: Batch) -> tuple[Table, MapParts, Map]:
        return extract_map_parts(self.extractor, self.backbone, batch, tuple(self.kept_.tolist()))

    def _score_with_maps(self, batch: Batch, raw: bool = False) -> tuple[Array, Fields]:
        table, parts, levels = self._map_parts(batch)
        from_map = self.score_from == "map"
        calibrated = self.maps_.z(parts, batch.size) if self.maps_ is not None and (from_map or not raw) else None
        shown = {self.map_part: combine(levels, self.weights_)} if raw or calibrated is None else calibrated
        if from_map and calibrated is not None:
            return map_scores(calibrated[TOGETHER]), shown
        return self.scorer_.score_kept(self.extractor.columns(table)), shown

    @property
    def map_part(self) -> str:
        """The part that `score_map` shows: `sum`, all of them together, unless the method's options say otherwise."""
        return str(getattr(self.extractor, "map_part", TOGETHER))

    @property
    def map_window(self) -> int:
        """Side of the box filter of calibrated maps: the method's `window` if it has one."""
        return int(getattr(self.extractor, "window", None) or MAP_WINDOW)

    def map_limit(self, alpha: float = 0.05, raw: bool = False) -> float:
        """The end of the colour scale of maps, the same for all images.

        Of calibrated maps it is the value above which a pixel has a family-wise p-value of at most `alpha`, see
        `gepc.maps.statistics`; of raw maps it is `map_scale_`.
        """
        statistics = None if raw else self._fitted().maps_
        return (self._fitted().map_scale_ or 1.0) if statistics is None else statistics.limit(self.map_part, alpha)

    def score_map(self, images: Any, raw: bool = False) -> Map:
        """Anomaly maps (N, H, W), in standard deviations of in-distribution maps; see `gepc.maps.statistics`.

        A detector without the statistics of maps, saved by an older version or fitted with `maps="raw"`, gives raw
        maps.

        Parameters
        ----------
        images : the images.
        raw : return m = sum_t w_t mean_g mean_c r_g^2 / b_t instead (of `gepc+` also the denoising error), to be
            divided by `map_scale_`. With mean pooling and raw calibration, the mean of a raw map is the score.
        """
        preprocessing = self._fitted().preprocessing_
        if not self.extractor.has_maps:
            names = ", ".join(self.extractor.column_names)
            raise OptionError(f"the method {self.extractor.name!r} has no maps of {names}")
        read = self._chunks(open_images(images), preprocessing)
        found = [self._score_with_maps(self._batch(chunk.images, chunk.keys), raw)[1][self.map_part] for chunk in read]
        if len({one.shape[1:] for one in found}) > 1:
            raise OptionError("images of several sizes have maps of several sizes; give one image at a time")
        return np.concatenate(found) if found else np.empty((0, *(preprocessing.size or (0, 0))), dtype=np.float32)

    def features(self, images: Any, noise: npt.ArrayLike | None = None) -> Table:
        """The method's feature table at every candidate level: name -> (N, levels[, g]). Needs no fit.

        The mean over the axes after the levels is the paper's scalar feature.

        Parameters
        ----------
        images : the images.
        noise : noise (levels, N, C, H, W) that replaces the drawn noise; that of latents has the latents' shape.
        """
        levels = self.extractor.timesteps(self.backbone)
        preprocessing = getattr(self, "preprocessing_", None) or self._preprocessing()
        opened = open_images(images)
        if next(opened.first(1), None) is None:
            raise InputError("there are no images")
        given = None if noise is None else np.asarray(noise)
        if given is not None and (given.ndim != 5 or given.shape[:2] != (len(levels), len(opened))):
            raise InputError(
                f"noise must be (levels, N, C, H, W) = ({len(levels)}, {len(opened)}, ...), got {given.shape}"
            )
        tables = []
        for chunk in self._chunks(opened, preprocessing):
            batch = self._batch(chunk.images, chunk.keys)
            if given is not None:
                part = given[:, chunk.indices]
                batch.fixed_noise = {(t, 0): part[position] for position, t in enumerate(levels)}
            tables.append(extract_table(self.extractor, self.backbone, batch, levels))
        return concatenate(tables)

    @property
    def input_size(self) -> tuple[int, int]:
        """(H, W) of the network's input; 32x32 where it depends on the first image."""
        preprocessing = self.preprocessing_ if self.is_fitted else self._preprocessing()
        return preprocessing.size or (32, 32)

    def cost(self) -> Cost:
        """Network passes per image: at the kept levels once fitted, at `keep` levels before."""
        levels = len(self.kept_) if self.is_fitted else self.keep
        return cost_of(self.extractor, self.backbone, self.input_size, levels)

    def fit_cost(self) -> Cost:
        """Network passes per image while fitting, at every candidate level."""
        return cost_of(self.extractor.for_fitting(), self.backbone, self.input_size)

    def _chunks(
        self, images: Images, preprocessing: Preprocessing, on_bad_image: OnBadImage = OnBadImage.NONE
    ) -> Iterator[Chunk]:
        warn_about_range(images, self.value_range)
        return chunks(images, preprocessing, self.batch_size, on_bad_image)

    def _batch(self, images: Sequence[Image], keys: Sequence[bytes] | None = None) -> Batch:
        self.backbone.check_size(*images[0].shape[1:])
        keys = [image_key(image) for image in images] if keys is None else keys
        return Batch(np.stack(images), keys, self.seed, self.batch_size)

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def is_fitted(self) -> bool:
        """Whether `fit` has been called."""
        return hasattr(self, "reference_")

    @property
    def weights_(self) -> Array:
        """The weights of the kept levels."""
        return self.scorer_.selection_.weights

    @property
    def cv_(self) -> Array:
        """The coefficient of variation at every candidate level."""
        return self.scorer_.selection_.cv

    @property
    def calibrator_(self) -> Calibrator:
        """The fitted calibrator."""
        return self.scorer_.calibrator_

    def _fitted(self) -> Detector:
        if not self.is_fitted:
            raise NotFittedError(f"this {self.extractor.name} detector is not fitted yet; call fit(id_images) first")
        return self

    def save(self, folder: StrPath) -> None:
        """Write `detector.json` and `state.safetensors`, both or none."""
        from gepc.detector.storage import save_detector

        save_detector(self._fitted(), folder)

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
        from gepc.detector.hub import push

        card = {"fitted_on": fitted_on, "figures": figures or {}, "licence": licence}
        return push(self._fitted(), repo_id, card, **options)

    def __repr__(self) -> str:
        state = f"fitted on {self.n_fit_}+{len(self.calibration_scores_)}" if self.is_fitted else "not fitted"
        return f"<{type(self).__name__} {self.extractor.name}, {self.calibration_name}, {state}, {self.backbone!r}>"


def _renamed(results: Iterable[Result], names: Iterator[str]) -> Iterator[Result]:
    for result in results:
        name = next(names, None)
        if name is None:
            raise InputError(f"`paths` has {result.index} names, but there are more images")
        yield replace(result, name=name)


def _check_enough(count: int, keys: Sequence[bytes]) -> None:
    if len(keys) > 1 and len(set(keys)) == 1:
        raise InputError("the in-distribution images are all the same image; there is nothing to calibrate on")
    if count < MINIMUM_FIT:
        raise InputError(
            f"{len(keys)} in-distribution images leave {count} to fit on; at least {MINIMUM_FIT} are needed "
            "(some hundreds for a useful false-alarm rate)"
        )


def _warn_about_copies(keys: Sequence[bytes]) -> None:
    """Copies are not exchangeable with other images, so they must not count several times."""
    copies = len(keys) - len(set(keys))
    if copies:
        message = f"{copies} of {len(keys)} images are copies of others; equal images count once"
        warnings.warn(message, stacklevel=3)


def _warn_about_shared(fitted: Sequence[bytes], reference: Sequence[bytes]) -> None:
    """The false-alarm guarantee needs calibration images that fitting has not seen."""
    shared = len(set(fitted) & set(reference))
    if shared:
        message = f"{shared} calibration images are among the images fitted on, so p-values are not guaranteed"
        warnings.warn(f"{message}; calibrate with other images", stacklevel=3)


def _warn_about_trained_on(hashes: Sequence[int], trained_on: npt.NDArray[np.uint64]) -> None:
    """A network denoises the images of its training better than new ones, so they are not exchangeable."""
    count = int(np.isin(np.asarray(hashes, dtype=np.uint64), trained_on).sum())
    if count:
        warnings.warn(
            f"{count} of {len(hashes)} images were used to train the backbone; the false-alarm guarantee does not hold "
            "for them; calibrate with unseen images (`calibration_images`)",
            stacklevel=4,
        )


def detector_options() -> list[str]:
    """Names of the parameters that every detector has."""
    return [one.name for one in fields(Detector) if one.init and one.kw_only]

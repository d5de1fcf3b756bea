"""A detector: extractor, level selection, calibrator and conformal reference behind one small interface."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.core.errors import InputError, NotFittedError, OptionError, check_choice
from gepc.detector.maps import Map, combine
from gepc.features.base import Batch, Cost, Extractor, Table, as_scored, extract_with_maps, for_fitting
from gepc.features.extraction import ExtractionJob, FeatureEngine, OnProgress, concatenate, extract_all
from gepc.images.batches import Chunk, OnBadImage, chunks
from gepc.images.noise import generator, image_key
from gepc.images.preprocessing import Preprocessing, warn_about_range
from gepc.images.sources import Image, open_images
from gepc.scoring import Aggregation, Calibrator, create_calibrator, selection
from gepc.scoring.sequential import Sequential, check_alpha
from gepc.verdicts.conformal import CalibrationScores, Guarantee, group_labels
from gepc.verdicts.multiple_testing import discoveries

Array = npt.NDArray[np.float64]
MINIMUM_FIT = 8


@dataclass(frozen=True)
class Result:
    """What a detector says of one image; `error` is set and the rest NaN where the image could not be scored."""

    index: int
    name: str
    score: float
    p_value: float
    error: str | None = None


class Detector:
    """Is this image out of distribution, how sure are we, and where?

    Parameters
    ----------
    backbone : the network that predicts noise.
    extractor : the method, with its parameters.
    calibration : calibrator name; None takes the method's usual one.
    keep, weights : how many levels the selection keeps (None: all), and `inv_cv` or `uniform` weights.
    aggregate, fuse : how levels and features are put together; see `gepc.scoring.Aggregation`.
    sequential : look at one kept level after another and stop once the verdict at this false-alarm rate is clear; the
        guarantee holds as without it (`gepc.scoring.sequential`). None looks at all of them.
    value_range, size, resize, magnitude, normalise : see `gepc.Preprocessing`; size defaults to the backbone's.
    calibration_share : share of the ID images held out for p-values.
    batch_size : images handed to the network at once; bounds the memory, does not change a score.
    seed : the noise is a function of this seed and of each image's content.

    Fitted state
    ------------
    levels_, kept_, weights_, cv_ : candidate timesteps, the kept ones, their weights, CV of every candidate.
    calibrator_, reference_, calibration_scores_ : the fitted calibrator, the conformal reference and its scores.
    sequential_, mean_levels_ : the stages of sequential scoring, or None; levels that an ID image needs on average.
    map_scale_ : v_global, the common scale of maps; None for a method without maps.
    """

    def __init__(
        self,
        backbone: Backbone,
        extractor: Extractor,
        *,
        calibration: str | None = None,
        keep: int | None = None,
        weights: str = "inv_cv",
        aggregate: str = "wmean",
        fuse: str = "sum",
        sequential: float | None = None,
        value_range: tuple[float, float] | None = None,
        size: int | tuple[int, int] | None = None,
        resize: str = "stretch",
        magnitude: str = "linear",
        normalise: str = "fixed",
        calibration_share: float = 1 / 3,
        batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        if not isinstance(backbone, Backbone):
            raise OptionError(
                f"backbone must be a gepc.Backbone, got {type(backbone).__name__}; see gepc.load_backbone"
            )
        self.backbone = backbone
        self.extractor = extractor
        self.calibration = calibration
        self.keep = keep
        self.weights = weights
        self.aggregate = aggregate
        self.fuse = fuse
        self.sequential = sequential
        self.value_range = value_range
        self.size = size
        self.resize = resize
        self.magnitude = magnitude
        self.normalise = normalise
        self.calibration_share = calibration_share
        self.batch_size = batch_size
        self.seed = seed
        self._check_options()

    def _check_options(self) -> None:
        create_calibrator(self.calibration_name)
        self._aggregation()
        self._preprocessing()
        check_alpha(self.sequential)
        if self.sequential is not None and for_fitting(self.extractor) != self.extractor:
            raise OptionError("sequential scoring chooses the levels of an image by itself; leave level_samples out")
        if self.weights not in selection.WEIGHTINGS:
            raise OptionError(f"weights must be one of {', '.join(selection.WEIGHTINGS)}, got {self.weights!r}")
        if not 0.0 < self.calibration_share < 1.0:
            raise OptionError(f"calibration_share must be between 0 and 1, got {self.calibration_share}")
        if self.batch_size < 1:
            raise OptionError(f"batch_size must be at least 1, got {self.batch_size}")
        levels = self.extractor.timesteps(self.backbone)
        if self.keep is not None and not 1 <= self.keep <= len(levels):
            raise OptionError(
                f"keep must be between 1 and {len(levels)}, the number of distinct levels here; got {self.keep}"
            )

    @property
    def calibration_name(self) -> str:
        """The calibrator in use."""
        return self.extractor.calibration if self.calibration is None else self.calibration

    def _aggregation(self) -> Aggregation:
        return Aggregation(self.fuse, self.aggregate)

    def _preprocessing(self) -> Preprocessing:
        size = self.backbone.image_size if self.size is None else self.size
        if isinstance(size, int):
            size = (size, size)
        preprocessing = Preprocessing(
            self.value_range, size, self.resize, self.backbone.channels, self.magnitude, self.normalise
        )
        if size is not None:
            self.backbone.check_size(*size)
        return preprocessing

    # --- fitting -------------------------------------------------------------------------------------------------

    def fit(
        self,
        images: Any,
        calibration_images: Any = None,
        groups: Sequence[str] | str | None = None,
        on_progress: OnProgress | None = None,
        engine: FeatureEngine | None = None,
    ) -> Detector:
        """Choose levels, fit the calibrator and the conformal reference on in-distribution images alone.

        A share of `images` is held out for the p-values, chosen by the images' content and the seed; with
        `calibration_images` those are the reference and all of `images` are fitted on. Files that cannot be read are
        left out with a warning. `groups`, a label for each reference image or "folder", makes the p-values valid
        within every group (Mondrian calibration): an image is then compared with the reference of its own group.
        `engine` makes the passes elsewhere (`gepc.runs.features`).
        """
        levels = self.extractor.timesteps(self.backbone)
        method = for_fitting(self.extractor)
        work = ExtractionJob(method, levels, self.seed, self.batch_size, self.extractor.has_maps)
        seen = extract_all(open_images(images), self._preprocessing(), self.backbone, work, on_progress, engine)
        columns = self.extractor.columns(seen.table)
        fitting, held_out = self._split(seen.keys, calibration_images is None)
        self._check_enough(len(fitting), seen.keys)
        picked = selection.select(self.extractor.stability(seen.table)[fitting], self.keep, self.weights)
        kept = list(picked.kept)
        timesteps = tuple(levels[position] for position in kept)
        calibrator = create_calibrator(self.calibration_name).fit(columns[fitting][:, kept])
        stages = self._stages(columns[fitting][:, kept], picked.weights)
        if calibration_images is None:
            source, indices = open_images(images), seen.indices[held_out]
            keys = [seen.keys[position] for position in held_out]
            reference = as_scored(self.extractor, columns[held_out][:, kept], keys, self.seed)
        else:
            source = open_images(calibration_images)
            work = replace(work, method=self.extractor, levels=timesteps, with_maps=False)
            again = extract_all(source, seen.preprocessing, self.backbone, work, on_progress, engine)
            reference, indices = self.extractor.columns(again.table), again.indices
            _check_disjoint(seen.keys, again.keys)
        if stages is None:
            scores, looked = calibrator.score(reference, picked.weights, self._aggregation()), float(len(kept))
        else:
            scores, used = stages.score_columns(reference)
            looked = float(used.mean())

        self.reference_ = CalibrationScores.of(scores, group_labels(groups, source, indices))
        self.preprocessing_ = seen.preprocessing
        self.levels_ = np.asarray(levels)
        self.kept_ = np.asarray(timesteps)
        self.weights_ = picked.weights
        self.cv_ = picked.cv
        self.calibrator_: Calibrator = calibrator
        self.sequential_, self.mean_levels_ = stages, looked
        self.n_fit_ = len(fitting)
        self.map_scale_ = seen.maps.v_global(picked.kept, picked.weights) if self.extractor.has_maps else None
        return self

    def _stages(self, columns: Array, weights: Array) -> Sequential | None:
        if self.sequential is None:
            return None
        if columns.shape[1] < 2:
            raise OptionError("sequential scoring needs at least two kept levels; give more levels or raise keep")
        return Sequential.fit(columns, weights, self.calibration_name, self._aggregation(), self.sequential)

    def fitting_images(self, images: Any, count: int) -> list[Image]:
        """At most `count` of the images that `fit(images)` learns from, preprocessed; none that it holds out.

        They are the ones with the smallest keys, whatever their order; equal images count once.
        """
        opened, preprocessing = open_images(images), self._preprocessing()
        keys: list[bytes] = []
        indices: list[int] = []
        for chunk in chunks(opened, preprocessing, self.batch_size, OnBadImage.UNREADABLE):
            keys += chunk.keys
            indices += chunk.indices
            if chunk.indices:
                preprocessing = preprocessing.for_images_of(chunk.images[0].shape)
        fitting, _ = self._split(keys, hold_out=True)
        first = sorted({keys[place]: indices[place] for place in fitting}.items())[:count]
        records = (opened[index] for _, index in first)
        return [preprocessing(record.pixels) for record in records if record.pixels is not None]

    def _split(self, keys: list[bytes], hold_out: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Positions to fit on and to hold out, ranked by a hash of each image: shuffling the images changes nothing."""
        rank = [(generator(self.seed, key, "split").random(), key) for key in keys]
        order = sorted(range(len(keys)), key=rank.__getitem__)
        held_out = max(1, round(len(keys) * self.calibration_share)) if hold_out else 0
        return np.sort(order[held_out:]).astype(np.int64), np.sort(order[:held_out]).astype(np.int64)

    def _check_enough(self, count: int, keys: list[bytes]) -> None:
        if count < MINIMUM_FIT:
            raise InputError(
                f"{len(keys)} in-distribution images leave {count} to fit on; at least {MINIMUM_FIT} are needed "
                "(some hundreds for a useful false-alarm rate)"
            )
        if len(set(keys)) == 1:
            raise InputError("the in-distribution images are all the same image; there is nothing to calibrate on")

    # --- scoring -------------------------------------------------------------------------------------------------

    def score(self, images: Any) -> Array:
        """One number per image, float64, higher = more out of distribution."""
        return np.asarray([result.score for result in self.results(images, OnBadImage.NONE)], dtype=np.float64)

    decision_function = score

    def p_value(self, images: Any, groups: Sequence[str] | str | None = None, ties: str = "conservative") -> Array:
        """p = (1 + #{calibration >= score})/(n + 1): how usual it is for an ID image to look at least this unusual.

        With `ties="random"` equal scores are ordered by a number drawn from the image's content, and p is uniform.
        A detector fitted with groups needs the group of every image.
        """
        results = self.results(images, OnBadImage.NONE, groups, ties)
        return np.asarray([result.p_value for result in results], dtype=np.float64)

    def predict(
        self,
        images: Any,
        alpha: float = 0.05,
        confidence: float | None = None,
        groups: Sequence[str] | str | None = None,
    ) -> npt.NDArray[np.bool_]:
        """True where the image is called out of distribution at false-alarm rate `alpha`.

        The rate holds on average over calibration sets; with `confidence`, for the one at hand with that probability.
        """
        source = open_images(images)
        limits = self._reference().limits(alpha, confidence, group_labels(groups, source, np.arange(len(source))))
        return np.asarray(self.p_value(source, groups) <= limits)

    def flag(
        self, images: Any, fdr: float = 0.1, procedure: str = "bh", groups: Sequence[str] | str | None = None
    ) -> npt.NDArray[np.bool_]:
        """Flag images of a batch so that on average at most a share `fdr` of the flags is false."""
        return discoveries(self.p_value(images, groups), fdr, procedure)

    def guarantee(self, alpha: float = 0.05) -> Guarantee:
        """What may be promised at this false-alarm rate with the calibration images at hand (of the smallest group)."""
        return Guarantee.at(alpha, self._reference().smallest)

    @property
    def calibration_scores_(self) -> Array:
        """The scores of all calibration images, sorted."""
        return self._reference().scores

    def results(
        self,
        images: Any,
        on_bad_image: OnBadImage = OnBadImage.ALL,
        groups: Sequence[str] | str | None = None,
        ties: str = "conservative",
        on_progress: OnProgress | None = None,
    ) -> Iterator[Result]:
        """Results one by one, in order, in constant memory; a bad image is a result with a reason."""
        reference = self._reference()
        check_choice("ties", ties, ("conservative", "random"))
        opened = open_images(images)
        warn_about_range(opened, self.value_range)
        labels = group_labels(groups, opened, np.arange(len(opened)))
        reference.check(labels)
        for chunk in chunks(opened, self.preprocessing_, self.batch_size, on_bad_image):
            yield from self.score_chunk(chunk, None if labels is None else labels[chunk.indices], ties)
            if on_progress is not None:
                on_progress(len(chunk))

    def score_chunk(
        self, chunk: Chunk, labels: npt.NDArray[np.str_] | None = None, ties: str = "conservative"
    ) -> list[Result]:
        """Results of images that are read already, in order; `labels` are the groups of those that can be scored."""
        results = [Result(index, name, np.nan, np.nan, error) for index, name, error in chunk.failures]
        if chunk.indices:
            scores = self._look(self._batch(chunk))
            uniform = None if ties == "conservative" else self._tie_breakers(chunk)
            p_values = self._reference().p_values(scores, labels, uniform)
            results += map(Result, chunk.indices, chunk.names, scores.tolist(), p_values.tolist())
        return sorted(results, key=lambda result: result.index)

    def _tie_breakers(self, chunk: Chunk) -> Array:
        return np.array([generator(self.seed, key, "ties").random() for key in chunk.keys])

    def score_batch(self, images: Sequence[Image], with_maps: bool = False) -> tuple[Array, Map | None]:
        """Scores of preprocessed images, (C, H, W) each, and their maps from the same passes where asked for."""
        self._check_fitted()
        batch = Batch(np.stack(images), [image_key(image) for image in images], self.seed, self.batch_size)
        return self._look_with_maps(batch) if with_maps else (self._look(batch), None)

    def _look(self, batch: Batch) -> Array:
        if self.sequential_ is not None:
            return self._look_sequentially(batch, self.sequential_)
        columns = self.extractor.columns(self.extractor.extract(self.backbone, batch, tuple(self.kept_)))
        return self.calibrator_.score(columns, self.weights_, self._aggregation())

    def _look_with_maps(self, batch: Batch) -> tuple[Array, Map]:
        table, maps = extract_with_maps(self.extractor, self.backbone, batch, tuple(self.kept_))
        columns, field = self.extractor.columns(table), combine(maps, self.weights_)
        if self.sequential_ is not None:
            return self.sequential_.score_columns(columns)[0], field
        return self.calibrator_.score(columns, self.weights_, self._aggregation()), field

    def _look_sequentially(self, batch: Batch, stages: Sequential) -> Array:
        def at_level(rows: npt.NDArray[np.int64], position: int) -> Array:
            part = Batch(batch.images[rows], [batch.keys[int(row)] for row in rows], batch.seed, batch.rows)
            return self.extractor.columns(self.extractor.extract(self.backbone, part, (int(self.kept_[position]),)))

        return stages.score(len(batch), at_level)[0]

    def score_map(self, images: Any) -> Map:
        """(N, H, W): where the image disagrees, m = sum_t w_t mean_g mean_c r_g^2 / b_t.

        Divide by `map_scale_` to show several on one scale. With mean pooling and raw calibration its spatial mean is
        the score itself.
        """
        self._check_fitted()
        if not self.extractor.has_maps:
            names = ", ".join(self.extractor.column_names)
            raise OptionError(f"the method {self.extractor.name!r} has no maps of {names}")
        opened = open_images(images)
        warn_about_range(opened, self.value_range)
        found = [
            self._look_with_maps(self._batch(chunk))[1]
            for chunk in chunks(opened, self.preprocessing_, self.batch_size, OnBadImage.NONE)
        ]
        if not found:
            height, width = self.preprocessing_.size or (0, 0)
            return np.empty((0, height, width), dtype=np.float32)
        return np.concatenate(found)

    def features(self, images: Any, noise: npt.ArrayLike | None = None) -> Table:
        """The method's table at every candidate level: name -> (N, levels[, g]).

        Needs no fit. `noise` (levels, N, C, H, W) replaces the drawn one. The mean over the axes after the levels is
        the paper's scalar feature.
        """
        levels = self.extractor.timesteps(self.backbone)
        preprocessing = getattr(self, "preprocessing_", None) or self._preprocessing()
        opened = open_images(images)
        if len(opened) == 0:
            raise InputError("there are no images")
        warn_about_range(opened, self.value_range)
        fields = None if noise is None else np.asarray(noise)
        if fields is not None and (fields.ndim != 5 or fields.shape[:2] != (len(levels), len(opened))):
            raise InputError(
                f"noise must be (levels, N, C, H, W) = ({len(levels)}, {len(opened)}, ...), got {fields.shape}"
            )
        tables = []
        for chunk in chunks(opened, preprocessing, self.batch_size, OnBadImage.NONE):
            batch = self._batch(chunk)
            if fields is not None:
                part = fields[:, chunk.indices]
                batch.fixed_noise = {(t, 0): part[position] for position, t in enumerate(levels)}
            tables.append(self.extractor.extract(self.backbone, batch, levels))
        return concatenate(tables)

    @property
    def input_size(self) -> tuple[int, int]:
        """(H, W) of what the network sees; 32x32 is assumed where only the first image will tell."""
        preprocessing = self.preprocessing_ if self.is_fitted else self._preprocessing()
        return preprocessing.size or (32, 32)

    def cost(self) -> Cost:
        """Network passes per image: on the kept levels once fitted, on `keep` levels before."""
        return self.extractor.cost(self.backbone, self.input_size, len(self.kept_) if self.is_fitted else self.keep)

    def fit_cost(self) -> Cost:
        """Network passes per image while fitting, on every candidate level."""
        return for_fitting(self.extractor).cost(self.backbone, self.input_size)

    def _batch(self, chunk: Chunk) -> Batch:
        images = chunk.stacked()
        self.backbone.check_size(*images.shape[2:])
        return Batch(images, chunk.keys, self.seed, self.batch_size)

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def is_fitted(self) -> bool:
        """Whether `fit` has been called."""
        return hasattr(self, "reference_")

    def _reference(self) -> CalibrationScores:
        self._check_fitted()
        return self.reference_

    def _check_fitted(self) -> None:
        if not self.is_fitted:
            raise NotFittedError(f"this {self.extractor.name} detector is not fitted yet; call fit(id_images) first")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `detector.json` and `state.safetensors`, both or none."""
        from gepc.detector.storage import save_detector

        self._check_fitted()
        save_detector(self, folder)

    def __repr__(self) -> str:
        state = f"fitted on {self.n_fit_}+{len(self.calibration_scores_)}" if self.is_fitted else "not fitted"
        return f"<{type(self).__name__} {self.extractor.name}, {self.calibration_name}, {state}, {self.backbone!r}>"


def _check_disjoint(fitted: list[bytes], reference: list[bytes]) -> None:
    """The false-alarm guarantee needs calibration images that fitting has not seen."""
    shared = set(fitted) & set(reference)
    if shared:
        warnings.warn(
            f"{len(shared)} calibration images are among the images fitted on, so p-values are not guaranteed; "
            "calibrate with other images",
            UserWarning,
            stacklevel=3,
        )

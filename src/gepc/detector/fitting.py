"""Fitting: from in-distribution images to a `FittedDetector`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.conformal.p_values import Array, CalibrationScores, group_labels
from gepc.core.errors import AdviceWarning, InputError
from gepc.core.progress import Progress, reporting
from gepc.detector.fitted import FittedDetector
from gepc.detector.parameters import Parameters
from gepc.detector.stream import known_length, scores_of
from gepc.images.batches import OnBadImage
from gepc.images.noise import generator
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import Image, Images, ObservedImages, Record, open_images
from gepc.maps.statistics import CALIBRATION_IMAGES, TOGETHER, MapStatistics, read_parts
from gepc.methods.base import Extractor, MapParts, Table
from gepc.methods.extraction import ExtractionSpec, FeatureCache, FeatureTable, concatenate, extract_all, plain_options
from gepc.methods.gepc import GepcExtractor
from gepc.methods.pooling import Map, v_global
from gepc.methods.symmetries import Evidence, choose, read_batch

Rows = npt.NDArray[np.int64]
Groups = Sequence[str] | str | None
MINIMUM_FIT = 8
SAMPLE_IMAGES = 600  # images of a stream that are kept for maps, since a stream cannot be read again


def fit_detector(
    parameters: Parameters,
    images: Any,
    calibration_images: Any = None,
    groups: Groups = None,
    on_progress: Progress = None,
    cache: FeatureCache | None = None,
) -> FittedDetector:
    """Select levels, fit the calibrator and the maps, and score the calibration images.

    The parameters are those of `Detector.fit`; features are read from a `cache` where they are known. Nothing of
    `parameters` is changed.

    Returns
    -------
    FittedDetector
    """
    source = open_images(images)
    hold_out = calibration_images is None
    share = parameters.calibration_share if hold_out else 0.0
    method, group_choice = _settled_method(parameters, source, share)
    levels = method.timesteps(parameters.backbone)
    by_maps = parameters.fits_by_maps
    spec = ExtractionSpec(method.for_fitting(), () if by_maps else levels, parameters.seed, parameters.batch_size)
    extract = partial(_extract, parameters, on_progress=None if by_maps else on_progress, cache=cache)
    table = extract(source, parameters.preprocessing(), spec, calibrating=hold_out)
    fit_rows, held_out_rows = split(table.keys, parameters.seed, share)
    _check_enough(len(fit_rows), table.keys)
    _warn_about_copies(table.keys)
    scorer = parameters.scorer().keep_all(1) if by_maps else parameters.scorer().fit(table.rows(fit_rows))
    kept = () if by_maps else tuple(levels[position] for position in scorer.selection_.kept)
    if hold_out:
        calibration_source, calibration = source, table.rows(held_out_rows).at(kept)
    else:
        calibration_source = open_images(calibration_images)
        separate = extract(calibration_source, table.preprocessing, replace(spec, timesteps=kept), calibrating=True)
        _warn_about_copies(separate.keys)
        rows, _ = split(separate.keys, parameters.seed, 0.0)  # each image counts once
        calibration = separate.rows(rows)
        _warn_about_shared(table.keys, calibration.keys)
    labels = group_labels(groups, calibration_source, calibration.indices)
    scores = np.zeros(len(calibration))
    if not by_maps:
        scores = scorer.score_kept(method.as_scored(calibration.columns, calibration.keys, parameters.seed))
    draft = FittedDetector(
        method=method,
        options={**parameters.options(), **plain_options(method.options())},
        backbone=parameters.backbone,
        preprocessing=table.preprocessing,
        levels=tuple(levels),
        scorer=scorer,
        reference=CalibrationScores.of(scores, labels),
        maps=None,
        map_scale=None,
        fit_images=len(fit_rows),
        input_size=table.first_size,
        seed=parameters.seed,
        batch_size=parameters.batch_size,
        score_from=parameters.score_from,
        group_choice=tuple(item.as_dict() for item in group_choice),
    )
    if method.has_maps:
        fitting = SomeImages.smallest(source, table.rows(fit_rows), method.map_model.images)
        calibrating = SomeImages.smallest(calibration_source, calibration, CALIBRATION_IMAGES)
        draft = _with_maps(draft, parameters, fitting, calibrating, on_progress if by_maps else None)
    if parameters.score_from == "map":
        scores = _map_scores(draft, calibration_source, calibration, calibrating.table.keys)
        draft = replace(draft, reference=CalibrationScores.of(scores, labels))
    maps = None if draft.maps is None else draft.maps.trim(parameters.contamination)
    return replace(draft, maps=maps, reference=draft.reference.trim(parameters.contamination))


def _settled_method(parameters: Parameters, source: Images, share: float) -> tuple[Extractor, Sequence[Evidence]]:
    """The method, with `group="auto"` replaced by what the images to fit on speak for, and the evidence.

    Images that calibrate p-values are not looked at.
    """
    method = parameters.extractor
    if not isinstance(method, GepcExtractor) or not method.group.auto:
        return method, ()

    def to_fit_on(keys: Sequence[bytes]) -> list[bytes]:
        rows, _ = split(keys, parameters.seed, share)
        return [keys[int(row)] for row in rows]

    batch = read_batch(source, parameters.preprocessing(), parameters.seed, parameters.batch_size, to_fit_on)
    group, evidence = choose(method, parameters.backbone, batch)
    return replace(method, group=group), evidence


def _extract(
    parameters: Parameters,
    images: Images,
    preprocessing: Preprocessing,
    spec: ExtractionSpec,
    *,
    calibrating: bool,
    on_progress: Progress,
    cache: FeatureCache | None,
) -> FeatureTable:
    """The features of a collection; a warning names images that are left out or that the network was trained on."""
    if next(images.first(1), None) is None:
        raise InputError("there are no in-distribution images to fit on or to calibrate with")
    trained_on = parameters.backbone.trained_on if calibrating else None
    hashes: dict[int, int] = {}
    observed = images
    if trained_on is not None:
        observed = ObservedImages(images, Record.content_hash)
        hashes = observed.seen
    kept = SAMPLE_IMAGES if parameters.extractor.has_maps and images.once else 0
    with reporting(on_progress, "fitting", known_length(images)) as advance:
        table = extract_all(
            observed, preprocessing, parameters.backbone, spec, cache=cache, on_progress=advance, sample_size=kept
        )
    table.warn_about_skipped()
    if trained_on is not None:
        _warn_about_trained_on([hashes[index] for index in table.indices.tolist()], trained_on)
    return table


def split(keys: Sequence[bytes], seed: int, share: float) -> tuple[Rows, Rows]:
    """Rows to fit on and a share of rows to hold out, at least one if the share is positive.

    Images are ranked by a hash of their content, so that shuffling them changes nothing. Equal images count once.
    """
    first = {key: row for row, key in reversed(list(enumerate(keys)))}
    rank = sorted((generator(seed, key, "split").random(), key) for key in first)
    order = [first[key] for _, key in rank]
    held_out = max(1, round(len(order) * share)) if share > 0.0 else 0
    return np.sort(order[held_out:]).astype(np.int64), np.sort(order[:held_out]).astype(np.int64)


@dataclass(frozen=True)
class SomeImages(Sequence[Image]):
    """Some images of a table, preprocessed when they are asked for: read again, or kept if they were a stream."""

    images: Images
    table: FeatureTable

    @classmethod
    def smallest(cls, images: Images, table: FeatureTable, most: int) -> SomeImages:
        """At most `most` of the images, those with the smallest keys: their order in the collection does not count."""
        keys = sorted(set(table.keys))
        if images.once:
            keys = [key for key in keys if key in table.sample.images]
        return cls(images, table.of(keys[:most]))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return SomeImages(self.images, self.table.rows(np.arange(len(self))[item]))
        if self.images.once:
            return self.table.sample.images[self.table.keys[item]]
        return self.table.preprocessing.prepare(self.images[int(self.table.indices[item])])


def _with_maps(
    draft: FittedDetector,
    parameters: Parameters,
    fitting: SomeImages,
    calibrating: SomeImages,
    on_progress: Progress = None,
) -> FittedDetector:
    """The detector with the statistics of calibrated maps, and the common scale of raw ones.

    If nothing but maps is learnt, the scorer takes the features of the same passes.
    """
    if not calibrating or (parameters.maps != "raw" and len(fitting) < 2):
        raise InputError("the stream's images are too large for maps; give a folder, or set `size`", options=("size",))
    raw: list[Map] = []
    tables: list[Table] = []
    # activations are vectors, which have no raw map: its scale is then that of all parts together
    scaled = draft.showing(TOGETHER) if draft.map_part == "activations" else draft

    with reporting(on_progress, "fitting", len(fitting) + len(calibrating)) as advance:

        def read(images: Sequence[Image]) -> MapParts:
            table, parts = draft.map_parts(images)
            raw.extend(scaled.raw_map(parts))
            tables.append(table)
            advance(len(images))
            return parts

        if parameters.maps == "raw":
            for _ in read_parts(read, calibrating):
                pass  # `read` collects the raw maps
            return replace(draft, map_scale=v_global(raw))
        ignored, model = draft.preprocessing.ignored, draft.method.map_model
        statistics = MapStatistics.fit(read, fitting, calibrating, draft.weights, ignored, model)
    draft = replace(draft, maps=statistics, map_scale=v_global(raw))
    if not parameters.fits_by_maps:
        return draft
    method = draft.method
    features = {name: values[: len(fitting)] for name, values in concatenate(tables).items()}
    columns, stability = method.columns(features), method.stability(features)
    return replace(draft, scorer=parameters.scorer().fit(columns, stability, method.parts(features)))


def _map_scores(
    draft: FittedDetector, images: Images, calibration: FeatureTable, calibrating: Sequence[bytes]
) -> Array:
    """The scores of all calibration images by their maps; the statistics of maps have those of `calibrating`."""
    assert draft.maps is not None
    known = dict(zip(calibrating, draft.maps.scores.tolist(), strict=True))
    others = [row for row, key in enumerate(calibration.keys) if key not in known]
    if others and images.once:
        raise InputError("score_from='map' reads calibration images twice; give a folder, list or array, not a stream")
    if others:
        scores = scores_of(draft, images, indices=calibration.indices[others].tolist())
        known |= dict(zip([calibration.keys[row] for row in others], scores.tolist(), strict=True))
    return np.array([known[key] for key in calibration.keys])


def _check_enough(count: int, keys: Sequence[bytes]) -> None:
    if len(keys) > 1 and len(set(keys)) == 1:
        raise InputError("the in-distribution images are all the same image; there is nothing to calibrate on")
    if count < MINIMUM_FIT:
        left = f"{len(keys)} in-distribution images leave {count} to fit on"
        raise InputError(f"{left}; at least {MINIMUM_FIT} are needed (some hundreds for a useful false-alarm rate)")


def _warn_about_copies(keys: Sequence[bytes]) -> None:
    """Copies are not exchangeable with other images, so they must not count several times."""
    copies = len(keys) - len(set(keys))
    if copies:
        message = f"{copies} of {len(keys)} images are copies of others; equal images count once"
        warnings.warn(message, stacklevel=4)


def _warn_about_shared(fitted: Sequence[bytes], reference: Sequence[bytes]) -> None:
    """The false-alarm guarantee needs calibration images that fitting has not seen."""
    shared = len(set(fitted) & set(reference))
    if shared:
        message = f"{shared} calibration images are among the images fitted on, so p-values are not guaranteed"
        warnings.warn(f"{message}; calibrate with other images", stacklevel=5)


def _warn_about_trained_on(hashes: Sequence[int], trained_on: npt.NDArray[np.uint64]) -> None:
    """A network denoises the images of its training better than new ones, so they are not exchangeable."""
    count = int(np.isin(np.asarray(hashes, dtype=np.uint64), trained_on).sum())
    if count:
        lost = "the false-alarm guarantee does not hold for them; calibrate with unseen images (`calibration_images`)"
        message = f"{count} of {len(hashes)} images were used to train the backbone; {lost}"
        warnings.warn(AdviceWarning(message, options=("calibration_images",)), stacklevel=5)


def feature_table(
    parameters: Parameters, preprocessing: Preprocessing, images: Images, noise: npt.ArrayLike | None = None
) -> Table:
    """The features of all images at every candidate level; `noise` (levels, N, C, H, W) replaces the drawn noise."""
    levels = parameters.extractor.timesteps(parameters.backbone)
    given = None if noise is None else np.asarray(noise)
    if given is not None and (given.ndim != 5 or given.shape[:2] != (len(levels), len(images))):
        raise InputError(f"noise must be (levels, N, C, H, W) = ({len(levels)}, {len(images)}, ...), got {given.shape}")
    spec = ExtractionSpec(parameters.extractor, levels, parameters.seed, parameters.batch_size, given)
    return extract_all(images, preprocessing, parameters.backbone, spec, on_bad_image=OnBadImage.NONE).table

"""The fitted state changes as a whole or not at all, and every calibration image counts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import LEVELS, as_uint8, pictures, toy_backbone, toy_detector, toy_network

import gepc
from gepc.cli.options import BASE_BYTES, BYTES_PER_PIXEL, memory_of
from gepc.core.errors import BackboneError, InputError, NotFittedError, OptionError
from gepc.detector.detector import Detector
from gepc.detector.storage import MAX_BATCH
from gepc.detector.stream import stream
from gepc.images import batches
from gepc.images.sources import open_images
from gepc.methods.base import Cost, MapModel
from gepc.methods.extraction import ImageSample

ID, NEW = pictures(30), pictures(5, seed=1)
OTHERS = pictures(30, seed=2, contrast=2.0)


def small_detector(**options: object) -> gepc.GEPC:
    """A detector with few passes, for many images of 6x6 pixels."""
    backbone = toy_backbone(channels=1, image_size=6)
    return toy_detector(backbone, levels=LEVELS[:1], keep=1, group=("flip_x",), **options)


# --- a fit that fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "refit",
    [
        lambda detector: detector.fit(OTHERS, groups=["a"] * 3),
        lambda detector: detector.fit(OTHERS, OTHERS[:4, :2]),
        lambda detector: detector.fit(OTHERS, np.full((4, 3, 8, 8), np.nan)),
    ],
    ids=["too few labels", "channels", "NaN"],
)
def test_a_refit_that_fails_at_the_calibration_images_changes_nothing(refit: Callable[[gepc.Detector], object]) -> None:
    """Levels, calibrator and maps of the other images are learnt by then."""
    detector = toy_detector().fit(ID)
    before, scores, maps = detector.fitted, detector.p_value(NEW), detector.score_map(NEW)
    with pytest.raises((InputError, OptionError)):
        refit(detector)
    assert detector.fitted is before
    np.testing.assert_array_equal(detector.p_value(NEW), scores)
    np.testing.assert_array_equal(detector.score_map(NEW), maps)


def test_the_fitted_state_cannot_be_assigned_to() -> None:
    fitted = toy_detector().fit(ID).fitted
    with pytest.raises(dataclasses.FrozenInstanceError):
        fitted.seed = 3  # type: ignore[misc]


# --- parameters that are assigned after fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("calibration", "mvn"), ("keep", 1), ("seed", 4), ("size", 8), ("backbone", toy_backbone()), ("maps", "raw")],
)
def test_a_parameter_that_is_assigned_after_fit_discards_the_fit(tmp_path: Path, name: str, value: object) -> None:
    """Nothing is saved that contradicts its own options."""
    detector = toy_detector().fit(ID)
    setattr(detector, name, value)
    assert not detector.is_fitted
    for ask in (lambda: detector.score(NEW), lambda: detector.save(tmp_path / "det")):
        with pytest.raises(NotFittedError, match=r"not fitted yet; call fit\(id_images\) first"):
            ask()
    assert not (tmp_path / "det").exists()
    detector.fit(ID).save(tmp_path / "det")
    loaded = gepc.load_detector(tmp_path / "det", toy_backbone())
    np.testing.assert_array_equal(loaded.score(NEW), detector.score(NEW))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch_size", 0, "batch_size must be at least 1, got 0"),
        ("batch_size", 2.5, "batch_size must be int, got 2.5"),
        ("batch_size", None, "batch_size must be int, got None"),
        ("seed", "1", "seed must be int, got '1'"),
        ("size", "8", "size must be int, got '8'"),
        ("value_range", "01", "value_range must be a list, got '01'"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_where_it_is_assigned(name: str, value: object, message: str) -> None:
    """As where the detector is created; the fitted state stays."""
    detector = toy_detector().fit(ID)
    expected = detector.score(NEW)
    with pytest.raises(OptionError, match=message):
        setattr(detector, name, value)
    with pytest.raises(OptionError, match=message):
        toy_detector(**{name: value})
    np.testing.assert_array_equal(detector.score(NEW), expected)


@pytest.mark.parametrize(
    ("name", "value"), [("keep", 9), ("seed", 2**70), ("maps", "row"), ("contamination", 0.7), ("backbone", "net")]
)
def test_a_value_out_of_range_is_refused_by_the_next_fit(name: str, value: object) -> None:
    detector = toy_detector().fit(ID)
    setattr(detector, name, value)
    with pytest.raises(OptionError, match=name):
        detector.fit(ID)


def test_an_assigned_value_is_what_the_constructor_makes_of_it() -> None:
    detector, ignored = toy_detector(), np.eye(8, dtype=bool)
    for name, value in (("ignore", ignored), ("size", [np.int64(8), 8]), ("keep", np.int32(1))):
        setattr(detector, name, value)
    assert detector.options() == toy_detector(ignore=ignored, size=(8, 8), keep=1).options()
    assert json.loads(json.dumps(detector.options())) == detector.options()


def test_an_attribute_that_is_no_parameter_does_not_discard_the_fit() -> None:
    detector: Any = toy_detector().fit(ID)
    detector.note = "line 3"
    assert detector.is_fitted


def test_images_of_several_sizes_or_none_cannot_be_evaluated_at_once() -> None:
    fitted = toy_detector().fit(ID).fitted
    for images in ([], [np.zeros((3, 8, 8), np.float32), np.zeros((3, 8, 4), np.float32)]):
        with pytest.raises(InputError, match=r"one or more arrays \(C, H, W\) of one size"):
            fitted.evaluate(images)


def test_a_method_without_maps_has_no_limit_of_maps() -> None:
    detector = gepc.create_detector(toy_backbone(), "pixel_stats").fit(ID)
    with pytest.raises(OptionError, match="has no maps"):
        detector.map_limit()


def test_the_batch_size_keeps_the_fit_and_is_saved(tmp_path: Path) -> None:
    detector = toy_detector().fit(ID)
    expected = detector.score(NEW)
    detector.batch_size = 2
    assert detector.is_fitted
    np.testing.assert_allclose(detector.score(NEW), expected, rtol=1e-5)
    assert max(len(chunk) for chunk in _chunk_sizes(detector)) == 2
    detector.save(tmp_path / "det")
    loaded = gepc.load_detector(tmp_path / "det", toy_backbone())
    assert (loaded.batch_size, loaded.fitted.batch_size) == (2, 2)
    assert Detector.of(dataclasses.replace(detector.fitted, batch_size=3)).batch_size == 3
    with pytest.raises(OptionError, match="batch_size must be at least 1"):
        detector.batch_size = 0
    assert (detector.batch_size, detector.fitted.batch_size) == (2, 2)


def _chunk_sizes(detector: gepc.Detector) -> list[range]:
    sizes: list[range] = []
    list(detector.results(NEW, on_progress=lambda count: sizes.append(range(count))))
    return sizes


def test_a_batch_size_beyond_what_a_folder_may_ask_for_can_be_saved(tmp_path: Path) -> None:
    detector = toy_detector(batch_size=MAX_BATCH + 1).fit(ID)
    detector.save(tmp_path / "det")
    loaded = gepc.load_detector(tmp_path / "det", toy_backbone())
    assert loaded.batch_size == MAX_BATCH
    np.testing.assert_array_equal(loaded.score(NEW), detector.score(NEW))


# --- scores from maps ------------------------------------------------------------------------------------------------


def test_scores_from_maps_are_calibrated_with_all_calibration_images() -> None:
    """More than the maps themselves are calibrated with; each has the score that it gets as a new image."""
    images = pictures(250, size=6, channels=1, seed=3)
    detector = small_detector(score_from="map").fit(pictures(30, size=6, channels=1), calibration_images=images)
    assert len(detector.calibration_scores_) == 250
    np.testing.assert_allclose(detector.calibration_scores_, np.sort(detector.score(images)), rtol=1e-4)
    held_out = small_detector(score_from="map", calibration_share=0.5).fit(pictures(500, size=6, channels=1))
    assert len(held_out.calibration_scores_) == 250


def test_groups_of_scores_from_maps_belong_to_their_images() -> None:
    images = pictures(40, size=6, channels=1, seed=3)
    labels = ["a", "b", "b", "b"] * 10
    detector = small_detector(score_from="map")
    detector.fit(pictures(30, size=6, channels=1), calibration_images=images, groups=labels)
    scores = detector.score(images)
    for label in "ab":
        own = np.sort(scores[np.array(labels) == label])
        np.testing.assert_allclose(detector.fitted.reference.by_group[label], own, rtol=1e-4)


@pytest.mark.parametrize("count", [30, 500])
def test_a_detector_that_scores_by_maps_evaluates_no_image_twice(count: int) -> None:
    """One level leaves no choice, so that the passes for maps are enough, and images without maps need none."""
    detector = small_detector(score_from="map")
    images = pictures(count, size=6, channels=1)
    detector.fit(images)
    calibrating = len(detector.calibration_scores_)
    evaluated = min(count - calibrating, MapModel.images) + calibrating
    assert detector.fit_cost() == Cost()
    assert detector.map_images(count - calibrating, calibrating) == evaluated
    assert detector.backbone.forward_count == evaluated * detector.cost().forward


# --- large images ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"score_from": "map"}, {"maps": "raw"}], ids=str)
def test_images_larger_than_any_budget_are_fitted_on(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    """Neither the images that are kept for maps nor the chunks have room for one of them; scores stay."""
    expected = toy_detector(**options).fit(ID)
    monkeypatch.setattr(ImageSample.__init__, "__defaults__", (100,))
    monkeypatch.setattr(batches, "MAX_CHUNK_PIXELS", 10)
    monkeypatch.setattr(batches, "MAX_AHEAD_PIXELS", 10)
    detector = toy_detector(**options).fit(ID)
    np.testing.assert_allclose(detector.calibration_scores_, expected.calibration_scores_, rtol=1e-4)
    np.testing.assert_allclose(detector.score(NEW), expected.score(NEW), rtol=1e-4)
    np.testing.assert_allclose(detector.score_map(NEW), expected.score_map(NEW), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("method", "images_at_once"), [("msma", 16), ("gepc+", 10)])
def test_a_method_that_holds_activations_evaluates_fewer_pixels_at_once(
    monkeypatch: pytest.MonkeyPatch, method: str, images_at_once: int
) -> None:
    """`gepc+` holds the activations of two passes, 1.6 times the memory of a plain pass for each pixel."""
    monkeypatch.setattr(batches, "MAX_CHUNK_PIXELS", 16 * 8 * 8)
    detector, counts = gepc.create_detector(toy_backbone(), method, size=8), []
    detector.fit(ID, on_progress=counts.append)
    assert counts[0] == images_at_once
    sizes = [len(chunk.results) for chunk in stream(detector.fitted, open_images(ID))]
    assert sizes[0] == images_at_once
    memory = detector.extractor.memory
    assert memory_of((256, 256), 1, memory) - BASE_BYTES == int(256 * 256 * memory) * BYTES_PER_PIXEL


def test_a_stream_of_images_that_are_too_large_to_keep_for_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageSample.__init__, "__defaults__", (100,))
    with pytest.raises(InputError, match="too large for maps; give a folder, or set `size`"):
        toy_detector().fit(iter(ID))


# --- the size of the input -------------------------------------------------------------------------------------------


def test_the_size_of_the_input_is_that_of_the_first_image_where_images_keep_their_size(tmp_path: Path) -> None:
    backbone = toy_backbone(image_size=None)
    images = [as_uint8(pictures(1, (24 + number % 3, 40), seed=number))[0] for number in range(24)]
    detector = gepc.create_detector(backbone, "gepc+", "inspect", levels=LEVELS[:1])
    assert detector.network_size(gepc.images.sources.open_images(images)) == (12, 20)
    assert detector.fit(images).input_size == (12, 20)
    detector.save(tmp_path / "det")
    assert gepc.load_detector(tmp_path / "det", backbone).input_size == (12, 20)


def test_every_part_of_a_calibrated_map_can_be_shown() -> None:
    """The activations are vectors: they have a calibrated map, and no raw one."""
    backbone = toy_network()
    detector = gepc.create_detector(backbone, "gepc+", levels=LEVELS[:1]).fit(pictures(45))
    for part in detector.fitted.maps.names:
        _, maps, _ = detector.fitted.showing(part).evaluate(NEW, maps=True)
        assert maps[part].shape == (5, 8, 8)
    shown = gepc.create_detector(backbone, "gepc+", levels=LEVELS[:1], map_part="activations").fit(pictures(45))
    np.testing.assert_array_equal(shown.score_map(NEW), detector.fitted.evaluate(NEW, maps=True)[1]["activations"])
    assert shown.fitted.map_scale == detector.fitted.map_scale
    with pytest.raises(OptionError, match="no raw map of 'activations'"):
        shown.score_map(NEW, raw=True)


def test_an_image_without_an_answer_does_not_cost_the_others_theirs() -> None:
    """The first five are in one batch, and the network answers to the third with infinity; the sixth is no image."""
    toy = toy_backbone()

    def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        found = torch.cat([toy.eps(one[None], int(step)) for one, step in zip(x, t, strict=True)])
        return torch.where(x.mean((1, 2, 3), keepdim=True) > 0.8, torch.inf, found)

    backbone = gepc.Backbone.from_callable(eps, toy.alphas_cumprod, 3, 8)
    detector = toy_detector(backbone, keep=1).fit(ID)
    new = NEW.copy()
    new[2] = 0.99
    scored = list(stream(detector.fitted, open_images([*new, None]), maps=True, on_error="row"))
    results = [result for part in scored for result in part.results]
    assert [result.index for result in results] == list(range(6))
    assert [result.error is not None for result in results] == [False, False, True, False, False, True]
    others = [0, 1, 3, 4]
    np.testing.assert_allclose([results[place].score for place in others], detector.score(NEW[others]))
    part = detector.fitted.map_part
    fields = [chunk.map_of(result.index, part) for chunk in scored for result in chunk.results]
    assert fields[2] is fields[5] is None
    found = np.stack([fields[place] for place in others])
    np.testing.assert_allclose(found, detector.score_map(NEW[others]), rtol=1e-5, atol=1e-6)
    with pytest.raises(BackboneError, match="returned NaN or infinite values"):
        detector.score(new)

"""The preset `inspect`: a memory of activations, and detectors that were saved without it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from toys import LEVELS, pictures, toy_network

import gepc
from gepc.methods.base import MapModel


def detector(**options: object) -> gepc.Detector:
    """The preset on images of 16x16, seen at their own resolution."""
    backbone = toy_network(image_size=None)
    return gepc.create_detector(backbone, "gepc+", "inspect", levels=LEVELS[:1], resize="native", **options)


def test_the_whole_map_is_that_of_the_activations() -> None:
    """In units of its own spread: away from the border, both maps have the same order of pixels."""
    fitted = detector().fit(pictures(40, size=16))
    model, maps = fitted.extractor.map_model, fitted.fitted.maps
    assert maps is not None
    assert (model.positions, model.band, model.centred) == ("level_local_memory:size=1000", 4, True)
    assert maps.leading == ("activations",)
    assert maps.names == ("sum", "error", "activations")
    _, fields, _ = fitted.fitted.evaluate(list(pictures(1, size=16, seed=1)), maps=True)
    assert fields is not None
    inside = [fields[name][0, 4:12, 4:12].ravel().argsort() for name in ("sum", "activations")]
    np.testing.assert_array_equal(*inside)


def test_a_detector_saved_before_the_option_keeps_its_model(tmp_path: Path) -> None:
    """A folder without `positions` has the Gaussian of all positions, and gives the same maps."""
    fitted = detector(positions="gaussian").fit(pictures(40, size=16))
    assert fitted.extractor.map_model == MapModel(window=9)
    fitted.save(tmp_path / "det")
    path = tmp_path / "det" / "detector.json"
    description = json.loads(path.read_text())
    assert description["options"].pop("positions") == "gaussian"
    path.write_text(json.dumps(description))
    again = gepc.load_detector(tmp_path / "det", fitted.backbone)
    images = pictures(3, size=16, seed=1)
    np.testing.assert_array_equal(again.score_map(images), fitted.score_map(images))
    np.testing.assert_array_equal(again.score(images), fitted.score(images))


def test_a_saved_memory_gives_the_same_maps(tmp_path: Path) -> None:
    fitted = detector().fit(pictures(40, size=16))
    fitted.save(tmp_path / "det")
    again = gepc.load_detector(tmp_path / "det", fitted.backbone)
    images = pictures(3, size=16, seed=1)
    np.testing.assert_array_equal(again.score_map(images), fitted.score_map(images))
    assert again.extractor.map_model == fitted.extractor.map_model


def test_a_fitted_image_is_not_unusual() -> None:
    """A position of the memory has no distance to it, which is no evidence against an image."""
    images = pictures(60, size=16)
    fitted = detector().fit(images[:30], images[30:])
    assert fitted.p_value(images[:30]).min() > 0.1

"""Regions to ignore: their pixels have no influence on scores, p-values or maps, at any entrance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from toys import as_uint8, pictures, toy_backbone, toy_detector

import gepc
from gepc.core.errors import InputError, OptionError
from gepc.images.preprocessing import Mask

CORNER = np.zeros((8, 8), dtype=bool)
CORNER[:3, 4:] = True


@given(arrays(bool, st.tuples(st.integers(1, 6), st.integers(1, 6))))
def test_a_mask_comes_back_from_its_runs(ignored):
    if ignored.all():
        with pytest.raises(InputError, match="ignores every pixel"):
            Mask.of(ignored)
    else:
        np.testing.assert_array_equal(Mask.of(ignored).array(ignored.shape), ignored)


@pytest.mark.parametrize(("size", "runs"), [((2, 2), (3,)), ((0, 2), ()), ((2, 2), (-1, 5)), ((9999, 9999), (1, 2))])
def test_a_mask_that_does_not_fit_its_size_is_refused(size, runs):
    with pytest.raises(InputError, match="the mask of ignored pixels"):
        Mask(size, runs)


def test_a_mask_with_too_many_edges_is_refused():
    with pytest.raises(OptionError, match="too many edges"):
        Mask.of(np.indices((200, 200)).sum(0) % 2 == 0)


@pytest.mark.parametrize(
    "options", [{}, {"score_from": "map"}, {"size": 16}, {"size": 6, "resize": "crop"}], ids=["", "map", "16", "crop"]
)
def test_ignored_pixels_have_no_influence(options, tmp_path: Path):
    backbone = toy_backbone(image_size=None)
    images = as_uint8(pictures(40))
    detector = toy_detector(backbone, ignore=CORNER, **options).fit(images[:36])
    other = images.copy()
    other[:, CORNER] = np.random.default_rng(0).integers(0, 256, other[:, CORNER].shape)
    again = toy_detector(backbone, ignore=CORNER, **options).fit(other[:36])
    np.testing.assert_array_equal(again.calibration_scores_, detector.calibration_scores_)
    detector.save(tmp_path / "det")
    loaded = gepc.load_detector(tmp_path / "det", backbone)
    for raw in (False, True):
        maps = loaded.score_map(other[36:], raw=raw)
        np.testing.assert_array_equal(maps, detector.score_map(images[36:], raw=raw))
        ignored = detector.fitted.preprocessing.ignored(maps.shape[1:])
        assert ignored.any()
        assert (maps[:, ignored] == 0.0).all()
    np.testing.assert_array_equal(loaded.score(other[36:]), detector.score(images[36:]))


def test_a_defect_outside_the_region_still_counts():
    images = as_uint8(pictures(40))
    detector = toy_detector(ignore=CORNER).fit(images[:36])
    other = images[36:].copy()
    other[:, 5:] = 255
    assert (detector.score(other) != detector.score(images[36:])).all()


def test_a_mask_may_be_a_picture(tmp_path: Path):
    Image.fromarray(CORNER.astype(np.uint8) * 255).save(tmp_path / "mask.png")
    found = toy_detector(ignore=tmp_path / "mask.png").preprocessing().ignore
    assert found == Mask.of(CORNER)
    Image.fromarray(np.stack([CORNER * 9] * 3, axis=2).astype(np.uint8)).save(tmp_path / "rgb.png")
    assert toy_detector(ignore=str(tmp_path / "rgb.png")).preprocessing().ignore == found


def test_what_would_look_at_ignored_pixels_is_refused():
    with pytest.raises(OptionError, match="`ignore` needs `normalise` to be 'fixed'"):
        toy_detector(ignore=CORNER, magnitude="log", normalise="patch")
    with pytest.raises(OptionError, match=r"ignore must be a picture, or a boolean array \(H, W\)"):
        toy_detector(ignore=np.zeros(4, dtype=bool))


def test_a_detector_for_large_images_loads_with_its_mask(tmp_path: Path):
    """The runs of a mask are counted in pixels, of which there may be more than of anything else."""
    clock = np.zeros((400, 600), dtype=bool)
    clock[380:] = True
    detector = toy_detector(ignore=clock).fit(pictures(24))
    detector.save(tmp_path / "det")
    loaded = gepc.load_detector(tmp_path / "det", toy_backbone())
    np.testing.assert_array_equal(loaded.score(pictures(3, seed=1)), detector.score(pictures(3, seed=1)))


def test_a_mask_may_be_a_list_or_a_picture_in_memory():
    expected = Mask(size=(1, 3), runs=(0, 2, 1))
    assert Mask.of([[True, True, False]]) == Mask.of(Image.fromarray(np.array([[9, 1, 0]], np.uint8))) == expected

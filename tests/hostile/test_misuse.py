"""Statistics and annotations under misuse: repeated images, rates that are no numbers, boxes that are no boxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from toys import pictures, toy_detector

from gepc.conformal.decision import DecisionRule
from gepc.conformal.monitor import Monitor
from gepc.core.errors import InputError, OptionError
from gepc.lab.radar.annotations import open_scenes

IMAGES = pictures(40)


def test_copies_among_the_images_count_once() -> None:
    once = toy_detector().fit(IMAGES)
    repeated = np.concatenate([IMAGES, IMAGES[:10], IMAGES[:5]])
    with pytest.warns(UserWarning, match="15 of 55 images are copies of others; equal images count once"):
        found = toy_detector().fit(repeated)
    assert np.array_equal(found.calibration_scores_, once.calibration_scores_)
    assert found.fitted.fit_images == once.fitted.fit_images


def test_copies_among_calibration_images_count_once() -> None:
    others = pictures(20, seed=4)
    once = toy_detector().fit(IMAGES, others)
    with pytest.warns(UserWarning, match="20 of 40 images are copies"):
        found = toy_detector().fit(IMAGES, np.concatenate([others, others]))
    assert np.array_equal(found.calibration_scores_, once.calibration_scores_)


def test_one_image_that_is_repeated_is_not_enough() -> None:
    almost_one = np.concatenate([np.repeat(IMAGES[:1], 29, axis=0), IMAGES[1:2]])
    with pytest.raises(InputError, match="30 in-distribution images leave 1 to fit on"):
        toy_detector().fit(almost_one)


@pytest.mark.parametrize("wrong", ["0.05", None, True, [0.05], float("nan"), 0, 1, -0.1, "x", np.array([0.1])])
def test_a_rate_is_a_number_between_0_and_1(wrong: Any) -> None:
    detector = toy_detector().fit(IMAGES)
    for use in (
        lambda: detector.predict(IMAGES, alpha=wrong),
        lambda: detector.predict(IMAGES, fdr="x" if wrong is None else wrong),
        lambda: detector.predict(IMAGES, alpha=0.3, confidence="x" if wrong is None else wrong),
        lambda: detector.guarantee(wrong),
        lambda: DecisionRule(wrong),
        lambda: DecisionRule(wrong, control="bh"),
        lambda: Monitor(detector, wrong),
        lambda: Monitor(detector, delta=wrong),
    ):
        with pytest.raises(OptionError, match="between 0 and 1"):
            use()


def hrsid(folder: Path, image: dict[str, Any], annotation: dict[str, Any]) -> Path:
    (folder / "JPEGImages").mkdir()
    (folder / "annotations").mkdir()
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(folder / "JPEGImages" / "a.jpg")
    images = [{"id": 1, "file_name": "a.jpg", "width": 8, "height": 8, **image}]
    content = {"images": images, "annotations": [{"image_id": 1, "bbox": [1, 1, 2, 2], **annotation}]}
    (folder / "annotations" / "test2017.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("image", "annotation"),
    [
        ({"width": "x"}, {}),
        ({"width": 1e999}, {}),
        ({"width": 10**30}, {}),
        ({"height": float("nan")}, {}),
        ({"height": [8]}, {}),
        ({"height": -8}, {}),
        ({"id": [1]}, {}),
        ({"id": None}, {}),
        ({"file_name": ["a.jpg"]}, {}),
        ({}, {"image_id": [1]}),
        ({}, {"image_id": {}}),
        ({}, {"bbox": [float("nan"), 1, 2, 2]}),
        ({}, {"bbox": [1, 1, 1e999, 2]}),
        ({}, {"bbox": "1234"}),
        ({}, {"bbox": [1, 2, 3]}),
        ({}, {"bbox": 7}),
        ({}, {"bbox": [[1], 2, 3, 4]}),
    ],
)
def test_coco_files_with_anything_in_them(tmp_path: Path, image: dict[str, Any], annotation: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        open_scenes(hrsid(tmp_path, image, annotation))


@pytest.mark.parametrize("wrong", ["1e999", "nan", "x", "", "-3", "1e30"])
@pytest.mark.parametrize("tag", ["width", "xmin"])
def test_voc_files_with_anything_in_them(tmp_path: Path, tag: str, wrong: str) -> None:
    (tmp_path / "JPEGImages").mkdir()
    (tmp_path / "Annotations").mkdir()
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "JPEGImages" / "a.jpg")
    text = "<a><size><width>8</width><height>8</height></size><object><bndbox><xmin>1</xmin><ymin>1</ymin>"
    text += "<xmax>3</xmax><ymax>3</ymax></bndbox></object></a>"
    old = {"width": "<width>8", "xmin": "<xmin>1"}[tag]
    (tmp_path / "Annotations" / "a.xml").write_text(text.replace(old, f"<{tag}>{wrong}"))
    if (tag, wrong) == ("xmin", "-3"):  # partly outside the image: clipped
        assert open_scenes(tmp_path).scenes[0].ships[0].x == 0
    else:
        with pytest.raises(InputError):
            open_scenes(tmp_path)

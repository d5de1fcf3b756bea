"""What must not change: scores, p-values and maps of detectors saved by version 0.1.

The saved folders and their expected answers were written by `tests/data/pinned/make.py`. The backbone
computes in float64, so that the answers are the same on every machine to far below the tolerance.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gepc

FOLDER = Path(__file__).parent / "data" / "pinned"
_spec = importlib.util.spec_from_file_location("make_pinned", FOLDER / "make.py")
assert _spec is not None
assert _spec.loader is not None
make: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)


@pytest.fixture(scope="module")
def backbone() -> gepc.Backbone:
    return gepc.load_backbone(FOLDER / "net", dtype="float64")


@pytest.fixture(scope="module")
def images() -> Any:
    return np.concatenate([make.images(4, 2), make.images(4, 3, blur=1)])


@pytest.mark.parametrize("name", make.CASES)
def test_a_saved_detector_answers_as_before(name: str, backbone: gepc.Backbone, images: Any) -> None:
    detector = gepc.load_detector(FOLDER / name, backbone)
    expected = np.load(FOLDER / name / "expected.npz")
    results = list(detector.results(images, groups=make.groups_for(name, len(images))))
    for field in ("score", "p_value"):
        found = [getattr(result, field) for result in results]
        np.testing.assert_allclose(found, expected[field], rtol=1e-12, atol=1e-12)
    assert ("map" in expected) == detector.extractor.has_maps
    if "map" in expected:
        np.testing.assert_allclose(detector.score_map(images), expected["map"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", make.CASES)
def test_fitting_again_gives_the_same_detector(name: str, backbone: gepc.Backbone, images: Any) -> None:
    method, options = make.CASES[name]
    options = dict(options)
    detector = gepc.create_detector(backbone, method, preset=options.pop("preset", None), **options)
    detector.fit(make.images(30, 0), make.images(20, 1), groups=make.groups_for(name, 20))
    expected = np.load(FOLDER / name / "expected.npz")["score"]
    results = detector.results(images, groups=make.groups_for(name, len(images)))
    np.testing.assert_allclose([result.score for result in results], expected, rtol=1e-12, atol=1e-12)


def test_a_detector_with_sequential_scoring_says_that_it_must_be_fitted_again(backbone: gepc.Backbone) -> None:
    with pytest.raises(gepc.GepcError, match=r"sequential scoring, which gepc 0\.2 no longer has"):
        gepc.load_detector(FOLDER / "sequential", backbone)


# `gepc+` since 0.3: five parts, combined by Fisher's rule
COMBINATIONS = {
    "evidence": (
        *(1.070604094929, 0.807584034161, 1.361057911066, 2.251081776106),
        *(1.860628314171, 3.780711470107, 1.565534769921, 4.555379339781),
    ),
    "evidence:view=0.5,wide=level_pca": (
        *(1.023029931838, 1.179204091743, 1.737781792721, 2.61241292333),
        *(1.769909061008, 5.256686613873, 2.281486272457, 5.323624820205),
    ),
}


@pytest.mark.parametrize("calibration", COMBINATIONS)
def test_the_combination_of_parts(calibration: str, backbone: gepc.Backbone, images: Any) -> None:
    detector = gepc.create_detector(backbone, maps="raw", calibration=calibration).fit(
        make.images(30, 0), make.images(20, 1)
    )
    np.testing.assert_allclose(detector.score(images), COMBINATIONS[calibration], rtol=1e-9)

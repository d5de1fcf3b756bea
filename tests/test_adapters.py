"""gepc.sklearn follows scikit-learn's conventions, by its own checks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, PredefinedSplit, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import estimator_checks_generator
from toys import as_uint8, pictures, toy_backbone

import gepc
import gepc.sklearn
from gepc.core.errors import OptionError
from gepc.lab.analytic import GaussianBackbone

LEVELS = {"levels": (0.99, 0.9), "group": "flips"}
RAMP = np.linspace(-0.5, 0.5, 64).reshape(1, 8, 8)


class _OnFeatures(gepc.sklearn.OODDetector):
    """Rows of any length as 8x8 images, since scikit-learn's checks fit on tables of 1 to 20 numbers."""

    def _reshaped(self, rows: npt.NDArray[Any], backbone: gepc.Backbone) -> npt.NDArray[Any]:
        squashed = rows.astype(np.float64) / (3.0 + np.abs(rows.astype(np.float64)))
        repeated = np.stack([np.resize(row, 64) for row in squashed])
        return repeated.reshape(-1, 1, 8, 8)


def _checks() -> Iterator[Any]:
    estimator = _OnFeatures(
        GaussianBackbone(RAMP, 0.3, (1, 8, 8)), alpha=0.4, options={**LEVELS, "calibration_share": 0.2}
    )
    for checked, check in estimator_checks_generator(estimator):
        name = check.func.__name__ if hasattr(check, "func") else check.__name__
        yield pytest.param(checked, check, id=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("estimator", "check"), _checks())
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def digits() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Zeros of scikit-learn's digits as rows of 64 numbers from 0 to 16, and the same with 30 sevens at the end."""
    X, y = load_digits(return_X_y=True)
    return X[y == 0], np.concatenate([X[y == 0][:30], X[y == 7][:30]])


def _backbone(rows: npt.NDArray[Any]) -> GaussianBackbone:
    return GaussianBackbone.fitted((rows / 8.0 - 1.0).reshape(-1, 1, 8, 8)[:60])


def _estimator(rows: npt.NDArray[Any], **more: Any) -> Any:
    options = {"value_range": (0, 16), "levels": (0.99, 0.95, 0.9)}
    return gepc.sklearn.OODDetector(_backbone(rows), "gepc", options=options, **more)


def test_the_numbers_are_those_of_the_native_detector(digits: Any) -> None:
    normal, mixed = digits
    estimator = _estimator(normal, alpha=0.1).fit(normal[60:])
    native = gepc.create_detector(_backbone(normal), "gepc", **estimator.options).fit(normal[60:].reshape(-1, 1, 8, 8))
    images = mixed.reshape(-1, 1, 8, 8)
    np.testing.assert_array_equal(estimator.score_samples(mixed), -native.score(images))
    np.testing.assert_array_equal(estimator.predict(mixed) == -1, native.predict(images, alpha=0.1))
    np.testing.assert_array_equal(estimator.decision_function(mixed) < 0, native.predict(images, alpha=0.1))
    np.testing.assert_array_equal(estimator.fit_predict(normal[60:]), estimator.predict(normal[60:]))


def test_pipelines_cross_validation_and_grids(digits: Any) -> None:
    normal, mixed = digits
    estimator = _estimator(normal, alpha=0.2)
    halved = make_pipeline(
        FunctionTransformer(lambda X: X / 2.0),
        clone(estimator).set_params(options={**estimator.options, "value_range": (0, 8)}),
    )
    np.testing.assert_array_equal(halved.fit(normal).predict(mixed), clone(estimator).fit(normal).predict(mixed))
    assert cross_val_predict(estimator, normal, cv=3).shape == (len(normal),)
    truth = np.r_[np.ones(len(normal) + 30), -np.ones(30)]
    once = PredefinedSplit(np.r_[np.full(len(normal), -1), np.zeros(60)])  # fit on zeros, test on both
    rows = np.concatenate([normal, mixed])
    assert cross_val_score(estimator, rows, truth, cv=once, scoring="roc_auc")[0] > 0.9
    search = GridSearchCV(estimator, {"alpha": [0.1, 0.2]}, cv=once, scoring="roc_auc", refit=False).fit(rows, truth)
    assert len(search.cv_results_["mean_test_score"]) == 2


def test_a_grid_of_presets() -> None:
    """Clones share the network, and method and preset are parameters like any other."""
    images, odd = pictures(30), pictures(10, seed=2, contrast=2.0)
    backbone = toy_backbone()
    estimator = gepc.sklearn.OODDetector(backbone, alpha=0.2)
    assert clone(estimator).backbone is backbone
    X, truth = np.concatenate([images, odd]).reshape(40, -1), np.r_[np.ones(30), -np.ones(10)]
    once = PredefinedSplit(np.r_[np.full(24, -1), np.zeros(16)])
    grid = [{"method": ["gepc+"], "preset": ["fast", "full"]}, {"method": ["msma"]}]
    search = GridSearchCV(estimator, grid, cv=once, scoring="roc_auc", refit=False).fit(X, truth)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_params_["method"] in ("gepc+", "msma")


def test_images_in_other_forms(tmp_path: Path) -> None:
    images = pictures(30)
    estimator = gepc.sklearn.OODDetector(toy_backbone(), alpha=0.2)
    by_array = clone(estimator).fit(images).predict(images)
    np.testing.assert_array_equal(by_array, clone(estimator).fit(list(images)).predict(list(images)))
    np.testing.assert_array_equal(by_array, clone(estimator).fit(images.reshape(30, -1)).predict(images))
    paths = [tmp_path / f"{place:02}.png" for place in range(len(images))]
    for path, picture in zip(paths, as_uint8(images), strict=True):
        Image.fromarray(picture).save(path)
    named, scores = np.array(list(map(str, paths))), clone(estimator).fit(paths).decision_function(paths)
    np.testing.assert_allclose(clone(estimator).fit(named).decision_function(named), scores)
    again = pickle.loads(pickle.dumps(clone(estimator).set_params(backbone="celeba32-tiny")))
    assert again.backbone == "celeba32-tiny"


def test_errors() -> None:
    estimator = gepc.sklearn.OODDetector(toy_backbone())
    with pytest.raises(NotFittedError):
        estimator.predict(pictures(3))
    with pytest.raises(ValueError, match=r"rows of 7 features are not images of shape \(3, 8, 8\); set `image_shape`"):
        estimator.fit(np.zeros((30, 7)))
    with pytest.raises(TypeError, match=r"alpha=0\.01 needs at least 99 calibration images"):
        gepc.sklearn.OODDetector(toy_backbone(), alpha=0.01).fit(pictures(30))


def test_the_default_method_is_that_of_create_detector() -> None:
    backbone = toy_backbone()
    fitted = gepc.sklearn.OODDetector(backbone, alpha=0.2).fit(pictures(30))
    assert fitted.detector_.extractor == gepc.create_detector(backbone, None).extractor


def test_a_failed_fit_leaves_the_estimator_as_it_was() -> None:
    """The second fit has too few images for `alpha`, which shows when its detector is fitted."""
    images = pictures(60)
    estimator = gepc.sklearn.OODDetector(toy_backbone(), "pixel_stats").fit(images)
    before = (estimator.detector_, estimator.offset_)
    with pytest.raises(OptionError, match="needs at least 19 calibration images"):
        estimator.fit(images[:30])
    assert (estimator.detector_, estimator.offset_) == before


def test_a_list_of_flattened_images_is_a_table() -> None:
    images = pictures(60)
    estimator = gepc.sklearn.OODDetector(toy_backbone(), "pixel_stats", image_shape=images.shape[1:]).fit(images)
    rows = [image.ravel() for image in images[:3]]
    np.testing.assert_array_equal(estimator.score_samples(rows), estimator.score_samples(images[:3]))

"""The library agrees with a literal reading of the paper on a random UNet, and needs 7 passes where that needs 8."""

from __future__ import annotations

import itertools

import literal_gepc
import numpy as np
import pytest
import torch
from literal_gepc import Literal
from toys import pictures

import gepc
from gepc.calibration import Aggregation, create_calibrator
from gepc.calibration.calibrators import AGGREGATIONS, FUSIONS
from gepc.calibration.scorer import WEIGHTINGS, select
from gepc.methods.pooling import KINDS

LEVELS = (0.9999, 0.9979)
FEATURES = ("s", "cos", "pair", "walk", "x0", "b", "d")
COUNT = 2


def literal_network(backbone: gepc.Backbone) -> literal_gepc.Network:
    """The backbone as a function of a single float64 image."""

    def network(image: np.ndarray, t: int) -> np.ndarray:
        return backbone.eps(torch.from_numpy(image[None]).float(), t)[0].double().numpy()

    return network


@pytest.mark.parametrize("pool", KINDS)
def test_every_feature_equals_the_literal_one(tiny_unet: gepc.Backbone, pool: str) -> None:
    """Same images, same noise: each feature at each level to 1e-5, from |G| passes a level instead of 1 + |G|."""
    images = pictures(COUNT, size=16)
    noise = np.random.default_rng(1).standard_normal((len(LEVELS), COUNT, 3, 16, 16)).astype(np.float32)
    detector = gepc.GEPC(tiny_unet, levels=LEVELS, features=FEATURES, pool=pool, topk=0.3, window=5)
    found = detector.features(images, noise=noise)
    library_passes = tiny_unet.forward_count

    literal = Literal(literal_network(tiny_unet), tiny_unet.alphas_cumprod, pool=pool, topk=0.3, window=5)
    timesteps = detector.extractor.timesteps(tiny_unet)
    for image, (level, t) in itertools.product(range(COUNT), enumerate(timesteps)):
        expected = literal.features(images[image].astype(float), noise[level, image].astype(float), t)
        for name in FEATURES:
            scalar = found[name][image, level].mean()
            assert scalar == pytest.approx(expected[name], rel=1e-5), (name, image, level)
    assert library_passes == 7 * len(LEVELS) * COUNT
    assert literal.passes == 8 * len(LEVELS) * COUNT


def synthetic_columns(count: int, seed: int) -> np.ndarray:
    """(images, 4 levels, 2 features): positive, skewed, correlated, each level with another spread."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal((count, 1, 1))
    spread = np.array([0.4, 0.1, 0.7, 0.2])[:, None]
    return np.exp(spread * (rng.standard_normal((count, 4, 2)) + common)) * np.array([1.0, 30.0])


@pytest.mark.parametrize(
    ("calibration", "over_levels", "over_features", "weighting"),
    [
        *itertools.product(("kde", "raw", "zscore"), AGGREGATIONS, FUSIONS, WEIGHTINGS),
        ("mvn", "max", "mean", "uniform"),
    ],
)
def test_selection_calibration_and_aggregation_equal_the_literal_ones(
    calibration: str, over_levels: str, over_features: str, weighting: str
) -> None:
    """From the same table: the same levels, weights and scores, also for images far outside."""
    id_table, test_table = synthetic_columns(40, seed=2), synthetic_columns(6, seed=3) * 2.0
    picked = select(id_table[:, :, 0], keep=3, weighting=weighting)
    kept, weights = literal_gepc.select_levels(id_table[:, :, 0], keep=3, weighting=weighting)
    assert list(picked.kept) == kept
    np.testing.assert_allclose(picked.weights, weights, rtol=1e-12)

    calibrator = create_calibrator(calibration).fit(id_table[:, kept])
    found = calibrator.score(test_table[:, kept], picked.weights, Aggregation(over_features, over_levels))
    expected = [
        literal_gepc.anomaly_score(calibration, row, id_table[:, kept], weights, over_levels, over_features)
        for row in test_table[:, kept]
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("calibration", ["kde", "zscore", "raw", "mvn"])
def test_the_fitted_detector_is_the_composition_of_its_parts(tiny_unet: gepc.Backbone, calibration: str) -> None:
    """fit and score do on the network's table what the literal reading does on it."""
    id_images, held_out, images = pictures(12, 16), pictures(2, 16, seed=1), pictures(3, 16, seed=2, contrast=1.5)
    detector = gepc.GEPC(
        tiny_unet, levels=(*LEVELS, 0.99), keep=2, features=("s", "cos"), calibration=calibration, pool="mean"
    )
    found = detector.fit(id_images, calibration_images=held_out).score(images)

    id_table, table = (
        np.stack([detector.features(part)[name].mean(2) for name in ("s", "cos")], axis=2)
        for part in (id_images, images)
    )
    kept, weights = literal_gepc.select_levels(id_table[:, :, 0], keep=2, weighting="inv_cv")
    np.testing.assert_array_equal(detector.kept_, detector.levels_[kept])
    expected = [
        literal_gepc.anomaly_score(calibration, row[kept], id_table[:, kept], weights, "wmean", "sum") for row in table
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)

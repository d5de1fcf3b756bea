"""Images of the training Gaussian against others of it: no method may tell them apart."""

from __future__ import annotations

import numpy as np
import pytest
from gaussians import S, method, run, sample

import gepc
from gepc.calibration import Aggregation, create_calibrator
from gepc.lab.metrics import auroc

N = 150


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gepc+", {"features": ("d", "ax", "ay", "ad")}),
        ("pixel_stats", {}),
        ("score_norm", {}),
        ("msma", {}),
        ("diffpath", {"clip": False}),
        ("diffpath", {"clip": False, "dim": 1}),
        ("scoped", {}),
        ("spr", {}),
        ("nll_vlb", {"strata": 8}),
        ("typicality", {"strata": 8}),
        ("dos", {"strata": 8}),
        ("waic", {"strata": 4}),
        ("lr", {}),
        ("nll_ode", {"steps": 4}),
        ("ddpm_ood", {}),
        ("lmd", {"blocks": 4, "steps": 4}),
        ("ufcod", {"clip": False}),
        ("combined", {"methods": ("msma", "pixel_stats")}),
    ],
)
def test_chance_level(name: str, options: dict[str, object]) -> None:
    """AUROC within .5 +- 3/sqrt(6 N), and the same again with the same seed."""
    extractor = method(name, **options)
    train, one, other = (extractor.columns(run(extractor, sample(N, S, seed))) for seed in (10, 11, 12))
    calibrator = create_calibrator(extractor.calibration_name).fit(train)
    weights, aggregation = np.full(train.shape[1], 1 / train.shape[1]), Aggregation("sum", extractor.aggregate)
    scores = [calibrator.score(columns, weights, aggregation) for columns in (one, other)]
    assert abs(auroc(*scores) - 0.5) < 3 / np.sqrt(6 * N)
    np.testing.assert_array_equal(extractor.columns(run(extractor, sample(N, S, 11))), one)


def test_every_method_with_features_that_vary_on_a_gaussian_is_here() -> None:
    """EigenScore is constant on a Gaussian, iDECODe zero, IC's PNG of 48 values all header, CFS needs layers; CFAR and
    RX need images larger than a target, energies and encoders another network, and have tests of their own."""
    tested = {item[0] for item in test_chance_level.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    assert set(gepc.list_detectors()) - tested == {
        *("gepc", "eigenscore", "idecode", "ic", "cfs"),
        *("ca_cfar", "os_cfar", "rx", "energy", "encoder"),
    }

"""Calibration sets that are not clean: trimming keeps its bound."""

from types import SimpleNamespace

import numpy as np
import pytest
from toys import pictures, toy_detector

import gepc
from gepc.conformal.decision import DecisionRule
from gepc.conformal.monitor import Monitor
from gepc.conformal.p_values import CalibrationScores, Guarantee
from gepc.core.errors import OptionError

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("outliers", [0, 5, 10])
def test_the_rate_after_trimming_stays_within_its_bound(outliers):
    """k = 10 of n = 100 are left out; the worst case is that none of them is an outlier."""
    n, k, alpha = 100, 10, 0.1
    rates = []
    for _ in range(400):
        scores = np.append(RNG.normal(size=n - outliers), np.full(outliers, 50.0))
        trimmed = CalibrationScores.of(scores, None).trim(0.1)
        assert trimmed.trimmed == k
        rates.append((trimmed.p_values(RNG.normal(size=200)) <= alpha).mean())
    error = 3 * np.std(rates) / np.sqrt(len(rates))
    bound = alpha + (k - outliers) / (n - outliers + 1)
    assert np.mean(rates) <= bound + error
    assert bound <= alpha + k / (n - k + 1)
    if outliers == k:
        assert np.mean(rates) >= alpha - 0.01 - error  # and the power is back: nearly the whole rate is used


def test_trimming_is_stored_and_stated(tmp_path):
    images, others = pictures(40), pictures(45, seed=3)
    detector = toy_detector(contamination=0.1).fit(images, others)
    assert (len(detector.calibration_scores_), detector.fitted.reference.trimmed) == (41, 4)
    text = str(detector.guarantee(0.1))
    assert "if the 4 calibration images that were left out are outliers, and at most 0.195 in any case" in text
    detector.save(tmp_path / "det")
    loaded = gepc.load_detector(tmp_path / "det", detector.backbone)
    assert loaded.contamination == 0.1
    assert loaded.guarantee(0.1) == detector.guarantee(0.1)
    np.testing.assert_array_equal(loaded.p_value(images), detector.p_value(images))
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again" / "state.safetensors").read_bytes() == (
        tmp_path / "det" / "state.safetensors"
    ).read_bytes()
    assert Guarantee.at(0.1, 99).trimmed == 0


def test_the_share_of_outliers_is_checked():
    with pytest.raises(OptionError, match=r"contamination must be at least 0 and below 0\.5, got 0\.7"):
        toy_detector(contamination=0.7)


def test_every_promise_after_trimming_says_what_it_takes() -> None:
    """Without outliers among the calibration images, trimming raises every rate."""
    trimmed = CalibrationScores.of(np.arange(400.0), None).trim(0.1)
    condition = "if the 40 calibration images that were left out are outliers"
    for rule in (DecisionRule(0.1), DecisionRule(fdr=0.1), DecisionRule(0.1, confidence=0.9)):
        assert condition in rule.statement(trimmed)
        assert "left out" not in rule.statement(CalibrationScores.of(np.arange(400.0), None))
    assert condition in DecisionRule(0.1).scene_statement(50, 360, trimmed.trimmed)
    with pytest.warns(UserWarning, match="40 calibration images were left out"):
        Monitor(SimpleNamespace(reference=trimmed))

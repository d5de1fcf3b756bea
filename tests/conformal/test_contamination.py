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
from gepc.scenes.regions import statement

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
    assert "if the 4 calibration images that were left out are outliers, and at most 0.195 if fewer of them are" in text
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
    with pytest.warns(UserWarning, match=f"hold only {condition}"):
        Monitor(SimpleNamespace(reference=trimmed))


def test_detections_of_a_scene_state_the_condition_of_their_own_calibration_maps(tmp_path) -> None:
    """Of 40 calibration images 4 are left out, and of their maps those of 4; a saved detector states the same."""
    detector = toy_detector(contamination=0.1).fit(pictures(40), pictures(40, seed=3))
    detector.save(tmp_path / "det")
    loaded = gepc.load_detector(tmp_path / "det", detector.backbone)
    for fitted in (detector.fitted, loaded.fitted):
        assert "(36 calibration maps) if the 4 calibration images that were left out" in statement(fitted, 50, 0.1)
    clean = toy_detector().fit(pictures(40), pictures(40, seed=3)).fitted
    assert "(40 calibration maps). The maps" in statement(clean, 50, 0.1)


def test_a_rate_with_confidence_is_that_of_each_group() -> None:
    """For several groups together the probability is another one, since their mean has another distribution."""
    labels = np.repeat(["a", "b"], 99)
    rule, scores = DecisionRule(0.05, confidence=0.5), np.arange(198.0)
    assert "for each group, with probability 0.5" in rule.statement(CalibrationScores.of(scores, labels))
    assert "each group" not in rule.statement(CalibrationScores.of(scores, None))


def test_a_worst_case_is_a_probability_and_a_monitor_states_what_its_own_group_lost() -> None:
    """Of 10 images one is left out, and of 400 images 40."""
    labels = np.repeat(["few", "many"], [10, 400])
    trimmed = CalibrationScores.of(np.arange(410.0), labels).trim(0.1)
    assert "at most 1 if fewer of them are" in DecisionRule(0.2).statement(trimmed)
    with pytest.warns(UserWarning, match="hold only if the 1 calibration images"):
        Monitor(SimpleNamespace(reference=trimmed), alpha=0.2, group="few")
    untouched = CalibrationScores.of(np.arange(410.0), labels).trim(0.05)
    Monitor(SimpleNamespace(reference=untouched), alpha=0.2, group="few")

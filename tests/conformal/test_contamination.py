"""Calibration sets that are not clean: the warning is rare on clean ones, and trimming keeps its bound."""

import warnings

import numpy as np
import pytest
from toys import pictures, toy_backbone, toy_detector

import gepc
from gepc.conformal.p_values import CalibrationScores, Guarantee, contamination_p_value
from gepc.core.errors import AdviceWarning, OptionError

RNG = np.random.default_rng(5)
CLEAN = {
    "exponential": lambda n: RNG.exponential(size=n),
    "normal": lambda n: RNG.normal(size=n),
    "chi-squared": lambda n: RNG.chisquare(10, n),
    "log-normal": lambda n: np.exp(RNG.normal(size=n)),
    "stretched exponential": lambda n: RNG.exponential(size=n) ** 2,
    "constant": lambda n: np.ones(n),
}


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("n", [40, 200])
def test_clean_scores_give_a_warning_in_at_most_one_of_a_hundred_cases(name, n):
    found = np.array([contamination_p_value(CLEAN[name](n)) for _ in range(1000)])
    for rate in (0.01, 0.05):
        assert (found <= rate).mean() <= rate + 3 * np.sqrt(rate * (1 - rate) / 1000)


@pytest.mark.parametrize(("share", "power"), [(0.01, 0.8), (0.05, 0.95), (0.1, 0.95)])
def test_outliers_are_noticed(share, power):
    def contaminated():
        scores = RNG.normal(size=300)
        scores[: round(share * 300)] = RNG.normal(20.0, 10.0, round(share * 300))
        return scores

    assert np.mean([contamination_p_value(contaminated()) <= 0.01 for _ in range(200)]) >= power


def test_few_scores_are_too_few_to_tell():
    assert contamination_p_value(np.append(np.arange(30.0), 1e9)) == 1.0


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


def test_fitting_warns_about_outliers_among_the_calibration_images():
    def fit(calibration):
        return gepc.create_detector(toy_backbone(), "pixel_stats").fit(pictures(40), calibration)

    clean, odd = pictures(96, seed=3), RNG.uniform(-1.0, 1.0, (4, 3, 8, 8)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(clean)
    with pytest.warns(AdviceWarning, match="look like outliers.*`contamination`"):
        fit(np.concatenate([clean, odd]))
    with pytest.raises(OptionError, match=r"contamination must be at least 0 and below 0\.5, got 0\.7"):
        toy_detector(contamination=0.7)

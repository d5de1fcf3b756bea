"""Group-conditional p-values, random ties, and the training-conditional threshold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.conformal.p_values import (
    CalibrationScores,
    group_labels,
    images_for_width,
    images_needed,
    p_values,
    pac_rank,
    realised_range,
)
from gepc.core.errors import OptionError
from gepc.images.sources import open_images


def test_a_group_is_compared_with_its_own():
    scores, labels = np.array([1.0, 2.0, 3.0, 10.0, 20.0, 30.0]), np.array(["a", "a", "a", "b", "b", "b"])
    reference = CalibrationScores.of(scores, labels)
    assert reference.p_values(np.array([5.0, 5.0]), np.array(["a", "b"]), None).tolist() == [0.25, 1.0]


def test_false_alarms_are_held_within_every_group():
    """Pooled calibration alarms too often in the noisy group; Mondrian calibration does not."""
    rng = np.random.default_rng(0)
    spread = np.array([1.0, 3.0])
    alarms, runs, n, alpha = np.zeros(2), 200, 100, 0.1
    for _ in range(runs):
        group = np.repeat([0, 1], n)
        reference = CalibrationScores.of(rng.normal(size=2 * n) * spread[group], group.astype(str))
        test = np.repeat([0, 1], 20)
        p = reference.p_values(rng.normal(size=40) * spread[test], test.astype(str), None)
        alarms += [(p[test == g] <= alpha).mean() for g in (0, 1)]
    rate, band = alarms / runs, 3 * np.sqrt(alpha * (1 - alpha) / (runs * 20))
    assert (rate <= alpha + band).all()
    assert (rate >= alpha - band - 1 / n).all()


def test_labels_must_fit_the_reference():
    grouped = CalibrationScores.of(np.arange(4.0), np.array(["day", "day", "night", "night"]))
    with pytest.raises(OptionError, match="give `groups`"):
        grouped.check(None)
    with pytest.raises(OptionError, match="did you mean 'night'"):
        grouped.check(np.array(["nigth"]))
    with pytest.raises(OptionError, match="without groups"):
        CalibrationScores.of(np.arange(4.0), None).check(np.array(["day"]))


def test_random_ties_make_p_uniform():
    """Scores with many ties: conservative p-values pile up, randomised ones are uniform."""
    rng = np.random.default_rng(5)
    p = np.concatenate(
        [
            p_values(rng.integers(0, 3, 1).astype(float), rng.integers(0, 3, 19).astype(float), rng.random(1))
            for _ in range(4000)
        ]
    )
    counts = np.histogram(p, bins=10, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 27.9  # the 0.999 quantile of chi-square with 9 degrees of freedom


@given(st.floats(0.01, 0.3), st.sampled_from([0.8, 0.9, 0.99]))
def test_the_safe_rank_is_safe_and_not_wasteful(alpha, confidence):
    from scipy.stats import beta

    n = 1000
    rank = pac_rank(n, alpha, confidence)
    assert beta.cdf(alpha, rank, n + 1 - rank) >= confidence
    assert beta.cdf(alpha, rank + 1, n - rank) < confidence


def test_the_safe_threshold_holds_for_most_calibration_sets():
    rng = np.random.default_rng(6)
    n, alpha, confidence, runs = 200, 0.1, 0.9, 400
    rank = pac_rank(n, alpha, confidence)
    uniform = np.sort(rng.random((runs, n)), axis=1)  # scores whose false-alarm rate is known: 1 - threshold
    realised = 1.0 - uniform[:, n - rank]
    share = (realised <= alpha).mean()
    assert share >= confidence - 3 * np.sqrt(confidence * (1 - confidence) / runs)


def test_too_few_images_for_confidence_says_how_many():
    with pytest.raises(OptionError, match="at least 299 calibration images, there are 50"):
        pac_rank(50, 0.01, 0.95)
    assert pac_rank(299, 0.01, 0.95) == 1


def test_images_for_width_is_the_first_that_is_narrow_enough():
    n = images_for_width(0.05, 0.02)
    assert isinstance(n, int)
    widths = [np.diff(realised_range(0.05, count))[0] for count in (n - 1, n)]
    assert widths[1] <= 0.02 < widths[0]


@given(st.integers(0, 60), st.sampled_from([0.02, 0.05, 0.1, 0.3, 0.7]), st.sampled_from([0.5, 0.9, 0.95]))
def test_the_safe_rank_is_a_binomial_tail(n, alpha, confidence):
    """P(Beta(k, n + 1 - k) <= alpha) = P(Binomial(n, alpha) >= k); no image at all is too few, like any other count."""
    from scipy.stats import binom

    safe = [k for k in range(1, n + 1) if binom.sf(k - 1, n, alpha) >= confidence]
    if safe:
        assert pac_rank(n, alpha, confidence) == max(safe)
        return
    needed = next(count for count in range(1, 500) if 1.0 - (1.0 - alpha) ** count >= confidence)
    with pytest.raises(OptionError, match=f"needs at least {needed} calibration images, there are {n}"):
        pac_rank(n, alpha, confidence)
    assert pac_rank(needed, alpha, confidence) >= 1


def test_random_ties_are_drawn_for_each_image_of_a_group():
    """p = (#{calibration > s} + U (1 + #{calibration = s}))/(n + 1), each image with its own U and its own group."""
    reference = CalibrationScores.of(np.array([1.0, 2.0, 2.0, 5.0]), np.array(["a", "a", "a", "b"]))
    scores, labels = np.array([2.0, 5.0, 0.0, 2.0]), np.array(["a", "b", "b", "a"])
    found = reference.p_values(scores, labels, np.array([0.5, 0.25, 1.0, 0.0]))
    np.testing.assert_allclose(found, [(0 + 0.5 * 3) / 4, (0 + 0.25 * 2) / 2, (1 + 1.0) / 2, 0.0])


def test_labels_are_those_given_or_the_names_of_folders(tmp_path, monkeypatch):
    from PIL import Image

    for name in ("day/a.png", "night/b.png"):
        (tmp_path / name).parent.mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name)
    files, array = open_images(tmp_path), open_images(np.zeros((2, 4, 4, 3), dtype=np.uint8))
    assert group_labels("folder", files).tolist() == ["day", "night"]
    monkeypatch.chdir(tmp_path / "day")
    assert group_labels("folder", open_images(["a.png", "../night/b.png"])).tolist() == ["day", "night"]
    assert group_labels([1, 2], array).tolist() == ["1", "2"]
    assert group_labels([1, 2], array, np.array([1])).tolist() == ["2"]
    assert group_labels(None, array) is None
    with pytest.raises(OptionError, match="a label for every image, or 'folder'; got 'folders'"):
        group_labels("folders", files)
    with pytest.raises(OptionError, match="'folder' only for images from files"):
        group_labels("folder", array)
    with pytest.raises(OptionError, match="groups has 3 labels for 2 images"):
        group_labels([1, 2, 3], array)


@pytest.mark.parametrize(
    ("n", "alpha", "confidence", "rank"),
    [(1, 0.5, 0.5, 1), (1, 0.7, 0.5, 1), (2, 0.9, 0.5, 2), (5, 0.9, 0.5, 5), (9, 0.3, 0.5, 3)],
)
def test_the_safe_rank_of_few_images(n, alpha, confidence, rank):
    """P(all n below alpha) = alpha^n: the last rank is safe from there on, and equality counts, as 0.5 >= 0.5 does."""
    assert pac_rank(n, alpha, confidence) == rank


@given(st.sampled_from([0.02, 0.1, 0.3, 0.7]), st.integers(60, 300), st.sampled_from([0.5, 0.8, 0.99]))
def test_the_range_of_the_realised_rate_leaves_out_equal_tails(alpha, n, probability):
    """P(Beta(k, n + 1 - k) < low) = P(Beta > high) = (1 - probability)/2."""
    from scipy.stats import beta

    k = int(alpha * (n + 1) + 1e-9)
    low, high = realised_range(alpha, n, probability)
    assert beta.cdf(low, k, n + 1 - k) == pytest.approx((1 - probability) / 2)
    assert beta.sf(high, k, n + 1 - k) == pytest.approx((1 - probability) / 2)


def test_ranges_have_a_probability_of_nine_tenths_unless_another_is_asked_for():
    assert realised_range(0.1, 99) == realised_range(0.1, 99, 0.9)
    assert images_for_width(0.1, 0.05) == images_for_width(0.1, 0.05, 0.9) > images_for_width(0.1, 0.05, 0.5)


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.3, 0.5, 0.93])
def test_no_smaller_number_of_images_is_narrow_enough(alpha):
    """At a new rank the range widens a little: for 0.05, 117 images are narrower than 0.06 and 119 are not."""
    widths = [np.inf] * 2 + [np.diff(realised_range(alpha, n))[0] for n in range(2, 800)]
    widths[: images_needed(alpha)] = [np.inf] * images_needed(alpha)
    for width in (0.06, 0.1, 0.17, 0.4):
        assert images_for_width(alpha, width) == next(n for n, found in enumerate(widths) if found <= width)


@pytest.mark.parametrize(("alpha", "n"), [(0.5, 3), (0.5, 7), (0.5, 15)])
def test_a_width_that_is_just_reached_is_enough(alpha, n):
    """For these every smaller number of images gives a wider range."""
    low, high = realised_range(alpha, n)
    assert images_for_width(alpha, high - low) == n


@pytest.mark.parametrize(("alpha", "needed"), [(0.05, 19), (0.1, 9), (0.5, 2), (0.7, 2)])
def test_any_width_needs_the_images_that_the_rate_needs(alpha, needed):
    """And at least two: the rate of a single calibration image is uniform."""
    assert images_for_width(alpha, 0.999) == needed


def test_a_width_is_a_number_between_0_and_1():
    with pytest.raises(OptionError, match=r"width must be between 0 and 1, got 1\.5"):
        images_for_width(0.05, 1.5)


def test_a_reference_knows_its_groups_its_scores_and_the_smallest_group():
    scores, labels = np.array([5.0, 1.0, 4.0, 2.0, 3.0]), np.array(["b", "a", "a", "b", "a"])
    grouped, plain = CalibrationScores.of(scores, labels), CalibrationScores.of(scores, None)
    assert {name: values.tolist() for name, values in grouped.by_group.items()} == {"a": [1, 3, 4], "b": [2, 5]}
    assert grouped.scores.tolist() == plain.scores.tolist() == [1, 2, 3, 4, 5]
    assert (grouped.grouped, grouped.smallest) == (True, 2)
    assert (plain.grouped, plain.smallest) == (False, 5)

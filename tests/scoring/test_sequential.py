"""Sequential scoring: fewer passes, the same promise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import spearmanr
from toys import as_uint8, pictures, toy_backbone, toy_detector

import gepc
from gepc.core.errors import OptionError
from gepc.scoring import Aggregation, create_calibrator
from gepc.scoring.metrics import auroc
from gepc.scoring.sequential import TOLERANCE, Sequential, _limit, by_agreement
from gepc.verdicts.conformal import p_values

Array = npt.NDArray[np.float64]
WEIGHTS = np.array([0.2, 0.5, 0.3])


def columns(count: int, seed: int, shift: float = 0.0) -> Array:
    """Three levels of one feature that share most of what they say: the second most, the first least."""
    rng = np.random.default_rng(seed)
    own = rng.standard_normal((count, 3, 1)) * np.array([0.7, 0.3, 0.5])[:, None]
    return rng.standard_normal((count, 1, 1)) + own + shift


def fitted(calibration: str = "z", alpha: float = 0.1, seed: int = 0) -> Sequential:
    return Sequential.fit(
        columns(400, seed), WEIGHTS, lambda part: create_calibrator(calibration).fit(part), Aggregation(), alpha
    )


@pytest.mark.parametrize("calibration", ["z", "kde"])
def test_the_level_that_agrees_most_with_all_of_them_comes_first(calibration: str) -> None:
    rule, seen = fitted(calibration), columns(400, 0)
    assert rule.order == (1, 2, 0)
    last = rule.stages[-1].calibrator.score(seen[:, list(rule.order)], WEIGHTS[list(rule.order)], Aggregation())
    alone = [
        create_calibrator(calibration).fit(seen[:, [level]]).score(seen[:, [level]], np.ones(1), Aggregation())
        for level in rule.order
    ]
    agreement = [float(spearmanr(scores, last).statistic) for scores in alone]
    assert agreement == sorted(agreement, reverse=True)


def test_a_level_that_tells_no_image_from_another_comes_last() -> None:
    scores = columns(50, 0)[:, 0, 0]
    assert by_agreement([np.ones(50), -scores, scores, scores], scores) == (2, 3, 0, 1)


def test_most_images_stop_early_and_the_score_is_that_of_the_stage_where_they_stopped() -> None:
    rule, seen = fitted(), columns(200, 1)
    scores, levels = rule.score_columns(seen)
    assert 1.0 < levels.mean() < 2.0
    for row in range(20):
        stage = rule.stages[levels[row] - 1]
        looked = list(rule.order[: levels[row]])
        raw = stage.calibrator.score(seen[[row]][:, looked], WEIGHTS[looked], Aggregation())
        assert scores[row] == pytest.approx((raw[0] - stage.median) / (stage.limit - stage.median), abs=1e-12)


def test_levels_after_the_stop_are_never_asked_for() -> None:
    rule, seen, asked = fitted(), columns(50, 2), []

    def score_batch(rows: npt.NDArray[np.int64], position: int) -> Array:
        asked.append((position, len(rows)))
        return seen[rows][:, [position]]

    _, levels = rule.score(len(seen), score_batch)
    assert [position for position, _ in asked] == [1, 2, 0][: len(asked)]
    assert [count for _, count in asked] == [int((levels > stage).sum()) for stage in range(len(asked))]


@pytest.mark.parametrize("calibration", ["z", "kde", "mahalanobis"])
def test_few_of_the_full_verdicts_on_the_fitted_images_are_overturned(calibration: str) -> None:
    rule, seen = fitted(calibration), columns(400, 0)
    last = rule.stages[-1]
    looked = list(rule.order)
    full = last.standardise(last.calibrator.score(seen[:, looked], WEIGHTS[looked], Aggregation())) > 1.0
    early = rule.score_columns(seen)[0] > 1.0
    assert 1 <= full.sum() <= 40
    # at each of the two early stages at most TOLERANCE on either side
    assert (full != early).sum() <= 2 * 2 * TOLERANCE * full.sum()


def test_false_alarms_keep_to_alpha_on_average_over_calibration_sets() -> None:
    """120 independent fits and references of 99 images: 6,000 test images, whose rate has a deviation of about .004."""
    alarms = []
    for trial in range(120):
        rule = fitted(seed=3 * trial)
        reference, _ = rule.score_columns(columns(99, 3 * trial + 1))
        tested, _ = rule.score_columns(columns(50, 3 * trial + 2))
        alarms.append((p_values(tested, reference) <= 0.1).mean())
    assert np.mean(alarms) == pytest.approx(0.1, abs=0.02)


def test_a_shifted_image_is_found() -> None:
    rule = fitted()
    inside, _ = rule.score_columns(columns(200, 5))
    outside, _ = rule.score_columns(columns(200, 6, shift=3.0))
    assert auroc(inside, outside) > 0.95


def test_state_and_back() -> None:
    rule, seen = fitted("kde"), columns(30, 7)
    again = Sequential.restore(rule.state(), WEIGHTS, "kde", Aggregation())
    np.testing.assert_array_equal(rule.score_columns(seen)[0], again.score_columns(seen)[0])


def test_detector_scores_need_fewer_passes_and_survive_saving(tmp_path: pytest.TempPathFactory) -> None:
    backbone = toy_backbone()
    detector = toy_detector(backbone, keep=4, sequential=0.1).fit(as_uint8(pictures(60)))
    new = as_uint8(pictures(24, seed=1))
    before = backbone.forward_count
    scores = detector.score(new)
    used = backbone.forward_count - before
    assert used < 24 * detector.cost().forward
    assert 1.0 <= detector.mean_levels_ < 4.0
    detector.save(tmp_path / "det")
    loaded = gepc.load_detector(tmp_path / "det", backbone)
    np.testing.assert_allclose(loaded.score(new), scores, rtol=1e-6)
    assert loaded.mean_levels_ == detector.mean_levels_


def test_scores_do_not_depend_on_the_batch_nor_on_asking_for_maps() -> None:
    detector = toy_detector(keep=3, sequential=0.1).fit(as_uint8(pictures(60)))
    new = as_uint8(pictures(10, seed=2))
    together = detector.score(new)
    detector.batch_size = 3
    np.testing.assert_allclose(detector.score(new), together, rtol=1e-4, atol=1e-5)
    prepared = [detector.preprocessing_(image) for image in new]
    with_maps, maps = detector.score_batch(prepared, with_maps=True)
    np.testing.assert_allclose(with_maps, together, rtol=1e-4, atol=1e-5)
    assert maps is not None
    assert maps.shape == (10, 8, 8)


@pytest.mark.parametrize("alpha", [0.0, 0.5, -1.0])
def test_a_rate_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(OptionError, match=r"between 0 and 0\.5"):
        toy_detector(sequential=alpha)


def test_one_level_cannot_be_sequential() -> None:
    with pytest.raises(OptionError, match="at least two kept levels"):
        toy_detector(keep=1, sequential=0.05).fit(as_uint8(pictures(40)))


@pytest.mark.parametrize("count", [21, 60, 101, 400])
@pytest.mark.parametrize("calibration", ["z", "kde"])
def test_rounding_moves_no_fitted_image_over_a_border(count: int, calibration: str) -> None:
    """Another batch size changes the last digits of a feature; no image may stop elsewhere because of them."""
    seen = columns(count, count)
    rule = Sequential.fit(seen, WEIGHTS, lambda part: create_calibrator(calibration).fit(part), Aggregation(), 0.05)
    scores, levels = rule.score_columns(seen)
    for factor in (1.0 - 1e-9, 1.0 + 1e-9):
        again, other = rule.score_columns(seen * factor)
        np.testing.assert_array_equal(levels, other)
        np.testing.assert_allclose(scores, again, atol=1e-6)


def test_levels_cannot_be_left_out_at_random_as_well() -> None:
    with pytest.raises(OptionError, match="leave level_samples out"):
        toy_detector(keep=3, sequential=0.1, level_samples=1)


def test_the_borders_follow_from_the_images_that_alarm_in_the_end() -> None:
    """An alarm is T > 1 at the last stage, which one image in ten reaches; the borders keep nine tenths of those."""
    rule, seen = fitted(alpha=0.1), columns(400, 0)

    def standard(position: int) -> Array:
        looked, stage = list(rule.order[: position + 1]), rule.stages[position]
        return stage.standardise(stage.calibrator.score(seen[:, looked], WEIGHTS[looked], Aggregation()))

    alarm = standard(2) > 1.0
    assert alarm.sum() == 40
    early, stage = standard(0), rule.stages[0]
    assert (early[alarm] < stage.low).sum() <= TOLERANCE * 40
    assert (early[~alarm] > stage.high).sum() <= TOLERANCE * 40
    assert (early < stage.low).any()
    assert stage.low <= np.sort(early[alarm])[5]


def test_a_limit_is_above_the_median_where_all_scores_tie() -> None:
    for value in (-5.0, 0.0, 3.0):
        assert _limit(np.full(9, value), 0.1) > value

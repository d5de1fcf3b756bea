"""The conformal test martingale: its false-alarm bound, its power, and a state that survives."""

from types import SimpleNamespace

import numpy as np
import pytest

from gepc.conformal.monitor import Monitor
from gepc.conformal.p_values import CalibrationScores
from gepc.core.errors import InputError, OptionError
from gepc.images.noise import generator


def test_unmoved_streams_are_called_drifted_at_most_with_probability_delta():
    rng = np.random.default_rng(1)
    runs, delta = 200, 0.1
    called = 0
    for run in range(runs):
        monitor = Monitor(rng.normal(size=80), delta=delta, seed=run)
        monitor.update_all(rng.normal(size=60))
        called += monitor.drifted
    band = 3 * np.sqrt(delta * (1 - delta) / runs)
    assert called / runs <= delta + band


def test_capital_is_a_martingale():
    """E M_n = 1 for every n when the stream has not moved: the mean over runs stays within its error."""
    rng = np.random.default_rng(2)
    capitals = []
    for run in range(800):
        monitor = Monitor(rng.normal(size=20), seed=run)
        capitals.append(np.exp([monitor.update(s).log10_capital * np.log(10) for s in rng.normal(size=8)]))
    mean, error = np.mean(capitals, axis=0), np.std(capitals, axis=0) / np.sqrt(800)
    assert (np.abs(mean - 1.0) < 4 * error + 1e-12).all()


@pytest.mark.parametrize("shift", [1.0, -1.0])
def test_a_shift_either_way_is_noticed(shift):
    rng = np.random.default_rng(3)
    monitor = Monitor(rng.normal(size=300), delta=0.01)
    monitor.update_all(rng.normal(size=100))
    assert not monitor.drifted
    monitor.update_all(rng.normal(shift, size=300))
    assert monitor.drifted
    assert monitor.drifted_at > 100


def test_ties_do_not_look_like_a_drift():
    monitor = Monitor(np.zeros(100), delta=0.01)
    monitor.update_all(np.zeros(500))
    assert not monitor.drifted


def test_single_verdicts_are_those_of_the_detector():
    monitor = Monitor(np.arange(99.0), alpha=0.02, window=2)
    first, second = monitor.update(98.5), monitor.update(50.0)
    assert first.p_value == pytest.approx(0.01)
    assert first.alarm
    assert not second.alarm
    assert second.alarm_rate == 0.5


def test_a_monitor_that_replays_its_scores_goes_on_as_if_nothing_had_happened():
    rng = np.random.default_rng(4)
    stream = rng.normal(0.4, size=120)
    whole = Monitor(np.sort(rng.normal(size=50)), window=10)
    half = Monitor(whole.calibration, window=10, seed=whole.seed)
    expected = whole.update_all(stream)
    half.update_all(stream[:70])
    resumed = Monitor(whole.calibration, window=10, seed=whole.seed)
    resumed.update_all(half.scores)
    assert resumed.update_all(stream[70:]) == expected[70:]


def test_bad_input_is_refused():
    with pytest.raises(OptionError, match="delta"):
        Monitor([1.0, 2.0], delta=0.0)
    with pytest.raises(InputError, match="calibration"):
        Monitor([])
    with pytest.raises(InputError, match="nan"):
        Monitor(range(20)).update(float("nan"))


def test_an_alarm_is_the_detectors_decision_up_to_rounding():
    """1 - 0.9 is a tenth: nine calibration scores and a larger one give p = 0.1, which alarms at alpha = 1 - 0.9."""
    assert Monitor(range(9), alpha=1 - 0.9).update(100.0).alarm


def test_a_rate_that_the_calibration_scores_cannot_guarantee_is_refused():
    with pytest.raises(OptionError, match="at least 19 calibration images, there are 9"):
        Monitor(range(9), alpha=0.05)


def test_a_grouped_detector_is_watched_one_group_at_a_time():
    """Pooling the groups would compare an image of one group with the calibration images of the other."""
    groups = CalibrationScores({"day": np.arange(20.0), "night": np.arange(100.0, 120.0)})
    detector = SimpleNamespace(reference=groups)
    with pytest.raises(OptionError, match=r"fitted with groups \(day, night\)"):
        Monitor(detector)
    with pytest.raises(OptionError, match="no calibration image of group 'dusk'"):
        Monitor(detector, group="dusk")
    assert Monitor(detector, group="day").update(50.0).alarm
    assert not Monitor(detector, group="night").update(50.0).alarm


def test_the_limit_counts_as_an_alarm():
    """p = 5/100 at alpha 0.05: an alarm is p <= alpha, not p < alpha; the next larger p is none."""
    monitor = Monitor(np.arange(99.0), alpha=0.05)
    at_the_limit, above = monitor.update(94.5), monitor.update(93.5)
    assert (at_the_limit.p_value, at_the_limit.alarm) == (pytest.approx(0.05), True)
    assert (above.p_value, above.alarm) == (pytest.approx(0.06), False)


def test_the_first_bets_by_hand():
    """After one score, capital = mean over bets e of 1 + e (p - 1/2) = 1, since the bets -1, 0, 1 cancel."""
    monitor = Monitor(np.arange(99.0), seed=3)
    assert monitor.update(200.0).log10_capital == pytest.approx(0.0, abs=1e-12)
    uniform = [generator(3, b"", "drift", step).random() for step in range(2)]
    first, second = (u / 100 for u in (uniform[0], uniform[1] * 100 / 101))  # larger than all before: p = U/(n + 1)
    shares = (1 + np.array([-1, 0, 1]) * (first - 0.5)) / 3
    moved = 0.99 * shares / shares.sum() + 0.01 / 3
    capital = (moved * (1 + np.array([-1, 0, 1]) * (second - 0.5))).sum()
    assert monitor.update(300.0).log10_capital == pytest.approx(np.log10(capital), rel=1e-9)


def test_a_capital_that_just_reaches_its_limit_is_a_drift(monkeypatch):
    """Ville's inequality bounds the probability of ever reaching 1/delta, not only of exceeding it."""
    monitor = Monitor(range(99), delta=0.05)
    monkeypatch.setattr(monitor, "_bet", lambda p: None)
    monitor.log_capital = -np.log(0.05) - 1e-9
    assert not monitor.update(50.0).drifted
    monitor.log_capital = -np.log(0.05)
    assert monitor.update(50.0).drifted
    assert monitor.drifted_at == 2


def test_the_rolling_rate_may_cover_a_single_image():
    monitor = Monitor(range(99), window=1)
    assert [monitor.update(score).alarm_rate for score in (200.0, 50.0)] == [1.0, 0.0]
    with pytest.raises(OptionError, match="window must be at least 1"):
        Monitor(range(99), window=0)


@pytest.mark.parametrize("scores", [[1.0, np.nan], [1.0, np.inf], [[]]])
def test_calibration_scores_must_be_finite_numbers(scores):
    with pytest.raises(InputError, match="a monitor needs finite calibration scores"):
        Monitor(scores, alpha=0.5)


def test_online_p_values_count_earlier_scores_of_the_stream_and_break_ties_at_random():
    """p_n = (#{larger} + U (1 + #{equal}))/n over calibration, stream and the score itself, by its definition."""
    calibration, stream = [1.0, 2.0, 2.0, 3.0, 5.0], [2.0, 5.0, 0.0, 2.0, 9.0]
    monitor = Monitor(calibration, alpha=0.5, seed=4)
    for step, score in enumerate(stream):
        past = np.array(calibration + stream[:step])
        uniform = generator(4, b"", "drift", step).random()
        expected = ((past > score).sum() + uniform * (1 + (past == score).sum())) / (len(past) + 1)
        assert monitor._online_p_value(score) == pytest.approx(expected, rel=1e-12)
        monitor.scores.append(score)


def test_a_reset_forgets_the_stream_and_its_drift():
    monitor, fresh = Monitor(range(99), delta=0.5, seed=1), Monitor(range(99), delta=0.5, seed=1)
    monitor.update_all([200.0] * 30)
    assert monitor.drifted
    monitor.reset()
    assert (monitor.drifted, monitor.scores) == (False, [])
    assert monitor.update_all([3.0, 200.0]) == fresh.update_all([3.0, 200.0])


def test_a_drift_stays_where_it_was_first_noticed():
    monitor = Monitor(range(99), delta=0.5)
    seen = [verdict.drifted for verdict in monitor.update_all([200.0] * 40)]
    assert seen == sorted(seen)
    assert monitor.drifted_at == seen.index(True) + 1
    assert [verdict.seen for verdict in monitor.update_all([1.0, 2.0])] == [41, 42]


def test_a_stream_of_equal_scores_drifts_as_rarely_as_stated():
    """All ties: every p-value is the tie-breaking number itself, so the seeds must differ between streams."""
    drifted = 0
    for _ in range(400):
        monitor = Monitor(np.zeros(19), delta=0.1)
        monitor.update_all(np.zeros(100))
        drifted += monitor.drifted
    assert drifted / 400 <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 400)


def test_equal_images_of_several_streams_are_ordered_by_their_keys():
    first, again, other = (Monitor(np.zeros(19), seed=0) for _ in range(3))
    verdicts = [
        [m.update(0.0, f"{name} {n}") for n in range(5)] for m, name in ((first, "a"), (again, "a"), (other, "b"))
    ]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0] != verdicts[2]


def test_every_stream_breaks_ties_anew_unless_a_seed_is_given():
    monitor = Monitor(np.zeros(99))
    first = monitor.seed
    monitor.reset()
    assert monitor.seed != first
    fixed = Monitor(np.zeros(99), seed=7)
    fixed.reset()
    assert fixed.seed == 7

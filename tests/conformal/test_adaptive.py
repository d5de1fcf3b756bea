"""The adaptive rate keeps its long-run bound on any stream, where a fixed rate does not."""

import numpy as np
import pytest

from gepc import Monitor
from gepc.conformal.monitor import AdaptiveRate
from gepc.core.errors import OptionError

RNG = np.random.default_rng(7)
STREAMS = {
    "all alarms": lambda t: np.zeros(t),
    "no alarms": lambda t: np.ones(t),
    "uniform": lambda t: RNG.random(t),
    "drifting": lambda t: RNG.random(t) ** np.linspace(1.0, 8.0, t),
    "against it": lambda t: np.tile([0.0, 1.0], t // 2),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(("alpha", "gamma"), [(0.05, 0.005), (0.2, 0.05), (0.9, 0.5)])
def test_the_share_of_alarms_is_within_its_bound_on_any_stream(name, alpha, gamma):
    adaptive = AdaptiveRate(alpha, gamma)
    for p in STREAMS[name](2000):
        adaptive.update(p)
        assert -gamma <= adaptive.rate <= 1 + gamma
        assert abs(adaptive.alarms / adaptive.seen - alpha) <= adaptive.bound


def test_a_monitor_follows_a_slow_drift():
    """Scores move by two standard deviations over 4,000 images: a fixed rate ends far above alpha."""
    calibration = RNG.normal(size=199)
    stream = RNG.normal(size=4000) + np.linspace(0.0, 2.0, 4000)
    fixed, adaptive = (Monitor(calibration, adapt=step) for step in (None, 0.02))
    rates = [np.mean([v.alarm for v in m.update_all(stream)][-1000:]) for m in (fixed, adaptive)]
    assert rates[0] > 0.3
    assert rates[1] == pytest.approx(0.05, abs=0.02)
    assert fixed.drifted
    assert adaptive.drifted


def test_a_reset_begins_again_and_wrong_steps_are_refused():
    monitor = Monitor(range(99), adapt=0.1)
    monitor.update(200.0)
    assert monitor.adaptive is not None
    assert monitor.adaptive.rate < 0.05
    monitor.reset()
    assert monitor.adaptive.rate == 0.05
    with pytest.raises(OptionError, match="adapt must be between 0 and 1"):
        Monitor(range(99), adapt=2.0)

"""Paired comparison of two detectors: exact where it is a count, and with the level that the test promises."""

import numpy as np
from plus_designs import advantage

from gepc.calibration.scorer import Selection
from gepc.lab.bench.evaluate import Scores


def scores(inside: np.ndarray, **outside: np.ndarray) -> Scores:
    return Scores(inside, outside, (0,), Selection((0,), np.ones(1), np.ones(1)))


def test_the_paired_test_holds_its_level_and_sees_a_difference() -> None:
    """Two detectors that are equally good, on the same images, many times: p is uniform. A better one is found."""
    rng = np.random.default_rng(0)

    def run(share: float) -> tuple[dict[str, Scores], dict[str, Scores]]:
        found = []
        truth = {"a": rng.standard_normal(50), "b": rng.standard_normal(40) + 1, "c": rng.standard_normal(60) + 1}
        for noise in (1.0, share):
            seen = {name: value + noise * rng.standard_normal(len(value)) for name, value in truth.items()}
            found.append({"a": scores(seen["a"], b=seen["b"], c=seen["c"])})
        return found[0], found[1]

    p = [advantage([first], [second])[1] for first, second in (run(1.0) for _ in range(300))]
    assert 0.02 < np.mean(np.array(p) < 0.05) < 0.09
    better, worse = run(6.0)
    lead, value = advantage([better], [worse])
    assert lead > 0.1
    assert value is not None
    assert value < 0.01

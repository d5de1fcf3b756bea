"""Are the promised false-alarm rates held on real images? Conformal p-values of held-out in-distribution images."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gepc.bench.evaluate import Bench
from gepc.bench.tables import Cell, ResultTable
from gepc.calibrators import Aggregation, create_calibrator
from gepc.conformal import p_values, realised_range
from gepc.selection import select

Array = npt.NDArray[np.float64]
ALPHAS = (0.01, 0.05, 0.1, 0.2)


def id_p_values(bench: Bench, name: str, seed: int, share: float = 1 / 3) -> tuple[Array, int]:
    """p-values of ID-test images; levels and densities from the first part of ID-train, the reference from the rest."""
    variant, timesteps = bench.main, bench.candidates(name)
    train = bench.columns(name, "train", seed, variant, timesteps)
    test = bench.columns(name, "test", seed, variant, timesteps)
    held_out = round(len(train) * share)
    fitting, reference = train[:-held_out], train[-held_out:]
    picked = select(fitting[:, :, 0], variant.keep, variant.weights)
    kept = list(picked.kept)
    calibrator = create_calibrator(variant.calibration).fit(fitting[:, kept])
    scores = [calibrator.score(columns[:, kept], picked.weights, Aggregation()) for columns in (test, reference)]
    return p_values(*scores), held_out


def false_alarm_table(bench: Bench) -> ResultTable:
    """The rate of alarms on held-out ID images at several alpha, and the range that theory gives it."""
    rows: list[tuple[Cell, ...]] = []
    for name in bench.protocol.pairs:
        p, count = id_p_values(bench, name, bench.protocol.seeds[0])
        for alpha in ALPHAS:
            if alpha * (count + 1) < 1:
                continue
            low, high = realised_range(alpha, count)
            rate = float((p <= alpha).mean())
            rows.append((bench.protocol.label(name), alpha, rate, f"{low:.3f} to {high:.3f}", len(p), count))
    header = ("ID set", "alpha", "alarms on held-out ID", "90 % range", "test images", "calibration images")
    note = (
        "The rate is at most alpha on average over calibration sets; for the one at hand it lies in the range with "
        "probability 0.9 (and the test set adds its own scatter). The guarantee supposes that train and test images "
        "of a set are exchangeable."
    )
    return ResultTable("false_alarms", "False alarms on in-distribution images", header, tuple(rows), note)

"""Are the promised false-alarm rates held on real images? Conformal p-values of held-out in-distribution images."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gepc.bench.evaluate import Bench
from gepc.core.tables import Cell, ResultTable
from gepc.scoring import Aggregation, create_calibrator
from gepc.scoring.scorer import select
from gepc.verdicts.conformal import p_values, realised_range

Array = npt.NDArray[np.float64]
ALPHAS = (0.01, 0.05, 0.1, 0.2)


def id_p_values(bench: Bench, name: str, seed: int, reference: str = "test") -> tuple[Array, int]:
    """p-values of one half of the ID-test images, and the number of reference images.

    Levels and densities come from two thirds of ID-train. The reference is the other half of ID-test, or (`train`) the
    rest of ID-train, which is not exchangeable with new images where the backbone was trained on it.
    """
    variant, timesteps = bench.main, bench.candidates(name)
    train, test = (bench.columns(name, split, seed, variant, timesteps) for split in ("train", "test"))
    rng = np.random.default_rng(seed)
    train, test = train[rng.permutation(len(train))], test[rng.permutation(len(test))]
    fitting, rest = np.split(train, [2 * len(train) // 3])
    half, evaluated = np.split(test, [len(test) // 2])
    picked = select(fitting[:, :, 0], variant.keep, variant.weights)
    kept = list(picked.kept)
    calibrator = create_calibrator(variant.calibration).fit(fitting[:, kept])
    compared = half if reference == "test" else rest
    scores = [calibrator.score(part[:, kept], picked.weights, Aggregation()) for part in (evaluated, compared)]
    return p_values(*scores), len(compared)


def false_alarm_table(bench: Bench) -> ResultTable:
    """The rate of alarms on held-out ID images at several alpha, averaged over noise seeds."""
    rows: list[tuple[Cell, ...]] = []
    for name in bench.protocol.pairs:
        for reference in ("test", "train"):
            runs = [id_p_values(bench, name, seed, reference) for seed in bench.protocol.seeds]
            count = runs[0][1]
            for alpha in (alpha for alpha in ALPHAS if alpha * (count + 1) >= 1):
                rate = float(np.mean([(p <= alpha).mean() for p, _ in runs]))
                low, high = realised_range(alpha, count)
                source = f"{count} of ID-{reference}"
                label = bench.protocol.label(name)
                rows.append((label, source, alpha, rate, f"{low:.3f} to {high:.3f}", len(runs[0][0])))
    header = ("ID set", "reference images", "alpha", "alarms on held-out ID", "90 % range", "held-out images")
    note = (
        "The rate is at most alpha on average over reference sets; for the one at hand it lies in the range with "
        "probability 0.9, to which the held-out images add their own scatter. This supposes that reference and new "
        "images are exchangeable: images that the backbone was trained on are not exchangeable with new ones."
    )
    return ResultTable("false_alarms", "False alarms on in-distribution images", header, tuple(rows), note)

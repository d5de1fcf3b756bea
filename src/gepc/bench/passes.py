"""AUROC and false alarms against network passes: all passes, a budget of them, and stopping when a verdict is clear.

Arithmetic on the wide table of `gepc.bench.plus`, which the first noise seed has. Two thirds of ID-train choose and
fit, the last third is the reference of the p-values; test images are only evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.bench.collect import Part
from gepc.bench.plus import WIDE, Design, PlusBench, fast, plus
from gepc.core.tables import Cell, ResultTable
from gepc.detector.planning import spend
from gepc.features.gepc import GepcExtractor
from gepc.features.groups import Group
from gepc.scoring import Aggregation, create_calibrator
from gepc.scoring.metrics import auroc
from gepc.scoring.scorer import select
from gepc.scoring.sequential import Sequential
from gepc.verdicts.conformal import p_values

Array = npt.NDArray[np.float64]
Look = Callable[[Part], Array]
Judge = Callable[[Array], tuple[Array, npt.NDArray[np.int64]]]
ALPHA = 0.05
NOTE = (
    "Passes are means over images: an in-distribution image usually needs fewer than another where scoring is "
    f"sequential. False alarms: share of ID-test images at alpha = {ALPHA:g}, mean over the ID sets. The paper counts "
    "16 passes for its detector, two levels of eight; the identity is not evaluated here, which leaves 14."
)


@dataclass(frozen=True)
class Economy:
    """One way to spend passes. Without a budget GEPC compares under all elements; gepc+ has its own."""

    label: str
    keep: int = 2
    budget: int | None = None
    sequential: float | None = None
    design: Design | None = None


def economies() -> list[Economy]:
    """The rows of the table."""
    rows = []
    for keep in (1, 2, 4):
        rows.append(Economy(f"GEPC, K={keep}", keep))
        if keep > 1:
            rows.append(Economy(f"GEPC, K={keep}, sequential", keep, None, ALPHA))
    for passes, keep in ((2, 1), (4, 2), (6, 2), (8, 4), (9, 3), (12, 4)):
        rows.append(Economy(f"GEPC, budget {passes}, K={keep}", keep, passes))
        if keep > 1:
            rows.append(Economy(f"GEPC, budget {passes}, K={keep}, sequential", keep, passes, ALPHA))
    rows.append(Economy("gepc+ fast", design=fast("fast")))
    rows.append(Economy("gepc+ full", design=plus("full")))
    rows.append(Economy("gepc+ full, sequential", sequential=ALPHA, design=plus("full")))
    return rows


class PassesBench:
    """The table of passes from a collected `PlusBench`."""

    def __init__(self, bench: PlusBench) -> None:
        self.bench = bench

    def table(self) -> ResultTable:
        """One line for each economy."""
        header = ("detector", "average", "worst", "passes, ID images", "passes, OOD images", "false alarms")
        return ResultTable("passes", "AUROC against passes", header, tuple(map(self._row, economies())), NOTE)

    def _row(self, economy: Economy) -> tuple[Cell, ...]:
        protocol = self.bench.protocol
        found = [self._measure(economy, name, protocol.seeds[0]) for name in protocol.pairs]
        pairs = np.concatenate([row[0] for row in found])
        inside, outside, alarms = (float(np.mean([row[place] for row in found])) for place in (1, 2, 3))
        return (economy.label, float(pairs.mean()), float(pairs.min()), inside, outside, alarms)

    def _measure(self, economy: Economy, name: str, seed: int) -> tuple[Array, float, float, float]:
        """AUROCs against every OOD set, passes of ID and of OOD images, share of false alarms."""
        parts = self.bench.parts
        if economy.design is None:
            look, per_level = self._gepc(economy, parts[name, "train", seed])
        else:
            look, per_level = self._plus(economy.design)
        train = look(parts[name, "train", seed])
        fitting = _fitting(len(train))
        judge = _fit(economy, train[:fitting])
        reference, _ = judge(train[fitting:])
        inside, levels = judge(look(parts[name, "test", seed]))
        others = [judge(look(parts[other, "test", seed])) for other in self.bench.protocol.pairs[name]]
        outside = float(np.mean([looked.mean() for _, looked in others])) * per_level
        alarms = float((p_values(inside, reference) <= ALPHA).mean())
        return np.array([auroc(inside, scores) for scores, _ in others]), levels.mean() * per_level, outside, alarms

    def _gepc(self, economy: Economy, train: Part) -> tuple[Look, int]:
        """The columns of s that the economy looks at, chosen on the images that it is fitted on."""
        s = train.table["s"][: _fitting(train.count)]
        elements = tuple(action.name for action in WIDE.group.moving)
        levels: tuple[int, ...] | None = None
        if economy.budget is not None:
            elements, levels = spend(s, WIDE.group, economy.budget, economy.keep)
        method = GepcExtractor(levels=WIDE.levels, group=Group.of(elements))
        places = [0, *(WIDE.group.names.index(name) for name in elements)]
        if levels is None:
            levels = select(method.reduce("s", s[:, :, places]), economy.keep, "inv_cv").kept
        kept = list(levels)

        def look(part: Part) -> Array:
            return method.reduce("s", part.table["s"][:, kept][:, :, places])[:, :, None]

        return look, len(places)

    def _plus(self, design: Design) -> tuple[Look, int]:
        timesteps = self.bench.timesteps(design)
        return lambda part: design.columns(part, timesteps), 1 + len(design.method.group.moving)


def _fitting(count: int) -> int:
    """How many of the first ID-train images are fitted on; the rest are the reference."""
    return count - round(count / 3)


def _fit(economy: Economy, columns: Array) -> Judge:
    """Columns in, (scores, numbers of levels looked at) out."""
    calibration = "kde" if economy.design is None else economy.design.scoring.calibration
    weighting = "inv_cv" if economy.design is None else "uniform"
    weights = select(columns[:, :, 0], None, weighting).weights
    if economy.sequential is not None:
        return Sequential.fit(columns, weights, calibration, Aggregation(), economy.sequential).score_columns
    calibrator = create_calibrator(calibration).fit(columns)
    return lambda seen: (calibrator.score(seen, weights, Aggregation()), np.full(len(seen), seen.shape[1]))

"""AUROC and false alarms against network passes, for benchmarks/plus.py and benchmarks/fresh.py.

Detectors with all passes, with a budget of them, and with sequential scoring, from the wide table of `plus_designs`
with the first noise seed. Two thirds of ID-train are for choices and fitting, the last third for calibration; test
images are only evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from plus_designs import WIDE, Design, PlusBench, fast, full

from gepc.bench.published import MAIN
from gepc.core.palette import LIGHT
from gepc.core.tables import Cell, ResultTable
from gepc.detector.planning import spend
from gepc.features.extraction import FeatureTable
from gepc.features.gepc import GepcExtractor
from gepc.features.groups import Group
from gepc.report.figures import PANEL, drawing, place_labels
from gepc.scoring import Scorer, select
from gepc.scoring.metrics import auroc
from gepc.verdicts.conformal import CalibrationScores
from gepc.verdicts.decision import DecisionRule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
ColumnsOf = Callable[[FeatureTable], Array]
ALPHA = 0.05
NOTE = (
    "Passes are means over images: with sequential scoring, an in-distribution image usually needs fewer than an "
    f"out-of-distribution one. False alarms: share of ID-test images at alpha = {ALPHA:g}, mean over the ID sets. The "
    "paper counts 16 passes for its detector, two levels of eight; here the identity is not evaluated, which leaves 14."
)


@dataclass(frozen=True)
class Economy:
    """One way to spend passes; without a budget GEPC uses all elements, and gepc+ those of its design."""

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
    rows.append(Economy("gepc+ full", design=full("full")))
    rows.append(Economy("gepc+ full, sequential", sequential=ALPHA, design=full("full")))
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
        found, others = self.bench.found, self.bench.protocol.pairs[name]
        parts: dict[str, int] | None = None
        if economy.design is None:
            columns_of, per_level = self._gepc(economy, found[name, "train", seed])
        else:
            columns_of, per_level = self._plus(economy.design)
            timesteps = self.bench.timesteps(economy.design)
            parts = economy.design.method.parts(economy.design.table(found[name, "train", seed], timesteps))
        fitting, rest = np.split(columns_of(found[name, "train", seed]), [_fitting(len(found[name, "train", seed]))])
        calibration = "kde" if economy.design is None else economy.design.calibration
        weights = "inv_cv" if economy.design is None else "uniform"
        scorer = Scorer(calibration, weights=weights, sequential=economy.sequential)
        scorer.fit(fitting, parts=parts)
        inside, *outside = (columns_of(found[one, "test", seed]) for one in (name, *others))
        scores = scorer.score(inside)
        reference = CalibrationScores.of(scorer.score(rest), None)
        alarms = DecisionRule(ALPHA).alarms(reference.p_values(scores, None, None), reference)
        aurocs = np.array([auroc(scores, scorer.score(columns)) for columns in outside])
        levels = float(np.mean([scorer.mean_levels(columns) for columns in outside]))
        return aurocs, scorer.mean_levels(inside) * per_level, levels * per_level, float(alarms.mean())

    def _gepc(self, economy: Economy, train: FeatureTable) -> tuple[ColumnsOf, int]:
        """The columns of s that the economy uses, chosen on the images that it is fitted on, and passes per level."""
        s = train.table["s"][: _fitting(len(train))]
        elements = tuple(action.name for action in WIDE.group.moving)
        levels: tuple[int, ...] | None = None
        if economy.budget is not None:
            elements, levels = spend(s, WIDE.group, economy.budget, economy.keep)
        method = GepcExtractor(levels=WIDE.levels, group=Group.of(elements))
        places = [0, *(WIDE.group.names.index(name) for name in elements)]
        if levels is None:
            levels = select(method.reduce("s", s[:, :, places]), economy.keep, "inv_cv").kept
        kept = list(levels)

        def columns(found: FeatureTable) -> Array:
            return method.reduce("s", found.table["s"][:, kept][:, :, places])[:, :, None]

        return columns, len(places)

    def _plus(self, design: Design) -> tuple[ColumnsOf, int]:
        timesteps = self.bench.timesteps(design)
        return lambda found: design.columns(found, timesteps), 1 + len(design.method.group.moving)


def _fitting(count: int) -> int:
    """The number of ID-train images for fitting; the rest are calibration images."""
    return count - round(count / 3)


def auroc_over_passes(table: ResultTable) -> Figure:
    """AUROC against mean passes per image, from the table of `PassesBench`, with the published detector.

    Filled points evaluate all levels, open ones are sequential.
    """
    names, y = [str(row[0]) for row in table.rows], table.numbers("average")
    both = (table.numbers(f"passes, {kind} images") for kind in ("ID", "OOD"))
    x = [(inside + outside) / 2 for inside, outside in zip(*both, strict=True)]
    with drawing(1.5 * PANEL) as figure:
        axes = figure.add_subplot()
        for place, name in enumerate(names):
            colour = LIGHT["outside" if name.startswith("gepc+") else "inside"]
            face = "none" if name.endswith("sequential") else colour
            axes.scatter(x[place], y[place], s=18, facecolors=face, edgecolors=colour, zorder=3)
        for label, face in (("all levels", LIGHT["ink"]), ("sequential", "none")):
            axes.scatter([], [], s=18, facecolors=face, edgecolors=LIGHT["ink"], label=label)
        published = [value for value in MAIN["GEPC"][0] if value is not None]
        x, y, names = [*x, 16.0], [*y, float(np.mean(published))], [*names, "published, 16F"]
        axes.scatter(x[-1], y[-1], s=26, color=LIGHT["muted"], marker="D", zorder=3)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlim=(min(x) / 1.7, max(x) * 2.2), ylim=(min(y) - 0.03, min(1.0, max(y) + 0.03)))
        axes.set_xticks([2, 4, 8, 16, 32])
        axes.minorticks_off()
        axes.set(xlabel="mean passes per image, log axis", ylabel="average AUROC")
        figure.legend(loc="outside upper center", ncols=2)
        place_labels(axes, x, y, [name.removesuffix(", sequential").removeprefix("GEPC, ") for name in names])
    return figure

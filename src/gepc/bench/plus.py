"""`gepc+` against GEPC, its own terms, its transforms, levels and calibrations: one table of features, then arithmetic.

The features of every split are extracted with all of the paper's transforms at every candidate level and kept in the
cache; a design is a choice of columns from that table and a way to score them. Noise seeds after the first see only the
transforms of the presets, a good half fewer passes: what the presets give is known over all seeds, the rest over one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.bench.collect import Part, SplitExtractor, open_split
from gepc.bench.evaluate import Scores, Scoring, over_seeds
from gepc.bench.paired import advantage, aurocs
from gepc.bench.protocol import Protocol
from gepc.core.tables import Cell, ResultTable
from gepc.detector.planning import by_violation
from gepc.features.base import Table
from gepc.features.extraction import FeatureCache
from gepc.features.gepc import GepcExtractor
from gepc.features.gepc_plus import FULL_LEVELS, GepcPlus
from gepc.features.groups import Group
from gepc.features.residuals import CORRELATIONS, LAGS, PER_ELEMENT
from gepc.scoring import Aggregation
from gepc.scoring.metrics import auroc

Array = npt.NDArray[np.float64]
Runs = dict[int, dict[str, Scores]]

TERMS = ("s", "cos", "b", "d", *CORRELATIONS)
WIDE = GepcPlus(levels=Levels(FULL_LEVELS), features=TERMS, group=Group.of("paper"))
LEAN = replace(WIDE, group=GepcPlus.group)
ELEMENTS = tuple(action.name for action in WIDE.group.moving)
NOTE = (
    "Same backbone, images and noise in every row; everything is fitted on ID-train alone. Figures are means over so "
    "many noise seeds. Rows marked * are the fixed presets. Rows that compare transforms, levels, features or "
    "calibrations show what a choice would have cost; choosing the best of them from this table would be an oracle. p: "
    "one-sided test that `gepc+ full` has the higher average, by DeLong's variance over the images of all pairs."
)


@dataclass(frozen=True)
class Design:
    """A detector that can be had from the wide table: the method, and how its columns become a score."""

    label: str
    method: GepcExtractor
    scoring: Scoring

    def columns(self, part: Part, timesteps: Sequence[int], group: Group = WIDE.group) -> Array:
        """(N, levels, features) of a part of the table, which was looked at with `group`."""
        places = [0, *(group.names.index(action.name) for action in self.method.group.moving)]
        return self.method.columns(
            {name: _some(name, values, places) for name, values in _wanted(part.at(timesteps), self.method).items()}
        )

    def passes(self, backbone: Backbone, size: int, timesteps: int) -> int:
        """Network passes to score one image."""
        kept = timesteps if self.scoring.keep is None else min(self.scoring.keep, timesteps)
        return self.method.cost(backbone, (size, size), kept).forward


def _wanted(table: Table, method: GepcExtractor) -> Table:
    return {name: table[name] for name in method.features if name in table}


def _some(name: str, values: Array, places: list[int]) -> Array:
    return values[:, :, places] if name in PER_ELEMENT else values


def plus(label: str, calibration: str = GepcPlus.calibration, **options: object) -> Design:
    """A design of `gepc+`; options as for the method."""
    method = GepcPlus(**options)  # type: ignore[arg-type]
    return Design(label, method, Scoring(None, "uniform", calibration, Aggregation(), method.base_column))


def fast(label: str, **options: object) -> Design:
    """A design of `gepc+` that differs from the preset `fast` in these options alone."""
    return plus(label, **{**GepcPlus.presets["fast"], **options})


def plain_gepc(label: str) -> Design:
    """The paper's detector with the levels of `gepc+` to choose from."""
    method = GepcExtractor(levels=Levels(FULL_LEVELS), features=("s",), group=Group.of("paper"))
    return Design(label, method, Scoring(2, "inv_cv", "kde", Aggregation()))


def designs() -> dict[str, list[Design]]:
    """Title -> rows. The first design of all is the reference of the significance tests."""
    paper = Group.of("paper")
    return {
        "gepc+ and GEPC": [
            plus("gepc+ full *"),
            fast("gepc+ fast *"),
            plain_gepc("GEPC, K=2 of these levels, 1/CV, KDE"),
        ],
        "Terms, at the level and transform of the preset fast": [
            fast(" + ".join(terms), features=terms)
            for terms in (
                ("s",),
                ("b",),
                ("d",),
                CORRELATIONS,
                ("s", "b"),
                ("s", "d"),
                ("s", "b", "d"),
                ("s", *CORRELATIONS),
                ("d", *CORRELATIONS),
                ("s", "d", "ac"),
                ("s", "d", *LAGS),
                ("s", "d", *CORRELATIONS),
                ("s", "b", "d", *CORRELATIONS),
                ("s", "cos", "b", "d", *CORRELATIONS),
            )
        ],
        "Transforms, at the level of the preset fast": [
            *(fast(name, group=Group.of(name)) for name in ELEMENTS),
            fast("rot90, flip_x", group=Group.of(("rot90", "flip_x"))),
            fast("rot90, rot180, flip_x", group=Group.of(("rot90", "rot180", "flip_x"))),
            fast("all six", group=paper),
            fast("all six, their mean", group=paper, elements="mean"),
        ],
        "Levels, with the transform of the preset fast": [
            *(fast(f"{level:g}", levels=Levels((level,))) for level in FULL_LEVELS),
            fast("0.99, 0.97", levels=Levels((0.99, 0.97))),
            fast("all four", levels=Levels(FULL_LEVELS)),
        ],
        "Calibrations of the preset full": [
            plus(name, calibration=name)
            for name in (GepcPlus.calibration, "level_mahalanobis", "mahalanobis", "gmm", "knn", "kde")
        ],
    }


class PlusBench:
    """A protocol, its backbone and the table of every split and seed: wide for the first seed, lean for the others."""

    def __init__(self, protocol: Protocol, backbone: Backbone, parts: Mapping[tuple[str, str, int], Part]) -> None:
        self.protocol, self.backbone, self.parts = protocol, backbone, parts

    def timesteps(self, design: Design) -> tuple[int, ...]:
        """The design's candidate levels on this backbone."""
        return design.method.timesteps(self.backbone)

    def seeds(self, design: Design) -> list[int]:
        """The noise seeds whose tables hold all transforms of the design."""
        wanted = set(design.method.group.names)
        return [seed for seed in self.protocol.seeds if wanted <= set(_looked_at(self.protocol, seed).group.names)]

    def scores(self, design: Design, name: str, seed: int) -> Scores:
        """Fit on ID-train alone, score ID-test and every OOD-test set."""
        timesteps, group = self.timesteps(design), _looked_at(self.protocol, seed).group
        picked, scored = design.scoring.fit(design.columns(self.parts[name, "train", seed], timesteps, group))
        kept = list(picked.kept)

        def score(other: str) -> Array:
            return scored(design.columns(self.parts[other, "test", seed], timesteps, group)[:, kept])

        outside = {other: score(other) for other in self.protocol.pairs[name]}
        return Scores(score(name), outside, tuple(timesteps[place] for place in kept), picked)

    def all_scores(self, design: Design) -> Runs:
        """Seed -> ID set -> scores, for every seed that the design can be had for."""
        return {
            seed: {name: self.scores(design, name, seed) for name in self.protocol.pairs} for seed in self.seeds(design)
        }

    def table(self, name: str, title: str, rows: Sequence[Design], reference: Runs) -> ResultTable:
        """One line for each design: every pair, average, spread, worst, passes, and the reference's advantage."""
        pairs = self.protocol.pair_list
        shown = [f"{self.protocol.label(a)}:{self.protocol.label(b)}" for a, b in pairs]
        header = ("design", *shown, "average", "seeds", "std over seeds", "worst", "passes", "full is ahead by", "p")
        return ResultTable(name, title, header, tuple(self._row(design, reference) for design in rows), NOTE)

    def _row(self, design: Design, reference: Runs) -> tuple[Cell, ...]:
        found = self.all_scores(design)
        runs = list(found.values())
        per_seed = np.array([list(aurocs(run).values()) for run in runs])
        mean = per_seed.mean(axis=0)
        spread = over_seeds(per_seed.mean(axis=1))
        passes = design.passes(self.backbone, self.protocol.size, len(self.timesteps(design)))
        lead, p = advantage([reference[seed] for seed in found], runs)
        values = [float(value) for value in mean]
        return (design.label, *values, float(mean.mean()), len(runs), spread, float(mean.min()), passes, lead, p)

    def chosen(self, name: str, seed: int) -> str:
        """The element that the rule `violation` of `gepc.detector.planning` takes for this ID set, on ID-train."""
        return by_violation(self.parts[name, "train", seed].table["s"], WIDE.group)[0].element


def collect_plus(
    protocol: Protocol,
    backbone: Backbone,
    data: Path,
    cache: FeatureCache,
    on_progress: Callable[[int], None] | None = None,
) -> PlusBench:
    """The table of every split that the pairs need."""
    parts: dict[tuple[str, str, int], Part] = {}
    timesteps = WIDE.timesteps(backbone)
    for name, split in _places(protocol):
        images = open_split(protocol, data, name, split)
        for seed in protocol.seeds:
            looking = SplitExtractor(protocol, backbone, _looked_at(protocol, seed), cache, {}, on_progress)
            parts[name, split, seed] = looking.at(name, split, images, timesteps, seed)
    return PlusBench(protocol, backbone, parts)


def passes_needed(protocol: Protocol, backbone: Backbone) -> int:
    """Network passes of `collect_plus` with an empty cache."""
    count = sum(protocol.images(split) for _, split in _places(protocol))
    size = (protocol.size, protocol.size)
    return count * sum(_looked_at(protocol, seed).cost(backbone, size).forward for seed in protocol.seeds)


def _looked_at(protocol: Protocol, seed: int) -> GepcPlus:
    """The method whose table is collected for that seed."""
    return WIDE if seed == protocol.seeds[0] else LEAN


def _places(protocol: Protocol) -> list[tuple[str, str]]:
    train = [(name, "train") for name in protocol.pairs]
    tested = dict.fromkeys(name for pair in protocol.pair_list for name in pair)
    return [*train, *((name, "test") for name in tested)]


def tables(bench: PlusBench) -> list[ResultTable]:
    """Every table of `designs`, and what the ID-only rule would have chosen."""
    groups = designs()
    first = next(iter(groups.values()))[0]
    reference = bench.all_scores(first)
    found = [bench.table(f"plus-{place}", title, rows, reference) for place, (title, rows) in enumerate(groups.items())]
    return [*found, _rule_table(bench)]


def _rule_table(bench: PlusBench) -> ResultTable:
    """Rule, fixed default and oracle, on each ID set, for the preset fast."""
    singles = {name: fast(name, group=Group.of(name)) for name in ELEMENTS}
    default = fast("default").method.group.moving[0].name
    seed = bench.protocol.seeds[0]
    rows: list[tuple[Cell, ...]] = []
    for name in bench.protocol.pairs:
        value = {
            element: float(np.mean([auroc(found.inside, other) for other in found.outside.values()]))
            for element, found in ((element, bench.scores(design, name, seed)) for element, design in singles.items())
        }
        best, chosen = max(value, key=value.__getitem__), bench.chosen(name, seed)
        label = bench.protocol.label(name)
        rows.append((label, default, value[default], chosen, value[chosen], best, value[best]))
    header = ("ID", "default", "average", "rule: violation", "average ", "oracle", "average  ")
    note = "Preset fast, first seed. The oracle is the best single transform, seen with OOD data."
    return ResultTable("plus-rule", "Choosing the transform", header, tuple(rows), note)

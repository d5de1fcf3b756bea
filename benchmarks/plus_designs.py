"""Designs of `gepc+` for benchmarks/plus.py and benchmarks/fresh.py: columns of one feature table, and their score.

The features of every split are extracted with all of the paper's transforms at every candidate level and kept in the
cache. Noise seeds after the first use only the transforms of the presets, which needs less than half of the passes: the
presets are evaluated with all seeds, the other designs with one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.calibration import Scorer
from gepc.core.tables import Cell, ResultTable
from gepc.lab.bench.evaluate import Benchmark, Scores, SeedScores, pair_aurocs, std_over_seeds
from gepc.lab.bench.protocol import Protocol
from gepc.lab.metrics import placements
from gepc.methods.base import Table
from gepc.methods.extraction import FeatureTable
from gepc.methods.features import find_feature
from gepc.methods.gepc import GepcExtractor
from gepc.methods.gepc_plus import CORRELATIONS, FULL_LEVELS, GepcPlus
from gepc.methods.groups import Group

Array = npt.NDArray[np.float64]

OUTPUT = ("s", "d", *CORRELATIONS)
TERMS = ("s", "cos", "b", "d", *CORRELATIONS, "inner", "h")
WIDE = GepcPlus(levels=Levels(FULL_LEVELS), features=TERMS, group=Group.of("paper"))
LEAN = replace(WIDE, group=GepcPlus.presets["full"].method["group"])
OUTPUT_CALIBRATIONS = ("level_knn", "level_mahalanobis", "mahalanobis", "gmm", "knn", "kde")
LEVEL_CALIBRATIONS = ("level_mahalanobis", "level_knn")
RANKS = (16, 64, 96, 256)
ELEMENTS = tuple(action.name for action in WIDE.group.moving)
NOTE = (
    "Same backbone, images and noise in every row; everything is fitted on ID-train alone. Values are means over the "
    "given number of noise seeds. Rows marked * are the fixed presets. Rows that compare transforms, levels, features "
    "or calibrations show the effect of a choice; choosing the best row of this table would use OOD data (oracle). p: "
    "one-sided DeLong test that `gepc+ full` has the higher average, over the images of all pairs."
)


@dataclass(frozen=True)
class Design:
    """A detector that can be computed from the wide table: the method, and how its columns become a score."""

    label: str
    method: GepcExtractor
    calibration: str
    keep: int | None = None
    weights: str = "uniform"

    def table(self, found: FeatureTable, timesteps: Sequence[int], group: Group = WIDE.group) -> Table:
        """The method's table, from one that was extracted with `group`."""
        table = {name: values for name, values in found.at(timesteps).table.items() if name in self.method.features}
        places = [0, *(group.names.index(action.name) for action in self.method.group.moving)]
        table.update({name: table[name][:, :, places] for name in table if find_feature(name).by_element})
        if "inner" in table:
            turning = [action.name for action in group if action.on_layers]
            kept = [turning.index(name) for name in self.method.group.names if name in turning]
            table["inner"] = table["inner"][:, :, kept]
        return table

    def columns(self, found: FeatureTable, timesteps: Sequence[int], group: Group = WIDE.group) -> Array:
        """(N, levels, features) of a table that was extracted with `group`."""
        return self.method.columns(self.table(found, timesteps, group))

    def passes(self, backbone: Backbone, size: int, timesteps: int) -> int:
        """Network passes to score one image."""
        kept = timesteps if self.keep is None else min(self.keep, timesteps)
        return self.method.cost(backbone, (size, size), kept).forward


def fast(label: str, calibration: str | None = None, **options: object) -> Design:
    """A design of `gepc+` that differs from the preset `fast` in these options alone."""
    method = GepcPlus(**options)  # type: ignore[arg-type]
    return Design(label, method, calibration or method.calibration_name)


def full(label: str, **options: object) -> Design:
    """A design of `gepc+` that differs from the preset `full` in these options alone."""
    return fast(label, **{**GepcPlus.presets["full"].method, **options})


def plain_gepc(label: str) -> Design:
    """The paper's detector with the levels of `gepc+` as candidates."""
    method = GepcExtractor(levels=Levels(FULL_LEVELS), features=("s",), group=Group.of("paper"))
    return Design(label, method, "kde", 2, "inv_cv")


def advantage(first: Sequence[SeedScores], second: Sequence[SeedScores]) -> tuple[float, float | None]:
    """By how much the average AUROC of one detector exceeds that of another, and the one-sided p-value.

    Both have scores of the same images for every noise seed. The average over pairs and seeds is a U-statistic in the
    images of each set. DeLong's variance is the sum over the sets of the variance of each image's contribution to the
    difference, over all pairs that the set is in. The p-value is None if the variance is 0, as between a detector and
    itself.
    """
    mine, theirs = _contributions(first), _contributions(second)
    averages = [float(np.mean([list(pair_aurocs(run).values()) for run in runs])) for runs in (first, second)]
    lead = averages[0] - averages[1]
    variance = sum(float((mine[name] - theirs[name]).var(ddof=1)) / len(mine[name]) for name in mine)
    if variance <= 0.0:
        return lead, None
    return lead, max(float(norm.sf(lead / np.sqrt(variance))), float(np.finfo(np.float64).tiny))


def _contributions(runs: Sequence[SeedScores]) -> dict[str, Array]:
    """Test set -> the contribution of each image to the average AUROC, from its placements among the other sets."""
    pairs = sum(len(scores.outside) for scores in runs[0].values())
    found: dict[str, Array] = {}
    for run in runs:
        for name, scores in run.items():
            for other, outside in scores.outside.items():
                below, above = placements(scores.inside, outside)
                for place, share in ((name, below), (other, above)):
                    found[place] = found.get(place, np.zeros(len(share))) + share / (pairs * len(runs))
    return found


def designs() -> dict[str, list[Design]]:
    """Title -> rows. The significance tests compare the first design with all others."""
    paper = Group.of("paper")
    return {
        "gepc+ and GEPC": [
            full("gepc+ full *"),
            fast("gepc+ fast *"),
            fast("gepc+ single *", **GepcPlus.presets["single"].method),
            full("full without inner layers", features=OUTPUT),
            fast("fast without inner layers", features=OUTPUT),
            Design("GEPC with inner, 0.998", GepcExtractor(Levels((0.998,)), ("inner",), group=LEAN.group), "parts"),
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
                ("s", "d", *CORRELATIONS[:-1]),
                OUTPUT,
                ("s", "b", "d", *CORRELATIONS),
                ("s", "cos", "b", "d", *CORRELATIONS),
                ("inner",),
                ("h",),
                ("inner", "h"),
                (*OUTPUT, "b", "inner", "h"),
                (*OUTPUT, "inner"),
                (*OUTPUT, "h"),
                (*OUTPUT, "inner", "h"),
            )
        ],
        "Transforms, at the level of the preset fast, without inner layers": [
            *(fast(name, group=Group.of(name), features=OUTPUT) for name in ELEMENTS),
            fast("rot90, flip_x", group=Group.of(("rot90", "flip_x")), features=OUTPUT),
            fast("rot90, rot180, flip_x", group=Group.of(("rot90", "rot180", "flip_x")), features=OUTPUT),
            fast("all six", group=paper, features=OUTPUT),
            fast("all six, their mean", group=paper, elements="mean", features=OUTPUT),
        ],
        "Levels, with the transform of the preset fast": [
            *(fast(f"{level:g}", levels=Levels((level,))) for level in FULL_LEVELS),
            fast("0.99, 0.97", levels=Levels((0.99, 0.97))),
            fast("all four", levels=Levels(FULL_LEVELS)),
        ],
        "Calibrations of the preset full": [
            *(full(f"output: {name}", calibration=name, features=OUTPUT) for name in OUTPUT_CALIBRATIONS),
            *(full(f"evidence, output: {name}", calibration=f"evidence:narrow={name}") for name in LEVEL_CALIBRATIONS),
            full("evidence, structure: level_pca", calibration="evidence:wide=level_pca"),
            full("sum of standardised scores, version 0.2", calibration="parts"),
            *(fast(f"fast, {rank} components", calibration=f"evidence:wide=level_lof:rank={rank}") for rank in RANKS),
        ],
    }


class PlusBench:
    """A benchmark and the table of every split and seed."""

    def __init__(self, benchmark: Benchmark, found: Mapping[tuple[str, str, int], FeatureTable]) -> None:
        self.protocol, self.backbone, self.found = benchmark.protocol, benchmark.backbone, found

    def group(self, seed: int) -> Group:
        """The transforms of the tables of a seed."""
        method = next(table.spec.extractor for place, table in self.found.items() if place[2] == seed)
        assert isinstance(method, GepcExtractor)
        return method.group

    def timesteps(self, design: Design) -> tuple[int, ...]:
        """The design's candidate levels on this backbone."""
        return design.method.timesteps(self.backbone)

    def seeds(self, design: Design) -> list[int]:
        """The noise seeds whose tables have all transforms of the design."""
        wanted = set(design.method.group.names)
        return [seed for seed in self.protocol.seeds if wanted <= set(self.group(seed).names)]

    def scores(self, design: Design, name: str, seed: int) -> Scores:
        """Fit on ID-train alone, score ID-test and every OOD-test set."""
        timesteps, group = self.timesteps(design), self.group(seed)
        train = design.table(self.found[name, "train", seed], timesteps, group)
        scorer = Scorer(design.calibration, design.keep, design.weights)
        scorer.fit(design.method.columns(train), design.method.stability(train), design.method.parts(train))

        def score(other: str) -> Array:
            return scorer.score(design.columns(self.found[other, "test", seed], timesteps, group))

        outside = {other: score(other) for other in self.protocol.pairs[name]}
        kept = tuple(timesteps[place] for place in scorer.selection_.kept)
        return Scores(score(name), outside, kept, scorer.selection_)

    def all_scores(self, design: Design) -> dict[int, SeedScores]:
        """Seed -> ID set -> scores, for every seed whose tables have the design's transforms."""
        return {
            seed: {name: self.scores(design, name, seed) for name in self.protocol.pairs} for seed in self.seeds(design)
        }

    def table(self, name: str, title: str, rows: Sequence[Design], full: Mapping[int, SeedScores]) -> ResultTable:
        """One line for each design: every pair, average, spread, worst, passes, and the lead of `full`."""
        tail = ("average", "seeds", "std over seeds", "worst", "passes", "full is ahead by", "p")
        header = ("design", *self.protocol.pair_labels, *tail)
        return ResultTable(name, title, header, tuple(self._row(design, full) for design in rows), NOTE)

    def _row(self, design: Design, full: Mapping[int, SeedScores]) -> tuple[Cell, ...]:
        found = self.all_scores(design)
        runs = list(found.values())
        per_seed = np.array([list(pair_aurocs(run).values()) for run in runs])
        mean, spread = per_seed.mean(axis=0), std_over_seeds(per_seed.mean(axis=1))
        passes = design.passes(self.backbone, self.protocol.size, len(self.timesteps(design)))
        lead, p = advantage([full[seed] for seed in found], runs)
        values = [float(value) for value in mean]
        return (design.label, *values, float(mean.mean()), len(runs), spread, float(mean.min()), passes, lead, p)


def extracted(protocol: Protocol, lean: bool) -> dict[int, GepcPlus]:
    """Seed -> the method whose table is extracted: lean for all seeds or for those after the first."""
    return {seed: LEAN if lean or place else WIDE for place, seed in enumerate(protocol.seeds)}


def collect_plus(
    benchmark: Benchmark, on_progress: Callable[[int], None] | None = None, lean: bool = False
) -> PlusBench:
    """The table of every split that the pairs need."""
    found: dict[tuple[str, str, int], FeatureTable] = {}
    for seed, method in extracted(benchmark.protocol, lean).items():
        alone = replace(benchmark, protocol=replace(benchmark.protocol, seeds=(seed,)))
        found |= alone.collect(method, on_progress=on_progress).tables
    return PlusBench(benchmark, found)


def passes_needed(benchmark: Benchmark, lean: bool = False) -> int:
    """Network passes of `collect_plus` with an empty cache."""
    size = (benchmark.protocol.size, benchmark.protocol.size)
    methods = extracted(benchmark.protocol, lean).values()
    return sum(benchmark.sizes.values()) * sum(method.cost(benchmark.backbone, size).forward for method in methods)


def tables(bench: PlusBench) -> list[ResultTable]:
    """Every table of `designs`."""
    groups = {title: [row for row in rows if bench.seeds(row)] for title, rows in designs().items()}
    first = next(iter(groups.values()))[0]
    full = bench.all_scores(first)
    return [bench.table(f"plus-{place}", title, rows, full) for place, (title, rows) in enumerate(groups.items())]

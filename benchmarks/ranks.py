"""Ranks of methods over the pairs of several benchmarks: is one better than another in general?

    gepc bench small32 --data data --out results/nine --methods all
    gepc bench my-protocol.yaml --data data --out results/mine --methods all
    python benchmarks/ranks.py results [--name ranks]

Every folder in `results` that `gepc bench` has written is one benchmark. The table is written to `ranks.md` and
`ranks.json`, and the diagram to `ranks.png` and `ranks.svg`; `--name` gives them another name. Methods that were not
run on all pairs are left out.

On every pair the method with the highest AUROC has rank 1; ties share their mean rank. With k methods and N pairs,
Friedman's test asks whether all average ranks are equal, and two of them differ at level alpha (Nemenyi) if they are
farther apart than the critical difference

    CD = q_alpha sqrt(k (k + 1) / (6 N))        q_alpha: studentised range of k means, divided by sqrt(2)

(Demsar, JMLR 2006). Both tests take the pairs for independent. Pairs that share a data set are not, so that p-values
are too small. Nemenyi's test also depends on which other methods are in the ranking.

The paired test avoids both: the AUROCs of two methods are averaged over the pairs of each ID set, and Wilcoxon's
signed-rank test compares the ID sets (Benavoli et al., JMLR 2016). Its p-values are adjusted for the number of methods
by Holm's procedure.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy.stats import binomtest, friedmanchisquare, rankdata, studentized_range, wilcoxon

from gepc.core.errors import InputError
from gepc.core.files import read_json
from gepc.core.palette import LIGHT
from gepc.core.rates import holm_adjusted
from gepc.core.tables import Cell, ResultTable, write_tables
from gepc.detector.plots import drawing, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHA = 0.05
DIAGRAM_WIDTH = 6.4  # inches
Aurocs = Mapping[str, Mapping[str, float]]  # method -> pair -> AUROC


@dataclass(frozen=True)
class Ranking:
    """Methods in the order of their average ranks."""

    methods: tuple[str, ...]  # names, the best first
    suites: tuple[str, ...]  # names of the benchmarks
    aurocs: npt.NDArray[np.float64]  # AUROC of every method and pair, (k, N)
    suite_of: npt.NDArray[np.int64]  # for every pair, the place of its benchmark in `suites`
    id_sets: tuple[str, ...]  # for every pair, its benchmark and ID set

    @classmethod
    def of(cls, suites: Mapping[str, Aurocs]) -> Ranking:
        """Rank the methods that were run on all pairs of all benchmarks, by name; others are left out."""
        common = set.intersection(*(set(suite) for suite in suites.values()))
        if len(common) < 2:
            raise InputError(f"ranks need two methods that all of {', '.join(suites)} have; there are {len(common)}")
        columns, suite_of, id_sets = [], [], []
        methods = sorted(common)
        for place, (suite_name, suite) in enumerate(suites.items()):
            for pair in suite[methods[0]]:
                columns.append([suite[method][pair] for method in methods])
                suite_of.append(place)
                id_sets.append(f"{suite_name}/{pair.split(':')[0]}")
        aurocs = np.array(columns).T
        order = np.argsort(_ranks(aurocs).mean(axis=1), kind="stable")
        names = tuple(methods[place] for place in order)
        return cls(names, tuple(suites), aurocs[order], np.array(suite_of), tuple(id_sets))

    @cached_property
    def average_ranks(self) -> npt.NDArray[np.float64]:
        """One per method."""
        return np.asarray(_ranks(self.aurocs).mean(axis=1))

    @cached_property
    def p_value(self) -> float:
        """Friedman's test; of two methods, the sign test, which it is then."""
        if len(self.methods) > 2:
            return float(friedmanchisquare(*self.aurocs).pvalue)
        wins = int((self.aurocs[0] > self.aurocs[1]).sum())
        decided = int((self.aurocs[0] != self.aurocs[1]).sum())
        return float(binomtest(wins, decided).pvalue) if decided else 1.0

    @cached_property
    def critical_difference(self) -> float:
        """Nemenyi's, at level 0.05."""
        k, pairs = self.aurocs.shape
        return float(studentized_range.isf(ALPHA, k, np.inf) / np.sqrt(2.0) * np.sqrt(k * (k + 1) / (6.0 * pairs)))

    @cached_property
    def paired_p_values(self) -> npt.NDArray[np.float64]:
        """Of each method after the first: is it as good as the first? Wilcoxon over ID sets, adjusted by Holm."""
        _, cluster = np.unique(self.id_sets, return_inverse=True)
        averages = np.array([np.bincount(cluster, row) / np.bincount(cluster) for row in self.aurocs])
        differences = averages[0] - averages[1:]
        decided = np.abs(differences).max(axis=1) > 0.0
        p_values = np.ones(len(differences))
        p_values[decided] = [wilcoxon(row).pvalue for row in differences[decided]]
        return holm_adjusted(p_values)

    def table(self) -> ResultTable:
        """Average rank, average AUROC over all pairs and in each benchmark, the worst pair, and the paired test."""
        sizes = zip(self.suites, np.bincount(self.suite_of), strict=True)
        counts = [f"{name} ({count})" for name, count in sizes]
        header = ("method", "average rank", "p against the first", "average AUROC", "worst", *counts)
        rows: list[tuple[Cell, ...]] = []
        paired: list[float | None] = [None, *self.paired_p_values.tolist()]
        for name, rank, p, values in zip(self.methods, self.average_ranks.tolist(), paired, self.aurocs, strict=True):
            each = [float(values[self.suite_of == place].mean()) for place in range(len(self.suites))]
            rows.append((name, rank, p, float(values.mean()), float(values.min()), *each))
        note = (
            f"{self.aurocs.shape[1]} pairs, numbers of each benchmark in brackets. Ranks that differ by less than "
            f"{self.critical_difference:.2f} do not differ at level {ALPHA:g} (Nemenyi); all equal: p = "
            f"{self.p_value:.1g} (Friedman). Pairs that share a data set are not independent, as these tests assume. "
            f"The column p compares averages over the {len(set(self.id_sets))} ID sets (Wilcoxon, adjusted by Holm)."
        )
        return ResultTable("ranks", "Average ranks over all benchmarks", header, tuple(rows), note)


def _ranks(aurocs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rank of every method on every pair, 1 for the highest AUROC."""
    return np.asarray(rankdata(-aurocs, axis=0))


def read_aurocs(folder: Path) -> dict[str, dict[str, float]]:
    """The AUROC of every method and pair of a finished benchmark, from its `results.json`."""
    tables: Sequence[Any] = read_json(folder / "results.json")["tables"]
    rows = next((table["rows"] for table in tables if table["name"] == "methods"), None)
    if rows is None:
        raise InputError(f"{folder / 'results.json'} has no table of methods and pairs; run `gepc bench` with methods")
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["method"], {})[row["pair"]] = float(row["AUROC"])
    return found


def diagram(ranking: Ranking) -> Figure:
    """The average rank of every method, with a bar as long as the critical difference.

    Methods whose bars do not overlap differ.
    """
    ranks, places = ranking.average_ranks, np.arange(len(ranking.methods))
    with drawing(0.7 + 0.17 * len(places)) as figure:
        figure.set_figwidth(DIAGRAM_WIDTH)
        axes = figure.add_subplot()
        axes.errorbar(ranks, places, xerr=ranking.critical_difference / 2, fmt="o", markersize=4, color=LIGHT["inside"])
        names = [f"{name}  {rank:.1f}" for name, rank in zip(ranking.methods, ranks, strict=True)]
        axes.set_yticks(places, names, fontsize=7)
        axes.invert_yaxis()
        axes.grid(axis="x", color=LIGHT["rule"], linewidth=0.6)
        axes.set(xlabel="average rank; methods whose bars do not overlap differ")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder with a folder of results for each benchmark")
    parser.add_argument("--name", default="ranks", help="of the table and of the files")
    options = parser.parse_args()
    folder = options.results
    names = sorted(path.parent.name for path in folder.glob("*/results.json"))
    if not names:
        parser.error(f"{folder} has no folder with a results.json")
    ranking = Ranking.of({name: read_aurocs(folder / name) for name in names})
    table = replace(ranking.table(), name=options.name)
    print(write_tables(folder, options.name, [table], {"benchmarks": names}))
    save(diagram(ranking), folder / options.name)


if __name__ == "__main__":
    main()

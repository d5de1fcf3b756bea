"""Are synthetic outliers to be trusted? What they prefer beside the default and the oracle, on every ID set.

    python benchmarks/suites.py --data data --out suites
    gepc bench suites/suites.yaml --data suites --out results/suites --methods \\
        gepc+:fast,gepc+:single,gepc+:full,cfs,msma:knn,diffpath,pixel_stats
    python benchmarks/choose.py suites results/suites --out results/choose

For every ID set the candidates are compared on its training images alone, as `gepc choose` does. The AUROC that each of
them has on the true OOD sets is read from the second command's results. The oracle takes the candidate with the highest
average AUROC on them. The answers are stored one by one, so that an interrupted run resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import yaml

import gepc
from gepc.core.allocator import keep_freed_memory
from gepc.core.files import read_json, write_json
from gepc.core.tables import Cell, ResultTable, write_tables
from gepc.images.formats import read_npz
from gepc.lab.bench.choose import CANDIDATES, DEFAULT, Candidate, clear_leader, compare
from gepc.lab.bench.ranks import read_aurocs

LABELS = {
    "gepc+:fast": "gepc+ fast",
    "gepc+:single": "gepc+ single",
    "gepc+:full": "gepc+ full",
    "cfs": "cfs",
    "msma:knn": "msma knn",
    "diffpath": "diffpath[1-D]",
    "pixel_stats": "pixel_stats",
}
"""Candidate -> its name in the tables of `gepc bench`."""


@dataclass(frozen=True)
class Choice:
    """What synthetic outliers prefer: the clear leader, or else the default; and the one with the highest average."""

    preferred: str
    best: str


def candidates() -> list[Candidate]:
    """The candidates of `gepc choose` whose AUROC on true OOD sets `gepc bench` measures."""
    return [candidate for candidate in CANDIDATES if str(candidate) in LABELS]


def choice(suite: Mapping[str, object], train: Path, stored: Path, count: int) -> Choice:
    """The choice for one ID set, from its training images."""
    if not stored.exists():
        size = suite.get("size", 32)
        assert isinstance(size, int)
        backbone = gepc.load_backbone(str(suite["backbone"]))
        trials = compare(backbone, read_npz(train, "train_x"), candidates(), count, size)
        leader = clear_leader(trials)
        preferred = DEFAULT if leader is None else leader[0].candidate
        found = Choice(str(preferred), str(trials[0].candidate))
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_json(stored, asdict(found))
    return Choice(**read_json(stored))


def averages(aurocs: Mapping[str, Mapping[str, float]], id_set: str) -> dict[str, float]:
    """Candidate -> its average AUROC over the OOD sets of `id_set`."""
    return {
        name: float(np.mean([value for pair, value in aurocs[label].items() if pair.startswith(f"{id_set}:")]))
        for name, label in LABELS.items()
    }


def table(rows: list[tuple[str, str, Choice, dict[str, float]]], count: int) -> ResultTable:
    """A row for every ID set, then averages over ID sets."""
    cells: list[tuple[Cell, ...]] = []
    found: list[tuple[float, ...]] = []
    for suite, id_set, made, true in rows:
        oracle = max(true, key=lambda name: true[name])
        picked = (true[made.preferred], true[str(DEFAULT)], true[made.best], true[oracle])
        found.append(picked)
        cells.append((suite, id_set, made.preferred, *picked, oracle))
    cells.append(("all", f"{len(rows)} ID sets", "", *np.mean(found, axis=0).tolist(), ""))
    header = (
        "suite",
        "ID set",
        "clear leader, else default",
        "its AUROC",
        "default",
        "best on synthetic",
        "oracle",
        "oracle takes",
    )
    note = (
        f"At most {count} normal images of each set to choose with. AUROC is the average over the set's true OOD sets; "
        "the oracle knows it, the others do not."
    )
    return ResultTable("choose", "gepc choose against the default and the oracle", header, tuple(cells), note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", type=Path, help="folder that benchmarks/suites.py wrote")
    parser.add_argument("results", type=Path, help="results of gepc bench on these suites")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=80, help="normal images of each set, at most")
    options = parser.parse_args()
    keep_freed_memory()
    choices = {}
    for name, file in yaml.safe_load((options.suites / "suites.yaml").read_text())["suites"].items():
        suite = yaml.safe_load((options.suites / file).read_text())
        for id_set in suite["pairs"]:
            stored = options.out / "choices" / f"{name}-{id_set}.json"
            choices[name, id_set] = choice(suite, options.suites / name / f"{id_set}.npz", stored, options.count)
            print(name, id_set, choices[name, id_set], flush=True)
    aurocs = {name: read_aurocs(options.results / name) for name in dict.fromkeys(name for name, _ in choices)}
    rows = [(name, id_set, made, averages(aurocs[name], id_set)) for (name, id_set), made in choices.items()]
    print(write_tables(options.out, "choose", [table(rows, options.count)], {"count": options.count}))


if __name__ == "__main__":
    main()

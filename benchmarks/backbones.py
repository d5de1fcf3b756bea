"""How much it matters what the backbone has seen: the same methods and images with each embedded backbone.

    python benchmarks/suites.py --data data --out suites --images 200 100
    python benchmarks/backbones.py --suites suites --out results/backbones

Runs `gepc bench` on the nine pairs, the fresh pairs and the magnetic tiles (64x64) with every backbone, resumes what
was interrupted, and prints the average AUROC of every method. All methods are fitted on in-distribution images alone.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
from ranks import read_aurocs

from gepc.cli.app import run as command_line
from gepc.core.tables import ResultTable, write_tables

SUITES = ("nine", "fresh", "tiles")
BACKBONES = ("photos-small", "celeba32-small", "sar-small")
METHODS = "gepc+:fast,cfs,msma:knn,spr"


def averages(folder: Path) -> dict[str, list[float]]:
    """Method -> average AUROC over the pairs of each suite."""
    found = [read_aurocs(folder / name) for name in SUITES]
    return {method: [float(np.mean(list(one[method].values()))) for one in found] for method in found[0]}


def table(out: Path, backbones: list[str]) -> ResultTable:
    """One row for each method and suite, one column for each backbone."""
    values = {backbone: averages(out / backbone) for backbone in backbones}
    methods = list(values[backbones[0]])
    rows = tuple(
        (suite, method, *(values[backbone][method][place] for backbone in backbones))
        for place, suite in enumerate(SUITES)
        for method in methods
    )
    note = "Average AUROC over the pairs of a suite; one noise seed."
    return ResultTable("backbones", "What the backbone has seen", ("suite", "method", *backbones), rows, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", type=Path, required=True, help="folder of benchmarks/suites.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backbones", nargs="+", default=list(BACKBONES))
    parser.add_argument("--cache", type=Path, default=Path(".gepc-cache"))
    options = parser.parse_args()
    for backbone, suite in itertools.product(options.backbones, SUITES):
        out = options.out / backbone / suite
        if (out / "results.json").exists():
            continue
        places = ["--data", str(options.suites), "--out", str(out), "--cache", str(options.cache)]
        choice = ["--methods", METHODS, "--set", f"backbone={backbone}"]
        code = command_line(["bench", str(options.suites / f"{suite}.yaml"), *places, *choice])
        if code:
            raise SystemExit(code)
    print(write_tables(options.out, "backbones", [table(options.out, options.backbones)], {}))


if __name__ == "__main__":
    main()

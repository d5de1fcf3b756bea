"""IGEBM, Improved CD and VAEBM, the energy models of the paper's table, trained on each ID set: AUROC of nine pairs.

    python benchmarks/energy.py --data data/ --out results/energy --minutes 7

Nine networks are trained for that many minutes each by the clock (leave the machine alone meanwhile), on all training
images of an ID set but the first 500, which the density of the energies is fitted to. The table `energy.md` gives the
energy as it is (one-sided, as published) and by its density (two-sided), on 500 test images of each set, beside the
published values. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import gepc
from gepc.core.allocator import keep_freed_memory
from gepc.core.tables import Cell, ResultTable, write_tables
from gepc.lab.bench.published import MAIN, PAIRS
from gepc.lab.metrics import auroc
from gepc.lab.training.choices import recipe_for
from gepc.lab.training.loop import train
from gepc.lab.training.recipe import ENERGIES

FIT, TEST = 500, 500
FILES = {"C10": "cifar10", "SVHN": "svhn32", "CelebA": "celeba32", "C100": "cifar100"}
ROWS = {"igebm": "IGEBM", "improved_cd": "Improved CD", "vaebm": "VAEBM"}
PRESETS = {"paper": "one-sided", "two_sided": "two-sided"}


def trained(objective: str, name: str, options: argparse.Namespace, changes: dict[str, Any]) -> gepc.Backbone:
    """The network of an objective on one ID set."""
    images, out = options.out / f"{name}.npz", options.out / f"{objective}-{name}"
    np.savez(images, train_x=np.load(options.data / f"{FILES[name]}.npz")["train_x"][FIT:])
    recipe, _ = recipe_for(images, out, overrides={"objective": objective, **changes})
    state = train(recipe, images, out, options.minutes)
    print(f"{objective} on {name}: {state.step} steps", flush=True)
    return gepc.load_backbone(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.0, help="training time of each network")
    parser.add_argument("--objectives", default=",".join(ENERGIES))
    parser.add_argument("--sets", default="C10,SVHN,CelebA", help="ID sets")
    parser.add_argument("--set", action="append", default=[], help="NAME=JSON, a field of the recipe")
    options = parser.parse_args()
    keep_freed_memory()
    options.out.mkdir(parents=True, exist_ok=True)
    changes = {name: json.loads(value) for name, _, value in (text.partition("=") for text in options.set)}
    sets = options.sets.split(",")
    pairs = [pair for pair in PAIRS if pair[0] in sets]
    test = {name: np.load(options.data / f"{file}.npz")["test_x"][:TEST] for name, file in FILES.items()}
    rows: list[tuple[Cell, ...]] = []
    for objective in options.objectives.split(","):
        found: dict[str, list[float]] = {preset: [] for preset in PRESETS}
        for name in sets:
            backbone = trained(objective, name, options, changes)
            fit = np.load(options.data / f"{FILES[name]}.npz")["train_x"][:FIT]
            for preset, values in found.items():
                detector = gepc.create_detector(backbone, "energy", preset).fit(fit)
                scores = {other: detector.score(images) for other, images in test.items()}
                values += [auroc(scores[name], scores[other]) for inside, other in pairs if inside == name]
        for preset, values in found.items():
            rows.append((f"{objective}, {PRESETS[preset]}", *values, float(np.mean(values))))
        printed = dict(zip(PAIRS, MAIN[f"{ROWS[objective]} (ID-trained)"][0], strict=True))
        rows.append((f"{ROWS[objective]}, published", *(printed[pair] for pair in pairs), None))
    header = ("model", *(f"{inside}:{outside}" for inside, outside in pairs), "average")
    note = f"{options.minutes:g} minutes of training for each network; {TEST} test images of each set."
    table = ResultTable("energy", "Energy models trained on each ID set", header, tuple(rows), note)
    print(write_tables(options.out, "energy", [table], {"minutes": options.minutes, **changes}))


if __name__ == "__main__":
    main()

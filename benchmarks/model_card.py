"""The tables of a model card from a finished training run: held-out error, cost, and loss over the steps.

    python benchmarks/model_card.py RUN

`RUN` is the folder that `gepc train` wrote to; `training/held_out.json`, `loss.csv` and `run.json` in it are read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from gepc.core.errors import InputError
from gepc.core.files import read_json
from gepc.core.tables import markdown_table
from gepc.lab.training.checkpoint import LossRow, read_loss_rows
from gepc.lab.training.evaluate import NAME, LevelError, error_table
from gepc.lab.training.loop import RUN_FOLDER


def model_card_tables(run: str | Path) -> str:
    folder = Path(run) / RUN_FOLDER
    found, rows = read_json(folder / NAME), read_loss_rows(folder)
    if not rows:
        raise InputError(f"{folder} has no rows in loss.csv; the run was too short for a model card")
    parts = (
        f"Noise MSE on {found['images']} held-out images after {found['step']} steps (best linear: {found['linear']}).",
        error_table(LevelError(**level) for level in found["levels"]),
        cost_table(found, rows, read_json(folder / "run.json")["recipe"]),
        loss_table(rows),
    )
    return "\n\n".join(parts) + "\n"


def cost_table(found: dict[str, Any], rows: list[LossRow], recipe: dict[str, Any]) -> str:
    facts = (
        ("parameters", f"{found['parameters']:,}"),
        ("steps", f"{found['step']:,}"),
        ("images seen", f"{found['step'] * recipe['batch_size']:,}"),
        ("wall time", f"{rows[-1].seconds / 3600:.2f} h"),
        ("CPU time", f"{rows[-1].cpu_seconds / 3600:.2f} h"),
    )
    return markdown_table(("training", ""), facts, aligned=True)


def loss_table(rows: list[LossRow], places: int = 8) -> str:
    """The loss at evenly spaced steps, each the mean of the rows since the previous one."""
    parts = np.array_split(np.arange(len(rows)), min(places, len(rows)))
    cells = [
        (
            f"{rows[part[-1]].step:,}",
            f"{np.mean([rows[i].loss for i in part]):.4f}",
            f"{rows[part[-1]].learning_rate:.2g}",
        )
        for part in parts
    ]
    return markdown_table(("up to step", "mean loss", "learning rate"), cells, aligned=True)


if __name__ == "__main__":
    print(model_card_tables(sys.argv[1]))

"""The tables of a model card from a finished training run: held-out error, cost, and loss over the steps.

    python benchmarks/model_card.py RUN
    python benchmarks/model_card.py RUN --against photos-tiny --data photos32.npz

`RUN` is the folder that `gepc train` wrote to; `training/held_out.json`, `loss.csv` and `run.json` in it are read.
With `--against`, only the errors of the network and of another backbone are compared, which a run that is not finished
has as well: on the held-out images of the run, and on `test_x` of `--data`, images of pictures that neither has seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import gepc
from gepc.backbones.diffusers import DiffusersBackbone
from gepc.core.errors import InputError
from gepc.core.files import read_json
from gepc.core.tables import markdown_table
from gepc.images.formats import read_npz
from gepc.images.sources import Image
from gepc.lab.training.checkpoint import loss_log
from gepc.lab.training.choices import saved_recipe
from gepc.lab.training.data import load_training_images
from gepc.lab.training.evaluate import NAME, LevelError, denoising_errors, error_table, fit_linear
from gepc.lab.training.loop import RUN_FOLDER
from gepc.lab.training.recipe import load_recipe


def model_card_tables(run: str | Path) -> str:
    folder = Path(run) / RUN_FOLDER
    found, rows = read_json(folder / NAME), list(loss_log(folder).rows())
    if not rows:
        raise InputError(f"{folder} has no rows in loss.csv; the run was too short for a model card")
    parts = (
        f"Noise MSE on {found['images']} held-out images after {found['step']} steps (best linear: {found['linear']}).",
        error_table(LevelError(**level) for level in found["levels"]),
        cost_table(found, rows, read_json(folder / "run.json")["recipe"]),
        loss_table(rows),
    )
    return "\n\n".join(parts) + "\n"


def cost_table(found: dict[str, Any], rows: list[dict[str, str]], recipe: dict[str, Any]) -> str:
    facts = (
        ("parameters", f"{found['parameters']:,}"),
        ("steps", f"{found['step']:,}"),
        ("images seen", f"{found['step'] * recipe['batch_size']:,}"),
        ("wall time", f"{float(rows[-1]['seconds']) / 3600:.2f} h"),
        ("CPU time", f"{float(rows[-1]['cpu_seconds']) / 3600:.2f} h"),
    )
    return markdown_table(("training", ""), facts, aligned=True)


def loss_table(rows: list[dict[str, str]], places: int = 8) -> str:
    """The loss at evenly spaced steps, each the mean of the rows since the previous one."""
    parts = np.array_split(np.arange(len(rows)), min(places, len(rows)))
    cells = [
        (
            f"{int(rows[part[-1]]['step']):,}",
            f"{np.mean([float(rows[i]['loss']) for i in part]):.4f}",
            f"{float(rows[part[-1]]['learning_rate']):.2g}",
        )
        for part in parts
    ]
    return markdown_table(("up to step", "mean loss", "learning rate"), cells, aligned=True)


def comparison(run: Path, other: str, data: Path) -> str:
    """Errors of the backbone `other` and of the network in `run`, on the same images with the same noise."""
    recipe = load_recipe(None, None, saved_recipe(run))
    held_out = load_training_images(data, recipe).held_out
    test = read_npz(data, "test_x").transpose(0, 3, 1, 2)
    white = np.iinfo(test.dtype).max
    sets = {"held-out images": held_out, "test_x": np.float32(test / (white / 2.0) - 1.0)}
    errors = {(name, images): level_errors(name, sets[images]) for images in sets for name in (other, str(run))}
    columns = [f"{images}: {Path(name).name}" for name, images in errors]
    levels = [f"{error.asked:g}" for error in next(iter(errors.values()))]
    cells = [[f"{error.net:.4f}" for error in column] for column in errors.values()]
    counts = ", ".join(f"{len(images)} of {name}" for name, images in sets.items())
    table = markdown_table(("level", *columns), list(zip(levels, *cells, strict=True)), aligned=True)
    return f"Noise MSE on {counts}.\n\n{table}\n"


def level_errors(name: str, images: Image) -> list[LevelError]:
    """The errors of a backbone; the linear predictor of the images themselves is not shown."""
    backbone = gepc.load_backbone(name)
    assert isinstance(backbone, DiffusersBackbone)
    return denoising_errors(backbone, fit_linear(images[:64]), images)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("--against", help="a backbone to compare with")
    parser.add_argument("--data", type=Path, help="the npz file of the run, with train_x and test_x")
    options = parser.parse_args()
    if options.against is None:
        print(model_card_tables(options.run))
    elif options.data is None:
        parser.error("--against needs --data")
    else:
        print(comparison(options.run, options.against, options.data))


if __name__ == "__main__":
    main()

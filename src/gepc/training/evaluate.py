"""How good a trained net is: its error on held-out images beside trivial predictors, samples, and the loss curve."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.schedule import Levels
from gepc.core.errors import InputError
from gepc.core.files import read_json, write_json
from gepc.core.tables import markdown_table
from gepc.images.sources import Image
from gepc.training import figures
from gepc.training.linear import Array, LinearPredictor, Predictor, fit_linear
from gepc.training.loop import RUN_FOLDER
from gepc.training.loss_log import Row, read_rows
from gepc.training.net import alphas_cumprod
from gepc.training.recipe import Recipe

if TYPE_CHECKING:
    from diffusers import UNet2DModel

NAME = "held_out.json"
LEVELS = (0.9999, 0.9979, 0.99, 0.97, 0.9, 0.5)
NOISE_SEED = 0


@dataclass(frozen=True)
class LevelError:
    """Mean squared error of the predicted noise at one level, for the net and two trivial predictors.

    `asked` is the level as sqrt(abar); `timestep` and `sqrt_abar` are what the schedule has nearest to it. `linear` is
    the best linear predictor, `zero` always answers 0: the mean square of the noise, 1 but for chance.
    """

    asked: float
    timestep: int
    sqrt_abar: float
    net: float
    linear: float
    zero: float


def evaluate(
    out: str | Path, recipe: Recipe, images: Image, held_out: Image, step: int
) -> tuple[list[LevelError], list[str]]:
    """Measure the net in the folder `out`; write `held_out.json`, `samples.png` and `loss.png` in its run folder.

    `images` are the training images, which the linear predictor is fitted to. Returns the errors per level and notes
    on what was left out.
    """
    import torch
    from diffusers import UNet2DModel

    folder, notes, errors = Path(out) / RUN_FOLDER, [], []
    net = UNet2DModel.from_pretrained(out).eval()
    net.to("cuda" if torch.cuda.is_available() else "cpu", memory_format=torch.channels_last)
    if len(held_out):
        linear = fit_linear(images)
        errors = denoising_errors(net, alphas_cumprod(recipe), linear, held_out)
        facts = {"step": step, "images": len(held_out), "linear": linear.kind, "noise_seed": NOISE_SEED}
        parameters = sum(parameter.numel() for parameter in net.parameters())
        levels = [dataclasses.asdict(error) for error in errors]
        write_json(folder / NAME, {**facts, "parameters": parameters, "levels": levels})
    else:
        notes.append("no images are held out (held_out: 0), so there is no held-out error")
    figures.write_samples(folder / "samples.png", net, recipe, images.shape[1:])
    rows = read_rows(folder)
    if rows and not figures.write_loss_curve(folder / "loss.png", rows):
        notes.append("no loss curve: it needs matplotlib, pip install 'gepc[report]'")
    return errors, notes


def denoising_errors(
    net: UNet2DModel,
    abar: npt.NDArray[np.float64],
    linear: LinearPredictor,
    held_out: Image,
    levels: Sequence[float] = LEVELS,
) -> list[LevelError]:
    """mean (eps_hat(x_t) - noise)^2 over the held-out images, the same noise for all predictors.

    The noise of an image depends on its place, the timestep and a fixed seed only.
    """
    errors = []
    for asked in levels:
        (timestep,) = Levels.sqrt_abar(asked).timesteps(abar)
        level = float(abar[timestep])
        predictors: list[Predictor] = [_net_predictor(net, timestep), linear.at(level), np.zeros_like]
        errors.append(LevelError(asked, timestep, level**0.5, *_noise_errors(predictors, held_out, timestep, level)))
    return errors


def _net_predictor(net: UNet2DModel, timestep: int) -> Predictor:
    import torch

    def predict(noisy: Image) -> Array:
        x = torch.from_numpy(noisy).to(net.device, memory_format=torch.channels_last)
        with torch.no_grad():
            answer: Array = net(x, timestep, return_dict=False)[0].float().cpu().numpy()
        return answer

    return predict


def _noise_errors(
    predictors: Sequence[Predictor],
    images: Image,
    timestep: int,
    abar: float,
    batch_size: int = 64,
) -> list[float]:
    sums = np.zeros(len(predictors))
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        noise = np.stack([_noise(timestep, start + offset, batch.shape[1:]) for offset in range(len(batch))])
        noisy = (np.sqrt(abar) * batch + np.sqrt(1.0 - abar) * noise).astype(np.float32)
        sums += [np.square(predict(noisy) - noise, dtype=np.float64).sum() for predict in predictors]
    return [float(total) for total in sums / images.size]


def _noise(timestep: int, index: int, shape: tuple[int, ...]) -> Image:
    return np.random.default_rng([NOISE_SEED, timestep, index]).standard_normal(shape, dtype=np.float32)


def error_table(errors: Iterable[LevelError]) -> str:
    """The held-out errors as a Markdown table, which is readable as it is."""
    rows = [
        (f"{e.asked:g}", f"{e.timestep}", f"{e.sqrt_abar:.6f}", f"{e.net:.4f}", f"{e.linear:.4f}", f"{e.zero:.4f}")
        for e in errors
    ]
    return markdown_table(("level", "timestep", "sqrt(abar)", "net", "best linear", "always 0"), rows, aligned=True)


def model_card_tables(run_folder: str | Path) -> str:
    """The figures of a finished run as Markdown, for its model card: held-out error, cost, loss over the run.

    `run_folder` is what `gepc train` wrote to; its `training/held_out.json` and `training/loss.csv` are read.
    """
    folder = Path(run_folder) / RUN_FOLDER
    found, rows = read_json(folder / NAME), read_rows(folder)
    if not rows:
        raise InputError(f"{folder} has no rows in loss.csv; the run was too short for a model card")
    errors = [LevelError(**level) for level in found["levels"]]
    parts = (
        f"Noise MSE on {found['images']} held-out images after {found['step']} steps (best linear: {found['linear']}).",
        error_table(errors),
        _cost_table(found, rows, read_json(folder / "run.json")["recipe"]),
        _loss_table(rows),
    )
    return "\n\n".join(parts) + "\n"


def _cost_table(found: dict[str, Any], rows: list[Row], recipe: dict[str, Any]) -> str:
    last = rows[-1]
    facts = (
        ("parameters", f"{found['parameters']:,}"),
        ("steps", f"{found['step']:,}"),
        ("images seen", f"{found['step'] * recipe['batch_size']:,}"),
        ("wall time", f"{last.seconds / 3600:.2f} h"),
        ("CPU time", f"{last.cpu_seconds / 3600:.2f} h"),
    )
    return markdown_table(("training", ""), facts, aligned=True)


def _loss_table(rows: list[Row], places: int = 8) -> str:
    """The loss at evenly spaced steps, each the mean of the rows since the one before."""
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

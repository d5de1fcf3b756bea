"""`gepc train`: train a small network on your images, or fine-tune one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from gepc.cli import options as opt
from gepc.cli.app import note, say, text_table, typed_command
from gepc.cli.backbones import shape_text
from gepc.core.errors import OptionError, StorageError, raising
from gepc.core.options import DEFAULT_BACKBONE
from gepc.lab.training.recipe import ENERGIES, builtin_recipes

if TYPE_CHECKING:
    from gepc.lab.training.choices import Choice
    from gepc.lab.training.loop import Tick, TrainingRun

LINE_EVERY_SECONDS = 60.0


def train(
    data: Annotated[Path, Option(help="Folder of images, or .npz file with an array train_x.")],
    out: Annotated[Path, Option(help="Folder for the backbone; an unfinished run in it is resumed.")],
    config: Annotated[
        str | None,
        Argument(
            metavar="RECIPE",
            help=f"Recipe: a YAML file, or a name ({', '.join(builtin_recipes())}). Chosen for the images if omitted.",
        ),
    ] = None,
    init: Annotated[
        str | None, Option(help="Backbone to start from (fine-tuning): an embedded name, or a folder.")
    ] = None,
    objective: Annotated[
        str | None, Option(help=f"Train an energy network instead, for the method energy: {', '.join(ENERGIES)}.")
    ] = None,
    steps: Annotated[int | None, Option(help="Total number of steps; by default the number in the recipe.")] = None,
    minutes: Annotated[
        float | None, Option(help="Total time in minutes, reading and evaluation included, instead of --steps.")
    ] = None,
    settings: Annotated[
        list[str] | None, opt.setting("Option of the recipe, for example `--set image_size=64`")
    ] = None,
) -> None:
    """Train a small diffusion backbone on your images.

    The result is a diffusers folder that every other command accepts as a backbone. Its subfolder `training/` holds the
    checkpoint, the loss, the error on held-out images and a grid of samples. Stop with Ctrl-C and give the same command
    again to resume: the result is the same as without the interruption.

    Example: `gepc train --data photos/ --out my-backbone --minutes 60`

    A first try of about a minute: `gepc train quick --data photos/ --out my-backbone`

    Fine-tuning: `gepc train --init photos-small --data photos/ --out my-backbone`

    An energy network: `gepc train --objective igebm --data photos/ --out energies`
    """
    from gepc.lab.training.choices import recipe_for
    from gepc.lab.training.evaluate import evaluation_passes
    from gepc.lab.training.loop import TrainingRun

    begun = time.monotonic()
    changes = opt.parse_settings(settings)
    options = {"steps": steps, "init": init, "objective": objective}
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() & changes.keys():
        raise OptionError(f"give either --{name} or --set {name}, not both")
    changes |= given
    if minutes is not None and "steps" in changes:
        raise OptionError("give either --steps or --minutes, not both")
    recipe, choices = recipe_for(data, out, config, changes)
    run = TrainingRun(recipe, data, out, minutes)
    note(_opening(run, choices))
    advice = "{error}; free disk space and give the same command again to resume"
    with raising(StorageError, advice, StorageError), _progress(run) as on_tick:
        passes = evaluation_passes(run.recipe, len(run.held_out))
        finished = run.loop(on_tick, time.monotonic() - begun, passes)
    if not finished:
        note(f"stopped after step {run.state.step}, which is saved; to resume:\n  {typed_command()}")
        raise typer.Abort
    _finish(run)


def _opening(run: TrainingRun, choices: Sequence[Choice]) -> str:
    lines, shown = [], [one for one in choices if one.field != "steps" or run.minutes is None]
    if shown:
        rows = [(f"  {one.field}", json.dumps(one.value), one.reason) for one in shown]
        lines.append(f"chosen for the images; change a value with --set:\n{text_table(rows)}")
    parameters = sum(parameter.numel() for parameter in run.net.parameters())
    lines.append(
        f"{len(run.images)} training images of {shape_text(run.images.shape[2:])}, {len(run.held_out)} held out; "
        f"{parameters / 1e6:.2f} M parameters on {run.accelerator.device.type}"
    )
    if run.resumed_from:
        lines.append(f"{run.out}: resuming after step {run.resumed_from}")
    return "\n".join(lines)


@contextmanager
def _progress(run: TrainingRun) -> Iterator[Callable[[Tick], None]]:
    """A progress bar on a terminal; in a log file one line per minute."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    shown, last = console.is_terminal, time.monotonic()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
    with Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task("training", total=None, completed=run.resumed_from, facts="")

        def on_tick(tick: Tick) -> None:
            nonlocal last
            left = timedelta(seconds=round(tick.seconds_left))
            facts = f"loss {tick.loss:.4f}, {tick.images_per_second:.0f} images/s, {left} left"
            bar.update(task, completed=tick.step, total=tick.total, facts=facts)
            if not shown and (time.monotonic() - last >= LINE_EVERY_SECONDS or tick.step == tick.total):
                last = time.monotonic()
                note(f"step {tick.step}/{tick.total}: {facts}")

        yield on_tick


def _finish(run: TrainingRun) -> None:
    from gepc.lab.training.evaluate import error_table, evaluate, worse_than_linear

    note("evaluating on held-out images")
    errors = evaluate(run.out, run.recipe, run.images, run.held_out, run.state.step)
    if not errors:
        energies = run.recipe.objective != "noise"
        reason = "an energy network does not predict noise" if energies else "no images are held out (held_out: 0)"
        note(f"no held-out error, since {reason}")
    else:
        say(f"noise MSE on {len(run.held_out)} held-out images after {run.state.step} steps:")
        say(error_table(errors))
        if (worse := worse_than_linear(errors)) is not None:
            other = f"start from a trained network in a new folder (--init {DEFAULT_BACKBONE})"
            if run.recipe.init is not None:
                lower = f"--set learning_rate={run.recipe.learning_rate / 4:g}"
                other = f"start again in a new folder with a lower learning rate ({lower})"
            note(f"{worse} Give the same command with more --steps or --minutes, use more images, or {other}.")
    say(f"backbone: {run.out}   loss, samples, held-out error: {run.folder}")

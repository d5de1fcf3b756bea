"""`gepc train`: make a small backbone from a folder of images."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gepc.cli.app import app, note, parse_settings, say
from gepc.core.errors import OptionError, StorageError
from gepc.training.recipe import builtin_recipes, load_recipe

if TYPE_CHECKING:
    from gepc.training.loop import Run, Tick

LINE_EVERY_SECONDS = 60.0
RECIPES = ", ".join(builtin_recipes())


@app.command()
def train(
    config: Annotated[str, typer.Argument(help=f"A recipe: a YAML file, or a name ({RECIPES}).")],
    data: Annotated[Path, typer.Option(help="A folder of images, or an .npz with an array train_x.")],
    out: Annotated[Path, typer.Option(help="Where the backbone goes; a run that is there already is taken up again.")],
    steps: Annotated[int | None, typer.Option(help="Steps in all; the recipe's own number without it.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Train for this long in all, instead of --steps.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe.")] = None,
) -> None:
    """Train a small diffusion backbone on your images.

    The result is a plain diffusers folder that every other command takes as a backbone; beside it, in `training/`, are
    the checkpoint, the loss, the error on held-out images and a grid of samples. Stop it with Ctrl-C and give the same
    command again to go on: the result is the same as without the stop.

    Example: `gepc train quick --data photos/ --out my-backbone --set image_channels=3`

    On several GPUs: `accelerate launch -m gepc train ...`
    """
    from gepc.training.loop import Run

    if steps is not None and minutes is not None:
        raise OptionError("give either --steps or --minutes, not both")
    changes = parse_settings(settings or [])
    recipe = load_recipe(config, changes if steps is None else {**changes, "steps": steps})
    run = Run(recipe, data, out, minutes)
    report: Callable[[str], None] = note if run.is_main else lambda _: None
    report(_opening(run))
    try:
        with _progress(run) as on_tick:
            finished = run.loop(on_tick)
    except StorageError as error:
        raise StorageError(f"{error}; make room and give the same command again to go on") from error
    if not finished:
        command = _command(config, data, out, steps, minutes, settings or [])
        report(f"stopped after step {run.progress.step}, which is saved; to go on from there:\n  {command}")
        raise typer.Abort
    if run.is_main:
        _finish(run)


def _opening(run: Run) -> str:
    size = "x".join(str(side) for side in run.images.shape[2:])
    images = f"{len(run.images)} training images of {size}, {len(run.held_out)} held out"
    parameters = sum(parameter.numel() for parameter in run.net.parameters())
    net = f"{parameters / 1e6:.2f} M parameters on {run.accelerator.num_processes} x {run.accelerator.device.type}"
    lines = [f"{images}; {net}"]
    if run.resumed_from:
        lines.append(f"{run.out} holds this run: going on after step {run.resumed_from}")
    if run.recipe.compile:
        lines.append("the first step compiles the net, which takes a minute")
    return "\n".join(lines)


@contextmanager
def _progress(run: Run) -> Iterator[Callable[[Tick], None]]:
    """A bar with loss, images/s and time left on a terminal; in a log file a line a minute."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not (console.is_terminal and run.is_main):
        yield _Lines()
        return
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
    with Progress(*columns, console=console) as bar:
        total = run.recipe.steps if run.minutes is None else None
        task = bar.add_task("training", total=total, completed=run.resumed_from, facts="")

        def on_tick(tick: Tick) -> None:
            first = tick.step == run.resumed_from + 1  # may have compiled the net: says nothing of the speed
            bar.update(task, completed=tick.step, total=tick.total, facts="" if first else _facts(tick))

        yield on_tick


class _Lines:
    """Notes one step a minute, and the last."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, tick: Tick) -> None:
        """Note this step if it is time."""
        if time.monotonic() - self._last >= LINE_EVERY_SECONDS or tick.step == tick.total:
            self._last = time.monotonic()
            note(f"step {tick.step}/{tick.total}: {_facts(tick)}")


def _facts(tick: Tick) -> str:
    minutes, seconds = divmod(round(tick.seconds_left), 60)
    left = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    return f"loss {tick.loss:.4f}, {tick.images_per_second:.0f} images/s, {left} left"


def _finish(run: Run) -> None:
    from gepc.training.evaluate import error_table, evaluate

    note("measuring the error on held-out images and drawing samples")
    errors, notes = evaluate(run.out, run.recipe, run.images, run.held_out, run.progress.step)
    for text in notes:
        note(text)
    if errors:
        say(f"noise MSE on {len(run.held_out)} held-out images after {run.progress.step} steps:")
        say(error_table(errors))
    say(f"backbone: {run.out}   loss, samples, held-out error: {run.folder}")


def _command(config: str, data: Path, out: Path, steps: int | None, minutes: float | None, settings: list[str]) -> str:
    options: dict[str, Any] = {"--data": data, "--out": out, "--steps": steps, "--minutes": minutes}
    words = ["gepc", "train", config]
    for name, value in options.items():
        words += [name, str(value)] if value is not None else []
    for setting in settings:
        words += ["--set", setting]
    return shlex.join(words)

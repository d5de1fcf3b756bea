"""Progress of long work: a callback, or a bar on the terminal."""

import contextlib
from collections.abc import Callable, Iterator

OnProgress = Callable[[int], None]  # called with the number of images of every finished chunk
Progress = OnProgress | bool | None
"""A callback; or True for a bar on the terminal, False and None for nothing."""


@contextlib.contextmanager
def reporting(wanted: Progress, label: str, total: int | None) -> Iterator[OnProgress]:
    """Yield the callback that was given, that of a new bar for True, or one that does nothing."""
    if callable(wanted):
        yield wanted
    elif wanted:
        with progress(label, total) as advance:
            yield advance
    else:
        yield lambda _: None


@contextlib.contextmanager
def progress(label: str, total: int | None) -> Iterator[OnProgress]:
    """A progress bar on the terminal, which disappears at the end; yields `advance(count)`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)

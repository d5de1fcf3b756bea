"""What all commands share: the application, messages for people, progress bars, `key=value` options."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import typer

from gepc.core.errors import GepcError, OptionError, StorageError

app = typer.Typer(
    name="gepc",
    help="Which images has a diffusion model never seen: how sure, and where.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def say(text: str = "") -> None:
    """Print a line of result to standard output."""
    with printing():
        print(text)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Standard output that takes no more is one sentence; that nobody reads any longer is no error."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write to standard output: {error.strerror or error}") from error


def note(text: str) -> None:
    """Print a line about the work to standard error, so that results can be piped."""
    print(text, file=sys.stderr, flush=True)


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Warnings as one sentence instead of a line of source code."""
    note(f"warning: {message}")


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; bad input is one sentence and exit code 2, never a traceback."""
    warnings.showwarning = show_warning
    code = _run(arguments)
    try:
        with printing():
            if sys.stdout:  # none where the command was started without one
                sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except StorageError as error:
        _drop_output()
        if code == 0:
            note(f"error: {error}")
            code = 2
    return code


def _drop_output() -> None:
    """What is left in the buffer goes nowhere; the interpreter would fail on it again when it ends."""
    with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _run(arguments: list[str] | None) -> int:
    try:
        code = app(args=arguments, standalone_mode=False)
    except GepcError as error:
        note(f"error: {error}")
        return 2
    except typer.Exit as stop:
        return stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        note("stopped")
        return 130
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        note(f"error: {(error.strerror or str(error)).lower()}: {error.filename or 'standard output'}")
        return 2
    except Exception as error:
        # typer vendors its own click: usage errors are known by what they can do, not by their class
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            note(f"error: {error.format_message()}")
            return 2
        raise
    return code if isinstance(code, int) else 0


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """`--set key=value` pairs, the values read as YAML: `channels=[16,32]`, `steps=100`, `flips=none`."""
    import yaml

    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise OptionError(f"--set takes key=value, got {setting!r}")
        try:
            values[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise OptionError(f"--set {key}: cannot read the value {text!r}") from error
    return values


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar that appears only when the work takes over a second; yields `advance(count)`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(label, total=total)
    begun, shown = time.monotonic(), False

    def advance(count: int) -> None:
        nonlocal shown
        if not shown and console.is_terminal and time.monotonic() - begun > 1.0:
            bar.start()
            shown = True
        bar.advance(task, count)

    try:
        yield advance
    finally:
        if shown:
            bar.stop()

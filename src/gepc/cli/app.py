"""The application and what its commands share: messages, errors, tables and progress bars."""

import contextlib
import errno
import io
import itertools
import json
import os
import shlex
import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import typer
from typer import Option

from gepc._version import __version__
from gepc.core.errors import GepcError, StorageError, raising
from gepc.core.plugins import run_file
from gepc.core.progress import progress as progress

new_app = partial(
    typer.Typer,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
"""A group of commands; called without a command it shows its help."""


app = new_app(name="gepc", help="Detect out-of-distribution images with a diffusion model.", add_completion=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"gepc {__version__}")
        raise typer.Exit


def _run_plugins(paths: list[Path] | None) -> list[Path]:
    for path in paths or []:
        run_file(path)
    return paths or []  # typer passes on what a callback returns, and its older versions expect a list


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    plugin: Annotated[
        list[Path] | None,
        Option(callback=_run_plugins, help="Python file that registers methods or features; any command takes it."),
    ] = None,
) -> None:
    pass


def say(text: str = "") -> None:
    """Print a line of results to standard output."""
    with printing():
        print(text)


def printing() -> contextlib.AbstractContextManager[None]:
    """Raise `StorageError` if standard output cannot be written; a closed pipe is not an error."""
    return raising(StorageError, "cannot write to standard output: {reason}", OSError, passing=BrokenPipeError)


def note(text: str) -> None:
    """Print a message to standard error, so that results can be piped."""
    print(text, file=sys.stderr, flush=True)


def show_warning(arguments: Sequence[str], message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning of the command `arguments` as one line, without the line of source code that Python adds."""
    note(f"warning: {message}{_flags(message, arguments)}")


def run(arguments: list[str] | None = None) -> int:
    """Run the command line. Invalid input gives a one-line message and exit code 2, never a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    warnings.showwarning = partial(show_warning, arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold bytes that are not text
    with _deterministic():
        code = _run(arguments)
    if code == 130:  # Ctrl-C, which typer turns into this exit code
        note("stopped; the same command continues an unfinished run")
    try:
        with printing():
            if sys.stdout:  # None if the process was started without a standard output
                sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except StorageError as error:
        _drop_output()
        if code == 0:
            note(f"error: {error}")
            code = 2
    return code


def _deterministic() -> contextlib.AbstractContextManager[None]:
    if os.environ.get("GEPC_DETERMINISTIC") != "1":
        return contextlib.nullcontext()
    from gepc.backbones.devices import deterministic

    return deterministic()


def _drop_output() -> None:
    """Discard buffered output: the interpreter would otherwise fail on it again at exit."""
    with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    try:
        code = app(args=_plugins_first(arguments), standalone_mode=False)
    except GepcError as error:
        note(f"error: {_installable(str(error))}{_flags(error, arguments)}")
        return 2
    except typer.Exit as stop:
        code = stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        note(f"error: {(error.strerror or str(error)).lower()}: {error.filename or 'standard output'}")
        return 2
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed
            return 0
        # typer vendors its own click: usage errors are recognised by their methods, not by their class
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            note(f"error: {error.format_message()}")
            return 2
        raise
    return code if isinstance(code, int) else 0


def _plugins_first(arguments: list[str]) -> list[str]:
    """The arguments with `--plugin FILE`, which belongs to all commands, before the command."""
    first, rest, words = list[str](), list[str](), iter(arguments)
    for word in words:
        if word == "--plugin":
            first += [word, *itertools.islice(words, 1)]
        else:
            (first if word.startswith("--plugin=") else rest).append(word)
    return [*first, *rest]


def _installable(message: str) -> str:
    """The message, with extras of the folder or file that this package was installed from, if it was."""
    with contextlib.suppress(PackageNotFoundError, ValueError):
        origin = json.loads(distribution("gepc").read_text("direct_url.json") or "{}")
        place = urlsplit(origin.get("url", ""))
        if place.scheme == "file":
            editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
            return message.replace("pip install 'gepc[", f"pip install {editable}'{url2pathname(place.path)}[")
    return message


def _flags(message: Exception | str, arguments: Sequence[str]) -> str:
    """Say how the command spells the `options` that an error or a warning of the library names.

    An option without a flag of its own is given with `--set`, if the command has it.
    """
    options: tuple[str, ...] = getattr(message, "options", ())
    command: Any = typer.main.get_command(app)
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    flags = {parameter.name: parameter.opts[0] for parameter in command.params}
    spelt = [flags.get(name, f"--set {name}=..." if "settings" in flags else "") for name in options]
    shown = [flag for flag in spelt if flag.startswith("--") and flag not in str(message)]
    return f" (on the command line: {', '.join(shown)})" if shown else ""


def typed_command() -> str:
    """The command line of this process, for reports and hints."""
    return shlex.join(["gepc", *sys.argv[1:]])


def several(count: int, noun: str) -> str:
    """A number with its noun: 1 image, 2 images, 1,000 passes."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def text_table(rows: Iterable[Sequence[object]], headers: Sequence[str] = ()) -> str:
    """Rows in aligned columns. With headers, all columns but the first are aligned to the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(headers))
    for position, header in enumerate(headers):
        table.add_column(header, justify="right" if position else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    text = io.StringIO()
    Console(file=text, width=1000, markup=False, highlight=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

"""`gepc` in a process of its own that need not import torch again: a copy of this process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path

Finished = subprocess.CompletedProcess[str]


def _command(place: Path, arguments: list[str], outputs: list[Path], before: Callable[[], None] | None) -> None:
    os.chdir(place)
    for number, (name, path) in enumerate(zip(("stdout", "stderr"), outputs, strict=True), start=1):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)
        setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115, it stays open until the process ends
    warnings.resetwarnings()
    if before is not None:
        before()
    from gepc.cli import main

    sys.argv = ["gepc", *arguments]
    main()


def start(place: Path, *arguments: object, outputs: Path, before: Callable[[], None] | None = None) -> ForkProcess:
    """Start the command in the folder `place`; what it prints goes into the folder `outputs`.

    `before` is called in the new process, where it may replace functions. `exitcode` is negative after a signal.
    """
    outputs.mkdir(parents=True, exist_ok=True)
    files = [outputs / "stdout", outputs / "stderr"]
    process = multiprocessing.get_context("fork").Process(
        target=_command, args=(place, [str(argument) for argument in arguments], files, before)
    )
    process.start()
    return process


def gepc(place: Path, *arguments: object, outputs: Path, before: Callable[[], None] | None = None) -> Finished:
    """Run the command in the folder `place` to its end."""
    process = start(place, *arguments, outputs=outputs, before=before)
    process.join()
    assert process.exitcode is not None
    printed = [(outputs / name).read_text() for name in ("stdout", "stderr")]
    return Finished([str(argument) for argument in arguments], process.exitcode, *printed)

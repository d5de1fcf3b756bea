"""The command line as the tests of this folder call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest


class Run(NamedTuple):
    """What a command ended with."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def gepc(place, monkeypatch, capsys) -> Callable[..., Run]:
    """The command line inside this process and the folder `place`, which spares the import of torch."""
    from gepc.cli.app import run

    def call(*arguments: object) -> Run:
        monkeypatch.chdir(place)
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Run(code, *capsys.readouterr())

    return call

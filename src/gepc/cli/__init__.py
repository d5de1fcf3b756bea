"""The command line. It is the only part of the package that prints."""

import sys

from gepc.cli.app import app, run
from gepc.cli.backbones import convert, export, info, train
from gepc.cli.data import data
from gepc.cli.detect import fit, map_, scene, serve, watch
from gepc.cli.evaluate import ablate, bench, choose, demo, reproduce, selfcheck
from gepc.cli.sar import sar
from gepc.cli.score import score
from gepc.core.allocator import keep_freed_memory

__all__ = ["main"]

PANELS = {
    "Get started": (demo, choose, selfcheck),
    "Detect": (fit, score, map_, scene, watch, serve),
    "Backbones": (info, convert, train, export),
    "Evaluate": (bench, ablate, reproduce),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(name=command.__name__.rstrip("_"), rich_help_panel=panel)(command)
for group in (data, sar):
    app.add_typer(group, rich_help_panel="Evaluate")


def main() -> None:
    """Entry point of `gepc` and `python -m gepc`."""
    keep_freed_memory()
    sys.exit(run())

"""The command line. It is the only part of the package that prints."""

import sys

from gepc.cli.app import app, run
from gepc.cli.backbones import convert, export, info
from gepc.cli.detect import fit, map_, scene, serve, watch
from gepc.cli.score import report, score
from gepc.core.allocator import keep_freed_memory
from gepc.core.isolation import isolate_children
from gepc.core.plugins import plugins

__all__ = ["main"]

PANELS = {"Detect": (fit, score, report, map_, scene, watch, serve), "Backbones": (info, convert, export)}
PANEL_ORDER = ("Get started", "Detect", "Backbones", "Evaluate")
for panel, commands in PANELS.items():
    for command in commands:
        app.command(name=command.__name__.rstrip("_"), rich_help_panel=panel)(command)
for add_commands in plugins("gepc.commands").values():
    add_commands(app)
app.registered_commands.sort(key=lambda command: PANEL_ORDER.index(command.rich_help_panel or "Evaluate"))


def main() -> None:
    """Entry point of `gepc` and `python -m gepc`."""
    isolate_children()
    keep_freed_memory()
    sys.exit(run())

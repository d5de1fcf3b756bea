"""The command line: the only room that prints."""

from __future__ import annotations

import sys

from gepc.cli.app import run

__all__ = ["main"]


def main() -> None:
    """Entry point of `gepc` and `python -m gepc`."""
    sys.exit(run())

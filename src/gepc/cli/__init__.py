"""The command line: the only room that prints."""

from __future__ import annotations

import sys

# importing a module registers its commands
from gepc.cli import backbones as _backbones  # noqa: F401
from gepc.cli import bench as _bench  # noqa: F401
from gepc.cli import demo as _demo  # noqa: F401
from gepc.cli import detect as _detect  # noqa: F401
from gepc.cli import sar as _sar  # noqa: F401
from gepc.cli import scene as _scene  # noqa: F401
from gepc.cli import score as _score  # noqa: F401
from gepc.cli import selfcheck as _selfcheck  # noqa: F401
from gepc.cli import serve as _serve  # noqa: F401
from gepc.cli import train as _train  # noqa: F401
from gepc.cli import watch as _watch  # noqa: F401
from gepc.cli.app import run
from gepc.core.allocator import keep_freed_memory

__all__ = ["main"]


def main() -> None:
    """Entry point of `gepc` and `python -m gepc`."""
    keep_freed_memory()
    sys.exit(run())

"""What other packages add, by entry points: methods (`gepc.methods`) and backbones (`gepc.backbones`)."""

import warnings
from functools import cache
from importlib.metadata import entry_points
from typing import Any


@cache
def plugins(group: str) -> dict[str, Any]:
    """Name -> object of every entry point in `group`. A package that cannot be imported is left out with a warning."""
    found = {}
    for point in entry_points(group=group):
        try:
            found[point.name] = point.load()
        except Exception as error:  # noqa: BLE001, PERF203 (other packages may raise anything)
            package = point.dist.name if point.dist else point.value
            warnings.warn(f"{point.name!r} of {package} cannot be loaded as one of {group}: {error}", stacklevel=2)
    return found

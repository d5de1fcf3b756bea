"""What other packages add by entry points.

The groups are `gepc.methods` (methods), `gepc.features` (modules that register features of `gepc` and `gepc+`),
`gepc.backbones` (functions that give a backbone or the path of one), `gepc.networks` (classes of networks: the
`_class_name` in a folder's config.json, and a function (folder, config, device) -> Backbone that loads such a folder)
and `gepc.commands` (commands).
"""

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

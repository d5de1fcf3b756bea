"""Plug-ins: additions of other packages by entry points, and of the user by a file.

The groups are `gepc.methods` (methods), `gepc.features` (modules that register features of `gepc` and `gepc+`),
`gepc.backbones` (functions that give a backbone or the path of one), `gepc.networks` (classes of networks: the
`_class_name` in a folder's config.json, and a function (folder, config, device) -> Backbone that loads such a folder)
and `gepc.commands` (commands).
"""

import sys
import warnings
from functools import cache
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from gepc.core.errors import InputError, raising


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


def run_file(path: Path) -> None:
    """Run a Python file that the user has named, for the methods and features that it registers.

    Modules beside it are not found: only what is installed can be imported.
    """
    name = f"gepc_plugin_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InputError(f"{path} is not a Python file; a plug-in is a file such as my_method.py")
    sys.modules[name] = module = module_from_spec(spec)
    with raising(InputError, f"{path} cannot be run: {{error}}", Exception):
        spec.loader.exec_module(module)

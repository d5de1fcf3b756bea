"""Out-of-distribution detection with diffusion models: scores, p-values with a guarantee, and maps.

    import gepc

    backbone = gepc.load_backbone("photos-small")
    detector = gepc.create_detector(backbone).fit(id_images)
    detector.score(images), detector.p_value(images), detector.score_map(images)

Each name is loaded on first use, so that `import gepc` is fast. The stub `__init__.pyi` lists the names once, for type
checkers and for this module.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_LISTED = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
_MODULE_OF = {
    name.name: str(line.module) for line in _LISTED if isinstance(line, ast.ImportFrom) for name in line.names
}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'gepc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

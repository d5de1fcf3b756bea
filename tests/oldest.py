"""Print the oldest versions that pyproject.toml allows, as constraints for pip.

`python tests/oldest.py [NAME=VERSION ...]`: a version that is given replaces the oldest one where there is no
build for this machine.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomllib

EXTRAS = ("train", "parquet", "frame", "report", "demo", "scenes", "serve", "onnx")  # of `all`, and onnx
NOT_NEWER = ("click<8.3", "huggingface-hub<1")  # what the oldest versions need of packages that they do not bound


def oldest(pyproject: Path) -> dict[str, str]:
    """Name -> lowest version of every requirement of the package and of the extras."""
    project = tomllib.loads(pyproject.read_text())["project"]
    requirements = [*project["dependencies"]]
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    bounds = (re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)", requirement) for requirement in requirements)
    return {bound[1]: bound[2] for bound in bounds if bound}


if __name__ == "__main__":
    versions = oldest(Path(__file__).parents[1] / "pyproject.toml")
    versions |= dict(argument.split("=") for argument in sys.argv[1:])
    lines = [f"{name}=={version}" for name, version in versions.items()]
    sys.stdout.write("\n".join([*lines, *NOT_NEWER, ""]))

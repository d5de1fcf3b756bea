"""Print the oldest versions that pyproject.toml allows, as constraints for pip: `python tests/oldest.py [NAME=VERSION ...]`.

A version that is given replaces the oldest one, for instance where there is no build for this machine.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("train", "parquet", "frame", "report", "demo", "scenes", "serve")  # of `all`


def oldest(pyproject: Path) -> dict[str, str]:
    """Name -> lowest version of every requirement of the package and of the extras in `all`."""
    project = tomllib.loads(pyproject.read_text())["project"]
    requirements = [*project["dependencies"]]
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    bounds = (re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)", requirement) for requirement in requirements)
    return {bound[1]: bound[2] for bound in bounds if bound}


if __name__ == "__main__":
    versions = oldest(Path(__file__).parents[1] / "pyproject.toml")
    versions |= dict(argument.split("=") for argument in sys.argv[1:])
    print("\n".join(f"{name}=={version}" for name, version in versions.items()))

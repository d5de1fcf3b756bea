"""`import gepc` is quick because nothing heavy loads with it, and every public name is there when asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest

import gepc

HEAVY = ("torch", "diffusers", "numpy", "scipy", "sklearn", "PIL", "safetensors", "yaml", "typer", "matplotlib")


def test_importing_loads_nothing_heavy() -> None:
    """In a fresh interpreter; listing the names loads nothing either."""
    code = f"import sys, gepc; dir(gepc); print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_dir_lists_the_public_names() -> None:
    assert set(dir(gepc)) == set(gepc.__all__)
    assert {"GEPC", "Backbone", "load_backbone", "load_detector", "create_detector", "list_detectors"} <= set(dir(gepc))


@pytest.mark.parametrize("name", gepc.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(gepc, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'GPEC'"):
        gepc.GPEC  # noqa: B018


def test_the_package_is_typed() -> None:
    assert files("gepc").joinpath("py.typed").is_file()

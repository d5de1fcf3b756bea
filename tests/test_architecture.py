"""docs/architecture.md is true: its layers are import-linter's, and it names every module of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

tomllib: Any = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "gepc"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLE = PAGE[PAGE.index("<!-- layers begin -->") : PAGE.index("<!-- layers end -->")]
ROWS = re.findall(r"^\| (\d+) \| `(\w+)/?` \|(.*?)\| (.*?) \|$", TABLE, re.MULTILINE)


def test_the_layers_are_those_that_lint_checks() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    layers = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
    expected = [(str(number), name) for number, layer in enumerate(layers, start=1) for name in layer]
    assert [(number, name) for number, name, _, _ in ROWS] == expected


@pytest.mark.parametrize("package", sorted(path.parent.name for path in SOURCE.glob("*/__init__.py")))
def test_every_module_is_named(package: str) -> None:
    folder = SOURCE / package
    found = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.py")}
    expected = {name.removesuffix("/__init__") for name in found} - {"__init__"}
    (named,) = (set(re.findall(r"`([\w/]+)`", modules)) for _, name, modules, _ in ROWS if name == package)
    assert named == expected


def test_no_class_is_longer_than_300_lines() -> None:
    classes = [
        (node.end_lineno - node.lineno + 1, node.name)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None
    ]
    assert max(classes) < (301, "")

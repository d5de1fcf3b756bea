"""Methods and backbones of other packages, by entry points: a tiny package that this test makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CODE = '''
from dataclasses import dataclass

import numpy as np

import gepc
from gepc.lab.analytic import GaussianBackbone
from gepc.methods.base import Cost, PerLevel, register


@register("tiny_norm")
@dataclass(frozen=True)
class TinyNorm(PerLevel):
    """The size of the predicted noise."""

    levels: gepc.Levels = gepc.Levels.rho(0.1, 0.3)

    def level_cost(self, size):
        return Cost(forward=1)

    def at_level(self, backbone, batch, t):
        x_t, _ = batch.noised(backbone, t)
        return {"tiny_norm": backbone.eps(x_t, t).square().mean((1, 2, 3))}


def network():
    return GaussianBackbone(np.linspace(-0.3, 0.3, 64).reshape(1, 8, 8), 0.3, (1, 8, 8))


def folder():
    from gepc.backbones.load import WEIGHTS

    return WEIGHTS / "celeba32-tiny"
'''
POINTS = """
[gepc.methods]
tiny_norm = tiny_gepc:TinyNorm
broken = tiny_gepc:Missing

[gepc.backbones]
tiny-gaussian = tiny_gepc:network
tiny-folder = tiny_gepc:folder
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package as an installer lays it out: a module and its metadata."""
    (tmp_path / "tiny_gepc.py").write_text(CODE)
    info = tmp_path / "tiny_gepc-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-gepc\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(POINTS)
    return tmp_path


def _python(package: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)


def test_an_installed_package_adds_methods_and_backbones(package: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.random.default_rng(0).uniform(-1, 1, (30, 1, 8, 8)))
    code = f"""
import json, gepc
from gepc.cli.app import run
import gepc.cli
folder = {str(tmp_path)!r}
assert run(["fit", folder + "/images.npy", "--out", folder + "/det", "--method", "tiny_norm",
            "--backbone", "tiny-gaussian"]) == 0
detector = gepc.load_detector(folder + "/det", gepc.load_backbone("tiny-gaussian"))
scores = detector.score(folder + "/images.npy")
print(json.dumps({{
    "names": [n for n in gepc.list_detectors() + gepc.list_backbones() if n.startswith("tiny")],
    "backbone": detector.backbone.family,
    "scores": len(scores),
    "folder": gepc.load_backbone("tiny-folder").source,
}}))
"""
    done = _python(package, code)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "names": ["tiny_norm", "tiny-folder", "tiny-gaussian"],
        "backbone": "gaussian",
        "scores": 30,
        "folder": "tiny-folder",
    }
    assert "'broken' of tiny-gepc cannot be loaded as one of gepc.methods" in done.stderr

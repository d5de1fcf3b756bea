"""No command runs code that lies in the working directory, not even the processes that it starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from importlib.metadata import packages_distributions
from pathlib import Path

import numpy as np
import pytest
from toys import as_uint8, pictures

import gepc

SOURCES = Path(gepc.__file__).parents[1]
TRAP = "open({marks!r} + '/' + __name__, 'w').close()\n"  # without an import, which would be another trap
HELP = ("serve", "export", "convert", "train", "bench", "demo", "ablate", "reproduce", "sar", "data")
COMMANDS = """
import json, sys
from gepc.cli.app import run
from gepc.core.isolation import isolate_children
if __name__ == "__main__":
    isolate_children()
    print(json.dumps([run(command) for command in json.loads(sys.argv[1])]))
"""


def _program(folder: Path, text: str) -> str:
    """A script in a folder of its own, as installers write them: Python searches that folder first."""
    folder.mkdir(exist_ok=True)
    (folder / "gepc").write_text(text)
    return str(folder / "gepc")


@pytest.fixture
def folder(tmp_path: Path, saved: Path) -> Path:
    """A working directory with images, where every module that Python or a package has is replaced by a trap."""
    place, marks = tmp_path / "photos", tmp_path / "marks"
    shutil.copytree(saved.parent, place)
    marks.mkdir()
    (place / "images").mkdir()
    for number, pixels in enumerate(as_uint8(pictures(60, 16))):
        np.save(place / "images" / f"{number}.npy", pixels)
    for name in {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "usercustomize"}:
        if name.isidentifier():
            (place / f"{name}.py").write_text(TRAP.format(marks=str(marks)))
    return place


def _environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", **variables}


def _sprung(folder: Path) -> set[str]:
    return {path.name for path in (folder.parent / "marks").iterdir()}


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=300)
    assert _sprung(folder) == set()
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_leaves_the_modules_of_the_working_directory_alone(folder: Path) -> None:
    """Really, where a command starts processes or imports much; otherwise its help, which imports the module."""
    np.save(folder / "scene.npy", as_uint8(pictures(1, 48))[0])
    network = ["--backbone", "net"]
    commands = [
        ["fit", "images", "--out", "new", *network, "--method", "score_norm", "--set", "size=16"],
        ["info", "det"],
        ["score", "det", "images", "--out", "s.csv", "--workers", "1", *network],
        ["map", "det", "images/1.npy", "--out", "maps", *network],
        ["scene", "det", "scene.npy", "--out", "scene", *network],
        ["watch", "det", "images", "--out", "log.csv", "--once", *network],
        *([name, "--help"] for name in HELP),
    ]
    program = _program(folder.parent / "bin", COMMANDS)
    codes = json.loads(_run(folder, sys.executable, program, json.dumps(commands)).splitlines()[-1])
    assert dict(zip(map(" ".join, commands), codes, strict=True)) == dict.fromkeys(map(" ".join, commands), 0)


def test_the_module_as_a_program_leaves_them_alone(folder: Path) -> None:
    """`python -m` puts the working directory first; what is imported before `gepc` runs cannot be helped."""
    used = ("PIL", "diffusers", "json", "numpy", "rich", "safetensors", "scipy", "torch", "typer", "yaml")
    for path in folder.glob("*.py"):
        if path.stem not in used:
            path.unlink()
    _run(folder, sys.executable, "-m", "gepc", "info", "det")


def test_the_service_leaves_them_alone(folder: Path) -> None:
    httpx = pytest.importorskip("httpx2")
    main = "from gepc.cli import main\nif __name__ == '__main__':\n    main()\n"
    program = _program(folder.parent / "bin", main)
    command = [sys.executable, program, "serve", "det", "--backbone", "net", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=_environment(), **pipes) as process:
        alarm = threading.Timer(300, process.kill)
        alarm.start()
        address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert address, process.stderr.read()
        form = [("images", ("1.npy", (folder / "images" / "1.npy").read_bytes()))]
        answer = httpx.post(f"{address[0]}/v1/score", files=form, timeout=300)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        alarm.cancel()
    assert answer.status_code == 200, answer.text
    assert "score" in answer.json()["results"][0]
    assert _sprung(folder) == set()


CLUSTER = """
import json, sys
from gepc.core.isolation import isolate_children
from gepc.runs.cluster import Cluster
if __name__ == "__main__":
    isolate_children()
    with Cluster().joined() as ray:
        print(json.dumps(ray.get(ray.remote(lambda: sys.path).remote())))
"""


@pytest.mark.ray
def test_workers_of_a_cluster_leave_them_alone(folder: Path) -> None:
    pytest.importorskip("ray")
    paths = json.loads(_run(folder, sys.executable, _program(folder.parent / "bin", CLUSTER)))
    assert str(SOURCES) in paths
    assert str(folder) not in paths


def test_the_traps_work(folder: Path) -> None:
    """With the working directory first on the search path, as a process of `python -c` has it."""
    command = [sys.executable, "-c", "import colorsys"]
    subprocess.run(command, cwd=folder, env=_environment(PYTHONSAFEPATH=""), check=False)
    assert "colorsys" in _sprung(folder)

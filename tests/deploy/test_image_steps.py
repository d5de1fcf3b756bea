"""The steps of deploy/Dockerfile in a clean virtual environment. Takes minutes and installs torch, so it is asked for:

GEPC_IMAGE_TEST=1 python -m pytest tests/deploy/test_image_steps.py

Every instruction is carried out but FROM and EXPOSE, which have no meaning outside of a container, and `useradd`, which
would change this machine. Run by root, the service runs as the image's user, who may read the environment and the
detector, and may write nowhere.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
TOKEN = "0123456789abcdef"

pytestmark = pytest.mark.skipif("GEPC_IMAGE_TEST" not in os.environ, reason="set GEPC_IMAGE_TEST=1: it installs torch")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may read, unlike `tmp_path`."""
    made = Path(tempfile.mkdtemp(prefix="gepc-image-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


class Image:
    """What the instructions of a Dockerfile leave behind, with another folder in place of /opt/gepc."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.environment_folder, self.port = folder, folder / "gepc", str(_free_port())
        ours = ("PYTHONPATH", "VIRTUAL_ENV")  # of these tests, not of an image
        self.environment = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("GEPC_")}
        self.work = folder
        self.user: int | None = None
        self.entry: list[str] = []
        self.command: list[str] = []
        self.check: list[str] = []
        self.done: list[str] = []

    def carry_out(self, name: str, arguments: str) -> None:
        """One instruction; one that this class does not know is an error."""
        arguments = arguments.replace("/opt/gepc", str(self.environment_folder)).replace("8000", self.port)
        getattr(self, f"_{name.lower()}")(arguments)
        self.done.append(name)

    def _from(self, arguments: str) -> None:
        assert arguments.startswith("python:3.11-slim")

    def _workdir(self, arguments: str) -> None:
        self.work = self.folder / arguments.lstrip("/")
        self.work.mkdir()

    def _arg(self, arguments: str) -> None:
        name, _, default = arguments.partition("=")
        self.environment.setdefault(name, default)

    def _env(self, arguments: str) -> None:
        for name, value in (item.split("=", 1) for item in shlex.split(arguments)):
            self.environment[name] = value.replace(f"${name}", self.environment.get(name, ""))

    def _copy(self, arguments: str) -> None:
        *sources, target = arguments.split()
        if sources[0].startswith("--from="):
            assert sources[1:] == [target] == [str(self.environment_folder)]  # an environment cannot be moved
            return
        for source in sources:
            place = self.work / target / (source if target in (".", "./") else "")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place)

    def _run(self, arguments: str) -> None:
        if arguments.startswith("useradd"):
            return
        command = re.sub(r"^python ", f"{shlex.quote(_interpreter())} ", arguments)
        subprocess.run(command, shell=True, cwd=self.work, env=self.environment, check=True)

    def _user(self, arguments: str) -> None:
        self.user = int(arguments) if os.geteuid() == 0 else None

    def _expose(self, arguments: str) -> None:
        assert arguments == self.port

    def _entrypoint(self, arguments: str) -> None:
        self.entry = json.loads(arguments)

    def _cmd(self, arguments: str) -> None:
        self.command = json.loads(arguments)

    def _healthcheck(self, arguments: str) -> None:
        self.check = json.loads(arguments.partition("CMD")[2])

    @property
    def as_user(self) -> dict[str, Any]:
        """How to start a process in the image: its user, who has no home here, and its environment."""
        found: dict[str, Any] = {"env": {**self.environment, "HOME": "/nonexistent"}, "cwd": "/"}
        return found if self.user is None else {**found, "user": self.user, "group": self.user, "extra_groups": []}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _interpreter() -> str:
    """A Python 3.11 that any user may run: that of the system if there is one, else the one of these tests."""
    return shutil.which("python3.11", path="/usr/local/bin:/usr/bin") or os.path.realpath(sys.executable)


def test_the_steps_of_the_image(folder: Path) -> None:
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    image = Image(folder)
    for line in filter(str.strip, text.splitlines()):
        image.carry_out(*line.split(None, 1))
    assert {"RUN", "COPY", "USER", "HEALTHCHECK", "ENTRYPOINT", "CMD"} <= set(image.done)
    np.save(folder / "images.npy", np.random.default_rng(0).integers(0, 255, (60, 32, 32, 3), dtype=np.uint8))
    detector, gepc = str(folder / "det"), str(image.environment_folder / "bin" / "gepc")
    subprocess.run([gepc, "fit", "images.npy", "--out", detector], env=image.environment, cwd=folder, check=True)

    start = [*image.entry, *(word.replace("/detector", detector) for word in image.command)]
    start[0] = str(image.environment_folder / "bin" / start[0])  # Popen looks it up in the PATH of these tests
    image.check[0] = str(image.environment_folder / "bin" / image.check[0])
    refused = subprocess.run(start, **image.as_user, capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0
    assert "GEPC_TOKEN" in refused.stderr

    image.environment["GEPC_TOKEN"] = TOKEN
    service = subprocess.Popen(start, **image.as_user)
    try:
        _wait_until_healthy(image, service)
        described = f"http://127.0.0.1:{image.port}/v1/detector"
        asked = urllib.request.Request(described, headers={"Authorization": f"Bearer {TOKEN}"})
        assert json.load(urllib.request.urlopen(asked, timeout=10))["method"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(described, timeout=10)
        if image.user is not None:
            assert f"Uid:\t{image.user}\t" in Path(f"/proc/{service.pid}/status").read_text()
    finally:
        service.terminate()
        code = service.wait(timeout=70)
    assert code in (0, -signal.SIGTERM)
    assert subprocess.run(image.check, **image.as_user, capture_output=True).returncode != 0


def _wait_until_healthy(image: Image, service: subprocess.Popen[bytes]) -> None:
    for _ in range(120):
        if subprocess.run(image.check, **image.as_user, capture_output=True).returncode == 0:
            return
        assert service.poll() is None, "the service has ended"
        time.sleep(1.0)
    pytest.fail("the health check of the image fails")

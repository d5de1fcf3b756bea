"""The steps of deploy/Dockerfile in a clean virtual environment. Takes minutes and downloads torch, so it is asked for:

GEPC_IMAGE_TEST=1 python -m pytest tests/deploy/test_image_steps.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
TOKEN = "0123456789abcdef"

pytestmark = pytest.mark.skipif("GEPC_IMAGE_TEST" not in os.environ, reason="set GEPC_IMAGE_TEST=1: it installs torch")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_steps_of_the_image(tmp_path: Path) -> None:
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy" / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    build, place, port = tmp_path / "build", tmp_path / "gepc", str(_free_port())
    build.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{place / 'bin'}{os.pathsep}{environment['PATH']}"
    start: list[str] = []
    check: list[str] = []
    for line in filter(str.strip, text.splitlines()):
        name, arguments = line.split(None, 1)
        arguments = arguments.replace("/opt/gepc", str(place)).replace("8000", port)
        if name == "ARG":
            key, _, default = arguments.partition("=")
            environment.setdefault(key, default)
        elif name == "ENV":
            environment |= dict(item.split("=", 1) for item in arguments.split() if not item.startswith("PATH="))
        elif name == "COPY" and "--from" not in arguments:
            *sources, target = arguments.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, build / source if target in (".", "./") else build / target)
        elif name == "RUN" and "useradd" not in arguments:
            subprocess.run(arguments, shell=True, cwd=build, env=environment, check=True)
        elif name in ("ENTRYPOINT", "CMD"):
            start += json.loads(arguments)
        elif name == "HEALTHCHECK":
            check = json.loads(arguments.partition("CMD")[2])
    np.save(tmp_path / "images.npy", np.random.default_rng(0).integers(0, 255, (60, 32, 32, 3), dtype=np.uint8))
    detector = str(tmp_path / "det")
    fit = ["gepc", "fit", str(tmp_path / "images.npy"), "--out", detector]
    subprocess.run(fit, env=environment, cwd=tmp_path, check=True)
    environment["GEPC_TOKEN"] = TOKEN
    service = subprocess.Popen([word.replace("/detector", detector) for word in start], env=environment, cwd=tmp_path)
    try:
        _wait_until_healthy(check, environment)
        described = f"http://127.0.0.1:{port}/v1/detector"
        asked = urllib.request.Request(described, headers={"Authorization": f"Bearer {TOKEN}"})
        assert json.load(urllib.request.urlopen(asked, timeout=10))["method"]
    finally:
        service.terminate()
        service.wait(timeout=70)


def _wait_until_healthy(check: list[str], environment: dict[str, str]) -> None:
    for _ in range(120):
        if subprocess.run(check, env=environment, capture_output=True).returncode == 0:
            return
        time.sleep(1.0)
    pytest.fail("the health check of the image fails")

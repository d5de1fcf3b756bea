"""Detectors on the hub: pushed to, and loaded from, a local server that speaks the hub's HTTP interface."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import gepc
from gepc.backbones.load import is_hub_id
from gepc.core.errors import InputError

pytestmark = pytest.mark.usefixtures("trusted")

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """One repository in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.created: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        self.server.requests.append(f"{self.command} {self.path}")

    def _answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": SHA, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object, status: int = 200) -> None:
        self._answer(json.dumps(value).encode(), status, Content_Type="application/json")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer hf_test":
            self._json({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            self._json({"url": f"{self.server.address}/org/det"})
        elif self.path.endswith("/preupload/main"):
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self._json({"files": files})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._json({"commitUrl": f"{self.server.address}/org/det/commit/{SHA}", "commitOid": SHA})
        else:  # validation of the card's metadata
            self._json({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/org/det/tree"):
            kinds = {"type": "file", "oid": SHA}
            self._json([{**kinds, "path": name, "size": len(file)} for name, file in self.server.files.items()])
        elif path.startswith("/api/models/org/det"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._json({"id": "org/det", "modelId": "org/det", "sha": SHA, "siblings": siblings, "tags": []})
        elif path.startswith("/org/det/resolve/") and name in self.server.files:
            content = self.server.files[name]
            self._answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"')
        else:
            self._answer(b"", 404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")

    do_HEAD = do_GET


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


CODE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import gepc
from toys import pictures
from huggingface_hub import constants

backbone = gepc.load_backbone("net")
detector = gepc.GEPC(backbone, levels=(0.99, 0.9)).fit(pictures(60, size=16))
address = detector.push_to_hub("org/det", "random colour fields", {"AUROC, DTD": 0.93}, "apache-2.0", private=True)
images = pictures(4, size=16, seed=1)
again = gepc.load_detector("org/det", backbone)
np.testing.assert_array_equal(again.p_value(images), detector.p_value(images))
errors = []
for name in ("org/absent", "org/det"):
    try:
        gepc.load_detector(name)
    except gepc.GepcError as error:
        errors.append(str(error))
print(json.dumps({"address": address, "errors": errors}))
"""


def test_a_detector_goes_to_the_hub_and_comes_back(hub: Hub, tiny_net: Any, tmp_path: Path) -> None:
    from diffusers import DDPMScheduler

    tiny_net.save_pretrained(tmp_path / "work" / "net")
    DDPMScheduler(num_train_timesteps=100).save_pretrained(tmp_path / "work" / "net")
    code = tmp_path / "push.py"
    code.write_text(CODE.replace('"net"', repr(str(tmp_path / "work" / "net"))))
    environment = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_test"}
    done = subprocess.run(
        [sys.executable, code, str(Path(__file__).parent.parent)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr + "\n".join(hub.requests)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["address"] == f"{hub.address}/org/det"
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    assert set(hub.files) == {"README.md", "detector.json", "state.safetensors"}
    facts = json.loads(hub.files["detector.json"])
    assert facts["backbone"]["source"] == "net"  # not the path on this machine
    assert str(tmp_path) not in hub.files["detector.json"].decode()
    _check_card(hub.files["README.md"].decode(), facts)
    absent, without_backbone = found["errors"]
    assert absent.startswith("there is no folder org/absent, and the hub did not give it: ")
    assert "'net'" in without_backbone  # where the weights are is for the user to say
    assert not any("README" in line for line in hub.requests if line.startswith("GET /org"))


def _check_card(card: str, facts: dict[str, Any]) -> None:
    _, metadata, body = card.split("---\n", 2)
    about = yaml.safe_load(metadata)
    assert about["library_name"] == "gepc"
    assert about["license"] == "apache-2.0"
    assert "out-of-distribution-detection" in about["tags"]
    for text in (
        "# org/det",
        "random colour fields (40 images)",
        "20 further images",
        f"net, SHA-256 `{facts['backbone']['sha256']}`",
        "at most 0.05 of in-distribution images raise an alarm",
        "| AUROC, DTD | 0.93 |",
        'gepc.load_detector("org/det")',
    ):
        assert text in body


@pytest.mark.parametrize(
    ("name", "expected"),
    [("org/name", True), ("org/name-1.0", True), ("name", False), ("a/b/c", False), ("../x", False), ("/abs", False)],
)
def test_what_may_be_on_the_hub(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "det").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"org/det holds no detector\.json"):
        gepc.load_detector("org/det")

"""Detectors on the hub, loaded from a local server that speaks the hub's HTTP interface."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import numpy as np
import pytest
from toys import pictures, toy_backbone, toy_detector

import gepc
from gepc.backbones.load import is_hub_id
from gepc.core.errors import BackboneError, InputError

pytestmark = pytest.mark.usefixtures("trusted")

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """One repository in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []

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


def test_a_detector_comes_from_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two files alone are downloaded; the backbone is the user's."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    download = partial(huggingface_hub.snapshot_download, endpoint=hub.address, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    detector = toy_detector().fit(pictures(30))
    detector.save(tmp_path / "det")
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "det").iterdir()}
    hub.files["README.md"] = b"# A model card"
    again = gepc.load_detector("org/det", toy_backbone())
    np.testing.assert_array_equal(again.calibration_scores_, detector.calibration_scores_)
    with pytest.raises(BackboneError, match="pass it: load_detector"):
        gepc.load_detector("org/det")
    with pytest.raises(InputError, match="there is no folder org/absent, and the hub did not give it: "):
        gepc.load_detector("org/absent")
    assert any("detector.json" in line for line in hub.requests)
    assert not any("README" in line for line in hub.requests)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("org/name", True), ("org/name-1.0", True), ("name", False), ("a/b/c", False), ("../x", False), ("/abs", False)],
)
def test_what_may_be_on_the_hub(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "det").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"org/det contains no detector\.json"):
        gepc.load_detector("org/det")

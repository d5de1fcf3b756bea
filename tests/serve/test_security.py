"""Access, limits on requests, and headers of responses."""

import io
import re
import tracemalloc

import numpy as np
import pytest
from PIL import Image
from serving import as_form, png

from gepc.core.errors import OptionError
from gepc.serve import Settings
from gepc.serve.app import STATIC
from gepc.serve.middleware import CONTENT_POLICY
from gepc.serve.server import is_loopback

pytestmark = pytest.mark.usefixtures("trusted")

TOKEN = "correct-horse-battery"


def test_every_answer_carries_strict_headers(client, files):
    answers = [client.get(path) for path in ("/", "/static/app.js", "/healthz", "/nothing", "/v1/detector?alpha=9")]
    answers.append(client.get("/", headers={"host": "evil.example"}))
    for answer in answers:
        assert answer.headers["content-security-policy"] == CONTENT_POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in answer.headers
    assert client.get("/v1/detector").headers["cache-control"] == "no-store"


def test_the_page_holds_nothing_inline_and_nothing_from_elsewhere():
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path.name
        if path.suffix == ".html":
            assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", text), path.name
        if path.suffix == ".js":
            assert "innerHTML" not in text


@pytest.mark.parametrize("path", ["/v1/detector", "/v1/nothing", "/metrics"])
def test_a_token_is_asked_of_everything_but_the_page_and_health(serve, detector_folder, path):
    client = serve(detector_folder, token=TOKEN)
    for given in (None, "Bearer wrong", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer", "Bearer é"):
        headers = {} if given is None else {"authorization": given.encode("latin-1")}
        answer = client.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code != 401
    for public in ("/", "/healthz", "/readyz", "/static/app.js", "/openapi.json", "/docs"):
        assert client.get(public).status_code == 200


def test_a_token_is_asked_before_the_body_is_read(serve, detector_folder, files):
    client = serve(detector_folder, token=TOKEN)
    assert client.post("/v1/score", files=as_form(files[:1])).status_code == 401
    answer = client.post("/v1/score", files=as_form(files[:1]), headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200
    assert client.get("/openapi.json").json()["components"]["securitySchemes"]["token"]["scheme"] == "bearer"


def test_pages_of_other_sites_and_other_host_names_are_refused(client):
    assert client.get("/v1/detector", headers={"origin": "https://evil.example"}).status_code == 403
    for origin in ("null", "http://[::1", "http://127.0.0.1:8000.evil.example", ""):
        assert client.get("/v1/detector", headers={"origin": origin}).status_code == 403
    assert client.get("/v1/detector", headers={"origin": "http://127.0.0.1:8000"}).status_code == 200
    for host in ("evil.example", "", "127.0.0.1.evil.example:8000", "[::1"):
        assert client.get("/healthz", headers={"host": host}).status_code == 421
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200


def test_bytes_are_bounded_with_and_without_a_declared_length(client, files):
    large = b"x" * 2_000_001

    def pieces():
        for _ in range(300):
            yield b"x" * 10_000

    form = {"content-type": "multipart/form-data; boundary=b"}
    head = b'--b\r\nContent-Disposition: form-data; name="images"; filename="x"\r\n\r\n'
    declared = client.post("/v1/score", content=head + large, headers=form)
    assert declared.status_code == 413
    assert "2,000,000 bytes" in declared.json()["error"]
    assert client.post("/v1/score", content=iter([head, *pieces()]), headers=form).status_code == 413
    assert client.app.state.service.held_bytes.taken == 0


def test_the_bytes_of_all_requests_together_are_bounded(serve, detector_folder, files):
    client = serve(detector_folder, max_held_bytes=500)
    answer = client.post("/v1/score", files=as_form(files[:3]))
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert client.app.state.service.held_bytes.taken == 0


def test_nothing_is_written_to_disk(client, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3)).astype(np.uint8)
    big = [png(noise[:, :, ::step], "BMP") for step in (1, -1)] * 3  # well above the parser's usual limit in all
    monkeypatch.setattr("tempfile.SpooledTemporaryFile.rollover", _refuse)
    monkeypatch.setattr("tempfile.TemporaryFile", _refuse)
    assert sum(map(len, big)) > 1_500_000
    assert client.post("/v1/score", files=as_form(big)).status_code == 200


def _refuse(*_, **__):
    raise AssertionError("something is written to disk")


def test_a_decompression_bomb_is_refused_by_its_header(client):
    import struct
    import zlib

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    for side in (400, 20_000, 60_000, 2**31 - 1):
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        bomb = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
        tracemalloc.start()
        answer = client.post("/v1/score", files=as_form([bomb]))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert answer.status_code == 422
        assert "pixels" in answer.json()["error"]
        assert peak < 20_000_000


def test_other_formats_and_names_that_lie(client, images):
    for kind in ("ICO", "PDF", "EPS", "TGA", "PCX"):
        out = io.BytesIO()
        Image.fromarray(images[0]).save(out, format=kind)
        assert client.post("/v1/score", files=as_form([out.getvalue()], "x.png")).status_code == 422, kind
    for kind in ("JPEG", "BMP", "TIFF", "WEBP", "GIF", "PPM"):
        assert client.post("/v1/score", files=as_form([png(images[0], kind)], "x.txt")).status_code == 200, kind


def test_settings_are_checked():
    for wrong in ({"token": "short"}, {"token": "a b" * 9}, {"queue": 3}, {"max_bytes": 0}, {"timeout": 0}):
        with pytest.raises(OptionError):
            Settings(**wrong)
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")

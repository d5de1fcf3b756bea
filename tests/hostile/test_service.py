"""A service under attack: slow images, malformed headers, and a signal in every state."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="serving needs gepc[serve]")


@contextlib.contextmanager
def serving(saved, **settings):
    """A service in a thread of this process: its application and (host, port)."""
    from gepc.serve import Settings, create_app, listen
    from gepc.serve.server import make_server

    application = create_app(saved, Settings(**settings), str(saved.parent / "net"))
    listener, server = listen("127.0.0.1", 0), make_server(application)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield application, listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def live(saved):
    with serving(saved) as (_, place):
        yield place


@pytest.fixture(scope="module")
def client(saved):
    from starlette.testclient import TestClient

    from gepc.serve import Settings, create_app

    app = create_app(saved, Settings(), str(saved.parent / "net"))
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


@pytest.fixture(scope="module")
def picture(photo, tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("picture") / "x.png"
    Image.fromarray(photo).save(path)
    return path.read_bytes()


def form(*files: bytes):
    return [("images", ("x.jpg", data, "image/jpeg")) for data in files]


def post(place, *files: bytes):
    return httpx.post(f"http://127.0.0.1:{place[1]}/v1/score", files=form(*files), timeout=300)


def test_two_dozen_slow_images_hold_up_nobody(live, slow_jpeg: bytes, picture: bytes) -> None:
    with ThreadPoolExecutor(25) as pool:
        slow = [pool.submit(post, live, slow_jpeg) for _ in range(24)]
        assert pool.submit(post, live, picture).result().status_code == 200
        assert {answer.result().status_code for answer in slow} == {422}


def test_an_image_that_takes_too_long_is_given_up(saved, picture: bytes) -> None:
    with serving(saved) as (application, place):
        assert post(place, picture).status_code == 200
        decoders = application.state.service._decoders
        for decoder in decoders:
            decoder.seconds = 0.2
            if decoder._process is not None:
                decoder._process.send_signal(signal.SIGSTOP)
        assert 422 in {post(place, picture).status_code for _ in decoders}  # they take turns
        for decoder in decoders:
            decoder.seconds = 60
        assert {post(place, picture).status_code for _ in decoders} == {200}


def test_a_signal_ends_the_service_in_every_state(saved, picture: bytes) -> None:
    """Unfinished heads and bodies, idle connections, and an image whose decoder hangs: all at once."""
    command = [sys.executable, "-m", "gepc", "serve", "det", "--backbone", "net", "--port", "0", "--timeout", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=saved.parent, env=environment, text=True, **pipes) as process:
        place = ("127.0.0.1", int(re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())[1]))
        head = b"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        body = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        held = [socket.create_connection(place) for _ in range(5)]
        for connection, text in zip(held, [b"", head, head + body, b"\0", b"GET / HT"], strict=True):
            connection.sendall(text)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(post, place, picture)
            while not (decoders := decoding(process.pid)) and not waiting.done():
                time.sleep(0.01)
            for decoder in decoders:
                os.kill(decoder, signal.SIGSTOP)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)  # an idle machine takes the timeout of 1 s and at most 5 s more
            finally:
                process.kill()  # a hang has failed by now; the block would wait for the process
            waiting.exception()
        for connection in held:
            connection.close()
    assert not any(Path(f"/proc/{decoder}/exe").exists() for decoder in decoders)


def decoding(parent: int) -> list[int]:
    """The decoders that this process started and that still run.

    A process that is stopped between its fork and its own program would keep its parent waiting for ever.
    """
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, its_parent = place.read_text().rpartition(")")[2].split()[:2]
            is_decoder = b"gepc.images.decoder" in (place.parent / "cmdline").read_bytes()
            if int(its_parent) == parent and state != "Z" and is_decoder:
                found.append(int(place.parent.name))
    return found


@pytest.mark.parametrize("host", ["[", "evil.com@127.0.0.1", "127.0.0.1:99999999", "127.0.0.1/x", "localhost evil", ""])
def test_malformed_hosts_are_refused(client, host: str) -> None:
    assert client.get("/v1/detector", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "[::1]:80", "LOCALHOST"])
def test_proper_hosts_are_accepted(client, host: str) -> None:
    assert client.get("/v1/detector", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://[", "null", "http://127.0.0.1:8000@evil.com", "http://127.0.0.1:80000000"])
def test_malformed_origins_are_refused(client, origin: str) -> None:
    assert client.get("/v1/detector", headers={"origin": origin}).status_code == 403


@pytest.mark.parametrize(
    "charset",
    ["undefined", "punycode", "idna", "utf-16", "rot13", "zlib", "unicode_escape", "x" * 500, '"', "mbcs"],
)
def test_odd_encodings_are_answered(client, picture: bytes, charset: str) -> None:
    body = (
        b'--X\r\nContent-Disposition: form-data; name="images"; filename="a\xff.png"\r\n\r\n'
        + picture
        + b"\r\n--X--\r\n"
    )
    kind = f"multipart/form-data; boundary=X; charset={charset}"
    assert client.post("/v1/score", content=body, headers={"content-type": kind}).status_code in (200, 400, 422)

"""Broken images and random requests: an answer to each, never a 500, memory steady."""

import io
import socket
import tracemalloc
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image
from serving import as_form, png

pytestmark = pytest.mark.usefixtures("trusted")

KINDS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP")
FAIR = {200, 422}


def _ask(client, data):
    answer = client.post("/v1/score", files=as_form([data]))
    assert answer.status_code in FAIR, answer.text
    result = answer.json()["results"][0]
    assert (result["error"] is None) == (answer.status_code == 200)
    assert "/" not in (result["error"] or "")
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_files_cut_short_anywhere(client, images, kind):
    whole = png(images[0], kind)
    for length in {*range(0, min(64, len(whole)), 13), *np.linspace(0, len(whole) - 1, 12).astype(int).tolist()}:
        _ask(client, whole[:length])


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bytes(client, images, kind):
    rng = np.random.default_rng(0)
    whole = np.frombuffer(png(images[1], kind), dtype=np.uint8)
    for _ in range(15):
        damaged = whole.copy()
        # the head, where sizes and offsets stand, is hit most
        places = np.minimum(rng.exponential(80, rng.integers(1, 6)).astype(int), len(whole) - 1)
        damaged[places] = rng.integers(0, 256, len(places))
        _ask(client, damaged.tobytes())


@pytest.mark.filterwarnings("ignore::gepc.images.formats.FirstFrameWarning")
def test_unusual_but_honest_images(client, images):
    grey = images[0][..., 0]
    honest = {
        "grey": png(grey),
        "16 bit": png(grey.astype(np.uint16) * 257),
        "16 bit TIFF": png(grey.astype(np.uint16) * 257, "TIFF"),
        "bilevel": _save(Image.fromarray(grey).convert("1")),
        "palette": _save(Image.fromarray(images[0]).convert("P")),
        "transparent": _save(Image.fromarray(images[0]).convert("RGBA")),
        "CMYK": _save(Image.fromarray(images[0]).convert("CMYK"), "JPEG"),
        "one pixel": png(images[0][:1, :1]),
        "thin": png(np.repeat(images[0][:1], 1, axis=0).repeat(40, axis=1)),
        "animated": _save(
            Image.fromarray(images[0]), "WEBP", save_all=True, append_images=[Image.fromarray(images[1])]
        ),
    }
    for name, data in honest.items():
        assert _ask(client, data)["error"] is None, name
    pages = _save(Image.fromarray(images[0]), "TIFF", save_all=True, append_images=[Image.fromarray(images[1])])
    assert "2 pages that are not grey bands" in _ask(client, pages)["error"]
    assert "int32 pixels, whose range is not known" in _ask(client, png(grey.astype(np.int32) - 300, "TIFF"))["error"]
    assert "value" in _ask(client, png(grey.astype(np.float32), "TIFF"))["error"]
    assert "NaN" in _ask(client, png(np.full((8, 8), np.nan, dtype=np.float32), "TIFF"))["error"]


def _save(picture, kind="PNG", **options):
    out = io.BytesIO()
    picture.save(out, format=kind, **options)
    return out.getvalue()


def test_memory_is_steady(client, files):
    mixed = as_form([files[0], files[1][:100], b"", b"nonsense" * 100])

    def held_after(requests):
        for _ in range(requests):
            assert client.post("/v1/score", files=mixed, data={"map": "true"}).status_code == 200
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = held_after(3)
        grown = held_after(10) - before
    finally:
        tracemalloc.stop()
    assert grown < 200_000


def test_a_caller_who_leaves_in_the_middle_is_no_failure(live, detector_folder, caplog):
    address = live(detector_folder)
    place = (urlsplit(address).hostname, urlsplit(address).port)
    head = f"POST /v1/score HTTP/1.1\r\nHost: {place[0]}\r\nContent-Length: 5000\r\n"
    for kind in ("multipart/form-data; boundary=b", "application/json"):
        with socket.create_connection(place, timeout=300) as caller:
            caller.sendall(f"{head}Content-Type: {kind}\r\n\r\n--b".encode())
    with socket.create_connection(place, timeout=300) as caller:
        caller.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"400" in caller.recv(1000)
    with urlopen(f"{address}/metrics", timeout=300) as answer:
        assert b'status="500"' not in answer.read()
    assert "failed" not in caplog.text


def test_random_requests_by_the_openapi_document(live, detector_folder):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import checks

    schema = schemathesis.openapi.from_url(f"{live(detector_folder)}/openapi.json")
    wanted = (
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.unsupported_method,
    )
    seen = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=10,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case):
            case.call_and_validate(checks=wanted)

        check()
        seen += 1
    assert seen == 5

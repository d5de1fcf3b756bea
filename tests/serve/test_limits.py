"""Limits on memory, the log, and who may read the metrics."""

import os
import re
import signal
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from serving import as_form, png
from toys import as_uint8, pictures

import gepc
from gepc.core.errors import OptionError
from gepc.serve import Settings, create_app

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def own_size_folder(tmp_path_factory):
    """A detector that sees every image at half its own size, as the preset `inspect` does."""
    folder = tmp_path_factory.mktemp("own_size") / "det"
    detector = gepc.GEPC(gepc.load_backbone("photos-small"), levels=(0.9,), keep=1, group=("flip_x",), resize="half")
    detector.fit(as_uint8(pictures(30, 32))).save(folder)
    return folder


def test_an_image_that_is_too_large_for_the_network_is_an_error_of_its_own(serve, own_size_folder):
    client = serve(own_size_folder, max_network_pixels=16 * 24)
    fits, large = as_uint8(pictures(1, (32, 48)))[0], as_uint8(pictures(1, (48, 64)))[0]
    answer = client.post("/v1/score", files=as_form([png(fits), png(large)])).json()
    first, second = answer["results"]
    assert first["error"] is None
    assert "64x48 pixels, 32x24 as the network sees it, and this service takes at most 384" in second["error"]
    assert "send a smaller image or a part of it" in second["error"]
    assert client.get("/v1/detector").json()["limits"]["network_pixels_per_image"] == 384


def test_a_photograph_of_12_megapixels_is_refused_before_it_is_preprocessed(serve, own_size_folder, monkeypatch):
    """With the default limits, in the time that it takes to decode it."""
    from gepc.images.preprocessing import Preprocessing

    seen = []
    call = Preprocessing.__call__
    monkeypatch.setattr(Preprocessing, "__call__", lambda *a: seen.append(a[1].shape) or call(*a))
    client = serve(own_size_folder)
    photograph = png(np.zeros((3000, 4000, 3), np.uint8), "JPEG")
    answer = client.post("/v1/score", files=as_form([photograph]))
    assert answer.status_code == 422
    assert "4000x3000 pixels, 2000x1500 as the network sees it" in answer.json()["error"]
    assert (3000, 4000, 3) not in seen


def test_a_photograph_for_a_detector_of_small_images_is_scored(client, serve, detector_folder):
    photograph = png(np.full((3000, 4000, 3), 90, np.uint8), "JPEG")
    answer = serve(detector_folder).post("/v1/score", files=as_form([photograph]))
    assert answer.json()["results"][0]["error"] is None


@pytest.mark.parametrize(("most", "batches"), [(16 * 16 * 4, [4, 4, 4]), (16 * 16, [1] * 12), (1 << 20, [12])])
def test_a_network_call_takes_no_more_pixels_than_allowed(serve, detector_folder, files, most, batches, monkeypatch):
    from gepc.detector.fitted import FittedDetector

    client = serve(detector_folder, max_network_pixels=most, gap=0.5)
    sizes = []
    evaluate = FittedDetector.evaluate
    monkeypatch.setattr(
        FittedDetector,
        "evaluate",
        lambda self, images, *a, **o: sizes.append(len(images)) or evaluate(self, images, *a, **o),
    )
    answer = client.post("/v1/score", files=as_form(files))
    assert answer.status_code == 200
    assert sizes == batches


def test_a_detector_of_larger_images_than_the_service_takes_is_refused_at_the_start(detector_folder):
    with pytest.raises(
        OptionError, match=r"sees images of 16x16 pixels .* at most 100: give a larger --max-network-mega"
    ):
        create_app(detector_folder, Settings(max_network_pixels=100))


def test_the_default_limit_leaves_room_below_the_memory_of_the_deployment():
    """Memory of torch, of a network call, and 40 bytes for each pixel of the largest image that is preprocessed."""
    from gepc.cli.options import BASE_BYTES, BYTES_PER_PIXEL

    settings = Settings()
    assert BASE_BYTES + settings.max_network_pixels * BYTES_PER_PIXEL + 40 * settings.max_pixels < 2 << 30


def test_metrics_need_the_token_unless_they_are_open(serve, detector_folder):
    closed, opened = serve(detector_folder, token=TOKEN), serve(detector_folder, token=TOKEN, open_metrics=True)
    assert closed.get("/metrics").status_code == 401
    answer = opened.get("/metrics")
    assert answer.status_code == 200
    assert "gepc_requests_total" in answer.text
    assert opened.get("/v1/detector").status_code == 401
    assert opened.get("/metrics/").status_code == 401  # no other path


def test_metrics_without_a_token_on_this_machine_need_none(client):
    assert client.get("/metrics").status_code == 200


def test_a_malformed_form_leaves_no_line_of_its_parser_in_the_log(live, detector_folder, capfd):
    """Over a real server, whose log goes to standard error; the caller gets the reason."""
    url = live(detector_folder)
    body = b"\xe9\xe9 no boundary here"
    headers = {"Content-Type": "multipart/form-data; boundary=cut"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{url}/v1/score", body, headers), timeout=60)
    with refused.value as answer:
        assert answer.code == 400
        assert b"the form cannot be read" in answer.read()
    time.sleep(0.1)
    assert capfd.readouterr().err == ""


def test_every_line_of_the_log_begins_with_the_time(live, detector_folder, capfd):
    import logging

    live(detector_folder)
    logging.getLogger("gepc.serve").warning("something to know")
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d.* WARNING:.*something to know", line)


def test_an_interrupt_of_the_whole_terminal_leaves_the_decoders_alone(serve, detector_folder, files):
    """Ctrl-C goes to every process of the terminal, and accepted requests are still answered."""
    client = serve(detector_folder)

    def decoders():
        assert client.post("/v1/score", files=as_form(files[:4])).status_code == 200
        started = (decoder._process for decoder in client.app.state.service._decoders)
        return {process.pid for process in started if process is not None}

    before = decoders()
    for pid in before:
        os.kill(pid, signal.SIGINT)
    assert before <= decoders()

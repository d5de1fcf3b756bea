"""The service as a process: port, token, signal."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from serving import as_form

pytestmark = pytest.mark.usefixtures("trusted")

TOKEN = "correct-horse-battery"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def start(detector_folder):
    """Start `gepc serve` on a free port of this machine; ended and waited for."""
    running = []

    def begin(*options, **variables):
        command = [sys.executable, "-m", "gepc", "serve", detector_folder.name, "--port", "0", *options]
        process = subprocess.Popen(
            command,
            cwd=detector_folder.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        alarm = threading.Timer(300, process.kill)
        alarm.start()
        line = process.stdout.readline()
        alarm.cancel()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + process.stderr.read()
        return process, found.group()

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=300)


def test_a_signal_finishes_what_was_accepted_and_ends_cleanly(start, detector, images, files):
    process, address = start(GEPC_TOKEN=TOKEN)
    assert httpx.get(f"{address}/v1/detector").status_code == 401
    expected = detector.score(images)
    sent = threading.Barrier(5, timeout=300)

    def ask(_):
        with httpx.Client(timeout=300, headers=HEADERS) as client:
            client.get(f"{address}/healthz")
            sent.wait()
            return client.post(f"{address}/v1/score", files=as_form(files * 3))

    def accepted():
        text = httpx.get(f"{address}/metrics", timeout=300, headers=HEADERS).text
        return float(re.search(r"^gepc_images_in_service (\S+)", text, re.MULTILINE).group(1))

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask, number) for number in range(4)]
        sent.wait()
        while accepted() < 144 and not any(future.done() for future in futures):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        answers = [future.result(300) for future in futures]
    for answer in answers:
        assert answer.status_code == 200
        found = [result["score"] for result in answer.json()["results"]]
        assert found == pytest.approx(list(expected) * 3, abs=1e-5)
    assert process.wait(300) == 0
    assert "all accepted requests were answered" in process.stderr.read()

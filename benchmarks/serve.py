"""The service under load, on this machine only: throughput and latency, with every answer checked by its client.

    python benchmarks/serve.py [--clients 32] [--images 64] [--rounds 3]

Prints throughput with micro-batching against one image at a time and against the library's own `score`, as ratios of
rounds that alternate: of wall time, which other load on the machine disturbs, and of the processor time of the service
and the library per image, which it disturbs less.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

LONGEST = 150.0  # seconds, for all rounds


def pictures(count: int, side: int = 48) -> list[np.ndarray]:
    rough = np.random.default_rng(0).standard_normal((count, side, side, 3))
    smooth = sum(np.roll(rough, (dy, dx), (1, 2)) for dy in range(4) for dx in range(4)) / 4.0
    return list(np.rint(127.5 + 127.5 * np.tanh(0.5 * smooth)).astype(np.uint8))


def as_request(image: np.ndarray) -> tuple[bytes, dict[str, str]]:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image).save(out, format="PNG")
    head = b'--frontier\r\nContent-Disposition: form-data; name="images"; filename="x.png"\r\n\r\n'
    return head + out.getvalue() + b"\r\n--frontier--\r\n", {"Content-Type": "multipart/form-data; boundary=frontier"}


@contextlib.contextmanager
def service(folder: Path, max_batch: int) -> Iterator[tuple[int, psutil.Process]]:
    """`gepc serve` in a process of its own, on a free port; ended by a signal."""
    command = [sys.executable, "-m", "gepc", "serve", str(folder), "--port", "0", "--max-batch", str(max_batch)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        line = process.stdout.readline() if process.stdout else ""
        yield int(re.findall(r"127\.0\.0\.1:(\d+)", line)[0]), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


class Load:
    """Closed loop: each client sends one image, waits for its answer, checks it, sends the next."""

    def __init__(self, images: list[np.ndarray], expected: np.ndarray, clients: int) -> None:
        self.requests = [as_request(image) for image in images]
        self.expected, self.clients = expected, clients

    def run(self, port: int) -> tuple[float, list[float]]:
        """Seconds in all, and the waiting time of every request."""
        together = threading.Barrier(self.clients + 1)

        def client(number: int) -> list[float]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.connect()
            together.wait()
            waited = []
            for index in range(number, len(self.requests), self.clients):
                start = time.perf_counter()
                connection.request("POST", "/v1/score", *self.requests[index])
                answer = connection.getresponse()
                body = json.loads(answer.read())
                waited.append(time.perf_counter() - start)
                found = body["results"][0]["score"]
                if answer.status != 200 or abs(found - self.expected[index]) > 1e-4 * max(1, abs(found)):
                    raise SystemExit(f"image {index}: {answer.status}, got {found}, expected {self.expected[index]}")
            connection.close()
            return waited

        with ThreadPoolExecutor(self.clients) as pool:
            futures = [pool.submit(client, number) for number in range(self.clients)]
            together.wait()
            start = time.perf_counter()
            waited = [seconds for future in futures for seconds in future.result()]
            return time.perf_counter() - start, waited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import gepc

    images = pictures(options.images)
    detector = gepc.GEPC(gepc.load_backbone("celeba32-tiny"), levels=(0.9979, 0.99), size=32, batch_size=32)
    with tempfile.TemporaryDirectory() as place:
        detector.fit(pictures(40)).save(Path(place) / "det")
        load = Load(images, detector.score(images), options.clients)
        rounds = measure(Path(place) / "det", lambda: detector.score(images), load, options.rounds)
    print(f"{options.images} images, {options.clients} clients, one image per request; every answer was checked")
    for name, found in rounds.items():
        each = [seconds for one in found for seconds in one.waited]
        line = f"{name:>11}: {options.images / statistics.median(one.wall for one in found):6.1f} images/s"
        print(line + (f", p50 {np.percentile(each, 50):.3f} s, p99 {np.percentile(each, 99):.3f} s" if each else ""))
    for other in ("library", "one by one"):
        pairs = list(zip(rounds["batched"], rounds[other], strict=True))
        wall = statistics.median(theirs.wall / ours.wall for ours, theirs in pairs)
        processor = statistics.median(theirs.processor / ours.processor for ours, theirs in pairs)
        print(f"batched / {other}: {wall:.2f} x the throughput by wall time, {processor:.2f} x by processor time")


@dataclass
class Round:
    wall: float
    processor: float
    waited: list[float] = field(default_factory=list)


def measure(folder: Path, library: Callable[[], object], load: Load, rounds: int) -> dict[str, list[Round]]:
    """Rounds in turn of the library here, the service with batches, the service without."""
    found: dict[str, list[Round]] = {"library": [], "batched": [], "one by one": []}
    begun = time.monotonic()
    with service(folder, 32) as batched, service(folder, 1) as single:
        for number in range(rounds):
            start, used = time.perf_counter(), time.process_time()
            library()
            found["library"].append(Round(time.perf_counter() - start, time.process_time() - used))
            for name, (port, process) in (("batched", batched), ("one by one", single)):
                used = sum(process.cpu_times()[:2])
                wall, waited = load.run(port)
                found[name].append(Round(wall, sum(process.cpu_times()[:2]) - used, waited))
            last = ", ".join(f"{name} {one[-1].wall:.1f} s ({one[-1].processor:.1f})" for name, one in found.items())
            print(f"round {number + 1}, wall (processor): {last}", flush=True)
            if time.monotonic() - begun > LONGEST and number + 1 < rounds:
                print("out of time: fewer rounds")
                break
    return found


if __name__ == "__main__":
    main()

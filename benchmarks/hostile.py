"""Damaged files, fuzzed requests and killed processes, many of each; prints what happened as a Markdown table.

    python benchmarks/hostile.py                        # everything, hours
    python benchmarks/hostile.py --scale 0.02           # a fiftieth of it
    python benchmarks/hostile.py --only requests kills

Everything attacked here is made here, in a temporary folder, from fixed seeds; only the moments of the kills differ
from run to run. The exit code is 1 if anything but an answer, an error message or a complete result came out.
"""

# ruff: noqa: S311 - repeatable numbers, not secrets

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import csv
import http.client
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import gepc
from gepc.cli.app import run as command_line
from gepc.core.errors import GepcError, InputError
from gepc.core.tables import markdown_table
from gepc.detector.storage import DESCRIPTION, STATE
from gepc.images.decoder import DecoderProcess
from gepc.images.formats import FORMATS, read_file

COUNTS = {"requests": 10_000, "images": 500, "folders": 500, "checkpoints": 200, "kills": 50}
COMMANDS = ("score", "scene", "watch", "fit", "train", "bench", "ray")
WRONG: list[Any] = [None, True, -1, 0, 7, 40_000, 10**12, 10**30, -0.5, 1e308, float("nan"), float("inf"), "", "x"]
WRONG += ["/etc/passwd", "someone/else", [], [1], ["a"], [[]], {}, {"a": 1}, [float("nan")] * 3, [1] * 20_000]
RECIPE = """{channels: [8, 8], norm_groups: 4, image_channels: 3, diffusion_steps: 16, batch_size: 4, steps: 60,
warmup_steps: 2, checkpoint_every: 10, held_out: 8}"""
PROTOCOL = """{backbone: net, size: 16, train_images: 30, test_images: 24, pairs: {a: [b], b: [a]},
datasets: {a: {dataset: 'npz:set0.npz', label: A}, b: {dataset: 'npz:set1.npz', label: B}},
levels: {default: [0.99, 0.9]}}"""


def photos(count: int, side: int | tuple[int, int], seed: int) -> np.ndarray:
    """Smooth random colour pictures (N, H, W, 3)."""
    height, width = (side, side) if isinstance(side, int) else side
    rough = np.random.default_rng(seed).standard_normal((count, height, width, 3))
    smooth = sum(np.roll(rough, (dy, dx), (1, 2)) for dy in range(2) for dx in range(2)) / 2.0
    return np.rint((np.tanh(0.5 * smooth) + 1.0) * 127.5).astype(np.uint8)


def prepare(place: Path) -> None:
    """A network, a detector, images, a scene, data sets and a recipe."""
    from diffusers import DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    net = UNet2DModel(**sizes, attention_head_dim=8, **blocks)
    net.save_pretrained(place / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(place / "net")
    torch.save({"model": net.state_dict()}, place / "net.pt")
    backbone = gepc.load_backbone(str(place / "net"))
    gepc.GEPC(backbone, levels=(0.99, 0.9), size=16).fit(photos(60, 16, 0)).save(place / "det")
    for folder, count in (("normal", 60), ("new", 40)):
        (place / folder).mkdir()
        for index, picture in enumerate(photos(count, 16, len(folder))):
            Image.fromarray(picture).save(place / folder / f"{index:03d}.png")
    Image.fromarray(photos(1, (64, 96), 3)[0]).save(place / "scene.png")
    (place / "data").mkdir()
    for number in range(2):
        parts = {f"{name}_x": photos(30, 16, 3 * number + n) for n, name in enumerate(("train", "test"))}
        np.savez(place / "data" / f"set{number}.npz", **parts)
    (place / "recipe.yaml").write_text(RECIPE)
    (place / "protocol.yaml").write_text(PROTOCOL)


# --- damage ----------------------------------------------------------------------------------------------------------


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Bytes changed, most often near the start or the end; cut, repeated or inserted."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        place = min(int(rng.expovariate(1 / 200)), len(data) - 1)
        data[place if rng.random() < 0.7 else -1 - place] = rng.randrange(256)
    start = rng.randrange(len(data))
    way = rng.randrange(6)
    if way == 0:
        del data[start:]
    elif way == 1:
        data[start:start] = data[: rng.randint(1, len(data))]
    elif way == 2:
        data[start:start] = rng.randbytes(rng.randrange(1, 100))
    return bytes(data) or b"\0"


def damaged_json(value: Any, rng: random.Random) -> Any:
    """Parts dropped, or replaced by what makes no sense."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        parent, name = value, rng.choice(list(value))
        while isinstance(parent[name], (dict, list)) and parent[name] and rng.random() < 0.8:
            parent = parent[name]
            name = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
        if rng.random() < 0.3:
            del parent[name]
        else:
            parent[name] = copy.deepcopy(rng.choice(WRONG))
        if not value:
            break
    return value


Outcomes = collections.Counter[str]


def outcome(work: Callable[[], object], expected: tuple[type[Exception], ...] = (GepcError,)) -> str:
    """`works`, `refused`, or the name of an error that nobody should see."""
    try:
        work()
    except expected:
        return "refused"
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        print(f"  {type(error).__name__}: {error}"[:300], file=sys.stderr)
        return f"FAILED: {type(error).__name__}"
    return "works"


def images(place: Path, count: int) -> dict[str, Outcomes]:
    """Damaged images of every format, in this process and in the one that decodes for the service."""
    found: dict[str, Outcomes] = {}
    decoder = DecoderProcess()
    for kind in (*FORMATS, "NPY"):
        rng, whole = random.Random(kind), io.BytesIO()
        picture = photos(1, (24, 20), 7)[0]
        np.save(whole, picture) if kind == "NPY" else Image.fromarray(picture).save(whole, format=kind)
        seen = found[f"damaged {kind}"] = Outcomes()
        for _ in range(count):
            path = place / f"x.{kind.lower()}"
            path.write_bytes(damaged(whole.getvalue(), rng))
            here = outcome(lambda path=path: read_file(path), (InputError,))
            isolated = outcome(lambda path=path: decoder.read_file(path), (InputError,))
            if isolated == "refused" and here == "works" and too_slow(decoder, path):
                here = isolated = "given up by the decoder"
            seen[here if here == isolated else f"FAILED: {here} here, {isolated} in the decoder"] += 1
    decoder.close()
    return found


def too_slow(decoder: DecoderProcess, path: Path) -> bool:
    """Whether the decoder refuses a file for its time or memory alone."""
    try:
        decoder.read_file(path)
    except InputError as error:
        return "takes" in str(error)
    return False


def folders(place: Path, count: int) -> dict[str, Outcomes]:
    """Damaged detector folders: descriptions, states, and the bytes of either."""
    rng, seen = random.Random(1), Outcomes()
    backbone, pictures = gepc.load_backbone(str(place / "net")), photos(2, 16, 9)
    value, state = json.loads((place / "det" / DESCRIPTION).read_text()), (place / "det" / STATE).read_bytes()

    def use() -> None:
        detector = gepc.load_detector(place / "bad", backbone)
        if not np.isfinite(detector.score(pictures)).all():
            raise ArithmeticError("a score is not finite")

    for _ in range(count):
        shutil.copytree(place / "det", place / "bad", dirs_exist_ok=True)
        way = rng.randrange(4)
        if way < 2:
            (place / "bad" / DESCRIPTION).write_text(json.dumps(damaged_json(value, rng)))
        elif way == 2:
            (place / "bad" / DESCRIPTION).write_bytes(damaged(json.dumps(value).encode(), rng))
        else:
            (place / "bad" / STATE).write_bytes(damaged(state, rng))
        seen[outcome(use)] += 1
    return {"damaged detector folders": seen}


def checkpoints(place: Path, count: int) -> dict[str, Outcomes]:
    """Damaged checkpoints: `.pt` with and without an archive, safetensors, and the config beside them."""
    rng, seen, whole = random.Random(2), Outcomes(), io.BytesIO()
    torch.save(torch.load(place / "net.pt"), whole, _use_new_zipfile_serialization=False)
    contents = {"zip.pt": (place / "net.pt").read_bytes(), "old.pt": whole.getvalue()}
    weights = "diffusion_pytorch_model.safetensors"
    config = json.loads((place / "net" / "config.json").read_text())
    for number in range(count):
        shutil.copytree(place / "net", place / "badnet", dirs_exist_ok=True)
        target = place / "badnet"
        if number % 4 == 0:
            (target / weights).write_bytes(damaged((place / "net" / weights).read_bytes(), rng))
        elif number % 4 == 1:
            (target / "config.json").write_text(json.dumps(damaged_json(config, rng)))
        else:
            name = ("zip.pt", "old.pt")[number % 2]
            target = place / name
            target.write_bytes(damaged(contents[name], rng))
        seen[outcome(lambda target=target: gepc.load_backbone(str(target)))] += 1
    return {"damaged checkpoints": seen}


# --- requests --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(place: Path) -> Iterator[tuple[str, int]]:
    """The service in a thread; (host, port)."""
    from gepc.serve import Settings, create_app, listen
    from gepc.serve.server import make_server

    application = create_app(place / "det", Settings(max_bytes=2_000_000), str(place / "net"))
    listener, server = listen("127.0.0.1", 0), make_server(application)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[:2]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def odd_request(rng: random.Random, picture: bytes) -> tuple[str, str, bytes, dict[str, str]]:
    """Method, path, body and headers, each proper or not."""
    part = b'--X\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
    bodies = {
        "multipart/form-data; boundary=X": part + damaged(picture, rng) + b"\r\n--X--\r\n",
        f"multipart/form-data; boundary=X; charset={rng.choice(['undefined', 'idna', 'utf-16'])}": part + b"x\r\n--X--",
        "text/plain": rng.randbytes(rng.randrange(100)),
    }
    kind, body = rng.choice(list(bodies.items()))
    if rng.random() < 0.3:
        body = damaged(body or b"x", rng)
    path = rng.choice(["/v1/score", "/v1/score", "/v1/detector", "/", "/docs", "/metrics", "/static/../x", "/v1"])
    if rng.random() < 0.3:
        path += "?" + "".join(rng.choice("abc=&%0123456789.") for _ in range(rng.randrange(30)))
    headers = {"Content-Type": kind}
    if rng.random() < 0.1:
        headers |= {
            rng.choice(["Origin", "Host", "Content-Length", "Accept"]): rng.choice(["http://[", "[", "-1", "é", ""])
        }
    return rng.choice(["POST", "POST", "POST", "GET", "PUT", "HEAD"]), path, body, headers


def requests(place: Path, count: int) -> dict[str, Outcomes]:
    """Fuzzed requests to a service in this process; the memory of the process before, at most, and after."""
    rng, seen = random.Random(3), Outcomes()
    picture = (place / "new" / "000.png").read_bytes()
    with serving(place) as (host, port):
        before = 0
        for number in range(count):
            method, path, body, headers = odd_request(rng, picture)
            connection = http.client.HTTPConnection(host, port, timeout=120)
            try:
                connection.request(method, path, body, {n: v.encode() for n, v in headers.items()})
                status = connection.getresponse().status
                seen[f"FAILED: {status}" if status >= 500 else f"{status // 100}xx"] += 1
            except (OSError, http.client.HTTPException, ValueError):
                seen["connection closed"] += 1
            connection.close()
            if number == min(500, count // 10):
                before = memory("VmRSS")
        connection = http.client.HTTPConnection(host, port, timeout=120)
        connection.request("GET", "/healthz")
        seen["alive afterwards" if connection.getresponse().status == 200 else "FAILED: dead"] += 1
        seen[f"memory {before} -> {memory('VmRSS')} MB, peak {memory('VmHWM')} MB"] += 1
    return {"fuzzed requests": seen}


def memory(name: str) -> int:
    """Megabytes of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) // 1024


# --- kills -----------------------------------------------------------------------------------------------------------


def started(arguments: list[str], place: Path) -> int:
    """The command line in a copy of this process, which need not import everything again; the id of the process."""
    child = os.fork()
    if child:
        return child
    with open(place / "output.txt", "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(place)
    try:
        os._exit(command_line(arguments))
    finally:
        os._exit(70)


def table(path: Path) -> dict[str, Any]:
    """The rows of a CSV file by their first cells; numbers rounded to what the size of a batch may change."""
    with open(path, newline="", encoding="utf-8") as handle:
        rows = list(csv.reader(handle))
    first = 1 if rows[0][0] == "path" else 2  # a file, or the row and column of a tile
    found = {tuple(row[:first]): [number(cell) for cell in row[first : first + 4]] for row in rows}
    if len(found) != len(rows):
        raise AssertionError(f"{path}: a row is there twice")
    return {str(key): value for key, value in found.items()}


def number(text: str) -> Any:
    try:
        return float(f"{float(text):.4g}")
    except ValueError:
        return text


def arrays(path: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return {name: np.round(value, 4).tolist() for name, value in load_file(path).items()}


def benchmark(path: Path) -> Any:
    tables = json.loads(path.read_text())["tables"]
    return {each["name"]: str(each["rows"]) for each in tables if each["name"] in ("main", "sweep", "false_alarms")}


@contextlib.contextmanager
def cluster(needed: bool) -> Iterator[str]:
    """The address of a Ray cluster on this machine, which outlives the commands that are killed."""
    if not needed:
        yield ""
        return
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield found.address
    finally:
        found.shutdown()


def jobs(address: str) -> dict[str, tuple[list[str], str, Callable[[Path], Any]]]:
    """Command, place of its results below `OUT`, and what is compared."""
    det = ["det", "--backbone", "net"]
    score = ["score", det[0], "new", *det[1:], "--shard-size", "4", "--alpha", "0.1", "--out"]
    return {
        "score": ([*score, "OUT.csv"], ".csv", table),
        "scene": (["scene", det[0], "scene.png", *det[1:], "--stride", "4", "--control", "tile", "--alpha", "0.1",
                   "--batch-size", "16", "--out", "OUT"], "/tiles.csv", table),
        "watch": (["watch", det[0], "new", *det[1:], "--once", "--alpha", "0.1", "--out", "OUT.csv"], ".csv", table),
        "fit": (["fit", "normal", "--backbone", "net", "--method", "gepc", "--set", "size=16", "--set",
                 "levels=0.99,0.9", "--out", "OUT"], f"/{STATE}", arrays),
        "train": (["train", "recipe.yaml", "--data", "data/set0.npz", "--out", "OUT"],
                  "/diffusion_pytorch_model.safetensors", arrays),
        "bench": (["bench", "protocol.yaml", "--data", "data", "--cache", "OUT-cache", "--out", "OUT"],
                  "/results.json", benchmark),
        "ray": ([*score, "OUT.csv", "--engine", "ray", "--address", address, "--actors", "1"], ".csv", table),
    }  # fmt: skip


def kills(place: Path, count: int, commands: list[str]) -> Iterator[tuple[str, Outcomes]]:
    """Kill each command again and again and give it again; what it completes must be what it gives uninterrupted."""
    for name in commands:
        with cluster(name == "ray") as address:
            yield f"kill -9 of {name}", _killed(name, place, count, address)


def _killed(name: str, place: Path, count: int, address: str) -> Outcomes:
    arguments, suffix, read = jobs(address)[name]
    seen = Outcomes()
    start = real if name == "ray" else started
    begun = time.monotonic()
    if ended(start([part.replace("OUT", f"{name}-whole") for part in arguments], place)) != 0:
        raise SystemExit(f"{name} fails uninterrupted: " + (place / "output.txt").read_text()[-2000:])
    seconds, expected = time.monotonic() - begun, read(place / f"{name}-whole{suffix}")
    rng, runs = random.Random(name), 0
    while seen["killed"] < count:
        child = start([part.replace("OUT", f"{name}-{runs}") for part in arguments], place)
        code = ended(child, rng.uniform(0.05, 1.0) * seconds)
        if code == -signal.SIGKILL:
            seen["killed"] += 1
        elif code == 0:
            seen["completed"] += 1
            compare(seen, read, place / f"{name}-{runs}{suffix}", expected)
            runs += 1
        else:
            seen[f"FAILED: exit code {code}"] += 1
            print((place / "output.txt").read_text()[-2000:], file=sys.stderr)
            runs += 1
    if ended(start([part.replace("OUT", f"{name}-{runs}") for part in arguments], place)) != 0:
        seen["FAILED: not resumed"] += 1
    compare(seen, read, place / f"{name}-{runs}{suffix}", expected)
    return seen


def compare(seen: Outcomes, read: Callable[[Path], Any], path: Path, expected: Any) -> None:
    try:
        seen["equal" if read(path) == expected else "FAILED: another result"] += 1
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        seen[f"FAILED: {error}"[:80]] += 1


def real(arguments: list[str], place: Path) -> int:
    """The command line in a process of its own."""
    with open(place / "output.txt", "a") as output:
        command = [sys.executable, "-m", "gepc", *arguments]
        return subprocess.Popen(command, cwd=place, stdout=output, stderr=output).pid


def ended(child: int, seconds: float = 3600.0) -> int:
    """The exit code of a process, which is killed after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    """Run the parts that were asked for; kills first, while this process has one thread."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full counts")
    parser.add_argument("--only", nargs="+", choices=COUNTS, default=list(COUNTS), help="parts to run")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS), help="commands to kill")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    parts = {"images": images, "folders": folders, "checkpoints": checkpoints, "requests": requests}
    rows = []
    with tempfile.TemporaryDirectory(prefix="gepc-hostile-") as folder:
        place = Path(folder)
        prepare(place)
        for name in sorted(options.only, key=lambda name: name != "kills"):
            count, begun = max(1, round(COUNTS[name] * options.scale)), time.monotonic()
            work = kills(place, count, options.commands) if name == "kills" else parts[name](place, count).items()
            for what, seen in work:
                told = ", ".join(
                    text if text.startswith("memory") else f"{text} {n}" for text, n in sorted(seen.items())
                )
                rows.append((what, str(count), told))
                print(f"{what}: {told} ({time.monotonic() - begun:.0f} s)", file=sys.stderr, flush=True)
    print(markdown_table(("attack", "count", "outcomes"), rows))
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(f"\nPeak memory of this process: {memory('VmHWM')} MB; of a process that it started: {children} MB.")
    return int(any("FAILED" in told for *_, told in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Decode untrusted image files in a process of their own, which is killed if one takes too long or too much memory.

`main` is that process. A job is a line of JSON and, unless it names a path, the bytes of the file; an answer is a line
of JSON and the pixels. Nothing is pickled: a broken decoder cannot make its parent run code.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gepc.core.errors import InputError, raising
from gepc.core.files import StrPath
from gepc.core.isolation import isolated_command
from gepc.images.formats import MAX_PIXELS, FirstFrameWarning, Pixels, decode, open_file, warn_about_frames

SECONDS = 10.0
MEMORY, MEMORY_PER_PIXEL = 1 << 30, 32  # bytes of address space


class DecoderProcess:
    """Decodes files one at a time, in at most `seconds` each; started when it is needed, and again after a kill."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def read_file(self, path: StrPath) -> Pixels:
        """As `gepc.images.formats.read_file`, for a local file."""
        with raising(InputError, f"{path} {{error}}", InputError):
            return self.decode(str(path))

    def decode(self, source: bytes | str, max_pixels: int = MAX_PIXELS) -> Pixels:
        """As `gepc.images.formats.decode`, for the bytes of a picture or the path of a file."""
        job = {"path": source} if isinstance(source, str) else {"bytes": len(source)}
        with self._lock, self._deadline() as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({**job, "pixels": max_pixels, "seconds": self.seconds}).encode() + b"\n")
            process.stdin.write(b"" if isinstance(source, str) else source)
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            if "error" in answer:
                raise InputError(answer["error"])
            if answer["first_frame"]:
                warn_about_frames()
            # a bytearray, so that the pixels are writable
            content = bytearray(process.stdout.read(answer["bytes"]))
            return np.frombuffer(content, dtype=answer["dtype"]).reshape(answer["shape"])

    @contextlib.contextmanager
    def _deadline(self) -> Iterator[subprocess.Popen[bytes]]:
        """The process, which is killed after `seconds`; an `InputError` if it ends before it has answered."""
        process, late = self._started(), threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self.seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield process
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            self.close()
            failed = "cannot be decoded: it makes the decoder fail"
            raise InputError(f"takes more than {self.seconds:g} s to decode" if late.is_set() else failed) from error
        finally:
            timer.cancel()
            timer.join()
            if late.is_set():
                self.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(  # noqa: S603 (this interpreter and this package)
                isolated_command("gepc.images.decoder"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
            assert self._process.stdout is not None
            self._process.stdout.readline()  # ready: starting does not count as decoding
        return self._process

    def close(self) -> None:
        """End the process, and with an `InputError` what it is decoding."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError), process:  # of a process that ended while it was given bytes
                process.kill()

    __del__ = close


def main() -> None:
    """Answer jobs until standard input is closed."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a C library prints is no answer
    answers.write(b"ready\n")
    answers.flush()
    while line := jobs.readline():
        job = json.loads(line)
        content = jobs.read(job["bytes"]) if "bytes" in job else b""
        if hasattr(signal, "setitimer"):  # where the parent is gone, nobody else ends this process
            signal.setitimer(signal.ITIMER_REAL, job["seconds"] + 1.0)
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            most = MEMORY + MEMORY_PER_PIXEL * job["pixels"]
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
        try:
            with (
                warnings.catch_warnings(record=True) as warned,
                open_file(job["path"]) if "path" in job else io.BytesIO(content) as opened,
            ):
                warnings.simplefilter("always")
                pixels = decode(opened, Path(job.get("path", "")).suffix, job["pixels"])
            first_frame = any(each.category is FirstFrameWarning for each in warned)
            answer = {"shape": pixels.shape, "dtype": pixels.dtype.str, "bytes": pixels.nbytes}
            answer["first_frame"] = first_frame
            content = pixels.tobytes()
        except (InputError, MemoryError) as error:
            refused = isinstance(error, InputError)
            answer, content = {"error": str(error) if refused else "takes too much memory to decode"}, b""
        answers.write(json.dumps(answer).encode() + b"\n" + content)
        answers.flush()
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0.0)

"""The process that decodes: its protocol, job by job, until its standard input is closed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gepc.core.errors import InputError
from gepc.core.isolation import isolated_command
from gepc.images.decoder import DecoderProcess


def _answers(*jobs: tuple[dict[str, Any], bytes]) -> list[tuple[dict[str, Any], bytes]]:
    """What a process answers to these jobs; it must end by itself."""
    limits = {"pixels": 10_000, "seconds": 60.0}
    sent = b"".join(json.dumps({**limits, **job}).encode() + b"\n" + content for job, content in jobs)
    command = isolated_command("gepc.images.decoder")
    done = subprocess.run(command, input=sent, capture_output=True, check=True, timeout=300)
    stream, found = io.BytesIO(done.stdout), []
    assert stream.readline() == b"ready\n"
    while line := stream.readline():
        facts = json.loads(line)
        found.append((facts, stream.read(facts.get("bytes", 0))))
    return found


def _png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def test_every_job_has_one_answer(tmp_path: Path) -> None:
    """Bytes, a path, damaged bytes, a missing file, more pixels than allowed, and bytes again after all of these."""
    picture = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    stack, png = np.arange(6.0).reshape(2, 3), _png(picture)
    np.save(tmp_path / "stack.npy", stack)
    sent = {"bytes": len(png)}
    found = _answers(
        (sent, png),
        ({"path": str(tmp_path / "stack.npy")}, b""),
        ({"bytes": 9}, png[:9]),
        ({"path": str(tmp_path / "none.png")}, b""),
        ({**sent, "pixels": 34}, png),
        ({**sent, "pixels": 35}, png),
    )
    facts, pixels = found[0]
    assert facts == {"shape": [5, 7, 3], "dtype": "|u1", "bytes": 105, "first_frame": False}
    assert pixels == picture.tobytes() == found[5][1]
    facts, pixels = found[1]
    np.testing.assert_array_equal(np.frombuffer(pixels, facts["dtype"]).reshape(facts["shape"]), stack)
    assert [sorted(facts) for facts, _ in found[2:5]] == [["error"]] * 3


def test_a_process_is_started_again_after_its_end() -> None:
    picture = np.zeros((2, 3, 3), dtype=np.uint8)
    decoder = DecoderProcess(seconds=60.0)
    try:
        np.testing.assert_array_equal(decoder.decode(_png(picture)), picture)
        first = decoder._process
        assert first is not None
        with pytest.raises(InputError, match=r"x\.png"):
            decoder.read_file("no/such/x.png")
        assert decoder._process is first
        first.kill()
        first.wait()
        decoded = decoder.decode(_png(picture))
        assert decoder._process is not first
        decoded[0, 0, 0] = 1  # the pixels are the caller's own
    finally:
        decoder.close()
        decoder.close()


def test_a_process_that_ends_while_it_is_given_bytes_is_an_error_of_the_image() -> None:
    """Such as one that the system kills for its memory."""
    decoder = DecoderProcess(seconds=60.0)
    ends_early = [sys.executable, "-c", "import sys; sys.stdin.buffer.read(1)"]
    decoder._process = subprocess.Popen(ends_early, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with pytest.raises(InputError, match="it makes the decoder fail"):
        decoder.decode(bytes(1 << 22))  # more than a pipe takes at once
    assert decoder.decode(_png(np.zeros((4, 4), dtype=np.uint8))).shape == (4, 4)

"""Untrusted images: bounded work, an allow-list of formats, and a decoder that can be killed."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gepc.core.errors import InputError
from gepc.images.decoder import DecoderProcess
from gepc.images.formats import FORMATS, MAX_SCANS, read_file


@pytest.fixture(scope="module")
def decoder():
    decoder = DecoderProcess(60.0)
    yield decoder
    decoder.close()


def encoded(pixels: np.ndarray, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format=kind, **options)
    return out.getvalue()


def test_the_process_gives_the_pixels_that_reading_gives(decoder: DecoderProcess, photo, tmp_path: Path) -> None:
    for kind in FORMATS:
        path = tmp_path / f"photo.{kind.lower()}"
        path.write_bytes(encoded(photo, kind))
        expected = read_file(path)
        for found in (decoder.read_file(path), decoder.decode(path.read_bytes())):
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected), kind
    np.save(tmp_path / "photo.npy", photo / 255.0)
    assert np.array_equal(decoder.read_file(tmp_path / "photo.npy"), photo / 255.0)


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded(decoder, slow_jpeg: bytes, tmp_path: Path) -> None:
    path = tmp_path / "slow.jpg"
    path.write_bytes(slow_jpeg)
    for read in (read_file, decoder.read_file):
        with pytest.raises(InputError, match=rf"slow\.jpg has \d+ JPEG scans, more than the {MAX_SCANS} allowed"):
            read(path)


def test_a_file_that_takes_too_long_is_given_up_and_the_next_one_is_decoded(photo) -> None:
    decoder = DecoderProcess(0.02)
    with pytest.raises(InputError, match=r"takes more than 0\.02 s to decode"):
        decoder.decode(encoded(np.zeros((4000, 4000), dtype=np.uint8), "JPEG", progressive=True))
    decoder.seconds = 60.0
    assert np.array_equal(decoder.decode(encoded(photo, "PNG")), photo)
    decoder.close()


def test_a_decoder_that_dies_costs_one_file(decoder: DecoderProcess, photo) -> None:
    decoder.decode(encoded(photo, "PNG"))
    process = decoder._process
    assert process is not None
    process.kill()
    process.wait()
    assert np.array_equal(decoder.decode(encoded(photo, "PNG")), photo)  # it was idle: nobody notices
    frozen = decoder._process
    assert frozen is not None
    os.kill(frozen.pid, 19)  # SIGSTOP: the next file never ends
    decoder.seconds = 0.2
    with pytest.raises(InputError, match="takes more than"):
        decoder.decode(encoded(photo, "PNG"))
    decoder.seconds = 60.0
    assert np.array_equal(decoder.decode(encoded(photo, "PNG")), photo)


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICO", "TGA", "PCX", "SGI", "IM"])
def test_a_format_outside_the_list_is_refused_whatever_its_name(tmp_path: Path, photo, kind: str, monkeypatch) -> None:
    """Pillow would start Ghostscript for an EPS file."""
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("a program was started"))
    for suffix in ("png", "jpg", "tif"):
        path = tmp_path / f"x.{suffix}"
        path.write_bytes(encoded(photo, kind))
        with pytest.raises(InputError, match="is not an image that can be decoded"):
            read_file(path)


def test_sizes_that_a_header_claims_are_refused_before_memory_is_touched(decoder, tmp_path: Path) -> None:
    header = {"descr": "<f8", "fortran_order": False, "shape": (100_000, 100_000)}
    with open(tmp_path / "large.npy", "wb") as handle:
        np.lib.format.write_array_header_1_0(handle, header)
        handle.truncate(80_000_000_000)  # the bytes are there, as holes
    whole = bytearray(encoded(np.zeros((4, 4), dtype=np.uint8), "BMP"))
    whole[18:26] = struct.pack("<ii", 60_000, 60_000)
    (tmp_path / "large.bmp").write_bytes(whole)
    for name, reason in {"large.npy": "more than the .* numbers allowed", "large.bmp": "pixels"}.items():
        for read in (read_file, decoder.read_file):
            with pytest.raises(InputError, match=reason):
                read(tmp_path / name)

"""Batches of the Python version are read instruction by instruction; nothing that they ask for is run."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.core.errors import InputError
from gepc.lab.datasets.cifar import decode_pickle

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)


def decode(content: bytes) -> np.ndarray:
    return decode_pickle(np.frombuffer(content, np.uint8))


class Runs:
    """What an attacker pickles: an object that comes back as the result of a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("key", ["data", b"data"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_comes_back_whole(protocol: int, key: str | bytes, order: Any) -> None:
    before, after = {b"labels": [1, 2, 1000], b"x": True}, {b"filenames": ["a" * 5000, "b"], b"y": [False, True]}
    batch = {**before, key: np.asarray(PIXELS, order=order), **after}
    np.testing.assert_array_equal(decode(pickle.dumps(batch, protocol=protocol)), PIXELS)


@pytest.mark.parametrize("protocol", [2, 3])
def test_code_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    content = pickle.dumps({b"data": PIXELS, b"labels": Runs(os.remove, str(victim))}, protocol=protocol)
    with pytest.raises(InputError, match=r"asks to run (posix|nt)\.remove, .* do not trust this file"):
        decode(content)
    assert victim.exists()
    pickle.loads(content)
    assert not victim.exists()  # the attack is a real one


def test_code_is_not_run_in_the_protocol_that_hides_its_name(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    content = pickle.dumps({b"labels": Runs(os.remove, str(victim)), b"data": PIXELS}, protocol=4)
    np.testing.assert_array_equal(decode(content), PIXELS)
    assert victim.exists()


@pytest.mark.parametrize(
    "other", [PIXELS.astype(np.int32), PIXELS.astype("O"), PIXELS[:, :5], PIXELS.ravel(), [1], None]
)
def test_other_values_are_no_batch(other: Any) -> None:
    with pytest.raises(InputError, match="does not hold an array of bytes"):
        decode(pickle.dumps({"data": other}, protocol=2))


def test_a_shape_that_does_not_fit_the_bytes() -> None:
    content = pickle.dumps({"data": PIXELS}, protocol=2).replace(b"K\x03M\x00\x0c\x86", b"K\x04M\x00\x0c\x86")
    with pytest.raises(InputError, match="does not hold an array of bytes"):
        decode(content)


@pytest.mark.parametrize("protocol", [0, 5])
def test_protocols_that_no_data_set_uses_are_refused(protocol: int) -> None:
    with pytest.raises(InputError):
        decode(pickle.dumps({"data": PIXELS}, protocol=protocol))


WHOLE = pickle.dumps({b"data": PIXELS, b"labels": [1, 2, 3]}, protocol=2)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r\xff\xff\xff\xff.",
        b"\x80\x02T\xff\xff\xff\x7f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\x00\x00.",
        b"\x80\x05\x96\xff\xff\xff\xff\x00\x00\x00\x00.",
    ],
    ids=["memo", "string", "bytes", "bytearray"],
)
def test_no_number_in_a_pickle_makes_it_take_memory(content: bytes) -> None:
    with pytest.raises(InputError):
        decode(content)


@given(end=st.integers(0, len(WHOLE) - 1))
def test_a_cut_pickle_is_one_sentence(end: int) -> None:
    with pytest.raises(InputError, match="damaged or cut short"):
        decode(WHOLE[:end])


@given(
    noise=st.binary(max_size=200),
    prefix=st.sampled_from([b"", b"\x80\x02}", b"\x80\x04}(", b"\x80\x02K\x02K\x03U\x02u1"]),
)
def test_no_noise_raises_anything_else(noise: bytes, prefix: bytes) -> None:
    with contextlib.suppress(InputError):
        decode(prefix + noise)

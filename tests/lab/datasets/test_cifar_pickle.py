from __future__ import annotations

import contextlib
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.core.errors import InputError
from gepc.lab.datasets import cifar
from gepc.lab.datasets.cifar import byte_array, read_plain_pickle

PIXELS = np.arange(12, dtype=np.uint8).reshape(3, 4)


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
    content = pickle.dumps({key: np.asarray(PIXELS, order=order), b"labels": [1, 2]}, protocol=protocol)
    found = read_plain_pickle(content)
    assert found["labels"] == [1, 2]
    np.testing.assert_array_equal(byte_array(found["data"]), PIXELS)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_code_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    content = pickle.dumps({b"data": PIXELS, b"labels": Runs(os.remove, str(victim))}, protocol=protocol)
    with pytest.raises(InputError, match=r"asks to run (posix|nt)\.remove, .* do not trust this file"):
        read_plain_pickle(content)
    assert victim.exists()
    pickle.loads(content)
    assert not victim.exists()  # the attack is a real one


@pytest.mark.parametrize("function", [eval, exec, getattr, print, bytes, np.load, np.frombuffer, OrderedDict])
def test_every_name_that_an_array_does_not_need_is_refused(function: Any) -> None:
    with pytest.raises(InputError, match="asks to run"):
        read_plain_pickle(pickle.dumps({"data": Runs(function, "1")}, protocol=2))


def test_a_class_by_its_dotted_way_is_refused() -> None:
    dotted = b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93."
    with pytest.raises(InputError, match=r"asks to run numpy\.ndarray\.tofile"):
        read_plain_pickle(dotted)


def test_the_allowed_names_stand_for_nothing_that_acts() -> None:
    for module, name in cifar._ALLOWED_NAMES:
        made = pickle.dumps({}, protocol=2)[:2] + b"}U\x01xc" + f"{module}\n{name}\n".encode() + b"U\x03abc\x85Rs."
        value = read_plain_pickle(made)["x"]
        assert value.arguments == (b"abc",)
        assert not callable(value)


def test_a_pickle_cannot_change_what_the_next_one_meets() -> None:
    writes = b"\x80\x02}U\x01xcnumpy\ndtype\n(N}U\x09argumentsU\x04evilstbs."
    with pytest.raises(InputError):
        read_plain_pickle(writes)
    np.testing.assert_array_equal(byte_array(read_plain_pickle(pickle.dumps({"d": PIXELS}, 2))["d"]), PIXELS)


@pytest.mark.parametrize(
    "value", [3, None, [1, 2], b"bytes", PIXELS.astype(np.int32), PIXELS.astype("O"), np.array(["a"]), np.uint8]
)
def test_other_values_are_no_byte_arrays(value: Any) -> None:
    with pytest.raises(InputError):
        byte_array(read_plain_pickle(pickle.dumps({"data": value}, protocol=2))["data"])


def test_a_shape_that_does_not_fit_the_bytes() -> None:
    content = pickle.dumps({"data": PIXELS}, protocol=2).replace(b"K\x03K\x04\x86", b"K\x03K\x05\x86")
    with pytest.raises(InputError, match="does not hold an array of bytes"):
        byte_array(read_plain_pickle(content)["data"])


def test_only_a_dictionary_will_do() -> None:
    with pytest.raises(InputError, match="holds a list, not a dictionary"):
        read_plain_pickle(pickle.dumps([1]))


WHOLE = pickle.dumps({b"data": PIXELS, b"labels": [1, 2, 3]}, protocol=2)


@pytest.mark.parametrize("protocol", [0, 1, 5])
def test_other_protocols_are_refused(protocol: int) -> None:
    with pytest.raises(InputError, match="uses the operation"):
        read_plain_pickle(pickle.dumps({"data": PIXELS}, protocol=protocol))


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
        read_plain_pickle(content)


@given(end=st.integers(0, len(WHOLE) - 1))
def test_a_cut_pickle_is_one_sentence(end: int) -> None:
    with pytest.raises(InputError, match="damaged or cut short"):
        read_plain_pickle(WHOLE[:end])


@given(noise=st.binary(max_size=200), prefix=st.sampled_from([b"", b"\x80\x02}", b"\x80\x04}("]))
def test_no_noise_raises_anything_else(noise: bytes, prefix: bytes) -> None:
    with contextlib.suppress(InputError):
        byte_array(read_plain_pickle(prefix + noise).get("data"))

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.io import loadmat, savemat

from gepc.core.errors import InputError
from gepc.datasets.matlab import read_byte_array

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 5, 3, 7), dtype=np.uint8)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("shape", [(4, 5, 3, 7), (4, 5, 21), (3, 1), (1, 2), (420, 1)])
def test_what_scipy_reads(tmp_path: Path, compressed: bool, shape: tuple[int, ...]) -> None:
    path = tmp_path / "some.mat"
    pixels = PIXELS.ravel()[: np.prod(shape)].reshape(shape)
    others = {"before": np.arange(3.0), "a_longer_name": "text", "cell": np.array([1, "a"], object), "struct": {"X": 1}}
    savemat(path, {**others, "X": pixels, "after": np.int16(3)}, do_compression=compressed)
    found = read_byte_array(path, "X")
    np.testing.assert_array_equal(found, pixels)
    np.testing.assert_array_equal(found, loadmat(path)["X"])
    assert isinstance(found, np.memmap) is not compressed


@pytest.mark.parametrize("other", [PIXELS.astype(np.int16), PIXELS / 2.0, "text", {"a": 1}])
def test_other_variables_are_no_byte_arrays(tmp_path: Path, other: object) -> None:
    savemat(tmp_path / "some.mat", {"X": other})
    with pytest.raises(InputError):
        read_byte_array(tmp_path / "some.mat", "X")


def test_a_file_without_the_variable(tmp_path: Path) -> None:
    savemat(tmp_path / "some.mat", {"y": PIXELS})
    with pytest.raises(InputError, match=r"some\.mat holds no array X"):
        read_byte_array(tmp_path / "some.mat", "X")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    path = tmp_path_factory.mktemp("mat") / "some.mat"
    contents = []
    for compressed in (False, True):
        savemat(path, {"X": PIXELS, "y": np.ones((7, 1))}, do_compression=compressed)
        contents.append(path.read_bytes())
    return contents


@given(data=st.data(), compressed=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_damage_is_one_sentence_or_does_not_matter(
    tmp_path: Path, files: list[bytes], data: st.DataObject, compressed: bool
) -> None:
    content = bytearray(files[compressed])
    for place in data.draw(st.lists(st.integers(0, 220), max_size=3)):
        content[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "some.mat"
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    with contextlib.suppress(InputError):
        assert read_byte_array(path, "X").dtype == np.uint8

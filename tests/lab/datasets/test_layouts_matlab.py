from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.io import loadmat, savemat

from gepc.core.errors import InputError
from gepc.lab.datasets import open_dataset
from gepc.lab.datasets.layouts import read_matlab_bytes

PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 6), dtype=np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, pixels in (("train", PIXELS), ("test", PIXELS[..., :2] // 2)):
        labels = np.arange(1, pixels.shape[3] + 1, dtype=np.uint8)[:, None]
        savemat(tmp_path / f"{split}_32x32.mat", {"X": pixels, "y": labels}, do_compression=True)
    return tmp_path


def test_images_are_as_matlab_shows_them(root: Path) -> None:
    images = open_dataset("svhn", root, "train")
    assert len(images) == 6
    for index in range(6):
        np.testing.assert_array_equal(images[index].pixels, PIXELS[..., index])
    np.testing.assert_array_equal(open_dataset("svhn", root, "test")[1].pixels, PIXELS[..., 1] // 2)


def test_a_subset_lets_go_of_the_rest(root: Path) -> None:
    images = open_dataset("svhn", root, "train", limit=2)
    pixels = images[1].pixels
    assert images[1].name == "train/1"
    assert pixels is not None
    assert pixels.base.nbytes == 2 * 32 * 32 * 3  # type: ignore[union-attr]


@pytest.mark.parametrize("keep", [0, 60, 128, 200, 5000, 15000])
def test_a_cut_file_is_named(root: Path, keep: int) -> None:
    path = root / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        InputError, match=r"train_32x32\.mat (is not a complete MATLAB 5 file: |holds no array X).*Expected"
    ):
        open_dataset("svhn", root, "train")


def test_a_version_7_3_file_is_refused(root: Path) -> None:
    header = b"MATLAB 7.3 MAT-file".ljust(116) + bytes(8) + b"\x00\x02IM"
    (root / "test_32x32.mat").write_bytes(header + bytes(512))
    with pytest.raises(InputError, match=r"test_32x32\.mat is not a complete MATLAB 5 file"):
        open_dataset("svhn", root, "test")


def test_the_full_numbers_are_not_taken_for_digits(root: Path) -> None:
    savemat(root / "test_32x32.mat", {"digitStruct": np.zeros(3)})
    with pytest.raises(InputError, match=r"test_32x32\.mat holds no array X"):
        open_dataset("svhn", root, "test")


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (np.zeros((2, 32, 32, 3), np.uint8), r"shape \(2, 32, 32, 3\) instead of \(32, 32, 3, N\)"),
        (np.zeros((4, 4), np.uint8), r"instead of \(32, 32, 3, N\)"),
        (np.zeros((32, 32, 3, 2)), "X is not an array of bytes"),
    ],
)
def test_another_array_is_refused(root: Path, pixels: np.ndarray, reason: str) -> None:
    savemat(root / "test_32x32.mat", {"X": pixels})
    with pytest.raises(InputError, match=reason):
        open_dataset("svhn", root, "test")


def test_a_missing_split(root: Path) -> None:
    (root / "test_32x32.mat").unlink()
    with pytest.raises(
        InputError, match=r"holds no test_32x32\.mat\. Expected in .*train_32x32\.mat and test_32x32\.mat"
    ):
        open_dataset("svhn", root, "test")


# --- the file format -------------------------------------------------------------------------------------------------

ARRAY = np.random.default_rng(0).integers(0, 256, (4, 5, 3, 7), dtype=np.uint8)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("shape", [(4, 5, 3, 7), (4, 5, 21), (3, 1), (1, 2), (420, 1)])
def test_what_scipy_reads(tmp_path: Path, compressed: bool, shape: tuple[int, ...]) -> None:
    path = tmp_path / "some.mat"
    pixels = ARRAY.ravel()[: np.prod(shape)].reshape(shape)
    others = {"before": np.arange(3.0), "a_longer_name": "text", "cell": np.array([1, "a"], object), "struct": {"X": 1}}
    savemat(path, {**others, "X": pixels, "after": np.int16(3)}, do_compression=compressed)
    found = read_matlab_bytes(path, "X")
    np.testing.assert_array_equal(found, pixels)
    np.testing.assert_array_equal(found, loadmat(path)["X"])
    assert isinstance(found, np.memmap) is not compressed


@pytest.mark.parametrize("other", [ARRAY.astype(np.int16), ARRAY / 2.0, "text", {"a": 1}])
def test_other_variables_are_no_byte_arrays(tmp_path: Path, other: object) -> None:
    savemat(tmp_path / "some.mat", {"X": other})
    with pytest.raises(InputError):
        read_matlab_bytes(tmp_path / "some.mat", "X")


def test_a_file_without_the_variable(tmp_path: Path) -> None:
    savemat(tmp_path / "some.mat", {"y": ARRAY})
    with pytest.raises(InputError, match=r"some\.mat holds no array X"):
        read_matlab_bytes(tmp_path / "some.mat", "X")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    path = tmp_path_factory.mktemp("mat") / "some.mat"
    contents = []
    for compressed in (False, True):
        savemat(path, {"X": ARRAY, "y": np.ones((7, 1))}, do_compression=compressed)
        contents.append(path.read_bytes())
    return contents


@given(data=st.data(), compressed=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
def test_damage_is_one_sentence_or_does_not_matter(
    tmp_path: Path, files: list[bytes], data: st.DataObject, compressed: bool
) -> None:
    content = bytearray(files[compressed])
    for place in data.draw(st.lists(st.integers(0, 220), max_size=3)):
        content[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "some.mat"
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    with contextlib.suppress(InputError):
        assert read_matlab_bytes(path, "X").dtype == np.uint8

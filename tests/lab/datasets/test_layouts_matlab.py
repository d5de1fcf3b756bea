from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from gepc.core.errors import InputError
from gepc.lab.datasets import open_dataset

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
        InputError, match=r"train_32x32\.mat (is not a complete MATLAB 5 file: |contains no array X).*Expected"
    ):
        open_dataset("svhn", root, "train")


def test_a_version_7_3_file_is_refused(root: Path) -> None:
    header = b"MATLAB 7.3 MAT-file".ljust(116) + bytes(8) + b"\x00\x02IM"
    (root / "test_32x32.mat").write_bytes(header + bytes(512))
    with pytest.raises(InputError, match=r"test_32x32\.mat is not a complete MATLAB 5 file"):
        open_dataset("svhn", root, "test")


def test_the_full_numbers_are_not_taken_for_digits(root: Path) -> None:
    savemat(root / "test_32x32.mat", {"digitStruct": np.zeros(3)})
    with pytest.raises(InputError, match=r"test_32x32\.mat contains no array X"):
        open_dataset("svhn", root, "test")


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (np.zeros((2, 32, 32, 3), np.uint8), r"shape \(2, 32, 32, 3\) instead of bytes \(32, 32, 3, N\)"),
        (np.zeros((4, 4), np.uint8), r"instead of bytes \(32, 32, 3, N\)"),
        (np.zeros((32, 32, 3, 2)), "X in .* is float64 of shape"),
    ],
)
def test_another_array_is_refused(root: Path, pixels: np.ndarray, reason: str) -> None:
    savemat(root / "test_32x32.mat", {"X": pixels})
    with pytest.raises(InputError, match=reason):
        open_dataset("svhn", root, "test")


def test_a_missing_split(root: Path) -> None:
    (root / "test_32x32.mat").unlink()
    with pytest.raises(
        InputError, match=r"contains no test_32x32\.mat\. Expected in .*train_32x32\.mat and test_32x32\.mat"
    ):
        open_dataset("svhn", root, "test")

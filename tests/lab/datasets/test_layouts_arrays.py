from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gepc.core.errors import InputError
from gepc.lab.datasets import open_dataset

TRAIN = np.random.default_rng(1).integers(0, 256, (9, 8, 8, 3), dtype=np.uint8)
TEST = TRAIN[:4] // 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    np.savez_compressed(tmp_path / "small.npz", train_x=TRAIN, test_x=TEST, train_y=np.zeros(9))
    np.save(tmp_path / "test_x.npy", TEST)
    return tmp_path


@pytest.mark.parametrize(("split", "pixels"), [("train", TRAIN), ("test", TEST)])
def test_each_split_is_its_array(root: Path, split: str, pixels: np.ndarray) -> None:
    images = open_dataset("npz:small.npz", root, split)
    assert len(images) == len(pixels)
    for index, record in enumerate(images):
        assert record.name == f"{split}/{index}"
        np.testing.assert_array_equal(record.pixels, pixels[index])


def test_the_file_itself_as_the_root(root: Path) -> None:
    assert len(open_dataset("npz", root / "small.npz", "test")) == 4


def test_a_file_with_a_test_part_alone_says_so(root: Path) -> None:
    np.savez(root / "half.npz", test_x=TEST)
    assert len(open_dataset("npz:half.npz", root, "test")) == 4
    with pytest.raises(InputError, match=r"half\.npz contains no array train_x, only test_x"):
        open_dataset("npz:half.npz", root, "train")


def test_a_folder_is_not_an_npz(root: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder; name the file in it, as in npz:FILE\.npz"):
        open_dataset("npz", root, "test")


def test_an_npy_is_not_an_npz(root: Path) -> None:
    with pytest.raises(InputError, match=r"test_x\.npy is not a complete, plain \.npz archive"):
        open_dataset("npz:test_x.npy", root, "test")


@pytest.mark.parametrize("keep", [0, 10, 200, 1000, -30])
def test_a_cut_file_is_named(root: Path, keep: int) -> None:
    path = root / "small.npz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"small\.npz is not a complete, plain .npz archive.* Expected in"):
        open_dataset("npz:small.npz", root, "train")


def test_a_flipped_byte_in_an_archive(root: Path) -> None:
    content = bytearray((root / "small.npz").read_bytes())
    content[len(content) // 4] ^= 0xFF
    (root / "small.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"small\.npz is not a complete, plain \.npz archive"):
        open_dataset("npz:small.npz", root, "train")


@pytest.mark.parametrize(
    "shape", [b"(4, 8, 8, 3", b"(4, 8, 8,-3)", b"(9**99999,)", b"(4, 8, 8, 9)", b"(4, 8000000000000000000000)"]
)
def test_a_damaged_header(root: Path, shape: bytes) -> None:
    content = (root / "test_x.npy").read_bytes().replace(b"(4, 8, 8, 3), }" + b" " * 30, (shape + b", }").ljust(45))
    assert shape in content
    with zipfile.ZipFile(root / "other.npz", "w") as archive:
        archive.writestr("test_x.npy", content)
    with pytest.raises(InputError, match=r"is not a complete, plain \.npz"):
        open_dataset("npz:other.npz", root, "test")


@pytest.mark.parametrize("array", [np.array([{}, 1], dtype=object), np.zeros((3, 8, 8, 8)), np.zeros(4), TEST[:0]])
def test_an_array_that_is_no_images(root: Path, array: Any) -> None:
    np.savez(root / "other.npz", test_x=array)
    with pytest.raises(InputError, match=r"other\.npz.* Expected in"):
        open_dataset("npz:other.npz", root, "test")


REAL = [
    ("celeba32.npz", {"train": 20_000, "test": 2_000}),
    ("cifar10.npz", {"train": 5_000, "test": 2_000}),
    ("svhn32.npz", {"train": 5_000, "test": 2_000}),
    ("tinyimagenet32.npz", {"test": 2_000}),
]


@pytest.mark.parametrize(("file", "counts"), REAL)
def test_real_images(data_folder: Path, file: str, counts: dict[str, int]) -> None:
    for split, count in counts.items():
        images = open_dataset(f"npz:{file}", data_folder, split)
        assert len(images) == count
        pixels = images[count - 1].pixels
        assert pixels is not None
        assert (pixels.shape, pixels.dtype) == ((32, 32, 3), np.uint8)
    some = open_dataset(f"npz:{file}", data_folder, "test", limit=20, seed=0)
    for record in some:
        np.testing.assert_array_equal(record.pixels, images[int(record.name.removeprefix("test/"))].pixels)


def test_real_images_without_a_train_part(data_folder: Path) -> None:
    with pytest.raises(InputError, match=r"tinyimagenet32\.npz contains no array train_x, only test_x"):
        open_dataset("npz:tinyimagenet32.npz", data_folder, "train")

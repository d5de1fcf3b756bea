from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gepc.core.errors import InputError
from gepc.images.sources import Images
from gepc.lab.datasets import open_dataset

FILES = {
    "cifar10": {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]},
    "cifar100": {"train": ["train"], "test": ["test"]},
}
FOLDERS = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}
BATCH = 4


def rows(name: str, file: str) -> np.ndarray:
    """The (N, 3072) pixels of a batch, red plane first."""
    seed = [sum(map(ord, name)), sum(map(ord, file))]
    return np.random.default_rng(seed).integers(0, 256, (BATCH, 3072), dtype=np.uint8)


def pictures(name: str, split: str) -> np.ndarray:
    """The images as anyone would look at them, (N, 32, 32, 3)."""
    flat = np.concatenate([rows(name, file) for file in FILES[name][split]])
    return flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def write_folder(root: Path, name: str) -> Path:
    folder = root / FOLDERS[name]
    folder.mkdir(parents=True)
    labels = np.full((BATCH, 1 if name == "cifar10" else 2), 7, dtype=np.uint8)
    for file in [*FILES[name]["train"], *FILES[name]["test"]]:
        (folder / f"{file}.bin").write_bytes(np.concatenate([labels, rows(name, file)], axis=1).tobytes())
    return folder


def stacked(images: Images) -> np.ndarray:
    return np.stack([images[index].pixels for index in range(len(images))])  # type: ignore[misc]


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_images_are_those_of_the_files(tmp_path: Path, name: str, split: str) -> None:
    place = write_folder(tmp_path, name)
    for root in (tmp_path, place):
        images = open_dataset(name, root, split)
        np.testing.assert_array_equal(stacked(images), pictures(name, split))
        assert images[len(images) - 1].name == f"{split}/{len(images) - 1}"
        assert images[0].pixels.dtype == np.uint8  # type: ignore[union-attr]


def test_a_subset_is_the_same_for_ever(tmp_path: Path) -> None:
    write_folder(tmp_path, "cifar10")
    images = open_dataset("cifar10", tmp_path, "train", limit=7, seed=5)
    numbers = [int(images[index].name.removeprefix("train/")) for index in range(7)]
    assert numbers == [10, 4, 16, 9, 15, 13, 14]
    np.testing.assert_array_equal(stacked(images), pictures("cifar10", "train")[numbers])


def test_indices_are_those_of_a_sequence(tmp_path: Path) -> None:
    write_folder(tmp_path, "cifar10")
    images = open_dataset("cifar10", tmp_path, "train")
    assert images[-1].name == "train/19"
    with pytest.raises(IndexError):
        images[20]


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    (write_folder(tmp_path, "cifar10") / "data_batch_3.bin").unlink()
    with pytest.raises(
        InputError, match=r"cifar-10-batches-bin lacks data_batch_3\.bin\. Expected in .*data_batch_1\.bin to data_"
    ):
        open_dataset("cifar10", tmp_path, "train")
    assert len(open_dataset("cifar10", tmp_path, "test")) == BATCH


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("keep", [0, 1, 3000, -1])
def test_a_cut_batch_is_named(tmp_path: Path, name: str, keep: int) -> None:
    path = next(iter(write_folder(tmp_path, name).glob("test*")))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=f"({path.name} in .* is cut short|contains no image).* Expected in"):
        open_dataset(name, tmp_path, "test")

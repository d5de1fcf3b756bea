from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.core.errors import InputError, OptionError
from gepc.images.batches import load_all
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import open_images
from gepc.lab.datasets import find_dataset, list_datasets, open_dataset, register
from gepc.lab.datasets import registry as registry_module

FAMILIES = ["celeba", "cifar10", "cifar100", "folder", "npz", "svhn"]
COUNTS = {"train": 60, "test": 40}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images whose first pixel is their number, those of the test split from 100 on."""
    folder = tmp_path_factory.mktemp("arrays")
    arrays = {}
    for split, count in COUNTS.items():
        numbers = np.arange(count, dtype=np.uint8) + (100 if split == "test" else 0)
        arrays[f"{split}_x"] = np.broadcast_to(numbers[:, None, None, None], (count, 4, 4, 3))
    for name in ("both", "again"):
        np.savez(folder / f"{name}.npz", **arrays)
    return folder


def numbers(name: str, root: Path, split: str, **options: Any) -> list[int]:
    return [int(record.pixels[0, 0, 0]) for record in open_dataset(name, root, split, **options)]  # type: ignore[index]


def test_every_data_set_is_listed() -> None:
    assert list_datasets() == FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_wrong_folder_says_what_was_expected(tmp_path: Path, name: str, split: str) -> None:
    (tmp_path / "unrelated").touch()
    for root in (tmp_path, tmp_path / "absent", tmp_path / "unrelated"):
        with pytest.raises(InputError) as caught:
            open_dataset(name, root, split)
        message = str(caught.value)
        assert message.startswith(f"{name}, {split} split: ")
        assert f"Expected in {root}: {find_dataset(name).layout}" in message
        assert "\n" not in message
        if root.name == "absent":
            assert f"{root} does not exist" in message


def test_the_files_looked_for_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        open_dataset("cifar10", tmp_path, "test")
    assert f"{tmp_path} contains no cifar-10-batches-bin. " in str(caught.value)
    assert "get it from https://www.cs.toronto.edu/~kriz/cifar.html, or with `gepc data get`" in str(caught.value)


@pytest.mark.parametrize(("wrong", "right"), [("cifar-10", "cifar10"), ("CelebA", "celeba"), ("Svhn", "svhn")])
def test_an_unknown_name_has_near_ones(tmp_path: Path, wrong: str, right: str) -> None:
    with pytest.raises(
        OptionError, match=f"unknown data set '{wrong}'; did you mean '{right}'.*valid: celeba, cifar10"
    ):
        open_dataset(wrong, tmp_path, "test")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"split": "tset"}, "unknown split 'tset'; did you mean 'test'"),
        ({"split": "val"}, "unknown split 'val'"),
        ({"limit": 0}, "limit must be a whole number of at least 1"),
        ({"limit": 2.5}, "limit must be"),
        ({"limit": True}, "limit must be"),
        ({"limit": 3, "seed": -1}, "seed must be a whole number of at least 0"),
        ({"limit": 3, "seed": "0"}, "seed must be"),
    ],
)
def test_options_are_checked(root: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        open_dataset(**{"name": "npz:both.npz", "root": root, "split": "test", **options})


def test_a_family_is_registered_once() -> None:
    with pytest.raises(OptionError, match="a data set named 'npz' exists already"):
        register("npz", layout="")(lambda root, split: open_images(np.zeros((1, 4, 4, 3))))


def test_a_new_family_is_one_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry_module, "_DATASETS", dict(registry_module._DATASETS))

    @register("checks", layout="nothing")
    def checks(root: Path, split: str) -> Any:
        return open_images(np.zeros((5, 4, 4, 3), np.uint8))

    assert "checks" in list_datasets()
    assert len(open_dataset("checks", tmp_path, "test", limit=2)) == 2


def test_a_file_that_may_not_be_read_is_an_input_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry_module, "_DATASETS", dict(registry_module._DATASETS))

    @register("locked", layout="a file")
    def locked(root: Path, split: str) -> Any:
        raise PermissionError(13, "Permission denied", str(root / "batch"))

    with pytest.raises(InputError, match=r"Permission denied: '.*batch'\. Expected in .*: a file"):
        open_dataset("locked", tmp_path, "test")


def test_without_a_seed_the_first_ones(root: Path) -> None:
    assert numbers("npz:both.npz", root, "test", limit=3) == [100, 101, 102]


@pytest.mark.parametrize("limit", [None, 60, 61, 10**9])
def test_a_limit_that_is_not_reached_gives_all(root: Path, limit: int | None) -> None:
    assert numbers("npz:both.npz", root, "train", limit=limit) == list(range(60))
    drawn = numbers("npz:both.npz", root, "train", limit=limit, seed=3)
    assert sorted(drawn) == list(range(60))
    if limit is not None:  # the whole set, too, begins with a smaller subset
        assert drawn[:50] == numbers("npz:both.npz", root, "train", limit=50, seed=3)


def test_a_seeded_subset_is_the_same_for_ever(root: Path) -> None:
    assert numbers("npz:both.npz", root, "train", limit=6, seed=0) == [30, 43, 50, 57, 55, 3]


@given(limit=st.integers(1, 40), seed=st.integers(0, 2**40), name=st.sampled_from(["npz:again.npz", "npz:both.npz"]))
def test_subsets_are_repeatable_and_apart(root: Path, limit: int, seed: int, name: str) -> None:
    train = numbers(name, root, "train", limit=limit, seed=seed)
    test = numbers(name, root, "test", limit=limit, seed=seed)
    assert train == numbers(name, root, "train", limit=limit, seed=seed)
    assert len(set(train)) == len(set(test)) == limit
    assert set(train).isdisjoint(test)
    assert train == numbers(name, root, "train", limit=limit + 5, seed=seed)[:limit]


def test_name_split_and_seed_each_matter(root: Path) -> None:
    drawn = [
        numbers("npz:both.npz", root, "train", limit=20, seed=0),
        numbers("npz:both.npz", root, "train", limit=20, seed=1),
        numbers("npz:again.npz", root, "train", limit=20, seed=0),
        [number - 100 for number in numbers("npz:both.npz", root, "test", limit=20, seed=0)],
    ]
    assert len({tuple(chosen) for chosen in drawn}) == 4


def test_every_image_is_drawn_equally_often(root: Path) -> None:
    draws = 600
    counts = np.zeros(60)
    for seed in range(draws):
        counts[registry_module._draw("npz:both.npz", "train", seed, 60, 15)] += 1
    assert np.abs(counts - draws / 4).max() < 5 * (draws * 0.25 * 0.75) ** 0.5


def test_a_data_set_goes_where_images_go(root: Path) -> None:
    images = open_dataset("npz:both.npz", root, "train", limit=5)
    assert open_images(images) is images
    loaded = load_all(images, Preprocessing())
    assert loaded.shape == (5, 3, 4, 4)


def test_importing_is_light() -> None:
    heavy = ("torch", "scipy", "PIL", "datasets")
    code = f"import sys, gepc.lab.datasets as d; d.list_datasets(); print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

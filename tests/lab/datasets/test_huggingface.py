from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage

from gepc.core.errors import InputError, OptionError
from gepc.lab.datasets import open_dataset


class Table:
    """As much of `datasets.Dataset` as is used: rows decoded when asked for, and the names of the columns."""

    def __init__(self, pictures: list[Any], column: str = "img") -> None:
        self.pictures, self.column_names = pictures, [column, "label"]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if isinstance(self.pictures[index], Exception):
            raise self.pictures[index]
        return {self.column_names[0]: self.pictures[index], "label": 0}


class Library(types.ModuleType):
    """Stands for the package `datasets`, and writes down what it was asked and whether it was kept offline."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.config = types.ModuleType("datasets.config")
        self.config.HF_HUB_OFFLINE = False  # type: ignore[attr-defined]
        self.calls: list[tuple[Any, ...]] = []
        self.bars_disabled = False
        self.answer: Any = {"test": Table([PILImage.new("RGB", (4, 4), (1, 2, 3)) for _ in range(5)])}

    def load_dataset(self, path: str, configuration: str | None) -> Any:
        self.calls.append(("load_dataset", path, configuration, self.config.HF_HUB_OFFLINE))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def are_progress_bars_disabled(self) -> bool:
        return self.bars_disabled

    def disable_progress_bars(self) -> None:
        self.bars_disabled = True

    def enable_progress_bars(self) -> None:
        self.bars_disabled = False

    def load_from_disk(self, path: str) -> Any:
        self.calls.append(("load_from_disk", path, self.config.HF_HUB_OFFLINE))
        return self.answer


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    fake = Library()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setitem(sys.modules, "datasets.config", fake.config)
    yield fake
    assert fake.config.HF_HUB_OFFLINE is False  # as it was before
    assert fake.bars_disabled is False


def test_from_the_cache_and_never_from_the_network(library: Library, tmp_path: Path) -> None:
    images = open_dataset("hf:uoft-cs/cifar10:plain_text", tmp_path, "test", limit=3, seed=1)
    assert library.calls == [("load_dataset", "uoft-cs/cifar10", "plain_text", True)]
    assert len(images) == 3
    assert images[0].pixels.shape == (4, 4, 3)  # type: ignore[union-attr]


def test_below_the_root_first(library: Library, tmp_path: Path) -> None:
    (tmp_path / "owner" / "cloned").mkdir(parents=True)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").touch()
    open_dataset("hf:owner/cloned", tmp_path, "test")
    open_dataset("hf:saved", tmp_path, "test")
    assert library.calls == [
        ("load_dataset", str(tmp_path / "owner" / "cloned"), None, True),
        ("load_from_disk", str(tmp_path / "saved"), True),
    ]


def test_every_kind_of_picture(library: Library, tmp_path: Path) -> None:
    kinds = ["RGB", "L", "P", "RGBA", "1", "LA", "I;16"]
    library.answer = {"test": Table([PILImage.new(kind, (4, 5)) for kind in kinds] + [np.ones((4, 5, 3))], "image")}
    shapes = [record.pixels.shape for record in open_dataset("hf:x", tmp_path, "test")]  # type: ignore[union-attr]
    assert shapes == [(5, 4, 3), (5, 4), (5, 4, 3), (5, 4, 3), (5, 4), (5, 4), (5, 4), (4, 5, 3)]


def test_a_broken_picture_is_a_record_with_a_reason(library: Library, tmp_path: Path) -> None:
    library.answer = {"test": Table([PILImage.new("L", (4, 4)), OSError("cannot identify image file")])}
    good, bad = open_dataset("hf:x", tmp_path, "test")
    assert good.error is None
    assert bad.error == "test/1 cannot be decoded: cannot identify image file"


def test_not_on_this_machine(library: Library, tmp_path: Path) -> None:
    library.answer = ConnectionError("Couldn't reach 'x' on the Hub (OfflineModeIsEnabled)\nmore")
    with pytest.raises(
        InputError, match=r"x is neither below .* nor in the cache: Couldn't reach 'x' .*Enabled\)\. Expected"
    ):
        open_dataset("hf:x", tmp_path, "test")


def test_a_missing_split(library: Library, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="x has no train split but test"):
        open_dataset("hf:x", tmp_path, "train")


def test_a_table_without_images(library: Library, tmp_path: Path) -> None:
    library.answer = {"test": Table([], "text")}
    with pytest.raises(InputError, match="no column is called image, img, pixel_values, images; there are text, label"):
        open_dataset("hf:x", tmp_path, "test")


def test_the_package_is_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="hf needs the package `datasets`: pip install datasets"):
        open_dataset("hf:x", tmp_path, "test")


def test_hf_alone_names_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="hf needs a name: write hf:NAME"):
        open_dataset("hf", tmp_path, "test")

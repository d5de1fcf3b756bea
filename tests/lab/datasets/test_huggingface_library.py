"""The `hf` reader on what the `datasets` library itself writes and reads; skipped where that is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from gepc.core.errors import InputError
from gepc.lab.datasets import open_dataset

library = pytest.importorskip("datasets", reason="needs the package datasets (the extra hf)")

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 6, 5, 3), dtype=np.uint8)
SPLITS = {"train": PIXELS[:5], "test": PIXELS[5:]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left in the user's cache of the library."""
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    library.disable_progress_bars()


def table(pixels: npt.NDArray[np.uint8]) -> Any:
    features = library.Features({"image": library.Image(), "label": library.Value("int64")})
    columns = {"image": [Image.fromarray(one) for one in pixels], "label": [0] * len(pixels)}
    return library.Dataset.from_dict(columns, features=features)


def assert_splits(name: str, root: Path) -> None:
    for split, expected in SPLITS.items():
        found = [record.pixels for record in open_dataset(f"hf:{name}", root, split)]
        np.testing.assert_array_equal(np.stack(found), expected)  # type: ignore[arg-type]


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    library.DatasetDict({split: table(pixels) for split, pixels in SPLITS.items()}).save_to_disk(tmp_path / "saved")
    assert_splits("saved", tmp_path)
    with pytest.raises(InputError, match="has no configurations"):
        open_dataset("hf:saved:plain", tmp_path, "test")


def test_one_table_saved_alone_is_a_test_set(tmp_path: Path) -> None:
    table(SPLITS["test"]).save_to_disk(tmp_path / "alone")
    assert len(open_dataset("hf:alone", tmp_path, "test")) == 3
    with pytest.raises(InputError, match="alone has no train split but test"):
        open_dataset("hf:alone", tmp_path, "train")


def test_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "owner" / "parquet").mkdir(parents=True)
    for split, pixels in SPLITS.items():
        table(pixels).to_parquet(tmp_path / "owner" / "parquet" / f"{split}-00000-of-00001.parquet")
    assert_splits("owner/parquet", tmp_path)


def test_an_image_folder_with_a_broken_file(tmp_path: Path) -> None:
    for split, pixels in SPLITS.items():
        (tmp_path / "pictures" / split).mkdir(parents=True)
        for number, one in enumerate(pixels):
            Image.fromarray(one).save(tmp_path / "pictures" / split / f"{number}.png")
    assert_splits("pictures", tmp_path)
    (tmp_path / "pictures" / "test" / "1.png").write_bytes(b"broken")
    errors = [record.error for record in open_dataset("hf:pictures", tmp_path, "test")]
    assert [error is None for error in errors] == [True, False, True]
    assert str(errors[1]).startswith("test/1 cannot be decoded")


def test_what_is_not_here_is_not_asked_from_the_network(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nobody/nothing is neither below .* nor in the cache"):
        open_dataset("hf:nobody/nothing", tmp_path, "test")
    assert library.config.HF_HUB_OFFLINE is False

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage

from gepc.core.errors import InputError
from gepc.images.formats import read_pixels
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import Images
from gepc.lab.datasets import open_dataset


def write_images(folder: Path, names: Sequence[str], size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    for index, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        PILImage.new(mode, size, color=(index * 10) if mode == "L" else (index * 10, 100, 200)).save(path, "JPEG")


def names_of(images: Images) -> list[str]:
    return [record.name for record in images]


@pytest.fixture
def celeba(tmp_path: Path) -> Path:
    names = [f"{number:06d}.jpg" for number in range(1, 7)]
    write_images(tmp_path / "img_align_celeba", names, size=(178, 218))
    lines = [f"{name} {part}\n" for name, part in zip(names, "001220", strict=True)]
    (tmp_path / "list_eval_partition.txt").write_text("".join(lines))
    return tmp_path


class TestCelebA:
    def test_the_partition_file_says_who_is_in_which_split(self, celeba: Path) -> None:
        assert names_of(open_dataset("celeba", celeba, "train")) == ["000001.jpg", "000002.jpg", "000006.jpg"]
        assert names_of(open_dataset("celeba", celeba, "test")) == ["000004.jpg", "000005.jpg"]

    def test_the_middle_140_by_140(self, celeba: Path) -> None:
        path = celeba / "img_align_celeba" / "000001.jpg"
        rows, columns = np.mgrid[:218, :178]
        PILImage.fromarray(np.stack([rows, columns, rows], 2).astype(np.uint8)).save(path, "JPEG", quality=100)
        pixels = open_dataset("celeba", celeba, "train")[0].pixels
        np.testing.assert_array_equal(pixels, read_pixels(path)[39:179, 19:159])
        assert Preprocessing(size=(32, 32))(pixels).shape == (3, 32, 32)  # type: ignore[arg-type]

    def test_the_csv_form_with_a_folder_in_the_folder(self, celeba: Path) -> None:
        text = (celeba / "list_eval_partition.txt").read_text().replace(" ", ",")
        (celeba / "list_eval_partition.txt").unlink()
        (celeba / "list_eval_partition.csv").write_text("image_id,partition\n" + text)
        (celeba / "img_align_celeba").rename(celeba / "inner")
        (celeba / "img_align_celeba").mkdir()
        (celeba / "inner").rename(celeba / "img_align_celeba" / "img_align_celeba")
        images = open_dataset("celeba", celeba, "test")
        assert [record.error for record in images] == [None, None]

    def test_the_owners_own_folders(self, celeba: Path) -> None:
        for part, name in (("Img", "img_align_celeba"), ("Eval", "list_eval_partition.txt")):
            (celeba / part).mkdir()
            (celeba / name).rename(celeba / part / name)
        assert len(open_dataset("celeba", celeba, "train")) == 3

    def test_bad_images_are_records_with_a_reason(self, celeba: Path) -> None:
        folder = celeba / "img_align_celeba"
        (folder / "000001.jpg").write_bytes((folder / "000001.jpg").read_bytes()[:300])
        (folder / "000002.jpg").unlink()
        write_images(folder, ["000006.jpg"], size=(100, 218))
        records = list(open_dataset("celeba", celeba, "train"))
        assert all(record.pixels is None for record in records)
        for record, reason in zip(records, ("damaged", "does not exist", "too small for the centre crop"), strict=True):
            assert record.name in (record.error or "")
            assert reason in (record.error or "")

    def test_no_partition_file(self, celeba: Path) -> None:
        (celeba / "list_eval_partition.txt").unlink()
        looked_for = (
            r"contains none of list_eval_partition\.txt, list_eval_partition\.csv, .* Expected in .*000001\.jpg 0"
        )
        with pytest.raises(InputError, match=looked_for):
            open_dataset("celeba", celeba, "train")

    def test_no_images(self, celeba: Path) -> None:
        for path in (celeba / "img_align_celeba").iterdir():
            path.unlink()
        with pytest.raises(InputError, match=r"img_align_celeba has none of the images, such as"):
            open_dataset("celeba", celeba, "test")

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"000001.jpg 0\n000002.jpg\n", "line 2 of .* is not a file name and 0, 1 or 2: '000002.jpg'"),
            (b"000001.jpg 3\n", "line 1 of"),
            (b"", "has no image in the train split"),
            (b"000001.jpg 1\n", "has no image in the train split"),
            (b"\xff\xfe\x00", "is not a text file"),
        ],
    )
    def test_a_damaged_partition_file(self, celeba: Path, content: bytes, reason: str) -> None:
        (celeba / "list_eval_partition.txt").write_bytes(content)
        with pytest.raises(InputError, match=reason):
            open_dataset("celeba", celeba, "train")


class TestFolder:
    def test_train_and_test_folders_are_the_splits(self, tmp_path: Path) -> None:
        write_images(tmp_path, ["train/b/1.jpg", "train/a/2.jpg", "test/3.jpg", "stray.jpg"])
        assert names_of(open_dataset("folder", tmp_path, "train")) == ["train/a/2.jpg", "train/b/1.jpg"]
        assert names_of(open_dataset("folder", tmp_path, "test")) == ["test/3.jpg"]

    def test_a_plain_folder_is_a_test_split_and_nothing_else(self, tmp_path: Path) -> None:
        write_images(tmp_path / "sea", ["2.jpg", "1.jpg"])
        assert names_of(open_dataset("folder:sea", tmp_path, "test")) == ["1.jpg", "2.jpg"]
        with pytest.raises(InputError, match="has no train/, so all its images are test images"):
            open_dataset("folder:sea", tmp_path, "train")

    def test_one_split_alone(self, tmp_path: Path) -> None:
        write_images(tmp_path, ["train/1.jpg"])
        assert len(open_dataset("folder", tmp_path, "train")) == 1
        with pytest.raises(InputError, match=r"test is not a folder\. Expected in .*: train/ and test/"):
            open_dataset("folder", tmp_path, "test")

    def test_a_broken_image_among_good_ones(self, tmp_path: Path) -> None:
        write_images(tmp_path, ["1.jpg", "2.jpg", "3.jpg"])
        (tmp_path / "2.jpg").write_bytes((tmp_path / "2.jpg").read_bytes()[:200])
        records = list(open_dataset("folder", tmp_path, "test", limit=2))
        assert [record.error is None for record in records] == [True, False]
        assert "2.jpg is damaged or cut short" in (records[1].error or "")

    def test_no_image_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        with pytest.raises(InputError, match="contains no image file"):
            open_dataset("folder", tmp_path, "test")

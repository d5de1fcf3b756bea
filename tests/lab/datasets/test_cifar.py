from __future__ import annotations

import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gepc.core.errors import InputError
from gepc.images.sources import Images
from gepc.lab.datasets import open_dataset

FILES = {
    "cifar10": {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]},
    "cifar100": {"train": ["train"], "test": ["test"]},
}
FOLDERS = {
    ("cifar10", "python"): "cifar-10-batches-py",
    ("cifar10", "binary"): "cifar-10-batches-bin",
    ("cifar100", "python"): "cifar-100-python",
    ("cifar100", "binary"): "cifar-100-binary",
}
BATCH = 4


def rows(name: str, file: str) -> np.ndarray:
    """The (N, 3072) pixels of a batch, red plane first."""
    seed = [sum(map(ord, name)), sum(map(ord, file))]
    return np.random.default_rng(seed).integers(0, 256, (BATCH, 3072), dtype=np.uint8)


def pictures(name: str, split: str) -> np.ndarray:
    """The images as anyone would look at them, (N, 32, 32, 3)."""
    flat = np.concatenate([rows(name, file) for file in FILES[name][split]])
    return flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def python2_pickle(pixels: np.ndarray) -> bytes:
    """Opcode by opcode what cPickle of Python 2 wrote: protocol 2, byte strings, numpy.core."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    count = struct.pack("<H", len(pixels))
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            text(b"batch_label") + b"q\x02" + text(b"training batch 1 of 5") + b"q\x03",
            text(b"labels") + b"q\x04]q\x05(" + b"".join(b"K" + bytes([n]) for n in range(len(pixels))) + b"e",
            text(b"data") + b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\x09",
            text(b"b") + b"q\x0a\x87q\x0bRq\x0c(K\x01M" + count + b"M\x00\x0c\x86q\x0dcnumpy\ndtype\nq\x0e",
            text(b"u1") + b"q\x0fK\x00K\x01\x87q\x10Rq\x11(K\x03" + text(b"|") + b"q\x12NNNJ\xff\xff\xff\xff",
            b"J\xff\xff\xff\xffK\x00tq\x13b\x89T" + struct.pack("<i", pixels.size) + pixels.tobytes() + b"q\x14tb",
            text(b"filenames") + b"q\x15]q\x16(" + text(b"leptodactylus_s_000004.png") + b"e",
            b"u.",
        ]
    )


def write_batch(path: Path, name: str, form: str) -> None:
    pixels = rows(name, path.stem)
    if form == "python":
        path.write_bytes(python2_pickle(pixels))
    else:
        labels = np.full((BATCH, 1 if name == "cifar10" else 2), 7, dtype=np.uint8)
        path.write_bytes(np.concatenate([labels, pixels], axis=1).tobytes())


def write_folder(root: Path, name: str, form: str) -> Path:
    folder = root / FOLDERS[name, form]
    folder.mkdir(parents=True)
    for file in [*FILES[name]["train"], *FILES[name]["test"]]:
        write_batch(folder / (file + (".bin" if form == "binary" else "")), name, form)
    return folder


def write_archive(root: Path, name: str, form: str) -> Path:
    archive = root / f"{'cifar-10' if name == 'cifar10' else 'cifar-100'}-{form}.tar.gz"
    folder = write_folder(root / "elsewhere", name, form)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return archive


def stacked(images: Images) -> np.ndarray:
    return np.stack([images[index].pixels for index in range(len(images))])  # type: ignore[misc]


def test_the_hand_written_pickle_is_a_true_one() -> None:
    pixels = rows("cifar10", "test_batch")
    batch: dict[bytes, Any] = pickle.loads(python2_pickle(pixels), encoding="bytes")
    assert list(batch) == [b"batch_label", b"labels", b"data", b"filenames"]
    np.testing.assert_array_equal(batch[b"data"], pixels)


@pytest.mark.parametrize("write", [write_folder, write_archive])
@pytest.mark.parametrize(("name", "form"), FOLDERS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_form_gives_the_same_images(tmp_path: Path, write: Any, name: str, form: str, split: str) -> None:
    place = write(tmp_path, name, form)
    for root in (tmp_path, place):
        images = open_dataset(name, root, split)
        np.testing.assert_array_equal(stacked(images), pictures(name, split))
        assert images[len(images) - 1].name == f"{split}/{len(images) - 1}"
        assert images[0].pixels.dtype == np.uint8  # type: ignore[union-attr]


def test_python_3_pickles_of_protocol_2(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = rows("cifar10", "test_batch")
    batch = {b"data": pixels, b"labels": [0] * BATCH, b"filenames": [b"a.png"], b"batch_label": b"testing batch 1 of 1"}
    (folder / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    np.testing.assert_array_equal(stacked(open_dataset("cifar10", tmp_path, "test")), pictures("cifar10", "test"))


@pytest.mark.parametrize("form", ["python", "binary"])
def test_a_subset_is_the_same_from_every_form(tmp_path: Path, form: str) -> None:
    write_folder(tmp_path, "cifar10", form)
    images = open_dataset("cifar10", tmp_path, "train", limit=7, seed=5)
    numbers = [int(images[index].name.removeprefix("train/")) for index in range(7)]
    assert numbers == [10, 4, 16, 9, 15, 13, 14]
    np.testing.assert_array_equal(stacked(images), pictures("cifar10", "train")[numbers])


def test_the_binary_version_is_mapped_and_not_loaded(tmp_path: Path) -> None:
    write_folder(tmp_path, "cifar100", "binary")
    for limit in (None, 2):
        pixels = open_dataset("cifar100", tmp_path, "train", limit)[0].pixels
        assert isinstance(pixels, np.memmap)


def test_indices_are_those_of_a_sequence(tmp_path: Path) -> None:
    write_folder(tmp_path, "cifar10", "binary")
    images = open_dataset("cifar10", tmp_path, "train")
    assert images[-1].name == "train/19"
    with pytest.raises(IndexError):
        images[20]


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    (write_folder(tmp_path, "cifar10", "python") / "data_batch_3").unlink()
    with pytest.raises(
        InputError, match=r"cifar-10-batches-py lacks data_batch_3\. Expected in .*data_batch_1 to data_"
    ):
        open_dataset("cifar10", tmp_path, "train")
    assert len(open_dataset("cifar10", tmp_path, "test")) == BATCH


@pytest.mark.parametrize(("name", "form"), FOLDERS)
@pytest.mark.parametrize("keep", [0, 1, 3000, -1])
def test_a_cut_batch_is_named(tmp_path: Path, name: str, form: str, keep: int) -> None:
    path = next(iter(write_folder(tmp_path, name, form).glob("test*")))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=f"{path.name} (is empty|cannot be read: .*cut short).* Expected in"):
        open_dataset(name, tmp_path, "test")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_cut_archive_is_named(tmp_path: Path, share: float) -> None:
    archive = write_archive(tmp_path, "cifar10", "python")
    content = archive.read_bytes()
    archive.write_bytes(content[: int(share * len(content))])
    with pytest.raises(InputError, match=r"cifar-10-python\.tar\.gz is damaged or cut short"):
        open_dataset("cifar10", tmp_path, "test")


def test_an_archive_without_the_batch(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz") as tar:
        tar.add(write_folder(tmp_path / "x", "cifar100", "binary") / "train.bin", "cifar-100-binary/train.bin")
    with pytest.raises(InputError, match=r"cifar-100-binary\.tar\.gz lacks cifar-100-binary/test\.bin"):
        open_dataset("cifar100", tmp_path, "test")


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({b"labels": [1]}, r"does not hold an array of bytes of shape \(N, 3072\)"),
        ({b"data": np.zeros((2, 5), np.uint8)}, "does not hold an array of bytes"),
        ({b"data": np.zeros((3072, 2), np.uint8)}, "does not hold an array of bytes"),
        ({b"data": np.zeros((2, 3072))}, "does not hold an array of bytes"),
        ({b"data": [0] * 3072}, "does not hold an array of bytes"),
        ({b"data": b"\0" * 3072}, "does not hold an array of bytes"),
        ({b"data": np.zeros((0, 3072), np.uint8)}, "it holds no image"),
        ([1, 2], "does not hold an array of bytes"),
    ],
)
def test_another_pickle_is_not_taken_for_a_batch(tmp_path: Path, batch: object, reason: str) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python" / "test").write_bytes(pickle.dumps(batch, protocol=4))
    with pytest.raises(InputError, match=reason):
        open_dataset("cifar100", tmp_path, "test")


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("packed", [False, True])
def test_a_malicious_archive_is_refused_without_running_it(tmp_path: Path, packed: bool) -> None:
    mark = tmp_path / "it ran"
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": Attack(mark)}, protocol=2))
    root = tmp_path
    if packed:
        root = tmp_path / "cifar-10-python.tar.gz"
        with tarfile.open(root, "w:gz") as tar:
            tar.add(folder, folder.name)
    with pytest.raises(InputError, match=r"test_batch.* asks to run .* do not trust this file"):
        open_dataset("cifar10", root, "test")
    assert not mark.exists()

"""DataLoaders, iterable data sets and generators: read once, in order, in constant memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from toys import as_uint8, pictures, toy_backbone, toy_detector

import gepc
from gepc.core.errors import InputError, OptionError
from gepc.images.sources import StreamImages, open_images

IMAGES = pictures(30)
NEW = pictures(7, seed=1, contrast=1.5)
TENSORS = torch.from_numpy(NEW)
LABELS = torch.arange(7)


@pytest.fixture(scope="module")
def fitted() -> gepc.GEPC:
    return toy_detector(batch_size=4).fit(IMAGES)


class Pairs(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(image, 3) for image in TENSORS])


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"img": TENSORS[index], "label": index}


def _image_lists(batch: list[Any]) -> tuple[list[Any], torch.Tensor]:
    return [image for image, _ in batch], torch.tensor([label for _, label in batch])


PAIRS = TensorDataset(TENSORS, LABELS)
STREAMS: dict[str, Callable[[], Any]] = {
    "generator of tensors": lambda: (image for image in TENSORS),
    "generator of pairs": lambda: ((image, 0) for image in NEW),
    "generator of batches": lambda: iter([NEW[:5], NEW[5:]]),
    "generator of batches with labels": lambda: iter([(NEW[:5], LABELS[:5]), (NEW[5:], LABELS[5:])]),
    "IterableDataset": Pairs,
    "Dataset of dictionaries": Named,
    "DataLoader": lambda: DataLoader(PAIRS, batch_size=3),
    "DataLoader of tensors": lambda: DataLoader(list(TENSORS), batch_size=3),  # type: ignore[arg-type]
    "DataLoader of dictionaries": lambda: DataLoader(Named(), batch_size=3),
    "DataLoader without batches": lambda: DataLoader(PAIRS, batch_size=None),
    "DataLoader over a stream": lambda: DataLoader(Pairs(), batch_size=2),
    "DataLoader of lists and labels": lambda: DataLoader(PAIRS, batch_size=3, collate_fn=_image_lists),
    "DataLoader with masks": lambda: DataLoader(TensorDataset(TENSORS, TENSORS[:, 0]), batch_size=3),
    "DataLoader with a sampler of batches": lambda: DataLoader(PAIRS, batch_sampler=[[0, 1], [2, 3, 4, 5, 6]]),
}


@pytest.mark.parametrize("name", STREAMS)
def test_every_usual_form_gives_the_scores_of_the_array(fitted: gepc.GEPC, name: str) -> None:
    np.testing.assert_allclose(fitted.score(STREAMS[name]()), fitted.score(NEW), rtol=1e-5)


@pytest.mark.parametrize("name", ["generator of pairs", "DataLoader", "IterableDataset"])
def test_the_other_methods_take_streams_too(fitted: gepc.GEPC, name: str) -> None:
    np.testing.assert_array_equal(fitted.predict(STREAMS[name](), alpha=0.2), fitted.predict(NEW, alpha=0.2))
    np.testing.assert_array_equal(fitted.predict(STREAMS[name](), fdr=0.4), fitted.predict(NEW, fdr=0.4))
    np.testing.assert_allclose(fitted.score_map(STREAMS[name]()), fitted.score_map(NEW), rtol=1e-4)


def test_fitting_on_a_loader_is_fitting_on_its_images() -> None:
    loader = DataLoader(TensorDataset(torch.from_numpy(IMAGES), torch.zeros(30)), batch_size=7)
    streamed, plain = toy_detector().fit(loader), toy_detector().fit(IMAGES)
    np.testing.assert_array_equal(streamed.calibration_scores_, plain.calibration_scores_)
    np.testing.assert_array_equal(streamed.kept_, plain.kept_)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_last_batch_of_grey_images_is_a_batch(count: int) -> None:
    """(1, H, W) and (3, H, W) could be one image with 1 or 3 channels."""
    loader = DataLoader(TensorDataset(torch.zeros(count, 8, 8), torch.zeros(count)), batch_size=8)
    assert [record.pixels.shape for record in open_images(loader)] == [(8, 8)] * count  # type: ignore[union-attr]


def test_memory_is_constant(fitted: gepc.GEPC) -> None:
    """An endless stream gives results, and reads at most a chunk ahead of the 16 images that are looked at first."""
    read = 0

    def endless() -> Iterator[torch.Tensor]:
        nonlocal read
        for read in itertools.count(1):
            yield TENSORS[read % 7]

    results = list(itertools.islice(fitted.results(endless()), 40))
    assert [result.index for result in results] == list(range(40))
    assert read <= 40 + 4


def test_looking_ahead_loses_nothing() -> None:
    stream = open_images(iter(NEW))
    assert [record.name for record in stream.first(3)] == ["0", "1", "2"]
    assert len(list(stream.first(2))) == 2
    assert [record.name for record in stream] == list("0123456")
    assert list(stream) == []  # a generator is read once


def test_a_loader_can_be_read_again(fitted: gepc.GEPC) -> None:
    loader = STREAMS["DataLoader"]()
    np.testing.assert_array_equal(fitted.score(loader), fitted.score(loader))


def test_a_stream_of_files(fitted: gepc.GEPC, tmp_path: Path) -> None:
    for number, pixels in enumerate(as_uint8(NEW)):
        PILImage.fromarray(pixels).save(tmp_path / f"{number}.png")
    (tmp_path / "3.png").write_bytes(b"not a picture")
    rows = list(fitted.results(path for path in sorted(tmp_path.iterdir())))
    assert [Path(row.name).name for row in rows] == [f"{n}.png" for n in range(7)]
    assert [row.error is None for row in rows] == [True, True, True, False, True, True, True]


def test_what_needs_a_length_says_so(fitted: gepc.GEPC) -> None:
    stream = open_images(iter(NEW))
    assert isinstance(stream, StreamImages)
    with pytest.raises(OptionError, match="stream of images has no length"):
        len(stream)
    with pytest.raises(OptionError, match="read in order"):
        stream[0]
    with pytest.raises(OptionError, match="no length"):
        toy_detector().fit(iter(IMAGES), groups=["a"] * 30)


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(InputError, match="no in-distribution images to fit on"):
        toy_detector().fit(iter([]))
    with pytest.raises(InputError, match="there are no images"):
        toy_detector().features(iter([]))


@pytest.mark.parametrize("source", [3, None, {"image": NEW}, b"photos"])
def test_what_is_no_collection_is_refused(source: Any) -> None:
    with pytest.raises(InputError, match="cannot read images from"):
        open_images(source)


def test_a_data_set_that_fails_on_an_item_gives_a_row(fitted: gepc.GEPC) -> None:
    class Damaged(Named):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 2:
                raise OSError("image file is truncated")
            return super().__getitem__(index)

    rows = list(fitted.results(Damaged()))
    assert [row.error for row in rows] == [
        None,
        None,
        "image 2 cannot be decoded: image file is truncated",
        None,
        None,
        None,
        None,
    ]
    with pytest.raises(InputError, match="image 2 cannot be decoded: image file is truncated"):
        fitted.score(Damaged())


def test_fitting_on_a_stream_with_a_network_that_lists_its_training_images() -> None:
    """The images are observed while they are read, and are still a stream."""
    backbone = toy_backbone()
    backbone.trained_on = np.array([1, 2, 3], dtype=np.uint64)
    found = toy_detector(backbone).fit(iter(IMAGES))
    np.testing.assert_allclose(found.score(NEW), toy_detector().fit(IMAGES).score(NEW), rtol=1e-5)


def test_a_picture_that_cannot_be_decoded_is_a_row(fitted: gepc.GEPC, tmp_path: Path) -> None:
    """Pillow opens a file that was cut short, and fails when it decodes it."""
    PILImage.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
    with PILImage.open(tmp_path / "a.png") as whole_picture, PILImage.open(tmp_path / "b.png") as cut:
        good, bad = fitted.results([whole_picture, cut])
    assert good.error is None
    assert "image 1 cannot be decoded" in str(bad.error)

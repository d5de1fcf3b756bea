"""Chunks: consecutive images of one size, read ahead within bounds, whatever reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage
from toys import as_uint8, pictures

from gepc.core.errors import AdviceWarning, InputError
from gepc.images import batches
from gepc.images.batches import Chunk, OnBadImage, chunks, load_all, settled
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import FileImages, Images, Record, StreamImages, open_images


class Counted(Images):
    """Remembers which images were read."""

    def __init__(self, count: int, side: int = 8) -> None:
        self.items, self.side = range(count), side
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Record:
        self.read.append(index)
        return Record(str(index), np.zeros((self.side, self.side, 3), np.uint8))


def in_own_size(images: object, size: int = 4, **options: object) -> list[Chunk]:
    opened = open_images(images)
    return list(chunks(opened, Preprocessing(resize="native"), size, OnBadImage.ALL, **options))  # type: ignore[arg-type]


def test_reading_ahead_is_bounded() -> None:
    """Memory does not grow with the list: at most two chunks are read beyond those that were taken."""
    images = Counted(1000)
    read = chunks(images, Preprocessing(size=(8, 8)), 10, OnBadImage.ALL, threads=2)
    for taken in range(1, 6):
        next(read)
        assert len(images.read) <= 10 * (taken + 2) + 1
    read.close()  # type: ignore[attr-defined]
    assert len(images.read) < 200


def test_fewer_large_images_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_AHEAD_PIXELS", 3 * 64)
    images = Counted(100)
    read = chunks(images, Preprocessing(size=(8, 8)), 10, OnBadImage.ALL, threads=2)
    next(read)
    assert len(images.read) <= 10 + 3 + 1


@pytest.mark.parametrize(("size", "most"), [(4, 10_000), (100, 2 * 64), (1, 64)])
def test_a_chunk_has_images_of_one_size_within_its_bounds(
    monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    monkeypatch.setattr(batches, "MAX_CHUNK_PIXELS", most)
    sides = [8, 8, 8, 6, 6, 8, 8, 8, 8, 8]
    images = [as_uint8(pictures(1, side, seed=number))[0] for number, side in enumerate(sides)]
    found = in_own_size(images, size)
    assert [index for chunk in found for index in chunk.indices] == list(range(10))
    for chunk in found:
        assert chunk.stacked().shape[0] <= size
        assert len(chunk) * chunk.images[0][0].size <= most


def test_an_image_larger_than_the_bound_is_a_chunk_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_CHUNK_PIXELS", 10)
    assert [chunk.indices for chunk in in_own_size(pictures(3))] == [[0], [1], [2]]


def test_files_that_cannot_be_read_stay_in_their_place(tmp_path: Path) -> None:
    for number, image in enumerate(as_uint8(pictures(5))):
        PILImage.fromarray(image).save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_text("this is text")
    first, last = in_own_size(tmp_path)
    assert (first.indices, [index for index, _, _ in first.failures]) == ([0, 1, 3], [2])
    assert last.indices == [4]
    with pytest.raises(InputError, match=r"2\.png is not an image"):
        list(chunks(open_images(tmp_path), Preprocessing(), 4, OnBadImage.NONE))


@pytest.mark.parametrize("options", [{}, {"threads": 3}])
def test_chosen_images_are_read_in_the_order_given(tmp_path: Path, options: dict[str, int]) -> None:
    images = as_uint8(pictures(6))
    for number, image in enumerate(images):
        PILImage.fromarray(image).save(tmp_path / f"{number}.png")
    order = [5, 0, 3, 2]
    read = chunks(FileImages.below(tmp_path), Preprocessing(), 3, OnBadImage.ALL, indices=order, **options)  # type: ignore[arg-type]
    found = list(read)
    assert [chunk.indices for chunk in found] == [[5, 0, 3], [2]]
    np.testing.assert_array_equal(
        np.concatenate([chunk.stacked() for chunk in found]), load_all(open_images(images[order]), Preprocessing())
    )


def test_the_first_image_sets_the_size_of_all() -> None:
    mixed = [*as_uint8(pictures(2)), *as_uint8(pictures(1, 6))]
    (chunk,) = chunks(open_images(mixed), Preprocessing(), 8, OnBadImage.ALL)
    assert chunk.indices == [0, 1]
    assert "6x6 pixels (width x height) but 8x8 is expected" in chunk.failures[0][2]


def test_a_stream_is_read_once_and_no_further_than_taken() -> None:
    taken = []

    def images() -> object:
        for number, image in enumerate(as_uint8(pictures(9))):
            taken.append(number)
            yield image

    opened = open_images(images())
    assert isinstance(opened, StreamImages)
    read = chunks(opened, Preprocessing(size=(8, 8)), 3, OnBadImage.ALL)
    next(read)
    assert max(taken) <= 3
    assert [index for chunk in read for index in chunk.indices] == [3, 4, 5, 6, 7, 8]


def test_pixels_are_kept_as_they_were_read_on_request() -> None:
    images = as_uint8(pictures(2, 12))
    for keep in (False, True):
        (chunk,) = chunks(open_images(images), Preprocessing(size=(8, 8)), 4, OnBadImage.ALL, keep_pixels=keep)
        assert [item.shape for item in chunk.read] == [(12, 12)] * 2
        for item, image in zip(chunk.read, images, strict=True):
            if keep:
                np.testing.assert_array_equal(item.pixels, image)
            else:
                assert item.pixels is None


def test_all_images_in_one_array_must_have_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one size may fill several chunks."""
    monkeypatch.setattr(batches, "MAX_CHUNK_PIXELS", 100)
    assert load_all(open_images(pictures(5)), Preprocessing()).shape == (5, 3, 8, 8)
    mixed = [*as_uint8(pictures(2)), *as_uint8(pictures(1, 6))]
    with pytest.raises(InputError, match="several sizes; set `size`"):
        load_all(open_images(mixed), Preprocessing(resize="native"))


def test_photographs_are_resized_unless_a_size_is_set() -> None:
    """Full resolution would take hours and gigabytes that nobody asked for."""
    photographs = open_images([np.zeros((600, 800, 3), np.uint8), np.zeros((800, 600, 3), np.uint8)])
    with pytest.warns(AdviceWarning, match=r"800x600 pixels \(width x height\); all images are resized to 256x256"):
        preprocessing = settled(Preprocessing(), photographs)
    assert (preprocessing.size, preprocessing.resize) == ((256, 256), "stretch")
    (chunk,) = chunks(photographs, preprocessing, 4, OnBadImage.NONE)
    assert [image.shape for image in chunk.images] == [(3, 256, 256)] * 2
    assert settled(Preprocessing(size=(600, 800)), photographs).size == (600, 800)
    small = open_images([np.zeros((512, 300, 3), np.uint8)])
    assert settled(Preprocessing(), small) == Preprocessing(size=(512, 300), resize="exact")


def test_the_first_readable_image_sets_the_size() -> None:
    images = open_images([np.zeros((2,), np.uint8), np.zeros((10, 12, 3), np.uint8)])
    assert settled(Preprocessing(), images).size == (10, 12)


def test_an_image_that_is_too_large_for_a_pass_is_refused_at_every_entrance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitting and scoring read with the same reader; an image that keeps its size may be of any size."""
    monkeypatch.setattr(batches, "MAX_IMAGE_PIXELS", 500)
    images = open_images([np.zeros((20, 20, 3), np.uint8), np.zeros((24, 32, 3), np.uint8)])
    native = Preprocessing(resize="native")
    (chunk,) = chunks(images, native, 4, OnBadImage.ALL)
    ((index, _, reason),) = chunk.failures
    assert index == 1
    assert "32x24 pixels (width x height) in the network" in reason
    with pytest.raises(InputError, match="at most 500 pixels are allowed: "):
        list(chunks(images, native, 4, OnBadImage.UNREADABLE))

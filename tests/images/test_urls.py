"""Images at URLs: the same records as from files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image
from toys import as_uint8, pictures, toy_detector

import gepc
from gepc.core.errors import InputError, OptionError
from gepc.images.sources import FileImages, file_stamp, open_images


@pytest.fixture(scope="module")
def detector() -> gepc.GEPC:
    return toy_detector().fit(pictures(40, seed=1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two folders of pictures; a file of no bytes and one that is cut short."""
    for index, picture in enumerate(as_uint8(pictures(6, seed=2))):
        path = tmp_path / ("day" if index % 2 else "night") / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(picture).save(path)
    (tmp_path / "night" / "cut.png").write_bytes((tmp_path / "day" / "1.png").read_bytes()[:50])
    (tmp_path / "day" / "empty.png").touch()
    return tmp_path


@pytest.fixture
def bucket(folder: Path) -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe(f"/bucket/{path.relative_to(folder)}", path.read_bytes())
    memory.pipe("/bucket/notes.txt", b"no image")
    np.save(folder / "day" / "array.npy", np.zeros((8, 8, 3), np.uint8))
    memory.pipe("/bucket/day/array.npy", (folder / "day" / "array.npy").read_bytes())
    yield "memory://bucket"
    memory.rm("/bucket", recursive=True)


def test_the_same_pixels_and_reasons_as_from_files(bucket: str, folder: Path) -> None:
    far, near = list(open_images(bucket)), list(open_images(folder))
    assert [record.name.split("/bucket/")[1] for record in far] == [
        str(Path(record.name).relative_to(folder)) for record in near
    ]
    for a, b in zip(far, near, strict=True):
        if b.pixels is None:
            assert a.pixels is None
            assert a.error.split(a.name)[1] == b.error.split(b.name)[1]
        else:
            np.testing.assert_array_equal(a.pixels, b.pixels)


def test_scores_and_folders(bucket: str, folder: Path, detector: gepc.GEPC) -> None:
    far, near = (list(detector.results(source)) for source in (bucket, folder))
    np.testing.assert_array_equal([r.score for r in far], [r.score for r in near])
    images = open_images(bucket)
    assert {path.parent.name for path in images.paths} == {"day", "night"}
    cut = images.take(range(2, 5))
    assert [record.name for record in cut] == images.names[2:5]


def test_one_file_and_file_addresses(folder: Path, detector: gepc.GEPC) -> None:
    one = open_images(f"file://{folder}/day/1.png")
    assert len(one) == 1
    assert detector.score(one) == detector.score([folder / "day" / "1.png"])


def test_addresses_that_lead_nowhere(bucket: str) -> None:
    for url in ("memory://nowhere", "memory://nowhere/photos.npz"):
        with pytest.raises(InputError, match=f"{url} does not exist or contains no image file"):
            open_images(url)
    with pytest.raises(OptionError, match="nosuch://x cannot be opened"):
        open_images("nosuch://x")
    gone = FileImages(["memory://bucket/gone.png"])[0]
    assert gone.error == "memory://bucket/gone.png does not exist"


def test_a_list_of_urls_keeps_its_order(bucket: str) -> None:
    urls = [f"{bucket}/night/2.png", f"{bucket}/day/1.png"]
    assert [(record.name, record.error) for record in open_images(urls)] == [(url, None) for url in urls]


def test_a_stamp_changes_with_the_content_of_a_file_or_url(bucket: str, folder: Path) -> None:
    near, far = folder / "day" / "1.png", f"{bucket}/day/1.png"
    before = [file_stamp(str(near)), file_stamp(far)]
    assert all(before)
    assert before == [file_stamp(str(near)), file_stamp(far)]
    near.write_bytes(near.read_bytes() + b"more")
    fsspec.filesystem("memory").pipe("/bucket/day/1.png", b"other")
    after = [file_stamp(str(near)), file_stamp(far)]
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert file_stamp(str(folder / "none.png")) == file_stamp(f"{bucket}/none.png") == ""


def test_a_url_that_cannot_be_listed_says_why(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(system: object, place: str) -> bool:
        raise PermissionError("no access to the bucket")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "isfile", fail)
    with pytest.raises(InputError, match="memory://bucket cannot be listed: no access to the bucket"):
        open_images(bucket)

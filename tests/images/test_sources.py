"""Every kind of input becomes the same float32 (C, H, W) in [-1, 1], or an error that says what to do."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image as PILImage
from toys import as_uint8, pictures

from gepc.core.errors import InputError
from gepc.images.batches import OnBadImage, chunks, load_all
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import FileImages, ObservedImages, Record, open_images

FLOATS = pictures(4, size=(6, 5))
BYTES = as_uint8(FLOATS)  # (N, H, W, C)


def loaded(source: object, **options: object) -> npt.NDArray[np.float32]:
    return load_all(open_images(source), Preprocessing(**options))  # type: ignore[arg-type]


EXPECTED = loaded(BYTES)


class Labelled(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A torch Dataset of (image, label)."""

    def __init__(self, images: object) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[object, int]:
        return self.images[index], 3  # type: ignore[index]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The four pictures as PNG files in two subfolders, beside a file that is none."""
    for index, image in enumerate(BYTES):
        home = tmp_path / "abba"[index]
        home.mkdir(exist_ok=True)
        PILImage.fromarray(image).save(home / f"{index}.png")
    (tmp_path / "notes.txt").write_text("not an image")
    return tmp_path


def test_the_reference_itself() -> None:
    """0 is -1, 255 is 1, channels come first."""
    np.testing.assert_allclose(EXPECTED, BYTES.transpose(0, 3, 1, 2) / 127.5 - 1.0, atol=1e-7)
    assert EXPECTED.dtype == np.float32
    assert EXPECTED.flags.c_contiguous


@pytest.mark.parametrize(
    "source",
    {
        "NHWC bytes": BYTES,
        "NCHW bytes": BYTES.transpose(0, 3, 1, 2),
        "NCHW float": EXPECTED.astype(np.float64),
        "NHWC float": EXPECTED.transpose(0, 2, 3, 1),
        "tensor": torch.from_numpy(EXPECTED),
        "tensor with a gradient": torch.from_numpy(EXPECTED).requires_grad_(),
        "list of arrays": list(BYTES),
        "list of pictures": [PILImage.fromarray(image) for image in BYTES],
        "list of palette pictures": [PILImage.fromarray(image).quantize(256) for image in BYTES],
        "Dataset with labels": Labelled(torch.from_numpy(EXPECTED)),
        "Dataset of dicts": [{"image": image} for image in BYTES],
        "TensorDataset": torch.utils.data.TensorDataset(torch.from_numpy(EXPECTED)),
    }.items(),
    ids=lambda item: item[0],
)
def test_every_kind_of_array_is_the_same_images(source: tuple[str, object]) -> None:
    np.testing.assert_array_equal(loaded(source[1]), EXPECTED)


def test_a_folder_is_read_through_its_subfolders_in_sorted_order(folder: Path) -> None:
    order = [0, 3, 1, 2]  # a/0, a/3, b/1, b/2
    images = open_images(folder)
    assert [Path(record.name).stem for record in images] == [str(i) for i in order]
    np.testing.assert_array_equal(loaded(folder), EXPECTED[order])
    np.testing.assert_array_equal(loaded(str(folder)), EXPECTED[order])


def test_a_list_of_files_keeps_its_order_and_one_file_is_one_image(folder: Path) -> None:
    files = [folder / "b" / "1.png", folder / "a" / "0.png"]
    np.testing.assert_array_equal(loaded(files), EXPECTED[[1, 0]])
    np.testing.assert_array_equal(loaded([str(file) for file in files]), EXPECTED[[1, 0]])
    np.testing.assert_array_equal(loaded(files[0]), EXPECTED[[1]])


def test_files_are_read_only_when_asked_for(folder: Path) -> None:
    """A million files cost nothing until they are looked at."""
    images = open_images([folder / "missing.png"] * 3)
    assert len(images) == 3
    assert "does not exist" in (images[1].error or "")


def test_an_empty_folder_and_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no image file"):
        open_images(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        open_images(tmp_path / "nowhere")


def named(images: FileImages, folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in images.paths]


def test_links_lose_no_image_and_repeat_no_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Folders that links lead to are read, once; a link to nothing is a row with a reason."""
    far = tmp_path_factory.mktemp("far")
    PILImage.fromarray(BYTES[0]).save(far / "x.png")
    (far / "back").symlink_to(folder)
    (folder / "linked").symlink_to(far)
    (folder / "again").symlink_to(folder / "a")
    (folder / "round").symlink_to("round")
    (folder / "round.png").symlink_to("round.png")
    (folder / "gone.png").symlink_to(far / "nowhere.png")
    (folder / "same.png").symlink_to(folder / "a" / "0.png")
    images = FileImages.below(folder)
    usual = ["a/0.png", "a/3.png", "b/1.png", "b/2.png"]
    assert named(images, folder) == [*usual, "gone.png", "linked/x.png", "round.png", "same.png"]
    assert images[4].error == f"{folder}/gone.png does not exist"
    assert "round.png cannot be read: too many levels" in (images[6].error or "")


def test_what_is_no_file_is_a_record_with_the_reason(folder: Path) -> None:
    """Reading a pipe or a device would never end."""
    os.mkfifo(folder / "pipe.png")
    (folder / "to-pipe.png").symlink_to(folder / "pipe.png")
    (folder / "zeros.png").symlink_to("/dev/zero")
    found = FileImages.below(folder)
    assert named(found, folder)[4:] == ["pipe.png", "to-pipe.png", "zeros.png"]
    reasons = [str(found[index].error).rpartition("cannot be read: ")[2] for index in (4, 5, 6)]
    assert reasons == ["is a named pipe", "is a named pipe", "is a device"]


def denied(monkeypatch: pytest.MonkeyPatch, name: str, place: Path) -> None:
    """As if we had no permission to do that with `place`; permissions do not bind root, which may run the tests."""
    allowed = getattr(os, name)

    def refusing(path: object, *arguments: object, **options: object) -> object:
        if not isinstance(path, int) and os.fspath(path) == str(place):  # type: ignore[call-overload]
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return allowed(path, *arguments, **options)

    monkeypatch.setattr(os, name, refusing)


@pytest.mark.parametrize("name", ["scandir", "stat"])
def test_a_folder_that_cannot_be_read_is_an_error_that_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    denied(monkeypatch, name, folder / "b")
    with pytest.raises(InputError, match=r"/b cannot be read: permission denied; its images would be missing"):
        open_images(folder)


def test_a_folder_that_goes_while_it_is_read_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def going(path: str) -> object:
        if path == str(folder / "b"):
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", going)
    assert named(FileImages.below(folder), folder) == ["a/0.png", "a/3.png"]


@pytest.mark.parametrize("file", ["a/0.png", "a/array.npy"])
def test_a_file_without_permission_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    np.save(folder / "a" / "array.npy", BYTES[0])
    denied(monkeypatch, "open", folder / file)
    assert FileImages([folder / file])[0].error == f"{folder / file} cannot be read: permission denied"


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
@pytest.mark.parametrize("mode", [0o000, 0o400])
def test_real_permissions(folder: Path, mode: int) -> None:
    (folder / "b").chmod(mode)
    try:
        if mode == 0:
            with pytest.raises(InputError, match="/b cannot be read: permission denied"):
                open_images(folder)
        else:
            images = FileImages.below(folder)
            assert named(images, folder) == ["a/0.png", "a/3.png", "b/1.png", "b/2.png"]
            assert "permission denied" in (images[2].error or "")
    finally:
        (folder / "b").chmod(0o700)


@pytest.mark.parametrize("source", [None, 3.5, object()])
def test_what_is_no_collection_of_images(source: object) -> None:
    with pytest.raises(InputError, match="cannot read images from"):
        open_images(source)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 8, 8), r"add an axis in front"),
        ((8, 8, 3), r"add an axis in front"),
        ((2, 3, 8, 1), "not clear whether the first or the last axis"),
        ((2, 3, 8, 3), "not clear whether the first or the last axis"),
        ((2, 9, 8, 9), "not clear whether the first or the last axis"),
        ((8,), "must be"),
    ],
)
def test_an_array_whose_axes_are_not_clear_is_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_images(np.zeros(shape))


@pytest.mark.parametrize("count", [2, 4, 5, 13])
def test_any_number_of_channels_is_read_in_either_order(tmp_path: Path, count: int) -> None:
    bands = np.random.default_rng(count).integers(0, 256, (3, 16, 20, count), dtype=np.uint8)
    expected = np.stack([Preprocessing(channels=count)(image) for image in bands])
    for name, array in (("last", bands), ("first", bands.transpose(0, 3, 1, 2))):
        (tmp_path / name).mkdir()
        np.save(tmp_path / f"{name}.npy", array)
        np.savez(tmp_path / f"{name}.npz", x=array)
        for index, image in enumerate(array):
            np.save(tmp_path / name / f"{index}.npy", image)
        files = (tmp_path / name, tmp_path / f"{name}.npy", tmp_path / f"{name}.npz")
        for source in (array, torch.from_numpy(array.copy()), list(array), *files):
            np.testing.assert_array_equal(loaded(source, channels=count), expected)
            with pytest.raises(InputError, match=f"has {count} channels, the backbone takes 3"):
                loaded(source)


@pytest.mark.parametrize(
    ("shape", "channels", "expected"),
    [
        ((3, 16, 4), 4, (16, 4, 3)),  # 1 and 3 come first, whatever the backbone takes
        ((16, 4, 3), 16, (16, 4, 3)),
        ((13, 8, 8), 13, (8, 8, 13)),  # then the backbone's count, even if the images are smaller
        ((8, 8, 13), 13, (8, 8, 13)),
        ((13, 8, 5), 13, (8, 5, 13)),
        ((4, 16, 20), 3, (16, 20, 4)),  # then the shortest axis, which only errors name
        ((16, 20, 4), 3, (16, 20, 4)),
        ((13, 8, 8), 3, None),
        ((5, 8, 5), 5, None),
        ((1, 8, 3), 3, None),
    ],
)
def test_the_rules_for_the_channel_axis(
    shape: tuple[int, ...], channels: int, expected: tuple[int, ...] | None
) -> None:
    (record,) = open_images([np.zeros(shape)])
    if expected is None:
        with pytest.raises(InputError, match="not clear whether the first or the last axis"):
            record.pixels_for(channels)
    else:
        assert record.pixels_for(channels).shape == expected


def test_alpha_is_dropped_from_pictures_and_kept_in_arrays() -> None:
    picture = PILImage.fromarray(np.dstack([BYTES[0], BYTES[0, :, :, 0]]))
    np.testing.assert_array_equal(loaded([picture])[0], EXPECTED[0])
    with pytest.raises(InputError, match="image 0 has 4 channels, the backbone takes 3"):
        loaded([np.asarray(picture)])


def test_a_list_item_of_no_image_shape_is_a_record_with_a_reason() -> None:
    """One bad item does not take the others with it."""
    images = open_images([BYTES[0], np.zeros((2, 2, 2, 2)), np.zeros((9, 8, 9))])
    assert images[0].error is None
    assert "shape (2, 2, 2, 2)" in (images[1].error or "")
    assert "not clear whether the first or the last axis" in (images[2].error or "")
    for item, kind in ((None, "NoneType"), (float("nan"), "float"), ({"picture": BYTES[0]}, "dict")):
        (record,) = open_images([item])
        assert (record.error or "").startswith(f"image 0 is of type {kind}; give an array, a picture or a path, in a")


def test_the_content_hash_depends_on_pixels_shape_and_type(tmp_path: Path) -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(4, 16)
    PILImage.fromarray(pixels).save(tmp_path / "a.png")
    arrays = [pixels, pixels[..., None], pixels.T, pixels.reshape(8, 8), pixels.astype(np.uint16), pixels + 1]
    hashes = [Record("0", array).content_hash() for array in arrays]
    assert open_images(tmp_path)[0].content_hash() == hashes[0] == hashes[1]
    assert len(set(hashes)) == 5
    assert all(0 <= value < 2**64 for value in hashes)
    with pytest.raises(InputError, match="no such file"):
        Record("1", error="no such file").content_hash()


def test_observed_images_are_passed_on_when_they_are_read_and_not_when_they_are_looked_at() -> None:
    images = open_images([BYTES[0], np.zeros((2, 2, 2, 2)), BYTES[1]])
    observed = ObservedImages(images, lambda record: record.pixels.sum())
    assert [record.name for record in observed.first(2)] == ["0", "1"]
    assert observed.seen == {}
    assert len(observed) == 3
    assert observed[2].name == "2"
    assert observed.seen == {2: BYTES[1].sum()}
    assert [record.name for record in observed] == ["0", "1", "2"]
    assert observed.seen == {0: BYTES[0].sum(), 2: BYTES[1].sum()}  # the second cannot be read


def test_a_chunk_has_images_of_one_size() -> None:
    """Where every image keeps its own size, a new size begins a new chunk."""
    images = open_images([np.zeros((side, 8, 3), dtype=np.uint8) for side in (8, 8, 12, 8, 8, 8)])
    found = [chunk.indices for chunk in chunks(images, Preprocessing(resize="native"), 2, OnBadImage.NONE)]
    assert found == [[0, 1], [2], [3, 4], [5]]


def test_no_images_are_an_error() -> None:
    with pytest.raises(InputError, match="there are no images"):
        load_all(open_images(BYTES[:0]), Preprocessing())


def _names(folder: Path) -> list[str]:
    return [Path(record.name).relative_to(folder).as_posix() for record in open_images(folder)]


def test_hidden_files_are_not_images(tmp_path: Path) -> None:
    shown = ["a.png", "b/c.png"]
    for name in [*shown, ".a.png", ".thumbs/a.png", "__MACOSX/a.png", "__MACOSX/b/._c.png"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        PILImage.new("RGB", (4, 4)).save(tmp_path / name)
    assert _names(tmp_path) == shown
    hidden = tmp_path / ".thumbs"
    assert _names(hidden) == ["a.png"]  # what is asked for by name is read


def test_files_of_other_formats_are_counted(tmp_path: Path) -> None:
    PILImage.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "labels.csv").touch()
    assert _names(tmp_path) == ["a.png"]
    (tmp_path / "b").mkdir()
    for name in ("1.HEIC", "b/2.heic", "3.mp4", "b/4.npz"):
        (tmp_path / name).touch()
    with pytest.warns(UserWarning, match=r"formats are skipped \(2 \.heic, 1 \.mp4, 1 \.npz\); convert or unpack them"):
        assert _names(tmp_path) == ["a.png"]
    (tmp_path / "a.png").unlink()
    with pytest.raises(InputError, match=r"contains no image file .* \(2 \.heic, 1 \.mp4, 1 \.npz\); convert"):
        open_images(tmp_path)


def test_masks_beside_their_images_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("a.png", "a_mask.png", "b/c.jpg", "b/c-GT.png", "d_mask.png", "_mask.png"):
        PILImage.new("RGB", (4, 4)).save(tmp_path / name)
    with pytest.warns(UserWarning, match=r"2 masks beside images are skipped, such as a_mask\.png"):
        assert _names(tmp_path) == ["_mask.png", "a.png", "b/c.jpg", "d_mask.png"]  # two are nobody's masks


def test_a_png_beside_a_photograph_of_the_same_name_is_its_mask(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.png", "b.png", "c.JPEG", "c.PNG", "d.bmp", "d.png"):
        PILImage.new("RGB", (4, 4)).save(tmp_path / name)
    with pytest.warns(UserWarning, match=r"2 masks beside images are skipped, such as a\.png"):
        assert _names(tmp_path) == ["a.jpg", "b.png", "c.JPEG", "d.bmp", "d.png"]


@pytest.mark.parametrize("name", ["photos.zip", "photos.tar.gz", "PHOTOS.ZIP"])
def test_an_archive_is_to_be_unpacked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\3\4")
    with pytest.raises(InputError, match=rf"{name} is an archive; unpack it and give the folder"):
        open_images(tmp_path / name)


def test_files_in_an_array_or_a_series(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    files = [str(tmp_path / f"{number}.png") for number in range(3)]
    for number, path in enumerate(files):
        PILImage.new("L", (4, 4), number).save(path)
    for source in (
        np.array(files),
        np.array(files, dtype=object),
        pandas.Series(files),
        pandas.DataFrame({"p": files}).p,
    ):
        images = open_images(source)
        assert [record.name for record in images] == files
        assert [int(record.pixels.max()) for record in images] == [0, 1, 2]


def test_one_picture(tmp_path: Path) -> None:
    images = open_images(PILImage.new("RGB", (6, 4), (1, 2, 3)))
    assert len(images) == 1
    assert images[0].pixels.shape == (4, 6, 3)


def test_a_whole_table_is_refused_with_what_to_give(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(InputError, match=r"give a column of paths, for example df\['path'\]"):
        open_images(pandas.DataFrame({"path": ["a.png"], "label": [1]}))

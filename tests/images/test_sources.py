"""Every kind of input becomes the same float32 (C, H, W) in [-1, 1], or an error that says what to do."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage
from toys import as_uint8, pictures

from gepc.core.errors import InputError, OptionError, ValueRangeWarning
from gepc.images.batches import OnBadImage, chunks
from gepc.images.preprocessing import Preprocessing, load_all, warn_about_range
from gepc.images.sources import FileImages, iterate, open_images, read_pixels

FLOATS = pictures(4, size=(6, 5))
BYTES = as_uint8(FLOATS)  # (N, H, W, C)


def loaded(source: object, **options: object) -> npt.NDArray[np.float32]:
    return load_all(open_images(source), Preprocessing(**options))[0]  # type: ignore[arg-type]


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
    assert [Path(record.name).stem for record in iterate(images)] == [str(i) for i in order]
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


GREY8 = BYTES[0, :, :, 0]
GREY16 = GREY8.astype(np.uint16) * 257
FILES = {
    "8-bit colour": (lambda path: PILImage.fromarray(BYTES[0]).save(path), "png", EXPECTED[0]),
    "8-bit grey": (lambda path: PILImage.fromarray(GREY8).save(path), "png", EXPECTED[0][[0, 0, 0]]),
    "16-bit grey": (lambda path: PILImage.fromarray(GREY16).save(path), "png", EXPECTED[0][[0, 0, 0]]),
    "16-bit grey TIFF": (lambda path: PILImage.fromarray(GREY16).save(path), "tif", EXPECTED[0][[0, 0, 0]]),
    "float TIFF": (lambda path: PILImage.fromarray(EXPECTED[0, 0]).save(path), "tiff", EXPECTED[0][[0, 0, 0]]),
    "transparent colour": (
        lambda path: PILImage.fromarray(np.dstack([BYTES[0], GREY8])).save(path),
        "png",
        EXPECTED[0],
    ),
    "transparent grey": (
        lambda path: PILImage.fromarray(np.dstack([GREY8, GREY8]), mode="LA").save(path),
        "png",
        EXPECTED[0][[0, 0, 0]],
    ),
    "palette": (lambda path: PILImage.fromarray(BYTES[0]).quantize(256).save(path), "png", EXPECTED[0]),
    "black and white": (
        lambda path: PILImage.fromarray(GREY8 > 127).save(path),
        "png",
        np.where(GREY8 > 127, 1.0, -1.0)[None].repeat(3, 0),
    ),
    "npy bytes": (lambda path: np.save(path, BYTES[0]), "npy", EXPECTED[0]),
    "npy channels first": (lambda path: np.save(path, EXPECTED[0]), "npy", EXPECTED[0]),
    "npy grey": (lambda path: np.save(path, GREY16), "npy", EXPECTED[0][[0, 0, 0]]),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_file_format_keeps_its_depth(tmp_path: Path, kind: str) -> None:
    write, suffix, expected = FILES[kind]
    path = tmp_path / f"image.{suffix}"
    write(path)
    np.testing.assert_array_equal(loaded(path)[0], expected.astype(np.float32))


def test_a_file_of_many_images(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", BYTES)
    np.testing.assert_array_equal(loaded(tmp_path / "data.npy"), EXPECTED)


def test_an_archive_of_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", train_x=BYTES, other=BYTES[:2])
    np.testing.assert_array_equal(loaded(tmp_path / "data.npz"), EXPECTED)
    np.testing.assert_array_equal(loaded(f"{tmp_path}/data.npz:other"), EXPECTED[:2])
    with pytest.raises(InputError, match=r"no array 'test_x'.*data.npz:NAME.*train_x, other"):
        open_images(f"{tmp_path}/data.npz:test_x")
    (tmp_path / "broken.npz").write_bytes((tmp_path / "data.npz").read_bytes()[:100])
    with pytest.raises(InputError, match=r"not a whole, plain \.npz archive"):
        open_images(tmp_path / "broken.npz")


# --- files that cannot be read ---------------------------------------------------------------------------------------


def truncated_png(path: Path) -> None:
    PILImage.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:5000])


UNREADABLE = {
    "truncated PNG": (truncated_png, "png", "damaged or cut short"),
    "text named .png": (lambda path: path.write_text("hello"), "png", "not an image"),
    "empty file": (lambda path: path.write_bytes(b""), "jpg", "not an image"),
    "nothing": (lambda path: None, "png", "does not exist"),
    "truncated npy": (lambda path: (np.save(path, BYTES[0]), path.write_bytes(path.read_bytes()[:150])), "npy", "npy"),
    "pickled npy": (lambda path: np.save(path, np.array([{}], dtype=object)), "npy", "npy"),
    "archive named .npy": (
        lambda path: (np.savez(path.with_suffix(".npz"), x=BYTES), path.with_suffix(".npz").rename(path)),
        "npy",
        "an archive of arrays",
    ),
    "no npy": (lambda path: None, "npy", "does not exist"),
    "folder named .png": (lambda path: path.mkdir(), "png", "cannot be read: is a directory"),
    "npy of many images": (lambda path: np.save(path, BYTES), "npy", "one image per file"),
    "32-bit integers": (
        lambda path: PILImage.fromarray(np.full((4, 4), 70000, dtype=np.int32)).save(path),
        "tiff",
        "bad.tiff has 32-bit integer pixels; save it as .npy",
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_unreadable_file_is_a_record_with_a_reason_that_names_it(tmp_path: Path, kind: str) -> None:
    write, suffix, reason = UNREADABLE[kind]
    path = tmp_path / f"bad.{suffix}"
    write(path)
    record = FileImages([path])[0]
    assert record.pixels is None
    assert str(path) in (record.error or "")
    assert reason in (record.error or "")
    with pytest.raises(InputError, match=reason):
        read_pixels(path)


def test_an_empty_folder_and_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no image file"):
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


def test_what_is_no_file_is_no_image(folder: Path) -> None:
    """Reading a pipe would never end."""
    os.mkfifo(folder / "pipe.png")
    (folder / "to-pipe.png").symlink_to(folder / "pipe.png")
    assert named(FileImages.below(folder), folder) == ["a/0.png", "a/3.png", "b/1.png", "b/2.png"]


def denied(monkeypatch: pytest.MonkeyPatch, name: str, place: Path) -> None:
    """As if we had no permission to do that with `place`; permissions do not bind root, which may run the tests."""
    allowed = getattr(os if name != "open" else builtins, name)

    def refusing(path: object, *arguments: object, **options: object) -> object:
        if not isinstance(path, int) and os.fspath(path) == str(place):  # type: ignore[call-overload]
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return allowed(path, *arguments, **options)

    monkeypatch.setattr(os if name != "open" else builtins, name, refusing)


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
        ((2, 7, 8, 9), "no axis of 1 or 3 channels"),
        ((2, 3, 8, 3), "both the first and the last axis"),
        ((8,), "must be"),
    ],
)
def test_an_array_whose_axes_are_not_clear_is_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_images(np.zeros(shape))


def test_a_list_item_of_no_image_shape_is_a_record_with_a_reason() -> None:
    """One bad item does not take the others with it."""
    images = open_images([BYTES[0], np.zeros((2, 2, 2, 2)), np.zeros((7, 8, 9))])
    assert images[0].error is None
    assert "shape (2, 2, 2, 2)" in (images[1].error or "")
    assert "no axis of 1 or 3 channels" in (images[2].error or "")


# --- ranges ----------------------------------------------------------------------------------------------------------


def test_floats_are_minus_one_to_one_unless_told() -> None:
    """Trap: a [0, 1] float image is only read as such when value_range says so."""
    unit = (EXPECTED + 1) / 2
    np.testing.assert_allclose(loaded(unit, value_range=(0, 1)), EXPECTED, atol=1e-6)
    with pytest.warns(ValueRangeWarning, match=r"value_range=\(0, 1\)"):
        found = loaded(unit)
    np.testing.assert_array_equal(found, unit)


def test_no_warning_without_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_range(open_images(EXPECTED), None)
        warn_about_range(open_images(BYTES), None)
        warn_about_range(open_images(np.zeros((2, 3, 8, 8))), (0.0, 1.0))
        warn_about_range(open_images([]), None)


@pytest.mark.parametrize("pixels", [np.array([[-1.0, 1.5]]), np.array([[0.0, 255.0]]), np.array([[-300.0, 0.0]])])
def test_floats_outside_their_range_name_the_argument(pixels: npt.NDArray[np.float64]) -> None:
    with pytest.raises(InputError, match=r"picture has values from .* value_range=\(low, high\)"):
        Preprocessing()(pixels, "picture")


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_any_range_maps_black_to_minus_one_and_white_to_one(low: float, width: float) -> None:
    pixels = low + width * np.array([[0.0, 0.25, 0.5, 1.0]])
    found = Preprocessing((low, low + width), channels=1)(pixels)
    np.testing.assert_allclose(found[0, 0], [-1.0, -0.5, 0.0, 1.0], atol=1e-3)
    assert np.abs(found).max() <= 1.0


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_integers_without_a_known_range_need_one(dtype: type) -> None:
    pixels = np.array([[0, 100]], dtype=dtype)
    with pytest.raises(InputError, match=r"range is not known; give value_range"):
        Preprocessing()(pixels)
    np.testing.assert_array_equal(Preprocessing((0, 100))(pixels)[0], [[-1, 1]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_pixels_that_are_not_finite_are_refused(bad: float) -> None:
    pixels = EXPECTED[0].transpose(1, 2, 0).copy()
    pixels[2, 3, 1] = bad
    with pytest.raises(InputError, match="scan has NaN or infinite pixels"):
        Preprocessing()(pixels, "scan")


NO_NUMBERS = {
    "text": np.full((8, 8, 3), "7"),
    "bytes": np.full((8, 8, 3), b"7"),
    "dates": np.full((8, 8, 3), 7, dtype="datetime64[s]"),
    "spans": np.full((8, 8, 3), 7, dtype="timedelta64[s]"),
    "records": np.zeros((8, 8, 3), dtype=[("a", "u1"), ("b", "u1")]),
    "void": np.zeros((8, 8, 3), dtype="V2"),
}


@pytest.mark.parametrize("magnitude", ["linear", "log"])
@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_what_holds_no_numbers_is_a_failure_of_its_own(tmp_path: Path, kind: str, magnitude: str) -> None:
    """With a range given too, and in the middle of a run."""
    np.save(tmp_path / "a.npy", np.full((8, 8, 3), 9, dtype=np.uint8))
    np.save(tmp_path / "b.npy", NO_NUMBERS[kind])
    preprocessing = Preprocessing(value_range=(0, 10), magnitude=magnitude)
    (chunk,) = chunks(open_images(tmp_path), preprocessing, 8, OnBadImage.ALL)
    assert chunk.indices == [0]
    assert [(index, "not numbers" in error) for index, _, error in chunk.failures] == [(1, True)]


def test_complex_and_empty_images_are_refused() -> None:
    with pytest.raises(InputError, match="complex; give its magnitude"):
        Preprocessing()(np.ones((3, 3), dtype=np.complex64))
    with pytest.raises(InputError, match="is empty"):
        Preprocessing()(np.ones((0, 3, 3)))


# --- channels and sizes ----------------------------------------------------------------------------------------------


def test_grey_and_colour_become_each_other() -> None:
    """Grey is repeated; colour becomes 0.299 R + 0.587 G + 0.114 B; transparency is dropped."""
    grey = Preprocessing(channels=1)(BYTES[0])
    np.testing.assert_allclose(grey[0], np.tensordot([0.299, 0.587, 0.114], EXPECTED[0], 1), atol=1e-6)
    np.testing.assert_array_equal(Preprocessing(channels=3)(GREY8), EXPECTED[0][[0, 0, 0]])
    np.testing.assert_array_equal(Preprocessing(channels=1)(np.dstack([BYTES[0], GREY8])), grey)


def test_mixed_sizes_are_an_error_that_says_what_to_give() -> None:
    mixed = [np.zeros((6, 5), dtype=np.uint8), np.zeros((6, 7), dtype=np.uint8)]
    with pytest.raises(InputError, match=r"1 is 6x7 but 6x5 is expected; give size="):
        loaded(mixed)
    assert loaded(mixed, size=(4, 4)).shape == (2, 3, 4, 4)


@pytest.mark.parametrize("resize", ["stretch", "crop"])
@given(height=st.integers(1, 20), width=st.integers(1, 20), size=st.tuples(st.integers(1, 12), st.integers(1, 12)))
def test_resizing_gives_the_size_asked_for_and_keeps_a_constant_constant(
    resize: str, height: int, width: int, size: tuple[int, int]
) -> None:
    found = Preprocessing(size=size, resize=resize)(np.full((height, width), 51, dtype=np.uint8))
    assert found.shape == (3, *size)
    np.testing.assert_allclose(found, -0.6, atol=1e-6)


def test_halving_averages_with_antialiasing() -> None:
    """A checkerboard of single pixels becomes grey, not black or white."""
    board = np.indices((16, 16)).sum(0) % 2 == 0
    inner = Preprocessing(size=(8, 8))(board)[:, 1:-1, 1:-1]
    np.testing.assert_allclose(inner, 0.0, atol=1e-6)


def test_crop_keeps_the_middle() -> None:
    """A 4x8 image to 4x4: the middle four columns, untouched."""
    image = np.arange(32, dtype=np.uint8).reshape(4, 8)
    found = Preprocessing(size=(4, 4), resize="crop", channels=1)(image)
    np.testing.assert_array_equal(found, Preprocessing(channels=1)(image[:, 2:6]))


def test_exact_refuses_another_size_and_passes_its_own() -> None:
    exact = Preprocessing(size=(6, 5), resize="exact")
    np.testing.assert_array_equal(exact(BYTES[0]), EXPECTED[0])
    with pytest.raises(InputError, match="is 4x4 but 6x5 is expected"):
        exact(np.zeros((4, 4), dtype=np.uint8), "tile")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resize": "strech"}, "did you mean 'stretch'"),
        ({"channels": 2}, "channels must be 1 or 3"),
        ({"value_range": (1, 0)}, "low < high"),
        ({"value_range": (0, float("nan"))}, "low < high"),
        ({"size": (0, 8)}, "size must be"),
        ({"size": (8, -1)}, "size must be"),
    ],
)
def test_impossible_preprocessing_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Preprocessing(**options)  # type: ignore[arg-type]

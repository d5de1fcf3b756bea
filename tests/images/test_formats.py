"""Every file format keeps its depth and its bands, and damaged files are errors that name them."""

from __future__ import annotations

import io
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image as PILImage
from PIL import ImageOps
from toys import as_uint8, pictures

from gepc.core.errors import InputError
from gepc.images.batches import load_all
from gepc.images.decoder import DecoderProcess
from gepc.images.formats import FirstFrameWarning, decode, is_stack, read_pixels, split_archive
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import FileImages, open_images

BYTES = as_uint8(pictures(4, size=(6, 5)))  # (N, H, W, C)


def loaded(source: object, **options: object) -> npt.NDArray[np.float32]:
    return load_all(open_images(source), Preprocessing(**options))  # type: ignore[arg-type]


EXPECTED = loaded(BYTES)
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
    with pytest.warns(UserWarning, match=r"several arrays \(train_x, other\): train_x is read; .* data\.npz:NAME"):
        np.testing.assert_array_equal(loaded(tmp_path / "data.npz"), EXPECTED)
    np.testing.assert_array_equal(loaded(f"{tmp_path}/data.npz:train_x"), EXPECTED)
    np.testing.assert_array_equal(loaded(f"{tmp_path}/data.npz:other"), EXPECTED[:2])
    with pytest.raises(InputError, match=r"data.npz contains no array test_x, only train_x, other"):
        open_images(f"{tmp_path}/data.npz:test_x")
    (tmp_path / "broken.npz").write_bytes((tmp_path / "data.npz").read_bytes()[:100])
    with pytest.raises(InputError, match=r"not a complete, plain \.npz archive"):
        open_images(tmp_path / "broken.npz")


def test_an_archive_below_a_folder_with_npz_in_its_name(tmp_path: Path) -> None:
    """`data.npz.d/train.npz` used to open `data.npz`."""
    (tmp_path / "data.npz.d").mkdir()
    np.savez(tmp_path / "data.npz", x=BYTES[:1])
    np.savez(tmp_path / "data.npz.d" / "train.npz", x=BYTES, y=BYTES[:2])
    with pytest.warns(UserWarning, match="x is read"):
        np.testing.assert_array_equal(loaded(tmp_path / "data.npz.d" / "train.npz"), EXPECTED)
    np.testing.assert_array_equal(loaded(f"{tmp_path}/data.npz.d/train.npz:y"), EXPECTED[:2])
    PILImage.fromarray(BYTES[3]).save(tmp_path / "data.npz.d" / "3.png")
    with pytest.warns(UserWarning, match=r"skipped \(1 \.npz\)"):
        np.testing.assert_array_equal(loaded(tmp_path / "data.npz.d"), EXPECTED[3:])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a/data.npz", (Path("a/data.npz"), None)),
        ("a/data.npz:", (Path("a/data.npz"), None)),
        ("a/data.npz:x", (Path("a/data.npz"), "x")),
        ("a/data.npz:x/y", (Path("a/data.npz"), "x/y")),
        ("data.npz.d/train.npz:x", (Path("data.npz.d/train.npz"), "x")),
        ("data.npz.d/1.png", None),
        ("photos", None),
    ],
)
def test_the_name_of_an_archive_and_of_its_array(source: str, expected: object) -> None:
    assert split_archive(source) == expected


BANDS = np.random.default_rng(0).integers(0, 256, (16, 20, 6), dtype=np.uint8)
TIFFS = {
    "4 bands": (BANDS[..., :4], {"photometric": "minisblack"}, 4),
    "RGB and infrared": (BANDS[..., :4], {"photometric": "rgb", "alpha": "unspecified"}, 4),
    "RGB and alpha": (BANDS[..., :4], {"photometric": "rgb", "alpha": "yes"}, 3),
    "RGB, alpha and a band": (BANDS[..., :5], {"photometric": "rgb", "alpha": "yes"}, 4),
    "2 bands": (BANDS[..., :2], {"photometric": "minisblack"}, 2),
    "5 bands": (BANDS[..., :5], {}, 5),
    "6 bands of RGB": (BANDS, {"photometric": "rgb", "alpha": "unspecified"}, 6),
    "4 bands by planes": (BANDS[..., :4], {"interleave": "band", "photometric": "minisblack"}, 4),
    "5 bands of 16 bits": (BANDS[..., :5].astype(np.uint16) * 257, {}, 5),
    "3 bands of floats": ((BANDS[..., :3] / 127.5 - 1).astype(np.float32), {}, 3),
}


def write_tiff(path: Path, array: npt.NDArray[Any], **options: str) -> None:
    rasterio = pytest.importorskip("rasterio")
    height, width, count = array.shape
    profile = {"driver": "GTiff", "height": height, "width": width, "count": count, "dtype": array.dtype.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(path, "w", **profile, **options) as file:
            file.write(array.transpose(2, 0, 1))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_the_pages_of_a_tiff_are_bands(tmp_path: Path, dtype: type) -> None:
    """All of them, in order; the preview that GeoTIFF writers add is not one."""
    pages = np.random.default_rng(0).integers(0, 255, (5, 6, 7)).astype(dtype)
    first, *rest = [PILImage.fromarray(page) for page in pages]
    first.save(tmp_path / "pages.tif", save_all=True, append_images=rest)
    np.testing.assert_array_equal(read_pixels(tmp_path / "pages.tif"), pages.transpose(1, 2, 0))
    small = PILImage.fromarray(pages[0, ::2, ::2])
    small.encoderinfo = {"tiffinfo": {254: 1}}
    first.save(tmp_path / "preview.tif", save_all=True, append_images=[small])
    with PILImage.open(tmp_path / "preview.tif") as picture:
        picture.seek(1)
        if not picture.tag_v2.get(254):
            pytest.skip("this version of Pillow does not write the tag of previews")
    np.testing.assert_array_equal(read_pixels(tmp_path / "preview.tif"), pages[0])


def test_pages_that_are_not_bands(tmp_path: Path) -> None:
    for others in ([PILImage.fromarray(GREY8[:3])], [PILImage.fromarray(BYTES[0])], [PILImage.fromarray(GREY16)]):
        PILImage.fromarray(GREY8).save(tmp_path / "pages.tif", save_all=True, append_images=others)
        with pytest.raises(InputError, match=r"pages.tif has 2 pages that are not grey bands of one size"):
            read_pixels(tmp_path / "pages.tif")


@pytest.mark.parametrize("kind", TIFFS)
def test_a_tiff_keeps_all_bands_but_alpha(tmp_path: Path, kind: str) -> None:
    """Bands after the third used to be dropped, or the file could not be read."""
    array, options, count = TIFFS[kind]
    path = tmp_path / "scene.tif"
    write_tiff(path, array, **options)
    kept = [band for band in range(array.shape[2]) if "alpha" not in kind or band != 3]
    assert len(kept) == count
    np.testing.assert_array_equal(read_pixels(path), array[..., kept])
    np.testing.assert_allclose(
        loaded(path, channels=count)[0], Preprocessing(channels=count)(BANDS[..., kept]), atol=1e-6
    )
    if count != 3:
        with pytest.raises(InputError, match=rf"scene\.tif has {count} channels, the backbone takes 3"):
            loaded(path)


def test_bands_without_rasterio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says what to install, and one for a picture that was opened already."""
    path = tmp_path / "scene.tif"
    write_tiff(path, BANDS[..., :4], photometric="rgb", alpha="no")
    monkeypatch.setitem(sys.modules, "rasterio", None)
    assert "other TIFF files need rasterio: pip install" in (FileImages([path])[0].error or "")
    with PILImage.open(path) as picture:
        assert "has 4 bands, which Pillow does not decode" in (open_images([picture])[0].error or "")


# --- files that cannot be read ---------------------------------------------------------------------------------------


def truncated_png(path: Path) -> None:
    PILImage.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:5000])


UNREADABLE = {
    "truncated PNG": (truncated_png, "png", "damaged or cut short"),
    "text named .tif": (lambda path: path.write_text("hello"), "tif", "not an image"),
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


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 6, 5, 3), r"holds an array of shape \(2, 6, 5, 3\); one image per file"),
        ((40, 40), r"holds an array of shape \(40, 40\), more than the 1,000 numbers allowed"),
    ],
)
def test_an_array_file_holds_one_image_of_a_bounded_size(shape: tuple[int, ...], message: str) -> None:
    content = io.BytesIO()
    np.save(content, np.zeros(shape))
    content.seek(0)
    with pytest.raises(InputError, match=message):
        decode(content, ".npy", max_pixels=1000)


def test_an_archive_with_the_name_of_an_array_is_named_as_such() -> None:
    content = io.BytesIO()
    np.savez(content, a=np.zeros((3, 3)))
    content.seek(0)
    with pytest.raises(InputError, match=r"is an archive of arrays; name it \.npz"):
        decode(content, ".npy")


def test_an_archive_of_several_arrays_needs_a_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", first=BYTES, second=BYTES)
    with pytest.raises(InputError, match=r"contains several arrays; choose one with data\.npz:NAME \(first, second\)"):
        open_images(tmp_path / "data.npz")
    with pytest.raises(InputError, match=r"contains no array third, only first, second"):
        open_images(f"{tmp_path / 'data.npz'}:third")
    np.testing.assert_array_equal(loaded(f"{tmp_path / 'data.npz'}:second"), EXPECTED)


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    content = io.BytesIO()
    PILImage.new("L", (40, 40)).save(content, "PNG")
    content.seek(0)
    with pytest.raises(InputError, match=r"has 40x40 pixels \(width x height\), more than the 1,000 allowed"):
        decode(content, ".png", max_pixels=1000)


def test_a_tiff_of_too_many_values_is_refused_whether_they_are_pages_or_bands(tmp_path: Path) -> None:
    """Each page and each band is small enough by itself."""
    pages = [PILImage.new("L", (30, 30)) for _ in range(3)]
    content = io.BytesIO()
    pages[0].save(content, "TIFF", save_all=True, append_images=pages[1:])
    write_tiff(tmp_path / "bands.tif", np.zeros((30, 30, 6), dtype=np.uint8))
    for file in (content, io.BytesIO((tmp_path / "bands.tif").read_bytes())):
        file.seek(0)
        with pytest.raises(InputError, match=r"has more than the 1,000 values allowed"):
            decode(file, ".tif", max_pixels=1000)


def test_a_picture_that_pillow_takes_for_a_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    PILImage.new("L", (40, 40)).save(content, "PNG")
    content.seek(0)
    monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InputError, match=r"has more than the 10,000 pixels allowed"):
        decode(content, ".png", max_pixels=10_000)


def test_only_an_array_of_four_dimensions_is_a_stack(tmp_path: Path) -> None:
    np.save(tmp_path / "stack.npy", BYTES)
    np.save(tmp_path / "one.npy", BYTES[0])
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "empty.npy").touch()
    found = {path.name: is_stack(path) for path in sorted(tmp_path.iterdir())}
    assert found == {"broken.npy": False, "empty.npy": False, "one.npy": False, "stack.npy": True}
    assert not is_stack(tmp_path / "none.npy")


def test_a_picture_that_was_opened_already_and_has_other_pixels() -> None:
    """Floats as they are; 32-bit integers only where 16 bits would do."""
    field = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(open_images([PILImage.fromarray(field)])[0].pixels, field)
    whole = np.arange(12, dtype=np.int32).reshape(3, 4) * 5000
    np.testing.assert_array_equal(open_images([PILImage.fromarray(whole)])[0].pixels, whole.astype(np.uint16))
    record = open_images([PILImage.fromarray(whole + 65535)])[0]
    assert "32-bit integer pixels" in str(record.error)


def _turned(orientation: int, kind: str) -> bytes:
    """A picture of 7x5 pixels whose EXIF data says how it was held."""
    exif, out = PILImage.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    PILImage.fromarray(TALL).save(out, kind, exif=exif, **options)
    return out.getvalue()


TALL = np.arange(7 * 5 * 3, dtype=np.uint8).reshape(7, 5, 3)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "JPEG"])
@pytest.mark.parametrize("orientation", range(10))
def test_pictures_are_upright_at_every_entrance(tmp_path: Path, kind: str, orientation: int) -> None:
    """As Pillow's `exif_transpose` turns them; an orientation that does not exist is none."""
    content = _turned(orientation, kind)
    with PILImage.open(io.BytesIO(content)) as picture:
        expected = np.asarray(ImageOps.exif_transpose(picture))
    path = tmp_path / f"a.{kind.lower()}"
    path.write_bytes(content)
    assert expected.shape == ((5, 7, 3) if orientation in (5, 6, 7, 8) else (7, 5, 3))
    np.testing.assert_array_equal(decode(io.BytesIO(content), ""), expected)
    np.testing.assert_array_equal(read_pixels(path), expected)
    with PILImage.open(path) as picture:
        for source in (tmp_path, [path], picture, [picture]):
            np.testing.assert_array_equal(open_images(source)[0].pixels, expected)


def test_the_decoder_process_turns_pictures_and_reports_animations(animation: bytes) -> None:
    decoder = DecoderProcess(seconds=60.0)
    try:
        np.testing.assert_array_equal(decoder.decode(_turned(6, "PNG")), np.rot90(TALL, -1))
        with pytest.warns(FirstFrameWarning, match="only the first frame"):
            decoder.decode(animation)
    finally:
        decoder.close()


def test_damaged_exif_data_is_ignored() -> None:
    out = io.BytesIO()
    PILImage.fromarray(TALL).save(out, "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    np.testing.assert_array_equal(decode(out, ""), TALL)


@pytest.fixture
def animation() -> bytes:
    out = io.BytesIO()
    first, second = (PILImage.fromarray(np.full((4, 6), value, np.uint8)) for value in (10, 200))
    first.save(out, "GIF", save_all=True, append_images=[second])
    return out.getvalue()


def test_only_the_first_frame_of_an_animation_is_read_and_python_says_so(animation: bytes) -> None:
    with pytest.warns(FirstFrameWarning, match="only the first frame of animated pictures is read"):
        pixels = decode(io.BytesIO(animation), "")
    assert pixels.shape[:2] == (4, 6)
    assert np.unique(pixels).tolist() == [10]


@pytest.mark.parametrize("kind", ["int8", "int16", "int32"])
def test_signed_pixels_of_a_tiff_are_read_as_they_are(tmp_path: Path, kind: str) -> None:
    """Their range is not known, whatever the values of an image: the detector asks for it."""
    for first in (-50, 0):
        pixels = np.arange(first, first + 100, dtype=kind).reshape(10, 10)
        tifffile(pixels, tmp_path / "signed.tif")
        record = FileImages([tmp_path / "signed.tif"])[0]
        assert record.pixels is not None
        assert record.pixels.dtype == kind
        np.testing.assert_array_equal(record.pixels, pixels)
        with pytest.raises(InputError, match="value_range"):
            Preprocessing(channels=1, size=(10, 10)).prepare(record)
        assert Preprocessing((-50.0, 100.0), channels=1, size=(10, 10)).prepare(record).shape == (1, 10, 10)


def tifffile(pixels: np.ndarray, path: Path) -> None:
    """A grey TIFF without compression, as the specification of TIFF 6.0 describes it."""
    height, width = pixels.shape
    data, signed = pixels.astype(pixels.dtype.newbyteorder("<")).tobytes(), 2
    short, long = 3, 4
    bits = 8 * pixels.dtype.itemsize
    tags = [(256, long, width), (257, long, height), (258, short, bits), (259, short, 1), (262, short, 1)]
    tags += [(273, long, 8), (277, short, 1), (278, long, height), (279, long, len(data)), (339, short, signed)]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, kind, 1, v) for tag, kind, v in tags)
    path.write_bytes(struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + directory + struct.pack("<I", 0))

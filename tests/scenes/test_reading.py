"""Windows of every kind of file: same pixels as the whole file, masks, bands, coordinates, clear refusals."""

import numpy as np
import pytest
import rasterio
from PIL import Image
from rasterio.enums import ColorInterp
from rasterio.transform import Affine

from gepc.core.errors import InputError
from gepc.images.formats import channels_last, read_pixels
from gepc.scenes.reading import PIXELS, ArrayScene, open_scene

pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
rng = np.random.default_rng(3)


def write_tiff(path, array, **options):
    array = array[..., None] if array.ndim == 2 else array
    height, width, count = array.shape
    with rasterio.open(
        path, "w", driver="GTiff", height=height, width=width, count=count, dtype=array.dtype, **options
    ) as file:
        file.write(array.transpose(2, 0, 1))
    return path


def window(path, top, left, height, width, **options):
    scene = open_scene(path, **options)
    try:
        return scene.read(top, left, height, width)
    finally:
        scene.close()


@pytest.mark.parametrize("layout", [{}, {"tiled": True, "blockxsize": 16, "blockysize": 16, "compress": "deflate"}])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("bands", [1, 3])
def test_a_tiff_window_is_that_part_of_the_array(tmp_path, dtype, bands, layout):
    array = (rng.random((40, 50, bands)) * 200).astype(dtype)
    path = write_tiff(tmp_path / "a.tif", array, **layout)
    pixels, valid = window(path, 5, 33, 20, 17)
    expected = array[5:25, 33:50]
    assert pixels.dtype == dtype
    assert np.array_equal(pixels, expected[..., 0] if bands == 1 else expected)
    assert valid.all()


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "grey.png", "deep.png", "alpha.png"])
def test_pictures_are_decoded_as_gepc_score_decodes_them(tmp_path, name):
    colour = rng.integers(1, 255, (20, 30, 4), dtype=np.uint8)
    colour[:5, :, 3] = 0
    array = {"grey.png": colour[..., 0], "deep.png": colour[..., 0].astype(np.uint16) * 200, "alpha.png": colour}
    Image.fromarray(array.get(name, colour[..., :3])).save(tmp_path / name)
    pixels, valid = window(tmp_path / name, 2, 3, 10, 12)
    assert np.array_equal(pixels, read_pixels(tmp_path / name)[2:12, 3:15])
    assert np.array_equal(valid.all(axis=1), np.arange(2, 12) >= 5 if name == "alpha.png" else np.ones(10, bool))


@pytest.mark.parametrize("suffix", ["npy", "tif"])
def test_complex_pixels_become_their_magnitude(tmp_path, suffix):
    array = (rng.standard_normal((12, 14)) + 1j * rng.standard_normal((12, 14))).astype(np.complex64)
    path = tmp_path / f"slc.{suffix}"
    if suffix == "npy":
        np.save(path, array)
    else:
        write_tiff(path, array)
    pixels, valid = window(path, 0, 2, 12, 12)
    assert pixels.dtype == np.float32
    assert np.array_equal(pixels, np.abs(array[:, 2:]))
    assert valid.all()


def test_array_files_take_channels_first_or_last(tmp_path):
    array = rng.integers(0, 255, (10, 12, 3), dtype=np.uint8)
    np.save(tmp_path / "last.npy", array)
    np.save(tmp_path / "first.npy", array.transpose(2, 0, 1))
    for name in ("last.npy", "first.npy"):
        assert np.array_equal(window(tmp_path / name, 1, 2, 5, 6)[0], array[1:6, 2:8])


@pytest.mark.parametrize("shape", [(2, 12, 3), (3, 12, 2), (12, 10, 5), (5, 10, 12)])
def test_the_axes_of_array_files_are_those_that_single_images_have(tmp_path, shape):
    array = rng.integers(0, 255, shape, dtype=np.uint8)
    np.save(tmp_path / "scene.npy", array)
    expected = channels_last(array, "scene.npy")
    scene = ArrayScene(tmp_path / "scene.npy")
    assert (scene.height, scene.width, len(scene.bands)) == expected.shape


def test_what_is_missing(tmp_path):
    array = np.full((8, 8, 3), 9.0, np.float32)
    array[0, 0] = -1  # no-data in all bands
    array[0, 1, 0] = -1  # in one band: a value like any other
    array[0, 2, 1] = np.nan
    array[0, 3, 2] = np.inf
    array[0, 4] = 7
    path = write_tiff(tmp_path / "m.tif", array, nodata=-1)
    assert window(path, 0, 0, 1, 8)[1].tolist() == [[False, True, False, False, True, True, True, True]]
    assert window(path, 0, 0, 1, 8, nodata=7.0)[1].tolist() == [[False, True, False, False, False, True, True, True]]


def test_an_alpha_band_is_a_mask_and_no_channel(tmp_path):
    array = rng.integers(1, 255, (8, 8, 4), dtype=np.uint8)
    array[..., 3] = 255
    array[:, :2, 3] = 0
    write_tiff(tmp_path / "a.tif", array, photometric="RGB", alpha="YES")
    with rasterio.open(tmp_path / "a.tif") as file:
        assert file.colorinterp[3] == ColorInterp.alpha
    pixels, valid = window(tmp_path / "a.tif", 0, 0, 8, 8)
    assert pixels.shape == (8, 8, 3)
    assert valid.all(axis=0).tolist() == [False] * 2 + [True] * 6


def test_bands_are_chosen_by_number(tmp_path):
    array = rng.integers(0, 255, (8, 8, 5), dtype=np.uint8)
    path = write_tiff(tmp_path / "b.tif", array, photometric="MINISBLACK")
    assert np.array_equal(window(path, 0, 0, 8, 8, bands=(4, 3, 2))[0], array[..., [3, 2, 1]])
    assert np.array_equal(window(path, 0, 0, 8, 8, bands=(5,))[0], array[..., 4])
    for bands, sentence in (
        (None, "has 5 bands and the detector's backbone takes 3; choose with bands"),
        ((1, 2), "2 bands are chosen and the detector's backbone takes 3"),
        ((6,), "has the bands 1, 2, 3, 4, 5; there is no band 6"),
        ((0,), "there is no band 0"),
    ):
        with pytest.raises(InputError, match=sentence):
            open_scene(path, bands)


def test_coordinates_are_those_of_the_file(tmp_path):
    array = np.ones((8, 8), np.uint8)
    place = open_scene(
        write_tiff(tmp_path / "g.tif", array, crs="EPSG:32631", transform=Affine(10, 0, 500, 0, -20, 900))
    ).place
    assert place.epsg == 32631
    assert place(3, 2) == (530.0, 860.0)
    assert open_scene(write_tiff(tmp_path / "plain.tif", array)).place == PIXELS


def test_files_that_are_no_scene_are_refused_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "junk.tif").write_bytes(b"II*\0 not a tiff at all" * 9)
    (tmp_path / "junk.png").write_bytes(b"nothing")
    np.save(tmp_path / "line.npy", np.ones(9))
    np.save(tmp_path / "empty.npy", np.ones((0, 9)))
    np.save(tmp_path / "text.npy", np.full((3, 3), "x"))
    palette = write_tiff(tmp_path / "palette.tif", np.ones((8, 8), np.uint8), photometric="palette")
    for path, sentence in (
        (tmp_path / "junk.tif", "not an image that can be read"),
        (tmp_path / "junk.png", "not an image that can be decoded"),
        (tmp_path / "line.npy", "a scene is"),
        (tmp_path / "empty.npy", "is empty"),
        (tmp_path / "text.npy", "not pixels"),
        (palette, "colour palette"),
        (tmp_path / "gone.tif", "does not exist"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(InputError, match=sentence):
            open_scene(path)
    monkeypatch.setitem(__import__("sys").modules, "rasterio", None)
    with pytest.raises(InputError, match=r"pip install 'gepc\[scenes\]'"):
        open_scene(palette)


def test_the_file_cache_is_bounded_while_a_scene_is_read(tmp_path):
    from rasterio._env import get_gdal_config

    scene = open_scene(write_tiff(tmp_path / "a.tif", np.zeros((20, 30), np.uint8)))
    found = get_gdal_config("GDAL_CACHEMAX")
    scene.close()
    assert found == 64 * 2**20  # in bytes


@pytest.mark.parametrize("name", ["palette.png", "palette.gif", "grey.png", "rgb.png", "rgba.png"])
def test_transparency_of_any_kind_marks_missing_pixels(tmp_path, name):
    shades = np.arange(64, dtype=np.uint8).reshape(8, 8)
    missing, colour = shades < 5, np.stack([shades] * 3, axis=2)
    colour[missing] = 0
    grey = Image.fromarray(np.where(missing, 0, shades + 100).astype(np.uint8))
    if name.startswith("palette"):
        grey.convert("P").save(tmp_path / name, transparency=0)
    elif name == "grey.png":
        grey.save(tmp_path / name, transparency=0)
    elif name == "rgb.png":
        Image.fromarray(colour).save(tmp_path / name, transparency=(0, 0, 0))
    else:
        Image.fromarray(np.dstack([colour, np.where(missing, 0, 255).astype(np.uint8)])).save(tmp_path / name)
    _, valid = window(tmp_path / name, 0, 0, 8, 8)
    assert (~valid).tolist() == missing.tolist()


def test_an_archive_named_npy_is_refused_in_a_sentence(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((8, 8), np.uint8))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(InputError, match="archive of arrays"):
        open_scene(tmp_path / "a.npy")

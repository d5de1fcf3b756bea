"""Scenes read by windows: raw pixels, not rescaled, and which of them are valid."""

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image as PILImage

from gepc.core.errors import InputError, raising
from gepc.core.files import StrPath, open_regular
from gepc.images.formats import DAMAGED_ARRAY, FORMATS, GDAL_OPTIONS, Pixels, channels_last, read_pixels, upright
from gepc.images.preprocessing import accepted_channels

Valid = npt.NDArray[np.bool_]

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm")
CACHE_BYTES = 64 << 20  # of decoded file blocks, which GDAL would otherwise let grow to a share of the machine's memory
# GDAL's drivers by the first bytes of a file. Others follow references to further files and to the network (VRT, WMS).
_TIFF, _JPEG2000 = "GTiff", "JP2OpenJPEG"
DRIVERS = {b"II*\0": _TIFF, b"MM\0*": _TIFF, b"II+\0": _TIFF, b"MM\0+": _TIFF}
DRIVERS |= {b"\0\0\0\x0c": _JPEG2000, b"\xff\x4f\xff\x51": _JPEG2000}


@dataclass(frozen=True)
class Georeference:
    """Map coordinates of pixels: x = a column + b row + c, y = d column + e row + f, in the reference system `crs`."""

    transform: tuple[float, float, float, float, float, float] = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    crs: str | None = None
    epsg: int | None = None

    def __call__(self, column: float, row: float) -> tuple[float, float]:
        """Map coordinates of a pixel corner; (0, 0) is the scene's upper left corner."""
        a, b, c, d, e, f = self.transform
        return a * column + b * row + c, d * column + e * row + f


PIXELS = Georeference()  # of a file without map coordinates: x to the right, y downwards, from the upper left corner


class Scene(ABC):
    """An image that is read window by window.

    A pixel is missing where a used band is NaN or infinite, where all used bands hold the no-data value, or where the
    file's own mask or transparency marks it. `bands` are the positions, from 0, of the bands that are used, `nodata` a
    value in addition to what the file declares, and `place` the map coordinates, or `PIXELS`.
    """

    path: Path
    height: int
    width: int
    dtype: str
    bands: tuple[int, ...]
    nodata: float | None
    place: Georeference = PIXELS

    @abstractmethod
    def _window(self, top: int, left: int, height: int, width: int) -> tuple[Pixels, Valid]:
        """The used bands (H, W, C) and the file's own mask (H, W)."""

    def read(self, top: int, left: int, height: int, width: int) -> tuple[Pixels, Valid]:
        """Pixels (H, W) or (H, W, C), complex ones as magnitudes, and which of them are valid."""
        pixels, valid = self._window(top, left, height, width)
        if np.iscomplexobj(pixels):
            pixels = np.abs(pixels)
        if pixels.dtype.kind == "f":
            valid = valid & np.isfinite(pixels).all(axis=2)
        if self.nodata is not None:
            valid = valid & ~(pixels == self.nodata).all(axis=2)
        return pixels[..., 0] if pixels.shape[2] == 1 else pixels, valid

    def read_or_missing(self, top: int, left: int, height: int, width: int) -> tuple[Pixels, Valid]:
        """As `read`; all pixels of a window that cannot be read count as missing."""
        try:
            return self.read(top, left, height, width)
        except InputError:
            return np.zeros((height, width, len(self.bands))), np.zeros((height, width), dtype=bool)

    def close(self) -> None:  # noqa: B027 - most scenes hold nothing open
        """Close the file."""


class ArrayScene(Scene):
    """A `.npy` file, memory-mapped: (H, W), (H, W, C) or (C, H, W), complex or real."""

    def __init__(self, path: Path) -> None:
        self.path = path
        array = self._mapped()
        if array.dtype.kind not in "biufc":
            raise InputError(f"{path} holds {array.dtype} values, not pixels")
        self.dtype = array.dtype.name
        self.height, self.width = array.shape[:2]
        self.bands = tuple(range(array.shape[2]))

    def _mapped(self) -> Pixels:
        """The array as (H, W, C), mapped for each window only: what is mapped counts as memory of the process."""
        with raising(InputError, f"{self.path} is not a plain .npy array: {{error}}", *DAMAGED_ARRAY):
            array = np.load(self.path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise InputError(f"{self.path} is an archive of arrays; save the scene as one array")
        if array.ndim not in (2, 3):
            shape = array.shape
            raise InputError(f"{self.path} holds an array of shape {shape}; a scene is (H,W), (H,W,C) or (C,H,W)")
        return np.asarray(array[..., None] if array.ndim == 2 else channels_last(array, str(self.path)))

    def _window(self, top: int, left: int, height: int, width: int) -> tuple[Pixels, Valid]:
        window = self._mapped()[top : top + height, left : left + width]
        pixels = np.stack([window[..., band] for band in self.bands], axis=2)
        return pixels, np.ones(pixels.shape[:2], dtype=bool)


@contextlib.contextmanager
def ignored(category: type[Warning]) -> Iterator[None]:
    """Ignore warnings of a category."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category)
        yield


class PictureScene(Scene):
    """A PNG, JPEG or other common format without windows, decoded whole by Pillow."""

    def __init__(self, path: Path) -> None:
        with ignored(PILImage.DecompressionBombWarning):  # the hard limit stays
            pixels = read_pixels(path)
            failing = raising(InputError, f"{path} is not a picture: {{error}}", OSError)
            with failing, PILImage.open(path, formats=FORMATS) as picture:
                has_alpha = picture.has_transparency_data and not picture.mode.startswith("I")
                valid = np.asarray(upright(picture).convert("RGBA").getchannel("A")) > 0 if has_alpha else None
        self.path, self.dtype = path, pixels.dtype.name
        self._pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        self._valid = np.ones(pixels.shape[:2], dtype=bool) if valid is None else valid
        self.height, self.width, count = self._pixels.shape
        self.bands = tuple(range(count))

    def _window(self, top: int, left: int, height: int, width: int) -> tuple[Pixels, Valid]:
        part = (slice(top, top + height), slice(left, left + width))
        return self._pixels[part][..., list(self.bands)], self._valid[part]


class RasterScene(Scene):
    """TIFF, GeoTIFF and JPEG 2000, read window by window with rasterio; files beside it are not read."""

    def __init__(self, path: Path) -> None:
        missing = f"{path} is read with rasterio; install it with: pip install 'gepc[scenes]'"
        with raising(InputError, missing, ImportError):
            import rasterio
            from rasterio.enums import ColorInterp
            from rasterio.errors import NotGeoreferencedWarning, RasterioError
        self._error: type[Exception] = RasterioError
        self._warning: type[Warning] = NotGeoreferencedWarning
        with open_regular(path) as handle:
            driver = DRIVERS.get(handle.read(4))
        if driver is None:
            raise InputError(f"{path} is not an image that can be read: TIFF, JPEG 2000, PNG, JPEG or .npy")
        with contextlib.ExitStack() as stack:  # closes the file again if it is refused
            stack.enter_context(rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES, **GDAL_OPTIONS))
            failing = raising(InputError, f"{path} is not an image that can be read: {{error}}", RasterioError)
            with failing, ignored(self._warning):  # absolute: GDAL and rasterio take some relative names for URLs
                self._file: Any = stack.enter_context(rasterio.open(path.absolute(), driver=driver))
            colours = self._file.colorinterp
            if not colours:
                raise InputError(f"{path} contains no band of pixels; extract one of its data sets to a file")
            if ColorInterp.palette in colours:
                raise InputError(f"{path} has a colour palette; convert it to RGB or grey first")
            self._stack = stack.pop_all()
        self.path, self.height, self.width = path, self._file.height, self._file.width
        self.bands = tuple(band for band, colour in enumerate(colours) if colour != ColorInterp.alpha)
        self.dtype = self._file.dtypes[self.bands[0] if self.bands else 0]
        crs = self._file.crs
        a, b, c, d, e, f = (float(value) for value in tuple(self._file.transform)[:6])
        self.place = Georeference((a, b, c, d, e, f), crs.to_wkt() if crs else None, crs.to_epsg() if crs else None)

    def _window(self, top: int, left: int, height: int, width: int) -> tuple[Pixels, Valid]:
        from rasterio.windows import Window

        indexes, window = [band + 1 for band in self.bands], Window(left, top, width, height)
        try:
            with ignored(self._warning):
                pixels = self._file.read(indexes, window=window)
                # a declared no-data value, often 0, is tested band by band: missing means that all bands have it
                valid = (self._file.read_masks(indexes, window=window) > 0).any(axis=0)
        except self._error as error:
            reason, lines = error.__cause__ or error, f"between lines {top} and {top + height}"
            raise InputError(f"{self.path} is damaged or cut short {lines}: {reason}") from error
        return pixels.transpose(1, 2, 0), valid

    def close(self) -> None:
        """Close the file and free its cache."""
        self._stack.close()


def open_scene(
    path: StrPath, bands: tuple[int, ...] | None = None, nodata: float | None = None, channels: int = 3
) -> Scene:
    """Open a scene.

    `bands` are counted from 1; by default all, which must be 1, 3 or `channels`, those of the backbone. With one
    channel, 3 bands become grey, as for any image. `nodata` is a value of missing pixels, in addition to what the file
    declares.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist" if not path.exists() else f"{path} is a folder; give one image file")
    suffix = path.suffix.lower()
    scene = (ArrayScene if suffix == ".npy" else PictureScene if suffix in PICTURES else RasterScene)(path)
    try:
        if scene.height == 0 or scene.width == 0:
            raise InputError(f"{path} is empty: {scene.height}x{scene.width} pixels")
        scene.nodata = nodata
        scene.bands = _choose(scene, bands, channels)
    except InputError:
        scene.close()
        raise
    return scene


def _choose(scene: Scene, bands: tuple[int, ...] | None, channels: int) -> tuple[int, ...]:
    allowed = accepted_channels(channels)
    if bands is None:
        if len(scene.bands) not in allowed:
            example = ",".join(map(str, range(1, channels + 1)))
            taken = f"the detector's backbone takes {channels}; choose with bands, such as {example}"
            raise InputError(f"{scene.path} has {len(scene.bands)} bands and {taken}")
        return scene.bands
    if any(band - 1 not in scene.bands for band in bands):
        known = ", ".join(str(band + 1) for band in scene.bands)
        raise InputError(f"{scene.path} has the bands {known}; there is no band {', '.join(map(str, bands))}")
    if len(bands) not in allowed:
        raise InputError(f"{len(bands)} bands are chosen and the detector's backbone takes {channels}")
    return tuple(band - 1 for band in bands)

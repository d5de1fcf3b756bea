"""Image files to pixels, and maps to PNG."""

import base64
import contextlib
import io
import threading

import numpy as np
import numpy.typing as npt
from PIL import Image as PILImage

from gepc.core.errors import InputError
from gepc.images.decoder import DecoderProcess
from gepc.images.formats import NPY_START
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import Image, Record
from gepc.maps.drawing import overlay
from gepc.methods.pooling import Map
from gepc.serve.server import Settings

LARGE, STRENGTH = 2_000_000, 0.75
_one_large_at_a_time = threading.Lock()


def network_input(data: bytes, decoder: DecoderProcess, settings: Settings, preprocessing: Preprocessing) -> Image:
    """Decode and preprocess. Large images go one at a time, since they take much memory.

    An image that would be too large for the network is refused before it is preprocessed. Raises `InputError` with a
    message that does not repeat that of a decoding library, which may name addresses.
    """
    if not data:
        raise InputError("the file is empty")
    try:
        pixels = decoder.decode(data, settings.max_pixels)
    except InputError as error:
        raise InputError(f"the file {str(error).partition(':')[0]}") from error
    if data[: len(NPY_START)] == NPY_START:
        pixels = Record.of_array("the image", pixels, "the image").pixels_for(preprocessing.channels)
    height, width = preprocessing.network_size((pixels.shape[0], pixels.shape[1]))
    if height * width > settings.max_network_pixels:
        raise InputError(
            f"the image has {pixels.shape[1]}x{pixels.shape[0]} pixels, {width}x{height} as the network sees it, and "
            f"this service takes at most {settings.max_network_pixels:,} there; send a smaller image or a part of it, "
            "or start the service with a larger --max-network-megapixels and more memory"
        )
    with _one_large_at_a_time if pixels.size >= LARGE else contextlib.nullcontext():
        return preprocessing(pixels, "the image")


def heat(field: Map, scale: float) -> bytes:
    """The map alone as an RGBA PNG, one pixel per map pixel; drawn over the image it gives `detector.maps.overlay`."""
    level = np.clip(field / scale, 0.0, 1.0)[..., None]
    colour = overlay(np.zeros((*field.shape, 3)), np.maximum(field, 1e-3 * scale), scale, 1.0)
    colour = colour / np.maximum(level, 1e-3)  # overlay multiplies by the opacity, PNG keeps them apart
    return png(np.concatenate([colour, STRENGTH * level], axis=2))


def data_uri(content: bytes) -> str:
    """A PNG as a data: URI."""
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")


def png(picture: npt.NDArray[np.floating]) -> bytes:
    """A picture (H, W, 3 or 4) in [0, 1] as PNG."""
    out = io.BytesIO()
    PILImage.fromarray(np.rint(np.clip(picture, 0.0, 1.0) * 255.0).astype(np.uint8)).save(out, format="PNG")
    return out.getvalue()

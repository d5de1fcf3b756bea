"""Maps and inputs as PNG, on the detector's common scale."""

from __future__ import annotations

import base64
import io

import numpy as np
import numpy.typing as npt

from gepc.detector.maps import overlay
from gepc.features.maps import Map
from gepc.images.preprocessing import rgb_picture
from gepc.images.sources import Image

STRENGTH = 0.75
SHOWN_SIZE = 256
Bytes = npt.NDArray[np.uint8]


def heat(field: Map, scale: float) -> bytes:
    """The map alone as RGBA: laid over the image it gives `gepc.detector.maps.overlay`. One PNG pixel per map pixel."""
    level = np.clip(field / scale, 0.0, 1.0)[..., None]
    colour = overlay(np.zeros((*field.shape, 3)), np.maximum(field, 1e-3 * scale), scale, 1.0)
    colour = colour / np.maximum(level, 1e-3)  # overlay multiplies by the opacity, PNG keeps them apart
    return _png(_bytes(np.concatenate([colour, STRENGTH * level], axis=2)))


def overlaid(image: Image, field: Map, scale: float) -> bytes:
    """The image as the network sees it under its map, enlarged to some 256 pixels."""
    pixels = _bytes(overlay(rgb_picture(image), field, scale, STRENGTH))
    enlarge = max(1, SHOWN_SIZE // image.shape[1])
    return _png(pixels.repeat(enlarge, axis=0).repeat(enlarge, axis=1))


def seen(image: Image) -> bytes:
    """The image as the network sees it."""
    return _png(_bytes(rgb_picture(image)))


def data_uri(png: bytes) -> str:
    """A PNG as text."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _bytes(picture: npt.NDArray[np.floating]) -> Bytes:
    return np.asarray(np.rint(np.clip(picture, 0.0, 1.0) * 255.0), dtype=np.uint8)


def _png(pixels: Bytes) -> bytes:
    from PIL import Image as PILImage

    out = io.BytesIO()
    PILImage.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()

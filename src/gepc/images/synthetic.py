"""Synthetic outliers: an image changed so much that a detector fitted on similar images should notice.

Each kind removes one property of the image and keeps the others:

    shuffle    the position of its sixteen blocks
    phase      the phase of its Fourier transform; colours and power spectrum stay
    blur       detail finer than about 1/20 of its side
    noise      smoothness: white noise of standard deviation 0.2 on [-1, 1] is added
    contrast   three fifths of every pixel's distance from the mean
    colour     hue: the channels are rotated; an image of one channel becomes its negative
    negative   sign: bright and dark are exchanged
    zoom       scale: the central half of each side fills the image

They need no other data, so that levels and transforms can be compared without out-of-distribution images. Every outlier
is a function of (seed, the image's content, kind) alone.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.ndimage import gaussian_filter, map_coordinates

from gepc.core.errors import check_choice
from gepc.images.noise import generator, image_key
from gepc.images.sources import Image

Field = npt.NDArray[np.float64]

GRID = 4
BLUR = 1 / 20
NOISE = 0.2
CONTRAST = 0.4


def _shuffle(image: Field, rng: np.random.Generator) -> Field:
    """Sixteen blocks in another order; rows and columns that do not fill a block stay."""
    height, width = (max(1, side // GRID) for side in image.shape[1:])
    corners = [(row * height, column * width) for row in range(GRID) for column in range(GRID)]
    corners = [(y, x) for y, x in corners if y + height <= image.shape[1] and x + width <= image.shape[2]]
    out = image.copy()
    for (y, x), source in zip(corners, rng.permutation(len(corners)), strict=True):
        from_y, from_x = corners[source]
        out[:, y : y + height, x : x + width] = image[:, from_y : from_y + height, from_x : from_x + width]
    return out


def _phase(image: Field, rng: np.random.Generator) -> Field:
    """The phase of white noise is added, the same to every channel, so that colours stay together."""
    turn = np.fft.rfft2(rng.standard_normal(image.shape[1:]))
    turn /= np.maximum(np.abs(turn), 1e-12)
    turn[0, 0] = 1.0
    return np.fft.irfft2(np.fft.rfft2(image) * turn, s=image.shape[1:])


def _blur(image: Field, _: np.random.Generator) -> Field:
    sigma = BLUR * min(image.shape[1:])
    return np.asarray(gaussian_filter(image, (0.0, sigma, sigma), mode="nearest"))


def _zoom(image: Field, _: np.random.Generator) -> Field:
    """Bilinear."""
    axes = [np.linspace(side / 4, 3 * side / 4 - 1, side) for side in image.shape[1:]]
    where = np.stack(np.meshgrid(*axes, indexing="ij"))
    return np.stack([map_coordinates(channel, where, order=1, mode="nearest") for channel in image])


_MAKERS: dict[str, Callable[[Field, np.random.Generator], Field]] = {
    "shuffle": _shuffle,
    "phase": _phase,
    "blur": _blur,
    "noise": lambda image, rng: image + NOISE * rng.standard_normal(image.shape),
    "contrast": lambda image, _: np.asarray(image.mean() + CONTRAST * (image - image.mean())),
    "colour": lambda image, _: -image if len(image) == 1 else np.roll(image, 1, axis=0),
    "negative": lambda image, _: -image,
    "zoom": _zoom,
}
KINDS = tuple(_MAKERS)


def synthetic_outlier(image: Image, kind: str, seed: int = 0) -> npt.NDArray[np.float32]:
    """The image (C, H, W) in [-1, 1], changed in one of the `KINDS`; stays in [-1, 1]."""
    check_choice("kind of outlier", kind, KINDS)
    rng = generator(seed, image_key(image), f"outlier {kind}")
    changed = _MAKERS[kind](np.asarray(image, dtype=np.float64), rng)
    return np.clip(changed, -1.0, 1.0).astype(np.float32)

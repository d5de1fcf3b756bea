"""Random numbers keyed by content: a draw is a function of (seed, pixels, timestep, repetition) and nothing else.

Batch size, order, sharding and the other images therefore cannot change a score.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gepc.images.sources import Image

Masks = npt.NDArray[np.bool_]


def image_key(image: Image) -> bytes:
    """128-bit hash of the pixels, rounded to 16-bit steps so that float rounding does not change it.

    The values of 8-bit and 16-bit images lie exactly on such steps.
    """
    quantised = np.rint((np.asarray(image, dtype=np.float64) + 1.0) * 32767.5).astype("<i4")
    digest = hashlib.blake2b(quantised.tobytes(), digest_size=16)
    digest.update(repr(quantised.shape).encode())
    return digest.digest()


def generator(seed: int, key: bytes, purpose: str, *numbers: int) -> np.random.Generator:
    """A counter-based generator for one image, by its `image_key`, and one purpose.

    Draws for different purposes or `numbers`, such as the timestep and the repetition, are independent.
    """
    text = f"{seed}|{purpose}|{'|'.join(map(str, numbers))}"
    digest = hashlib.blake2b(key + text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))


def normal(
    seed: int, keys: Sequence[bytes], shape: tuple[int, ...], timestep: int, draw: int = 0, purpose: str = "noise"
) -> npt.NDArray[np.float32]:
    """Standard normal noise (len(keys), *shape), one independent field per image."""
    out = np.empty((len(keys), *shape), dtype=np.float32)
    for row, key in zip(out, keys, strict=True):
        generator(seed, key, purpose, timestep, draw).standard_normal(out=row, dtype=np.float32)
    return out


def subsets(seed: int, keys: Sequence[bytes], count: int, size: int, purpose: str, *numbers: int) -> Masks:
    """For each image a uniformly drawn subset of `size` out of `count`, as a mask (len(keys), count)."""
    masks = np.zeros((len(keys), count), dtype=bool)
    for mask, key in zip(masks, keys, strict=True):
        mask[generator(seed, key, purpose, *numbers).permutation(count)[:size]] = True
    return masks

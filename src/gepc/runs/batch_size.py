"""`--batch-size auto`: the size at which an image costs the least time, among those that fit into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from gepc.detector.detector import Detector
from gepc.features.base import Batch
from gepc.images.noise import image_key

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
WORTH_IT = 0.97
"""A larger batch takes more memory, so it must be faster by three per cent."""


def fastest(seconds_per_image: Callable[[int], float], sizes: Iterable[int] = SIZES) -> int:
    """The size with the least time; looking ends at the first that is no faster, or that memory does not hold."""
    best, least = 0, float("inf")
    for size in sizes:
        try:
            seconds = seconds_per_image(size)
        except (MemoryError, RuntimeError) as error:
            if best == 0 or not _is_out_of_memory(error):
                raise
            break
        if seconds > least * WORTH_IT:
            break
        best, least = size, seconds
    return best


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def fastest_for(detector: Detector, images: int) -> int:
    """Measured on noise of the images' size at the first kept level; no more than the images of the run."""
    shape = (detector.backbone.channels, *detector.input_size)
    kept = tuple(detector.kept_[:1])
    counts = detector.backbone.forward_count, detector.backbone.jvp_count

    def seconds_per_image(size: int) -> float:
        noise = np.random.default_rng(0).uniform(-1.0, 1.0, (size, *shape)).astype(np.float32)
        batch = Batch(noise, [image_key(image) for image in noise], detector.seed, size)
        start = time.perf_counter()
        detector.extractor.extract(detector.backbone, batch, kept)
        return (time.perf_counter() - start) / size

    seconds_per_image(SIZES[0])  # the first call of a network is slower than the others
    best = fastest(seconds_per_image, [size for size in SIZES if size <= images] or SIZES[:1])
    detector.backbone.forward_count, detector.backbone.jvp_count = counts
    return best

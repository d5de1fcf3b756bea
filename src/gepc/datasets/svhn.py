"""SVHN, cropped digits (Netzer et al., 2011): one MATLAB file per split with `X`, (32, 32, 3, N) bytes.

The files are compressed, so a split is loaded at once (225 MB for the training images). The `extra` images are in
neither split.
"""

from __future__ import annotations

from pathlib import Path

from gepc.core.errors import InputError
from gepc.datasets.collection import PixelImages, first_of
from gepc.datasets.matlab import read_byte_array
from gepc.datasets.registry import register


@register(
    "svhn",
    layout="train_32x32.mat and test_32x32.mat (format 2, cropped digits)",
    home="http://ufldl.stanford.edu/housenumbers/",
)
def svhn(root: Path, split: str) -> PixelImages:
    """73,257 training and 26,032 test images, 32x32."""
    path = first_of(root, f"{split}_32x32.mat")
    pixels = read_byte_array(path, "X")
    if pixels.ndim != 4 or pixels.shape[2] != 3:
        raise InputError(f"X in {path} has shape {pixels.shape} instead of (32, 32, 3, N)")
    return PixelImages([pixels.transpose(3, 0, 1, 2)], split)

"""Input complexity (IC): likelihood against a lossless compressor. Serra et al., ICLR 2020.

    S = bpd(x) - L(x)/D        L = 8 times the bytes of the PNG (level 9) of the 8-bit image the network sees

The PNG's header is part of L, a constant. S inverts for in-distribution sets that are simple themselves; the kernel
density (`calibration="kde"`) is its two-sided form.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.extractors.base import Batch, Columns, Table, register
from gepc.extractors.nll_vlb import NllVlb

if TYPE_CHECKING:
    from gepc.extractors.shapes import Features


@register("ic")
@dataclass(frozen=True)
class InputComplexity(NllVlb):
    """The bound's parameters and presets; the compressor costs no pass."""

    @property
    def label(self) -> str:
        """With the compressor."""
        return f"{self.name}[png]"

    @property
    def column_names(self) -> tuple[str, ...]:
        """Bits per dimension beyond the compressor's."""
        return ("ic",)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """`bpd` of the model and `png` of the compressor."""
        import torch

        png = torch.tensor([png_bits(image) / image.size for image in batch.images], dtype=torch.float64)
        return {**super().of_images(backbone, batch), "png": png}

    def columns(self, table: Table) -> Columns:
        """bpd - L/D."""
        return (table["bpd"] - table["png"])[:, :, None]


def png_bits(image: npt.NDArray[np.float32]) -> int:
    """Bits of the PNG of an image (C, H, W) in [-1, 1]; channels other than 1 or 3 are stacked into one grey image."""
    from PIL import Image

    pixels = np.rint((np.clip(image, -1.0, 1.0).astype(np.float64) + 1.0) * 127.5).astype(np.uint8)
    rows = pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels.reshape(-1, pixels.shape[2])
    packed = BytesIO()
    Image.fromarray(np.ascontiguousarray(rows)).save(packed, "PNG", compress_level=9)
    return 8 * packed.getbuffer().nbytes

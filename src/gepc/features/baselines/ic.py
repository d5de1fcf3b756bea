"""Input complexity (IC): likelihood against a lossless compressor. Serra et al., ICLR 2020.

    S = bpd(x) - L(x)/D        L = 8 times the bytes of the 8-bit image the network sees, compressed

The compressor is PNG (level 9), or the best of several: `compressors=("png", "webp")` takes the smaller file for each
image. Figures from different compressors are not comparable, so they are part of the method's label. The file's header
is part of L, a constant. S inverts for in-distribution sets that are simple themselves; the kernel density
(`calibration="kde"`) is its two-sided form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.core.errors import OptionError, check_choice
from gepc.features.base import Batch, Columns, DerivedExtractor, Table, register
from gepc.features.baselines.nll_vlb import NllVlb

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_SAVE: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG", "compress_level": 9},
    "webp": {"format": "WEBP", "lossless": True, "quality": 100, "method": 6, "exact": True},
}


@register("ic")
@dataclass(frozen=True)
class InputComplexity(DerivedExtractor, NllVlb):
    """The bound's parameters and presets, and the `compressors` (png, webp), which cost no pass."""

    compressors: tuple[str, ...] = ("png",)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (self.compressors,) if isinstance(self.compressors, str) else tuple(self.compressors)
        object.__setattr__(self, "compressors", given)
        if not given:
            raise OptionError(f"name at least one compressor ({', '.join(_SAVE)})")
        for name in given:
            check_choice("compressor", name, _SAVE)

    @property
    def label(self) -> str:
        """With the compressors."""
        return f"{self.name}[{'+'.join(self.compressors)}]"

    @property
    def column_names(self) -> tuple[str, ...]:
        """Bits per dimension beyond the compressor's."""
        return ("ic",)

    def builds_on(self) -> tuple[NllVlb]:
        """The likelihood's table."""
        return (self.plain(),)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """`bpd` of the model, and the bits per dimension of every compressor under its name."""
        return self.complete([super().extract(backbone, batch, timesteps)], batch)

    def complete(self, tables: Sequence[Table], batch: Batch) -> Table:
        """The table of the likelihood and what the compressors make of the images."""
        sizes = {
            name: np.array([[packed_bits(image, name) / image.size] for image in batch.images])
            for name in self.compressors
        }
        return {**super().complete(tables, batch), **sizes}

    def columns(self, table: Table) -> Columns:
        """bpd - L/D."""
        smallest = np.min([table[name] for name in self.compressors], axis=0)
        return np.asarray(table["bpd"] - smallest)[:, :, None]


def packed_bits(image: npt.NDArray[np.float32], compressor: str) -> int:
    """Bits of an image (C, H, W) in [-1, 1] as a file of that kind."""
    packed = BytesIO()
    _picture(image).save(packed, **_SAVE[compressor])
    return 8 * packed.getbuffer().nbytes


def _picture(image: npt.NDArray[np.float32]) -> Picture:
    """The 8-bit picture; channels other than 1 or 3 are stacked into one grey image."""
    from PIL import Image

    pixels = np.rint((np.clip(image, -1.0, 1.0).astype(np.float64) + 1.0) * 127.5).astype(np.uint8)
    rows = pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels.reshape(-1, pixels.shape[2])
    from_array: Callable[[npt.NDArray[np.uint8]], Picture] = Image.fromarray
    return from_array(np.ascontiguousarray(rows))

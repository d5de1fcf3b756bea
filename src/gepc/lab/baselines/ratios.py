"""Likelihoods compared with something else: a background model, an ensemble, a lossless compressor."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError, check_choice
from gepc.core.options import at_least, checked
from gepc.lab.baselines.likelihood import BoundOptions, NllVlb
from gepc.methods.base import Batch, Columns, Cost, Derived, Features, Table, WholeImage, register
from gepc.methods.pooling import energy
from gepc.methods.presets import Preset, Presets

_SAVE: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG", "compress_level": 9},
    "webp": {"format": "WEBP", "lossless": True, "quality": 100, "method": 6, "exact": True},
}


@register("lr")
@dataclass(frozen=True)
class LikelihoodRatio(WholeImage):
    """Likelihood ratio: what the image holds beyond its background. After Ren et al., NeurIPS 2019.

    The paper trains a second model on perturbed images. Here one diffusion model serves as both: its denoising loss
    e_t = mean (noise - eps)^2 depends on detail at low noise, and on the whole image at all levels together. Then

        LR = sum_{t in low} w_t e_t / sum_{t in low} w_t - sum_t w_t e_t / sum_t w_t

    over levels even in log rho, with w_t the level's rank. Which sign is OOD depends on the ID set: the density over ID
    values is two-sided.

    Parameters
    ----------
    levels : noise levels of the losses.
    fraction : the share of the levels, from the lowest noise, that makes up `low`.
    """

    pixels_only: ClassVar[str | None] = "it is a ratio of likelihoods of pixels"
    presets: ClassVar[Presets] = {
        "paper": Preset({"levels": Levels.rho(*np.geomspace(0.02, 5.0, 100).tolist())}),
        "light": Preset(),
    }

    levels: Levels = Levels.rho(*np.geomspace(0.02, 5.0, 16).tolist())
    fraction: float = checked(0.5, lambda part: 0.0 < part < 1.0, "a share of the levels between 0 and 1")

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        return Cost(forward=len(self._timesteps(backbone)))

    def _timesteps(self, backbone: Backbone) -> Sequence[int]:
        return self.levels.timesteps(backbone.alphas_cumprod)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """`loss` (N, levels), lowest noise first."""
        noised = ((t, *batch.noised(backbone, t)) for t in self._timesteps(backbone))
        losses = [energy(field - backbone.eps(x_t, t)) / field[0].numel() for t, x_t, field in noised]
        return {"loss": torch.stack(losses, 1)}

    def columns(self, table: Table) -> Columns:
        """The loss at low noise minus the loss at all levels."""
        loss = table["loss"]
        weights = np.arange(1.0, loss.shape[2] + 1)
        low = max(1, round(self.fraction * len(weights)))
        part = loss[:, :, :low] @ weights[:low] / weights[:low].sum()
        return np.asarray(part - loss @ weights / weights.sum())[:, :, None]


@register("waic")
@dataclass(frozen=True)
class WAIC(BoundOptions, WholeImage):
    """WAIC: expected likelihood with a penalty for its variance. Choi, Jang & Alemi, 2018.

        E[-log p] + Var[log p]/D, in nats of the whole image; per dimension in the table

    The paper takes both over an ensemble of models, and the variance undivided, which then dominates the mean. Here
    both are over the noise draws of one model: the variance is the estimator's, and tables label this as a heuristic.

    Parameters
    ----------
    draws : noise draws.

    The others are those of `BoundOptions`.
    """

    column_names = ("waic",)

    strata: int | None = at_least(1, 16)
    draws: int = at_least(2, 3)

    @property
    def label(self) -> str:
        return f"{self.name}[heuristic]"

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        return Cost(forward=self.draws * self.bound.image_cost(backbone, size).forward)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """`nll` (N, draws): -log p in nats per dimension."""
        bound, size = self.bound, batch.images[0].size
        draws = [bound.terms(backbone, batch, draw).sum(1) / size for draw in range(self.draws)]
        return {"nll": torch.stack(draws, 1)}

    def columns(self, table: Table) -> Columns:
        """mean + var of the nats per dimension: 1/D of the formula above."""
        return np.asarray(table["nll"].mean(2) + table["nll"].var(2, ddof=1))[:, :, None]


@register("ic")
@dataclass(frozen=True)
class InputComplexity(BoundOptions, Derived):
    """Input complexity: likelihood against a lossless compressor. Serra et al., ICLR 2020.

        S = bpd(x) - L(x)/D        L = 8 times the bytes of the 8-bit image the network sees, compressed

    The file's header is part of L, a constant. S inverts for in-distribution sets that are simple themselves;
    `calibration="kde"` is its two-sided form.

    Parameters
    ----------
    compressors : any of `png` (level 9) and `webp` (lossless); of several the smallest file counts, for each image.

    The others are those of `BoundOptions`.
    """

    column_names = ("ic",)

    compressors: tuple[str, ...] = ("png",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.compressors:
            raise OptionError(f"name at least one compressor ({', '.join(_SAVE)})")
        for name in self.compressors:
            check_choice("compressor", name, _SAVE)

    @property
    def label(self) -> str:
        return f"{self.name}[{'+'.join(self.compressors)}]"

    def builds_on(self) -> tuple[NllVlb]:
        return (self.bound,)

    def complete(self, tables: Sequence[Table], batch: Batch) -> Table:
        """The likelihood's table, and the bits per dimension of every compressor under its name."""
        table = super().complete(tables, batch)
        for name in self.compressors:
            table[name] = np.array([[packed_bits(image, name) / image.size] for image in batch.images])
        return table

    def columns(self, table: Table) -> Columns:
        smallest = np.min([table[name] for name in self.compressors], axis=0)
        return np.asarray(table["bpd"] - smallest)[:, :, None]


def packed_bits(image: npt.NDArray[np.float32], compressor: str) -> int:
    """Bits of an image (C, H, W) in [-1, 1] as a file of that kind."""
    packed = BytesIO()
    _picture(image).save(packed, **_SAVE[compressor])
    return 8 * packed.getbuffer().nbytes


def _picture(image: npt.NDArray[np.float32]) -> Image.Image:
    """The 8-bit picture; channels other than 1 or 3 are stacked into one grey image."""
    pixels = np.rint((np.clip(image, -1.0, 1.0).astype(np.float64) + 1.0) * 127.5).astype(np.uint8)
    rows = pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels.reshape(-1, pixels.shape[2])
    return Image.fromarray(np.ascontiguousarray(rows))

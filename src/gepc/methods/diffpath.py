"""DiffPath: the path of an image to noise, by DDIM inversion.

The sampler works in the coordinates y = x_t/sqrt(abar), rho = sqrt(1/abar - 1), where dy = eps drho.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import rho_of
from gepc.core.errors import OptionError
from gepc.core.options import at_least, one_of
from gepc.methods.base import Batch, Columns, Cost, Derived, Features, Table, WholeImage, register
from gepc.methods.pooling import total
from gepc.methods.presets import Preset, Presets

MOMENTS = ("eps", "eps2", "eps3", "d", "d2", "d3")
SSIM_WINDOW = 7


def ddim_grid(n_steps: int, count: int) -> tuple[int, ...]:
    """`count` evenly strided timesteps 0, stride, 2 stride, ...; an error where no stride gives exactly that many."""
    for stride in range(1, n_steps + 1):
        if len(range(0, n_steps, stride)) == count:
            return tuple(range(0, n_steps, stride))
    raise OptionError(f"no stride divides a schedule of {n_steps} timesteps into exactly {count} steps")


def denoise(backbone: Backbone, x: Tensor, t: int, clip: bool) -> tuple[Tensor, Tensor]:
    """(xhat0, eps) at x_t = x. With `clip`, xhat0 is clipped to [-1, 1] and eps is recomputed from it."""
    abar = float(backbone.alphas_cumprod[t])
    rho = float(rho_of(abar))
    eps = backbone.eps(x, t)
    y = x / abar**0.5
    x0 = y - rho * eps
    if not clip:
        return x0, eps
    x0 = x0.clamp(-1.0, 1.0)
    return x0, (y - x0) / rho


def invert(backbone: Backbone, x0: Tensor, timesteps: Sequence[int], clip: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """(xhat0, eps_n) along the DDIM inversion of the image itself, which is taken as x_t at the first timestep."""
    abar = backbone.alphas_cumprod
    x = x0
    for t, after in zip(timesteps, [*timesteps[1:], None], strict=True):
        estimate, eps = denoise(backbone, x, t, clip)
        yield estimate, eps
        if after is not None:
            ahead = float(abar[after])
            x = ahead**0.5 * estimate + (1.0 - ahead) ** 0.5 * eps


def ssim_map(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """SSIM of the window around every pixel of every channel, (N, C, H, W) float64; the border is replicated."""
    pad = torch.nn.ReplicationPad2d(SSIM_WINDOW // 2)
    return similarity(pad(a.double()), pad(b.double()), SSIM_WINDOW)


def similarity(a: torch.Tensor, b: torch.Tensor, window: int) -> torch.Tensor:
    """SSIM of every uniform window that fits, with unbiased variances."""
    c1, c2 = 0.01**2, 0.03**2
    mean = partial(torch.nn.functional.avg_pool2d, kernel_size=window, stride=1)
    mu_a, mu_b, unbiased = mean(a), mean(b), window**2 / (window**2 - 1.0)
    var_a = unbiased * (mean(a.square()) - mu_a.square())
    var_b = unbiased * (mean(b.square()) - mu_b.square())
    both = unbiased * (mean(a * b) - mu_a * mu_b)
    bottom = (mu_a.square() + mu_b.square() + c1) * (var_a + var_b + c2)
    return (2 * mu_a * mu_b + c1) * (2 * both + c2) / bottom


def unit(x: torch.Tensor) -> torch.Tensor:
    """From [-1, 1] to [0, 1], clipped."""
    return ((x + 1.0) / 2.0).clamp(0.0, 1.0)


@dataclass(frozen=True)
class PathMoments(WholeImage):
    """The six moments of the path, from which every form of DiffPath and UFCOD follow.

    The parameters are those of `DiffPath`.
    """

    name: ClassVar[str] = "path_moments"
    column_names = MOMENTS

    steps: int = at_least(2, 10)
    clip: bool = True
    errors: bool = False

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        return Cost(forward=self.steps)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """sum eps^k and sum d^k for k = 1, 2, 3, over steps, channels and pixels."""
        if self.errors and batch.pixels is not None:
            raise OptionError("the errors of diffpath are weighted by a similarity of pictures, not of latents")
        grid, image = ddim_grid(backbone.n_steps, self.steps), batch.clean(backbone)
        sums = dict.fromkeys(MOMENTS, image.new_zeros(len(batch)).double())
        before: Tensor | None = None
        for t, (estimate, eps) in zip(grid, invert(backbone, image, grid, self.clip), strict=True):
            now = eps.double()
            if self.errors:
                error = (image - estimate).double() / float(rho_of(backbone.alphas_cumprod[t]))
                now = (1.0 - ssim_map(unit(image), unit(estimate))) * error
            fields = {"eps": now} if before is None else {"eps": now, "d": self.steps * (now - before)}
            for name, power in product(fields, (1, 2, 3)):
                moment = name if power == 1 else f"{name}{power}"
                sums[moment] = sums[moment] + total(fields[name] ** power)
            before = now
        return sums


@register("diffpath")
@dataclass(frozen=True)
class DiffPath(Derived):
    """DiffPath: moments of the path from an image to noise. Heng, Thiery & Soh, NeurIPS 2024.

    DDIM inversion of x_0 on N evenly strided timesteps gives eps_0 ... eps_{N-1}, and d_n = N (eps_{n+1} - eps_n):

        1-D   sqrt(sum d^2), or sqrt(sum eps^2), the score norm along the path
        6-D   sum eps, sum eps^2, sum eps^3, sum d, sum d^2, sum d^3      sums over steps, channels and pixels

    As in the authors' code the image is taken as x_t at t = 0. Their kernel density has bandwidth 5, which is
    meaningful for N = 10 and 32x32x3 only: `calibration="kde:bandwidth=5"`.

    The second version (presets `v2`, `v2_light`; Abdi et al., ICCV workshops 2025, arXiv 2507.22692) takes errors of
    the score, weighted by structural similarity to stress what the network does not reproduce, in place of eps_n:

        u_n = (1 - SSIM_n) (eps_n - noise_n) = (1 - SSIM_n) (x_0 - xhat0_n)/rho_n

    Only its abstract and summaries of it were available. Assumed here: the error is the difference from noise_n, which
    leads from x_0 to the n-th state of the inversion; SSIM_n is the map of image and estimate, 7x7 uniform windows; the
    moments and their density are those of the first version.

    Parameters
    ----------
    dim : 6 for the six moments, 1 for one of the norms.
    steps : N; it must divide the schedule evenly.
    clip : clip the estimate of x_0 and recompute eps from it, as the authors' code does.
    root : with dim=1, the norm of `d` or of `eps`.
    errors : the second version: weighted errors of the score in place of the score.
    """

    calibration: ClassVar[str] = "gmm"
    presets: ClassVar[Presets] = {
        "paper": Preset({"dim": 6}, calibration={"calibration": "gmm"}),
        "light": Preset({"dim": 1}, calibration={"calibration": "kde"}),
        "v2": Preset({"dim": 6, "errors": True}, calibration={"calibration": "gmm"}),
        "v2_light": Preset({"dim": 1, "root": "eps", "errors": True}, calibration={"calibration": "kde"}),
    }

    dim: int = 6
    steps: int = at_least(2, 10)
    clip: bool = True
    root: str = one_of("d", "eps")
    errors: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim not in (1, 6):
            raise OptionError(f"dim must be 1 or 6, got {self.dim}")
        if self.dim == 6 and self.root != "d":
            raise OptionError("root has no effect with dim=6; set dim=1, or leave it out", options=("root", "dim"))

    @property
    def label(self) -> str:
        kind = "norm" if (self.dim, self.root) == (1, "eps") else f"{self.dim}-D"
        return f"{self.name}[{'errors ' if self.errors else ''}{kind}]"

    @property
    def column_names(self) -> tuple[str, ...]:
        return MOMENTS if self.dim == 6 else ("diffpath",)

    def builds_on(self) -> tuple[PathMoments]:
        return (PathMoments(self.steps, self.clip, self.errors),)

    def columns(self, table: Table) -> Columns:
        if self.dim == 1:
            return np.sqrt(table[f"{self.root}2"])[:, :, None]
        return super().columns(table)

"""Backbones from a function that already exists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.base import Backbone
from gepc.core.errors import InputError

if TYPE_CHECKING:
    import torch

    from gepc.backbones.base import Denoiser


class FunctionBackbone(Backbone):
    """What the two below share: a function, and where it runs. A `torch.nn.Module` is put in eval mode."""

    def __init__(
        self,
        function: Denoiser,
        alphas_cumprod: npt.ArrayLike,
        channels: int,
        image_size: int | tuple[int, int] | None,
        size_multiple: int,
        device: str | torch.device | None,
    ) -> None:
        import torch

        super().__init__(alphas_cumprod, channels, image_size, size_multiple)
        weights: list[Any] = []
        if isinstance(function, torch.nn.Module):
            function.eval()
            weights = list(function.parameters())
            self.parameters = sum(weight.numel() for weight in weights)
        self.device = torch.device(device or (weights[0].device if weights else "cpu"))
        self._function = function


class CallableBackbone(FunctionBackbone):
    """eps(x, t) as the function gives it."""

    family = "callable"

    def __init__(
        self,
        eps: Denoiser,
        alphas_cumprod: npt.ArrayLike,
        channels: int,
        image_size: int | tuple[int, int] | None = None,
        size_multiple: int = 1,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(eps, alphas_cumprod, channels, image_size, size_multiple, device)

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self._function(x, t)


class DenoiserBackbone(FunctionBackbone):
    """A denoiser in variance-exploding coordinates: with y = x_t/sqrt(abar), eps = (y - D(y, sigma))/sigma.

    The level sigma is the method's rho, so abar = 1/(1 + sigma^2).
    """

    family = "denoiser"

    def __init__(
        self,
        denoiser: Denoiser,
        sigmas: npt.ArrayLike,
        channels: int,
        image_size: int | tuple[int, int] | None = None,
        size_multiple: int = 1,
        device: str | torch.device | None = None,
    ) -> None:
        levels = np.array(sigmas, dtype=np.float64).reshape(-1)
        if levels.size == 0 or not (np.isfinite(levels).all() and (levels > 0).all() and (np.diff(levels) > 0).all()):
            raise InputError("sigmas must be positive, finite and ascending")
        super().__init__(denoiser, 1.0 / (1.0 + levels**2), channels, image_size, size_multiple, device)
        self._sigmas = levels

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        import torch

        sigma = torch.from_numpy(self._sigmas[t.tolist()]).to(x.dtype).to(x.device)
        wide = sigma.reshape(-1, *([1] * (x.ndim - 1)))
        y = x * torch.sqrt(1.0 + wide**2)
        return (y - self._function(y, sigma)) / wide

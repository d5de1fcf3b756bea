"""A backbone is one call with one meaning: the noise predicted in x_t at timestep t of a schedule."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.schedule import FloatArray, check_alphas_cumprod
from gepc.core.errors import BackboneError, InputError

if TYPE_CHECKING:
    import torch

    Denoiser = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Backbone(ABC):
    """What predicts noise.

    A subclass gives `_predict(x, t)`: eps for a batch x (N, C, H, W) at schedule indices t (N,). Everything a caller
    may know about a network is here: its schedule (float64), its channels, the sizes it takes and what it has cost.

    Attributes
    ----------
    alphas_cumprod : abar_t for t = 0 ... T-1, float64, read-only.
    channels : image channels that go in and come out.
    image_size : (H, W) the net was made for, or None where any multiple of `size_multiple` will do.
    rows : the most images that go through the network in one call; larger batches are cut. None does not cut.
    forward_count, jvp_count : F and J, counted per image since the last `reset_counts`.
    source, sha256 : where it was loaded from and the hash of its weights; None for objects made in Python.
    load_options : what `load_backbone` was given besides the source, to load the same again.
    parameters : how many weights the network has; None where that is not known.
    device, dtype : where a caller must put `x`, and as what.
    """

    family = "custom"
    learned_variance = False

    def __init__(
        self,
        alphas_cumprod: npt.ArrayLike,
        channels: int,
        image_size: int | tuple[int, int] | None = None,
        size_multiple: int = 1,
    ) -> None:
        import torch

        self.alphas_cumprod: FloatArray = check_alphas_cumprod(alphas_cumprod)
        self.channels = int(channels)
        self.image_size = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.size_multiple = size_multiple
        self.device = torch.device("cpu")
        self.dtype: torch.dtype = torch.float32
        self.source: str | None = None
        self.sha256: str | None = None
        self.parameters: int | None = None
        self.load_options: dict[str, Any] = {}
        self.rows: int | None = None
        self.forward_count = 0
        self.jvp_count = 0

    @abstractmethod
    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """eps(x, t) for x (N, C, H, W) and schedule indices t (N,), both on the backbone's device."""

    @property
    def n_steps(self) -> int:
        """T, the number of timesteps of the schedule."""
        return len(self.alphas_cumprod)

    def reset_counts(self) -> None:
        """Set F and J back to zero."""
        self.forward_count = self.jvp_count = 0

    def eps(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """The predicted noise in `x` at schedule index `t` (one for all, or one per image). Costs N forward passes."""
        import torch

        with torch.set_grad_enabled(x.requires_grad):
            answer = self._in_parts(x, self._timesteps(x, t))
        self.forward_count += len(x)
        self._check_answer(answer, x)
        return answer

    def _in_parts(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        import torch

        if self.rows is None or len(x) <= self.rows:
            return self._predict(x, t)
        parts = zip(torch.split(x, self.rows), torch.split(t, self.rows), strict=True)
        return torch.cat([self._predict(images, steps) for images, steps in parts])

    def score(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """s(x, t) = -eps(x, t) / sigma_t."""
        return self.eps(x, t) / -self.sigma(x, t)

    def sigma(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """sigma_t = sqrt(1 - abar_t), shaped to multiply a batch like `x`."""
        return self._per_image(np.sqrt(1.0 - self.alphas_cumprod), x, t)

    def sqrt_abar(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """sqrt(abar_t), shaped to multiply a batch like `x`."""
        return self._per_image(np.sqrt(self.alphas_cumprod), x, t)

    def jvp(self, x: torch.Tensor, t: int | torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """eps(x, t) and its Jacobian times `v`, by forward-mode differentiation. Costs N F and N J."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        timesteps = self._timesteps(x, t)
        # fused attention kernels have no forward-mode derivative; the plain one has
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            answer, tangent = torch.func.jvp(lambda y: self._predict(y, timesteps), (x,), (v,))[:2]
        self.forward_count += len(x)
        self.jvp_count += len(x)
        self._check_answer(answer, x)
        return answer, tangent

    def _timesteps(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        import torch

        if isinstance(t, torch.Tensor) and t.ndim > 0:
            if t.shape != (len(x),) or t.is_floating_point():
                raise InputError(
                    f"t must hold one whole number per image: {len(x)} images, t of shape {tuple(t.shape)}"
                )
            if len(t):
                self._check_index(int(t.min()))
                self._check_index(int(t.max()))
            return t.to(device=x.device, dtype=torch.int64)
        self._check_index(int(t))
        return torch.full((len(x),), int(t), dtype=torch.int64, device=x.device)

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.n_steps:
            raise InputError(f"timestep {index} is outside the schedule, 0 to {self.n_steps - 1}")

    def _per_image(self, table: FloatArray, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        import torch

        # `tolist`, not `numpy`: it also works inside `jvp`
        values = torch.from_numpy(table[self._timesteps(x, t).tolist()])
        return values.to(x.dtype).to(x.device).reshape(-1, *([1] * (x.ndim - 1)))

    def _check_answer(self, answer: torch.Tensor, x: torch.Tensor) -> None:
        import torch

        if answer.shape != x.shape:
            raise BackboneError(
                f"the backbone answered shape {tuple(answer.shape)} to an input of shape {tuple(x.shape)}; "
                "a noise prediction has the shape of its input"
            )
        # one reduction instead of an elementwise isfinite: a NaN or an infinity survives the sum
        if not torch.isfinite(answer.detach().sum()):
            raise BackboneError(
                "the backbone returned NaN or infinite values; check its weights, its precision and the input's range"
            )

    def check_size(self, height: int, width: int, what: str = "images") -> None:
        """Refuse a size that this net does not take, saying which ones it does."""
        if self.image_size is not None and (height, width) != tuple(self.image_size):
            rows, columns = self.image_size
            raise InputError(
                f"{what} of {height}x{width} do not fit this backbone, which takes {rows}x{columns}; give size="
            )
        multiple = self.size_multiple
        if height % multiple or width % multiple:
            raise InputError(
                f"{what} of {height}x{width} do not fit this backbone: both sides must be multiples of {multiple}"
            )

    def settings(self) -> dict[str, Any]:
        """The choices beside weights and schedule that change an answer, as plain values (label, precision, ...)."""
        return {}

    @property
    def fingerprint(self) -> str | None:
        """SHA-256 over weights, schedule and settings: equal where answers are equal. None without a weights file."""
        if self.sha256 is None:
            return None
        digest = hashlib.sha256(self.alphas_cumprod.tobytes())
        digest.update(json.dumps([self.family, self.sha256, self.settings()], sort_keys=True).encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """What `gepc info` prints, as plain values."""
        return {
            "family": self.family,
            "source": self.source,
            "sha256": self.sha256,
            "load_options": self.load_options,
            "parameters": self.parameters,
            "channels": self.channels,
            "image_size": None if self.image_size is None else list(self.image_size),
            "size_multiple": self.size_multiple,
            "timesteps": self.n_steps,
            "first_abar": float(self.alphas_cumprod[0]),
            "last_abar": float(self.alphas_cumprod[-1]),
        }

    def __repr__(self) -> str:
        size = "any size" if self.image_size is None else "x".join(map(str, self.image_size))
        name = f"{type(self).__name__} {self.source or self.family}"
        return f"<{name}: {self.channels} channels, {size}, {self.n_steps} steps>"

    @staticmethod
    def from_callable(
        eps: Denoiser,
        alphas_cumprod: npt.ArrayLike,
        channels: int = 3,
        image_size: int | tuple[int, int] | None = None,
        size_multiple: int = 1,
        device: str | torch.device | None = None,
    ) -> Backbone:
        """A backbone from any function eps(x, t), where t (N,) holds indices into `alphas_cumprod`.

        A `torch.nn.Module` is put in eval mode; `device` defaults to where its parameters are, else to the CPU.
        """
        from gepc.backbones.callables import CallableBackbone

        return CallableBackbone(eps, alphas_cumprod, channels, image_size, size_multiple, device)

    @staticmethod
    def from_denoiser(
        denoiser: Denoiser,
        sigmas: npt.ArrayLike,
        channels: int = 3,
        image_size: int | tuple[int, int] | None = None,
        size_multiple: int = 1,
        device: str | torch.device | None = None,
    ) -> Backbone:
        """A backbone from D(y, sigma), an estimate of x_0 from y = x_0 + sigma noise (EDM, VE, blind denoisers).

        `sigmas` are the noise levels to offer, ascending, in units where images lie in [-1, 1]; D gets one per image,
        shape (N,). A denoiser that is blind to the level is `lambda y, sigma: net(y)`.
        """
        from gepc.backbones.callables import DenoiserBackbone

        return DenoiserBackbone(denoiser, sigmas, channels, image_size, size_multiple, device)

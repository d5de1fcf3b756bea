"""A backbone that does not answer the same question twice: several poolings are compared at the cost of one."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from gepc.backbones.base import Backbone

if TYPE_CHECKING:
    import torch


class MemoizedBackbone(Backbone):
    """Passes a question on to `inner` (which counts it) unless it was asked since the last `forget`."""

    def __init__(self, inner: Backbone) -> None:
        super().__init__(inner.alphas_cumprod, inner.channels, inner.image_size, inner.size_multiple)
        self.inner = inner
        self.device, self.dtype = inner.device, inner.dtype
        self._answers: dict[tuple[Any, ...], torch.Tensor] = {}

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        digest = hashlib.blake2b(x.detach().cpu().contiguous().numpy().tobytes(), digest_size=16).digest()
        key = (tuple(x.shape), tuple(t.tolist()), digest)
        if key not in self._answers:
            self._answers[key] = self.inner.eps(x, t)
        return self._answers[key]

    def forget(self) -> None:
        """Drop all answers; call it between batches to bound the memory."""
        self._answers.clear()

"""Directions that belong to the image, and traces along them: tr J = E v^T J v for random signs v (Hutchinson)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gepc.backbones.base import Backbone
from gepc.features.base import Batch
from gepc.features.templates import total
from gepc.images import noise

if TYPE_CHECKING:
    import torch


def signs(backbone: Backbone, batch: Batch, *numbers: int) -> torch.Tensor:
    """A Rademacher field (+-1) for each image, shaped like the batch; `numbers` tell probes apart."""
    import torch

    shape = batch.images.shape[1:]
    fields = [
        noise.generator(batch.seed, key, "probe", *numbers).integers(0, 2, shape, dtype=np.int8) for key in batch.keys
    ]
    return torch.from_numpy(np.stack(fields)).to(device=backbone.device, dtype=backbone.dtype) * 2.0 - 1.0


def eps_and_trace(
    backbone: Backbone, x: torch.Tensor, t: int, probes: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """eps(x, t) and the estimate of tr(d eps/dx), (N,) float64: 1F + 1J a probe, averaged over probes.

    Exact with random signs wherever the Jacobian is diagonal.
    """
    traces = []
    for probe in probes:
        eps, tangent = backbone.jvp(x, t, probe)
        traces.append(total(probe.double() * tangent.double()))
    return eps, sum(traces[1:], traces[0]) / len(traces)

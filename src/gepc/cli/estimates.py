"""How long network passes take on this machine, measured before the work starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gepc.cli.app import note

if TYPE_CHECKING:
    from gepc.backbones.base import Backbone
    from gepc.detector.detector import Detector
    from gepc.features.base import Cost

QUICK = 2000  # fewer network passes than this need no estimate


def estimate(detector: Detector, count: int, cost: Cost, what: str = "{:,} images") -> None:
    """Print the number of network passes for `count` images or tiles and how long they take, if there are many."""
    passes = count * (cost.forward + 2 * cost.jvp)
    if passes < QUICK:
        return
    seconds = passes * seconds_per_pass(detector.backbone, detector.input_size)
    each = cost.forward + cost.jvp
    note(f"{what.format(count)} x {each} passes = {count * each:,} network passes, about {duration(seconds)}")


def duration(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 1.0:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.1f} minutes"


def seconds_per_pass(backbone: Backbone, size: tuple[int, int], patience: float = 5.0) -> float:
    """Seconds per image and forward pass: the best of batches of 1 to 32 that should take under `patience` seconds."""

    def measure(count: int) -> float:
        return _timed(backbone, size, count, lambda x: backbone.eps(x, 0))

    best = measure(1)
    if best < patience:
        best = measure(1)  # the first one was a warm-up
    for count in (4, 8, 32):
        if count * best < patience:
            best = min(best, measure(count))
    return best


def seconds_per_jvp(backbone: Backbone, size: tuple[int, int], count: int = 8) -> float:
    """Seconds per image of a Jacobian-vector product together with its forward pass."""
    seconds = [_timed(backbone, size, count, lambda x: backbone.jvp(x, 0, x)) for _ in range(2)]
    return seconds[-1]  # the first one was a warm-up


def _timed(backbone: Backbone, size: tuple[int, int], count: int, call: Callable[[Any], object]) -> float:
    """Seconds per image of one call on `count` images; its passes are not counted."""
    import torch

    x = torch.rand((count, backbone.channels, *size), generator=torch.Generator().manual_seed(0))
    x = x.to(dtype=backbone.dtype, device=backbone.device)
    counted = backbone.forward_count, backbone.jvp_count
    begun = time.perf_counter()
    call(x)
    seconds = (time.perf_counter() - begun) / count
    backbone.forward_count, backbone.jvp_count = counted
    return seconds

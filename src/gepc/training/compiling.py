"""Whether a compiled net may be trusted. A compiler can get a gradient wrong without a word: training then goes on,
with parts of the net standing still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Gradients = dict[str, "torch.Tensor"]
TOLERANCE = 0.05  # of a parameter's gradient; reduced precision reorders sums, errors of this kind lose all of it


def gradients(net: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Gradients:
    """d loss/d parameter of every parameter that has one; leaves none behind."""
    net.zero_grad(set_to_none=True)
    loss().backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.detach().clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    return found


def wrong_gradients(found: Gradients, expected: Gradients) -> list[str]:
    """The parameters whose gradient is missing or off by more than `TOLERANCE`, rounding of the largest aside."""
    rounding = 1e-4 * max(float(g.norm()) for g in expected.values())
    return [
        name
        for name, right in expected.items()
        if name not in found or float((found[name] - right).norm()) > TOLERANCE * float(right.norm()) + rounding
    ]


def compiled_is_wrong(net: torch.nn.Module, compiled: Any, loss_of: Callable[[Any], torch.Tensor]) -> list[str]:
    """The parameters that the compiled net would train wrongly, judged on one batch; empty where it can be trusted."""
    return wrong_gradients(gradients(net, lambda: loss_of(compiled)), gradients(net, lambda: loss_of(net)))

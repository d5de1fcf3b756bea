"""Where a network runs and in which precision."""

from __future__ import annotations

import torch

from gepc.core.errors import OptionError, check_choice

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def choose_device(device: str | torch.device) -> torch.device:
    """`device` if it exists here; "auto" is CUDA, else MPS, else the CPU."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"device {str(device)!r} cannot be used here ({reason}); try device='auto'") from error
    return chosen


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The precision of that name, after a convolution in it has run on `device`."""
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, DTYPES)
    chosen = DTYPES[name]
    if chosen != torch.float32:
        probe = torch.ones(1, 1, 3, 3, device=device)
        try:
            torch.nn.functional.conv2d(probe.to(chosen), probe.to(chosen))
        except (RuntimeError, TypeError) as error:
            raise OptionError(f"{device} cannot compute in {name}; leave dtype at float32") from error
    return chosen

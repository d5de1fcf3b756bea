"""Where networks run, and in which precision."""

import torch

from gepc.core.errors import OptionError, check_choice, first_line

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
MIXED = ("mixed_bfloat16", "mixed_float16")


def choose_device(device: str | torch.device) -> torch.device:
    """`device` if it exists here; "auto" is CUDA, otherwise MPS, otherwise the CPU."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error)
        raise OptionError(f"device {str(device)!r} cannot be used here ({reason}); try device='auto'") from error
    return chosen


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """The precision of weights and that of autocast, if any, after a convolution in it has run on `device`."""
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, (*DTYPES, *MIXED))
    chosen = DTYPES[name.removeprefix("mixed_")]
    if chosen != torch.float32:
        probe = torch.ones(1, 1, 3, 3, device=device)
        try:
            torch.nn.functional.conv2d(probe.to(chosen), probe.to(chosen))
        except (RuntimeError, TypeError) as error:
            raise OptionError(f"{device} cannot compute in {name}; leave dtype at float32") from error
    return (torch.float32, chosen) if name in MIXED else (chosen, None)

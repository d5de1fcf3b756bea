"""Where networks run, and in which precision."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gepc.core.errors import OptionError, check_choice, raising

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


def choose_device(device: str | torch.device) -> torch.device:
    """`device` if it exists here; "auto" is CUDA, otherwise MPS, otherwise the CPU."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    reason = f"device {str(device)!r} cannot be used here ({{line}}); try device='auto'"
    with raising(OptionError, reason, RuntimeError, AssertionError, NotImplementedError):
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The precision of that name, after a convolution in it has run on `device`."""
    check_choice("dtype", dtype, DTYPES)
    with raising(OptionError, f"{device} cannot compute in {dtype}; leave dtype at float32", RuntimeError, TypeError):
        probe = torch.ones(1, 1, 3, 3, device=device, dtype=DTYPES[dtype])
        torch.nn.functional.conv2d(probe, probe)
    return DTYPES[dtype]


def profits_from_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 numbers in hardware (AVX-512 BF16 or AMX), as torch reports."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in checks)


@contextmanager
def deterministic() -> Iterator[None]:
    """Compute on a GPU as exactly and as reproducibly as PyTorch can, in the block.

    TensorFloat-32 is off, so that float32 products have 24 bits and not 11. Algorithms are deterministic, and cuDNN
    does not choose them by timing. An operation without a deterministic algorithm raises an error. All settings are
    restored at the end. `GEPC_DETERMINISTIC=1` in the environment does this for a whole command.

    Enter the block before the first use of CUDA in the process: cuBLAS reads its setting when it starts.

    Returns
    -------
    A context manager.

    Examples
    --------
    >>> import gepc, torch
    >>> with gepc.deterministic():
    ...     torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32
    (True, False)
    >>> torch.are_deterministic_algorithms_enabled()
    False

    See Also
    --------
    load_backbone : `dtype` is the precision of the network.
    """
    matmul, cudnn, workspace = torch.backends.cuda.matmul, torch.backends.cudnn, "CUBLAS_WORKSPACE_CONFIG"
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark)
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    configured = os.environ.get(workspace)
    try:
        os.environ.setdefault(workspace, ":4096:8")
        matmul.allow_tf32 = cudnn.allow_tf32 = cudnn.benchmark = False
        cudnn.deterministic = True
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
        if configured is None:
            os.environ.pop(workspace, None)

"""Keep freed memory for the next forward pass.

The C library of Linux returns large blocks to the system when they are freed, and a network frees all of its
activations in every pass. The next pass then pays for zeroed pages again, 10 % of its time and more
(`benchmarks/allocator.py`). The command line keeps the blocks; who imports gepc calls `keep_freed_memory`.
"""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of mallopt's options in malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell the allocator to keep freed blocks; False if it has no such option or the environment configures it.

    The process then keeps its peak size, which is bounded because passes have a bounded size.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("LD_PRELOAD", "")
    if sys.platform != "linux" or own or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    option = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from other C libraries than glibc
    return option is not None and bool(option(_MMAP_MAX, 0)) and bool(option(_TRIM_THRESHOLD, _LARGEST))

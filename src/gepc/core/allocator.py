"""Memory that a pass has freed is kept for the next one.

The C library of Linux gives large blocks back to the system when they are freed, and a network frees all of its
activations in every pass: the next pass pays for zeroed pages again, a tenth of its processor time and more
(`benchmarks/allocator.py`). Programs of our own keep the blocks. A library does not decide that for the process it is
in: who imports gepc may call `keep_freed_memory` before the first pass.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of mallopt's options in malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell the allocator to hold on to freed blocks; False where it cannot be told or the user has set it up himself.

    The process then stays as large as it was at its largest, which passes of bounded size keep bounded.
    """
    if sys.platform != "linux" or _set_by_user():
        return False
    option = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from other C libraries than glibc
    return option is not None and bool(option(_MMAP_MAX, 0)) and bool(option(_TRIM_THRESHOLD, _LARGEST))


def _set_by_user() -> bool:
    own = any(name.startswith("MALLOC_") for name in os.environ)
    return own or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or "malloc" in os.environ.get("LD_PRELOAD", "")

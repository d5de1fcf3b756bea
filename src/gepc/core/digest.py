"""One content hash for cached features, run folders and saved detectors: of what is computed, not of where."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def digest(facts: Any, arrays: Mapping[str, npt.NDArray[Any]] | None = None, keys: Iterable[bytes] = ()) -> str:
    """Hash JSON-like values, named arrays and byte strings; 32 hexadecimal digits of BLAKE2b.

    Parameters
    ----------
    facts : any value that JSON can hold; the order of mapping keys does not matter.
    arrays : arrays by name; their type and shape count as well as their values.
    keys : byte strings of equal length, such as the keys of images, in order.
    """
    state = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
    for name, array in sorted((arrays or {}).items()):
        state.update(f"{name}|{array.dtype}|{array.shape}|".encode() + np.ascontiguousarray(array).tobytes())
    for key in keys:
        state.update(key)
    return state.hexdigest()

"""Read a pickled dictionary of numbers, text and byte arrays without running anything that it asks for.

A pickle is a program: it names functions and has them called. Here the few names that an array needs stand for a class
that only writes down what it was given, any other name or operation ends the reading, and the arrays are put together
afterwards.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError

NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 3 writes bytes for Python 2
}
OPERATIONS = {  # what protocols 2 to 4 need for such a dictionary
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINUNICODE", "SHORT_BINUNICODE"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
}
# all that a damaged pickle makes the unpickler raise
_DAMAGE = (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, OverflowError)


class _Call:
    """A call that the pickle asks for: written down, not made."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Call]:
        if (module, name) not in NAMES:
            raise InputError(f"it asks to run {module}.{name}, which no data set needs: do not trust this file")
        return type(name, (_Call,), {})  # a new one each time: a pickle may write to what it is given


def _check_operations(content: bytes) -> None:
    """Refuse what is not needed, sizes beyond the end, and numbers that would make the unpickler allocate at will."""
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if operation.name not in OPERATIONS:
            raise InputError(f"it uses the operation {operation.name}, which no data set needs, or is damaged")
        if operation.name == "LONG_BINPUT" and int(argument or 0) > count:
            raise ValueError("it remembers more than it holds")


def read_plain_pickle(content: bytes) -> dict[str, Any]:
    """The dictionary, its keys as text; byte arrays in it are still to be read with `byte_array`."""
    try:
        _check_operations(content)
        found = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(found, dict):
            raise InputError(f"it holds a {type(found).__name__}, not a dictionary")
        return {_text(key): value for key, value in found.items()}
    except InputError:
        raise
    except _DAMAGE as error:
        raise InputError(f"it is damaged or cut short: {error}") from error


def _text(key: Any) -> str:
    key = _bytes(key)
    if not isinstance(key, (str, bytes)):
        raise TypeError("a key of its dictionary is not text")
    return key if isinstance(key, str) else key.decode("latin1")


def _bytes(value: Any) -> Any:
    """`value`, or the bytes that it stands for where Python 3 wrote them for Python 2."""
    if isinstance(value, _Call) and type(value).__name__ == "encode":
        return value.arguments[0].encode("latin1")
    return value


def byte_array(value: Any) -> npt.NDArray[np.uint8]:
    """A pickled array of unsigned bytes; of any other type of array it is an `InputError`."""
    try:
        shape, dtype, by_columns, content = value.state[-4:]
        content = _bytes(content)
        plain = dtype.arguments[0] in ("u1", b"u1") and isinstance(content, bytes)
        if plain and all(isinstance(n, int) and n >= 0 for n in shape) and math.prod(shape) == len(content):
            return np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")
    except (AttributeError, TypeError, ValueError, LookupError):
        pass
    raise InputError("it does not hold an array of bytes where the pixels should be")

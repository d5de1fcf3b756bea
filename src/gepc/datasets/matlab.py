"""One array of bytes out of a MATLAB 5 file. Read here and not by scipy, whose reader crashes on some damaged files.

The file is a header of 128 bytes and a row of elements, each a type, a size and its content. A variable is an element
that holds others (flags, shape, name, numbers), and may be compressed as a whole.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError

HEADER = 128
ORDERS = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}
UINT8, MATRIX, COMPRESSED = 2, 14, 15


def read_byte_array(path: Path, name: str) -> npt.NDArray[np.uint8]:
    """The variable `name`, its axes in MATLAB's order; an uncompressed one stays memory-mapped."""
    try:
        content = np.memmap(path, np.uint8, mode="r")
        order = ORDERS.get(content[HEADER - 4 : HEADER].tobytes())
        if order is None:
            raise ValueError("its header is another one")
        for fields in _variables(content[HEADER:], order):
            if len(fields) > 3 and fields[2][1].tobytes() == name.encode():
                (_, shape), _, (kind, numbers) = fields[1:4]
                if kind != UINT8:
                    raise ValueError(f"{name} is not an array of bytes")
                return numbers.reshape(shape.view(f"{order}i4"), order="F")
    except (OSError, ValueError, struct.error, zlib.error) as error:
        raise InputError(f"{path} is not a whole MATLAB 5 file: {error}") from error
    raise InputError(f"{path} holds no array {name}")


Element = tuple[int, npt.NDArray[np.uint8]]


def _variables(content: npt.NDArray[np.uint8], order: str) -> Iterator[list[Element]]:
    """The elements that each variable is made of."""
    for kind, element in _elements(content, order):
        if kind == COMPRESSED:
            unpacked = np.frombuffer(zlib.decompress(element.data), np.uint8)
            kind, element = next(_elements(unpacked, order), (0, element))
        if kind == MATRIX:
            yield list(_elements(element, order))


def _elements(content: npt.NDArray[np.uint8], order: str) -> Iterator[Element]:
    """(type, content) of each element, one after the other, as views."""
    at = 0
    while at < len(content):
        kind, size = struct.unpack_from(f"{order}II", content.data, at)
        start, end = at + 8, at + 8 + size
        if kind >> 16:  # a small one: size and type share a word and the content is the next word
            kind, size = kind & 0xFFFF, kind >> 16
            start, end = at + 4, at + 4 + size
        if end > len(content):
            raise ValueError("it is cut short")
        yield kind, content[start:end]
        at = end if kind == COMPRESSED else end + -end % 8

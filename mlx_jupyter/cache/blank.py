"""Arrays that nobody has written to yet.

MLX has no operation for that; ``mx.zeros`` writes every byte, which for a live cache that is about
to be filled from files is a third of the work. But MLX fills an array from a file object by asking
it to read into the array's buffer, and this one leaves the buffer as it is.
"""

from __future__ import annotations

import io
import json
import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_jupyter.cache.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence


def blank(arrays: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> list[mx.array]:
    """An array for each shape and type, evaluated, in the host's memory, with any content."""
    table: dict[str, Any] = {}
    at = 0
    for place, (shape, dtype) in enumerate(arrays):
        end = at + math.prod(shape) * dtype.size
        table[str(place)] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (at, end)}
        at = end
    header = json.dumps(table).encode()
    file: Any = _Blank(len(header).to_bytes(8, "little") + header, at)
    made = mx.load(file, format="safetensors")
    assert isinstance(made, dict)
    mx.eval(made)
    return [made[str(place)] for place in range(len(arrays))]


class _Blank(io.RawIOBase):
    """A file that begins with ``header``; what ``nbytes`` more bytes are is left open."""

    def __init__(self, header: bytes, nbytes: int) -> None:
        self._header = header
        self._size = len(header) + nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        known = self._header[self._at : self._at + into.nbytes]
        into[: len(known)] = known
        count = min(into.nbytes, max(self._size - self._at, 0))
        self._at += count
        return count

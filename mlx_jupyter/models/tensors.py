"""Safetensors files: their headers, checked, and a writer that holds one tensor at a time.

Headers are read without MLX, so that a model's size is known before anything is loaded and a
damaged file is refused in one line instead of in native code.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_jupyter.errors import BadModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import numpy as np

MAX_HEADER = 100 << 20

# Bits of one element by safetensors' dtype names.
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its name, safetensors' dtype name and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.size * _BITS[self.dtype] // 8


def read_header(path: Path) -> list[Entry]:
    """The tensors of a safetensors file, after checking that the file really holds them.

    Raises:
        BadModel: the file can't be read, is cut short or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise BadModel(path, "not a safetensors file, or cut short")
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise BadModel(path, f"its safetensors header can't be read: {error}") from error
    if not isinstance(header, dict):
        raise BadModel(path, "its safetensors header isn't a table")
    header.pop("__metadata__", None)
    return [checked(path, name, value, size - 8 - length) for name, value in header.items()]


def checked(path: Path | str, name: str, value: Any, room: int) -> Entry:
    """The tensor that a header describes so, in ``room`` bytes of data.

    Raises:
        BadModel: the description is wrong.
    """
    try:
        dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        whole = all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError) as error:
        raise BadModel(path, f"the tensor {name[:80]!r} is described wrongly") from error
    if not whole or dtype not in _BITS:
        raise BadModel(path, f"the tensor {name[:80]!r} has an unknown dtype or shape")
    entry = Entry(name, dtype, shape)
    if end > room:
        raise BadModel(path, f"the tensor {name[:80]!r} lies beyond the file's end (cut short?)")
    if end - start != entry.nbytes:
        raise BadModel(path, f"the tensor {name[:80]!r} has a wrong size")
    return entry


def model_entries(directory: Path) -> list[Entry]:
    """The tensors of all weight files of an MLX model directory.

    Raises:
        BadModel: there are none, or one is damaged.
    """
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise BadModel(directory, "has no model*.safetensors files")
    return [entry for file in files for entry in read_header(file)]


def write(path: Path, entries: Sequence[Entry], arrays: Iterable[np.ndarray]) -> None:
    """Write a safetensors file; ``arrays`` are taken one by one, in the order of ``entries``."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry, array in zip(entries, arrays, strict=True):
            assert array.nbytes == entry.nbytes, f"{entry.name}: {array.nbytes} bytes"
            file.write(array.tobytes())
        file.flush()
        os.fsync(file.fileno())

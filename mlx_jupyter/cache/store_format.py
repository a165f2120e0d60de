"""A stored thing as a file: safetensors, with its place and a checksum in the metadata.

Any safetensors reader opens it. The checksum is XXH3 over the header (its own digits as zeros) and
all data; it stands at a fixed place, first in the header. The ids that lead to the thing are a
tensor, ``tokens``.

``store_file.py`` reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mlx_jupyter.models import tensors as safetensors

if TYPE_CHECKING:
    import io
    from collections.abc import Mapping

MAX_HEADER = 1 << 20
MAX_FILE = 1 << 32
"""Largest file that is written or read, in bytes."""

VERSION = "1"
TOKENS = "tokens"
META = "meta."
_ALIGN = 64
HEAD = b'{"__metadata__":{"checksum":"'
ZEROS = b"0" * 16
UNTIL = len(HEAD) + len(ZEROS)


Data = np.ndarray | memoryview | bytes
"""A contiguous buffer."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as bytes.

    Attributes:
        dtype: safetensors' name, such as ``"BF16"``.
        shape: its dimensions.
        data: its elements in row-major order, little-endian: any contiguous buffer, whose own
            shape and type don't matter. From a file: uint8, shape (bytes,).
    """

    dtype: str
    shape: tuple[int, ...]
    data: Data = field(repr=False)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A thing laid out for a file.

    Attributes:
        header: the file's beginning, with its checksum still zeros.
        parts: its data, in order; not copied.
    """

    header: bytearray
    parts: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """The file's size."""
        return len(self.header) + sum(part.nbytes for part in self.parts)

    def seal(self) -> None:
        """Put the checksum in."""
        self.header[8 + len(HEAD) : 8 + UNTIL] = ZEROS
        sum_ = xxhash.xxh3_64(memoryview(self.header)[8:])
        for part in self.parts:
            sum_.update(part)
        self.header[8 + len(HEAD) : 8 + UNTIL] = sum_.hexdigest().encode()


def lay_out(
    place: Mapping[str, str],
    tokens: np.ndarray,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, str],
) -> Sheet:
    """Lay a thing out; cheap, nothing is copied.

    Args:
        place: what the file's name says too.
        tokens: int32.
        tensors: by name; ``tokens`` is taken.
        meta: kept as it is.

    Raises:
        ValueError: the tensors or the meta can't be stored.
    """
    if TOKENS in tensors:
        raise ValueError(f"A tensor can't be called {TOKENS!r}.")
    ids = np.ascontiguousarray(tokens, "<i4")
    entries: list[tuple[safetensors.Entry, memoryview]] = [
        (safetensors.Entry(TOKENS, "I32", ids.shape), flat(ids))
    ]
    for name, tensor in tensors.items():
        entry, data = safetensors.Entry(name, tensor.dtype, tuple(tensor.shape)), flat(tensor.data)
        try:
            fits = entry.nbytes == data.nbytes
        except KeyError:
            raise ValueError(f"The tensor {name!r} has an unknown dtype.") from None
        if not fits:
            raise ValueError(f"The tensor {name!r} has {data.nbytes} bytes, not {entry.nbytes}.")
        entries.append((entry, data))
    # Wide elements first, so that each begins at a multiple of its own size.
    entries.sort(key=lambda pair: -pair[0].nbytes // max(pair[0].size, 1))
    described: dict[str, Any] = {
        "__metadata__": {
            "checksum": ZEROS.decode(),
            "format": "mlx-jupyter page",
            "version": VERSION,
            **place,
            **{META + key: value for key, value in meta.items()},
        }
    }
    at = 0
    for entry, _ in entries:
        described[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    sheet = Sheet(
        bytearray(len(text).to_bytes(8, "little") + text), tuple(data for _, data in entries)
    )
    if len(text) > MAX_HEADER or sheet.nbytes > MAX_FILE:
        raise ValueError(f"{sheet.nbytes} bytes, {len(text)} of them a header, are too many.")
    return sheet


def write(file: io.FileIO, sheet: Sheet) -> None:
    """Write a sealed sheet to an unbuffered file."""
    for part in (memoryview(sheet.header), *sheet.parts):
        at = 0
        while at < part.nbytes:
            at += file.write(part[at:])


def flat(data: Data) -> memoryview:
    """The bytes of a contiguous buffer, not copied; ``ValueError`` for another one."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if not view.c_contiguous:
        raise ValueError("A tensor's data must be contiguous.")
    return view.cast("B") if view.nbytes else memoryview(b"")

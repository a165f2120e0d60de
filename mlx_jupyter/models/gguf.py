"""A GGUF header parser that believes nothing it reads.

Every count, length, type, dimension and offset is checked against the file's real size before it
is used. A file is either fully described, so that each tensor's bytes lie inside the file, or
refused with one ``BadModel`` line; no input makes it raise anything else or allocate more than
the file's own size suggests. The layout is that of the GGUF specification, versions 2 and 3,
little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mlx_jupyter.errors import BadModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)

MAX_ENTRIES = 1 << 16  # metadata entries, and tensors; real files have below 3,000
MAX_ITEMS = 1 << 22  # items of one metadata array; the largest vocabularies have 262,144
MAX_STRING = 1 << 24  # bytes of one string; chat templates have some 10,000
MAX_NAME = 1 << 8  # bytes of a key or a tensor's name
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16

# GGUF's scalar types by number.
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "bool",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING = 8
_ARRAY = 9

# ggml's tensor types: number → (name, elements in a block, bytes of a block).
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies.

    Attributes:
        name: as in the file.
        type: ggml's name of its type, a value of ``TENSOR_TYPES``.
        shape: rows first (GGUF lists the fastest dimension first; this is reversed).
        offset: absolute, in bytes.
        nbytes: its size in the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUF:
    """A checked GGUF file.

    Attributes:
        path: the file.
        metadata: key → int, float, bool, str, list of str, or a numpy array.
        tensors: name → where it lies, inside the file without overlaps.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def bad(self, reason: str) -> NoReturn:
        """Refuse the file."""
        raise BadModel(self.path, reason)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """The whole number under ``key``, within bounds; ``default`` when it isn't there."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.bad(f"GGUF metadata {key} should be a whole number, not {_short(value)}")
        if not low <= value <= high:
            self.bad(f"GGUF metadata {key} is {value}, outside {low}…{high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """The number under ``key``, finite and within bounds."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.bad(f"GGUF metadata {key} should be a number, not {_short(value)}")
        if not low <= value <= high:  # false for NaN too
            self.bad(f"GGUF metadata {key} is {value}, outside {low}…{high}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """The string under ``key``."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            self.bad(f"GGUF metadata {key} should be a string, not {_short(value)}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """The truth value under ``key``."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            self.bad(f"GGUF metadata {key} should be true or false, not {_short(value)}")
        return value

    def strings(self, key: str) -> list[str]:
        """The list of strings under ``key``."""
        value = self.metadata.get(key)
        if not isinstance(value, list):
            self.bad(f"GGUF metadata {key} should be a list of strings, not {_short(value)}")
        return value

    def numbers(self, key: str) -> np.ndarray | None:
        """The array of numbers under ``key``, or None when it isn't there."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, np.ndarray):
            self.bad(f"GGUF metadata {key} should be an array of numbers, not {_short(value)}")
        return value


def _short(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


class _Cursor:
    """Reads forward through the file; refuses to pass its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def bad(self, reason: str) -> NoReturn:
        raise BadModel(self.path, f"not a usable GGUF file: {reason}")

    @property
    def left(self) -> int:
        return self.size - self.at

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            self.bad(f"{what} needs {count:,} bytes but the file ends after {self.left:,}")
        start = self.at
        self.at += count
        return self.data[start : self.at]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str, limit: int = MAX_STRING) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            self.bad(f"{what} claims {length:,} bytes, at most {limit:,} are allowed")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.bad(f"{what} isn't valid UTF-8")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            self.bad(f"{key!r} has the unknown value type {kind}")
        return self._numbers(kind, 1, key)[0].item()

    def _array(self, key: str) -> Any:
        kind = self.u32(f"the item type of {key!r}")
        count = self.u64(f"the length of {key!r}")
        if count > MAX_ITEMS:
            self.bad(f"{key!r} claims {count:,} items, at most {MAX_ITEMS:,} are allowed")
        if kind in _SCALARS:
            return self._numbers(kind, count, key)
        if kind != _STRING:
            self.bad(f"{key!r} is an array of the unsupported type {kind}")
        if count * 8 > self.left:
            self.bad(f"{key!r} claims {count:,} strings but only {self.left:,} bytes follow")
        return [self.string(f"item {i} of {key!r}") for i in range(count)]

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray:
        if kind == 7:
            raw = self.take(count, f"the value of {key!r}")
            if raw.strip(b"\x00\x01"):
                self.bad(f"{key!r} has a truth value that is neither 0 nor 1")
            return np.frombuffer(raw, np.bool_)
        kind_of = np.dtype(_SCALARS[kind])
        raw = self.take(count * kind_of.itemsize, f"the value of {key!r}")
        return np.frombuffer(raw, kind_of)


def read(path: str | Path) -> GGUF:
    """Parse and check the header of a GGUF file.

    Raises:
        BadModel: the file can't be read, isn't GGUF, or contradicts itself.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise BadModel(path, f"not a GGUF file: only {size} bytes long")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(path, data))
    except (OSError, ValueError) as error:
        raise BadModel(path, f"can't be read: {error}") from error


def _parse(cursor: _Cursor) -> GGUF:
    if (magic := cursor.take(4, "the magic")) != MAGIC:
        cursor.bad(f"it starts with {magic!r} instead of {MAGIC!r}")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        swapped = struct.unpack(">I", struct.pack("<I", version))[0]
        hint = " (big-endian)" if swapped in VERSIONS else ""
        cursor.bad(f"version {version}{hint} isn't supported, only 2 and 3 are")
    tensor_count = cursor.u64("the number of tensors")
    entry_count = cursor.u64("the number of metadata entries")
    # The smallest tensor entry has 33 bytes, the smallest metadata entry 13.
    for what, count, least in (("tensors", tensor_count, 33), ("entries", entry_count, 13)):
        if count > MAX_ENTRIES or count * least > cursor.left:
            cursor.bad(f"it claims {count:,} {what}, which can't be in {cursor.size:,} bytes")
    metadata: dict[str, Any] = {}
    for i in range(entry_count):
        key = cursor.string(f"metadata key {i}", MAX_NAME)
        if key in metadata:
            cursor.bad(f"the metadata key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.u32(f"the type of {key!r}"), key)
    alignment = metadata.get("general.alignment", 32)
    if (
        not isinstance(alignment, int)
        or not 8 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        cursor.bad(f"its alignment {_short(alignment)} is no power of two up to {MAX_ALIGNMENT}")
    heads = [_tensor_head(cursor, i, alignment) for i in range(tensor_count)]
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, kind, shape, offset, nbytes in heads:
        if name in tensors:
            cursor.bad(f"the tensor {name!r} is there twice")
        if start + offset + nbytes > cursor.size:
            cursor.bad(
                f"the tensor {name!r} ends at byte {start + offset + nbytes:,} "
                f"but the file has {cursor.size:,} (cut short?)"
            )
        tensors[name] = Tensor(name, kind, shape, start + offset, nbytes)
    end = 0
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end:
            cursor.bad(f"the tensor {tensor.name!r} overlaps another one")
        end = tensor.offset + tensor.nbytes
    return GGUF(cursor.path, metadata, tensors)


def _tensor_head(
    cursor: _Cursor, index: int, alignment: int
) -> tuple[str, str, tuple[int, ...], int, int]:
    name = cursor.string(f"the name of tensor {index}", MAX_NAME)
    dimensions = cursor.u32(f"the dimensions of {name!r}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        cursor.bad(f"the tensor {name!r} has {dimensions} dimensions, 1 to {MAX_DIMENSIONS} can be")
    shape = [cursor.u64(f"the shape of {name!r}") for _ in range(dimensions)]
    kind = cursor.u32(f"the type of {name!r}")
    offset = cursor.u64(f"the offset of {name!r}")
    if kind not in TENSOR_TYPES:
        cursor.bad(f"the tensor {name!r} has the unsupported type {kind}")
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    if min(shape) < 1:
        cursor.bad(f"the tensor {name!r} has an empty dimension")
    if shape[0] % block:
        cursor.bad(f"rows of {name!r} have {shape[0]} elements, no multiple of {block}")
    if offset % alignment:
        cursor.bad(f"the offset of {name!r} is no multiple of {alignment}")
    nbytes = math.prod(shape) // block * block_bytes
    return name, type_name, tuple(reversed(shape)), offset, nbytes

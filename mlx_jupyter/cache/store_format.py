"""A stored thing as a file: safetensors, with its place and a checksum in the metadata.

Any safetensors reader opens it. The checksum is XXH3 over the header (its own digits as zeros) and
all data; it stands at a fixed place, first in the header. The ids that lead to the thing are a
tensor, ``tokens``.

Nothing in a file is believed: the header's size, form and depth are bounded, the tensors must tile
the data exactly, and what is allocated is never more than the file really has.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mlx_jupyter.cache.trie import PAGE
from mlx_jupyter.errors import BadModel
from mlx_jupyter.models import tensors as safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

MAX_HEADER = 1 << 20
MAX_FILE = 1 << 32
"""Largest file that is written or read, in bytes."""

_VERSION = "1"
_TOKENS = "tokens"
_META = "meta."
_ALIGN = 64
_RANK = 16
_PIECE = 1 << 26
_HEAD = b'{"__metadata__":{"checksum":"'
_ZEROS = b"0" * 16
_UNTIL = len(_HEAD) + len(_ZEROS)


Data = np.ndarray | memoryview | bytes
"""A contiguous buffer."""


class Damaged(Exception):
    """A file isn't what it should be; the text says why."""


class Stopped(Exception):
    """A read was ended early."""


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
class Content:
    """What a file holds.

    Attributes:
        tokens: the ids from the thing's base to its end, int32.
        tensors: by name; their data are views of one buffer.
        meta: what its writer added.
    """

    tokens: np.ndarray
    tensors: dict[str, Tensor]
    meta: dict[str, str]


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
        self.header[8 + len(_HEAD) : 8 + _UNTIL] = _ZEROS
        sum_ = xxhash.xxh3_64(memoryview(self.header)[8:])
        for part in self.parts:
            sum_.update(part)
        self.header[8 + len(_HEAD) : 8 + _UNTIL] = sum_.hexdigest().encode()


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
    if _TOKENS in tensors:
        raise ValueError(f"A tensor can't be called {_TOKENS!r}.")
    ids = np.ascontiguousarray(tokens, "<i4")
    entries: list[tuple[safetensors.Entry, memoryview]] = [
        (safetensors.Entry(_TOKENS, "I32", ids.shape), flat(ids))
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
            "checksum": _ZEROS.decode(),
            "format": "mlx-jupyter page",
            "version": _VERSION,
            **place,
            **{_META + key: value for key, value in meta.items()},
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


def open_file(path: Path) -> io.FileIO:
    """Open a stored file for reading, unbuffered; never through a link, never waiting for a pipe.

    Raises:
        Damaged: it isn't a regular file.
        OSError: it can't be opened.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = io.FileIO(path, opener=lambda name, _: os.open(name, flags))
    except IsADirectoryError:
        raise Damaged("it is a directory") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Damaged("it isn't a regular file")
    return file


def will_need(path: Path) -> None:
    """Have the operating system read a file ahead, where it can; never fails."""
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return
    with suppress(OSError, Damaged), open_file(path) as file:
        advise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def read(
    file: io.FileIO, place: Mapping[str, str], stopped: Callable[[], bool] = lambda: False
) -> Content:
    """All that a file holds, checked.

    Args:
        file: from ``open_file``.
        place: what its name says, and its metadata must too.
        stopped: asked between pieces; True ends the read.

    Raises:
        Damaged: the file isn't what it should be.
        Stopped: ``stopped`` said so.
        OSError: it can't be read.
        MemoryError: its data don't fit.
    """
    header = _Header(file, place)
    data = np.empty(header.nbytes, np.uint8)
    _fill(file, data, stopped)
    sum_ = xxhash.xxh3_64(header.zeroed)
    sum_.update(data.data)
    if sum_.hexdigest().encode() != header.checksum:
        raise Damaged("its checksum is wrong")
    found = {
        name: Tensor(entry.dtype, entry.shape, data[start : start + entry.nbytes])
        for name, (entry, start) in header.tensors.items()
    }
    tokens = found.pop(_TOKENS)
    assert isinstance(tokens.data, np.ndarray)
    return Content(tokens.data.view("<i4").astype(np.int32), found, header.meta)


def read_tokens(file: io.FileIO, place: Mapping[str, str]) -> np.ndarray:
    """The ids alone, int32; nothing but their key tells whether they are right.

    Raises:
        Damaged: the file isn't what it should be.
        OSError: it can't be read.
    """
    header = _Header(file, place)
    entry, start = header.tensors[_TOKENS]
    data = np.empty(entry.nbytes, np.uint8)
    file.seek(start, os.SEEK_CUR)
    _fill(file, data)
    return data.view("<i4").astype(np.int32)


class _Header:
    """A file's header, read and checked; the file then stands at its data.

    Attributes:
        nbytes: of the data.
        tensors: by name, with where each begins in the data.
        meta: what its writer added.
        checksum: the digits.
        zeroed: the header's text with zeros in their place.
    """

    def __init__(self, file: io.FileIO, place: Mapping[str, str]) -> None:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE:
            raise Damaged(f"{size} bytes are too many")
        length = int.from_bytes(_exactly(file, 8), "little")
        if length > min(size - 8, MAX_HEADER):
            raise Damaged("it is no safetensors file, or cut short")
        text = bytearray(_exactly(file, length))
        if not text.startswith(_HEAD) or len(text) < _UNTIL:
            raise Damaged("its header has no checksum")
        self.nbytes = size - 8 - length
        self.checksum = bytes(text[len(_HEAD) : _UNTIL])
        table = table_of(text)
        metadata = table.pop("__metadata__")
        if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            raise Damaged("its metadata aren't texts")
        if metadata.get("version") != _VERSION:
            raise Damaged("it has another version")
        if any(metadata.get(key) != value for key, value in place.items()):
            raise Damaged("its name says something else than its content")
        self.meta = {
            key.removeprefix(_META): value
            for key, value in metadata.items()
            if key.startswith(_META)
        }
        self.tensors = tiled(table, self.nbytes)
        text[len(_HEAD) : _UNTIL] = _ZEROS
        self.zeroed = text
        tokens = self.tensors.get(_TOKENS)
        if tokens is None or tokens[0].dtype != "I32" or len(tokens[0].shape) != 1:
            raise Damaged("it has no tokens")
        if not 0 < tokens[0].size <= PAGE:
            raise Damaged("it has too many tokens, or none")


def table_of(text: bytes | bytearray) -> dict[str, Any]:
    """A header's table, in which no name comes twice.

    Raises:
        Damaged: it isn't one.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError("a name comes twice")
        return table

    def nothing(word: str) -> None:
        raise ValueError(f"{word} is no number")

    try:
        table = json.loads(text, object_pairs_hook=once, parse_constant=nothing)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its header can't be read: {error}") from None
    if not isinstance(table, dict):
        raise Damaged("its header isn't a table")
    return table


def tiled(table: dict[str, Any], nbytes: int) -> dict[str, tuple[safetensors.Entry, int]]:
    """The tensors by name with their beginnings, which lie one after another in all the data.

    Raises:
        Damaged: they don't.
    """
    found: dict[str, tuple[safetensors.Entry, int]] = {}
    try:
        for name, value in table.items():
            entry = safetensors.checked("", name, value, nbytes)
            # An empty tensor's other dimensions could be anything.
            if len(entry.shape) > _RANK or math.prod(n for n in entry.shape if n) > MAX_FILE * 8:
                raise Damaged(f"the tensor {name[:80]!r} is too large")
            found[name] = entry, value["data_offsets"][0]
    except (BadModel, TypeError, KeyError) as error:
        reason = error.reason if isinstance(error, BadModel) else "a tensor is described wrongly"
        raise Damaged(reason) from None
    at = 0
    for entry, start in sorted(found.values(), key=lambda pair: (pair[1], pair[0].nbytes)):
        if start != at:
            raise Damaged("its tensors overlap or leave gaps")
        at += entry.nbytes
    if at != nbytes:
        raise Damaged("its data are longer than its tensors")
    return found


def _exactly(file: io.FileIO, count: int) -> bytes:
    data = np.empty(count, np.uint8)
    _fill(file, data)
    return data.tobytes()


def _fill(file: io.FileIO, into: np.ndarray, stopped: Callable[[], bool] = lambda: False) -> None:
    """Read until ``into``, uint8, is full."""
    view, at = into.data, 0
    while at < view.nbytes:
        if stopped():
            raise Stopped
        count = file.readinto(view[at : at + _PIECE])
        if not count:
            raise Damaged("it is cut short")
        at += count


def flat(data: Data) -> memoryview:
    """The bytes of a contiguous buffer, not copied; ``ValueError`` for another one."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if not view.c_contiguous:
        raise ValueError("A tensor's data must be contiguous.")
    return view.cast("B") if view.nbytes else memoryview(b"")

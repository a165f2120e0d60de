"""Reads stored things from their files, with every check.

Nothing in a file is believed: the header's size, form and depth are bounded, the tensors must tile
the data exactly, and what is allocated is never more than the file really has.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mlx_jupyter.cache.store_format import (
    HEAD,
    MAX_FILE,
    MAX_HEADER,
    META,
    TOKENS,
    UNTIL,
    VERSION,
    ZEROS,
    Tensor,
)
from mlx_jupyter.cache.trie import PAGE
from mlx_jupyter.errors import BadModel
from mlx_jupyter.models import tensors as safetensors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_RANK = 16
_PIECE = 1 << 20
"""Bytes that are read at once: what was read is still in a processor's cache when it is checked."""
_STRIDE = 1 << 26
"""The same where other threads keep Python busy: each step of a read has to wait for them."""
_PARTS = 512
"""Buffers that they may go to; systems take 1,024."""

Into = Callable[[Mapping[str, safetensors.Entry]], Mapping[str, Sequence[memoryview]]]
"""Told a file's tensors, says for some of them where their bytes go, in order."""


class Damaged(Exception):
    """A file isn't what it should be; the text says why."""


class Stopped(Exception):
    """A read was ended early."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds.

    Attributes:
        tokens: the ids from the thing's base to its end, int32.
        tensors: by name, but for those whose bytes went elsewhere.
        meta: what its writer added.
    """

    tokens: np.ndarray
    tensors: dict[str, Tensor]
    meta: dict[str, str]


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
    file: io.FileIO,
    place: Mapping[str, str],
    stopped: Callable[[], bool] = lambda: False,
    into: Into | None = None,
) -> Content:
    """All that a file holds, checked.

    Args:
        file: from ``open_file``.
        place: what its name says, and its metadata must too.
        stopped: asked between pieces; True ends the read.
        into: where tensors' bytes go that the caller has room for; they are written before the
            checksum is known.

    Raises:
        Damaged: the file isn't what it should be.
        Stopped: ``stopped`` said so.
        OSError: it can't be read.
        MemoryError: its data don't fit.
    """
    header = Header(file, place)
    entries = header.entries
    given = into(entries) if into is not None else {}
    own = {
        name: np.empty(entry.nbytes, np.uint8)
        for name, entry in entries.items()
        if name not in given
    }
    buffers: list[memoryview] = []
    for name in sorted(entries, key=lambda name: header.tensors[name][1]):
        buffers += given[name] if name in given else [own[name].data]
    sum_ = xxhash.xxh3_64(header.zeroed)
    _fill(file, buffers, sum_.update, stopped)
    if sum_.hexdigest().encode() != header.checksum:
        raise Damaged("its checksum is wrong")
    tokens = own.pop(TOKENS).view("<i4").astype(np.int32)
    found = {n: Tensor(entries[n].dtype, entries[n].shape, data) for n, data in own.items()}
    return Content(tokens, found, header.meta)


def check(
    file: io.FileIO, place: Mapping[str, str], stopped: Callable[[], bool] = lambda: False
) -> Content:
    """What ``read`` gives, without the tensors; they are read and checked, but not kept.

    Args and errors: as ``read``'s.
    """
    header = Header(file, place)
    entry, start = header.tensors[TOKENS]
    scratch = np.empty(min(_STRIDE, header.nbytes), np.uint8).data
    sum_ = xxhash.xxh3_64(header.zeroed)
    data = file.tell()
    for at in range(0, header.nbytes, _STRIDE):
        _fill(file, [scratch[: header.nbytes - at]], sum_.update, stopped, _STRIDE)
    if sum_.hexdigest().encode() != header.checksum:
        raise Damaged("its checksum is wrong")
    file.seek(data + start)
    tokens = np.empty(entry.nbytes, np.uint8)
    _fill(file, [tokens.data])
    return Content(tokens.view("<i4").astype(np.int32), {}, header.meta)


def read_tokens(file: io.FileIO, place: Mapping[str, str]) -> np.ndarray:
    """The ids alone, int32; nothing but their key tells whether they are right.

    Raises:
        Damaged: the file isn't what it should be.
        OSError: it can't be read.
    """
    header = Header(file, place)
    entry, start = header.tensors[TOKENS]
    data = np.empty(entry.nbytes, np.uint8)
    file.seek(start, os.SEEK_CUR)
    _fill(file, [data.data])
    return data.view("<i4").astype(np.int32)


class Header:
    """A file's header, read and checked in itself; the file then stands at its data.

    Args:
        file: from ``open_file``.
        place: what its name says.

    Raises:
        Damaged: the file isn't what it should be.
        OSError: it can't be read.

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
        if not text.startswith(HEAD) or len(text) < UNTIL:
            raise Damaged("its header has no checksum")
        self.nbytes = size - 8 - length
        self.checksum = bytes(text[len(HEAD) : UNTIL])
        table = table_of(text)
        metadata = table.pop("__metadata__")
        if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            raise Damaged("its metadata aren't texts")
        if metadata.get("version") != VERSION:
            raise Damaged("it has another version")
        if any(metadata.get(key) != value for key, value in place.items()):
            raise Damaged("its name says something else than its content")
        self.meta = {
            key.removeprefix(META): value for key, value in metadata.items() if key.startswith(META)
        }
        self.tensors = tiled(table, self.nbytes)
        text[len(HEAD) : UNTIL] = ZEROS
        self.zeroed = text
        tokens = self.tensors.get(TOKENS)
        if tokens is None or tokens[0].dtype != "I32" or len(tokens[0].shape) != 1:
            raise Damaged("it has no tokens")
        if not 0 < tokens[0].size <= PAGE:
            raise Damaged("it has too many tokens, or none")

    @property
    def entries(self) -> dict[str, safetensors.Entry]:
        """The tensors by name."""
        return {name: entry for name, (entry, _) in self.tensors.items()}


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
    _fill(file, [data.data])
    return data.tobytes()


def _fill(
    file: io.FileIO,
    buffers: Sequence[memoryview],
    seen: Callable[[memoryview], object] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
    piece: int = _PIECE,
) -> None:
    """Read until the buffers, of bytes, are full; ``seen`` is told each part when it is."""
    for group in _groups(buffers, piece):
        if stopped():
            raise Stopped
        left = group
        while left:
            count = _readv(file, left)
            if not count and any(part.nbytes for part in left):
                raise Damaged("it is cut short")
            left = _behind(left, count)
        for part in group:
            seen(part)


def _readv(file: io.FileIO, parts: Sequence[memoryview]) -> int:
    """Read into the parts, in order, as much as there is at once; 0 at the end."""
    return os.readv(file.fileno(), parts)


def _behind(parts: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """What is left of parts after so many bytes."""
    for place, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[place + 1 :]]
        count -= part.nbytes
    return ()


def _groups(buffers: Sequence[memoryview], piece: int) -> Iterator[Sequence[memoryview]]:
    """The buffers' parts, in groups of at most ``piece`` bytes, which are read at once."""
    first = at = size = 0
    while at < len(buffers):
        nbytes = buffers[at].nbytes
        if first < at and (size + nbytes > piece or at - first == _PARTS):
            yield buffers[first:at]
            first, size = at, 0
        at += 1
        if nbytes > piece:
            whole = buffers[first]
            yield from ([whole[i : i + piece]] for i in range(0, nbytes, piece))
            first = at
        else:
            size += nbytes
    if first < at:
        yield buffers[first:at]

"""One file for a whole conversation: safetensors, with JSON in its metadata and a checksum.

Any safetensors reader opens it. It is written beside its place and moved there when it is whole, so
that a crash, a full disk or an interrupt leaves what was there before. Pieces are written and read
one at a time: the file may be larger than the memory that is free.

Nothing in a file is believed: its size, its header and the number of its tensors are bounded, the
tensors must tile the data exactly, and what is allocated is never more than the file really has.
"""

from __future__ import annotations

import io
import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import xxhash

from mlx_jupyter.cache.store_file import Damaged, Stopped, open_file, table_of, tiled
from mlx_jupyter.cache.store_format import HEAD, UNTIL, ZEROS, Tensor, flat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from mlx_jupyter.cache.store_format import Data
    from mlx_jupyter.models.tensors import Entry

SUFFIX = ".llm.safetensors"

MAX_HEADER = 16 << 20
MAX_TENSORS = 1 << 16
MAX_FILE = 1 << 36
"""Bytes of the largest file that is written or read, and of the largest header."""

_FORMAT = "mlx-jupyter conversation"
_VERSION = "1"
_OURS = b'","format":"mlx-jupyter conversation","version":"'
_ALIGN = 64
_SPAN = 1 << 24


class Foreign(Exception):
    """A file is something else, or of another version; the text says what."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tensors that are written together.

    Attributes:
        entries: what they are.
        load: gives their data, in order; called once, when it is their turn.
    """

    entries: tuple[Entry, ...]
    load: Callable[[], Sequence[Data]]


def _untold(done: int, total: int) -> None:
    del done, total


def write(
    path: Path,
    meta: Mapping[str, str],
    pieces: Sequence[Piece],
    told: Callable[[int, int], None] = _untold,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Write a file that only its user can read; its bytes.

    Args:
        path: where; a file that is there is replaced, see ``foreign``.
        meta: texts.
        pieces: in the order of the file.
        told: called after each piece with the bytes done and those of all.
        stopped: asked before each piece; True ends the writing.

    Raises:
        ValueError: it would be too large, or a piece isn't what its entries say.
        Stopped: ``stopped`` said so; nothing has changed.
        OSError: it can't be written; nothing has changed.
    """
    header = _header(meta, [entry for piece in pieces for entry in piece.entries])
    total = len(header) + sum(e.nbytes for piece in pieces for e in piece.entries)
    if total > MAX_FILE:
        raise ValueError(f"{total:,} bytes are too many for one file")
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with io.FileIO(part, "w", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
            sum_ = xxhash.xxh3_64(memoryview(header)[8:])
            _write(file, memoryview(header))
            done = len(header)
            for piece in pieces:
                if stopped():
                    raise Stopped
                for entry, data in zip(piece.entries, piece.load(), strict=True):
                    view = flat(data)
                    if view.nbytes != entry.nbytes:
                        raise ValueError(f"{entry.name} has {view.nbytes} bytes")
                    sum_.update(view)
                    _write(file, view)
                    done += view.nbytes
                told(done, total)
            file.seek(8 + len(HEAD))
            _write(file, memoryview(sum_.hexdigest().encode()))
            os.fsync(file.fileno())
        if stopped():
            raise Stopped
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return total


def _write(file: io.FileIO, data: memoryview) -> None:
    at = 0
    while at < data.nbytes:
        at += file.write(data[at : at + _SPAN])


def _header(meta: Mapping[str, str], entries: Sequence[Entry]) -> bytearray:
    table: dict[str, Any] = {
        "__metadata__": {
            "checksum": ZEROS.decode(),
            "format": _FORMAT,
            "version": _VERSION,
            **meta,
        }
    }
    at = 0
    for entry in entries:
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    if len(text) > MAX_HEADER or len(entries) > MAX_TENSORS:
        raise ValueError(f"a header of {len(text):,} bytes is too large")
    assert len(table) == len(entries) + 1, "a tensor's name comes twice"
    return bytearray(len(text).to_bytes(8, "little") + text)


def foreign(path: Path) -> str:
    """What is at a path that ``write`` mustn't replace; "" for nothing, or one of our files."""
    try:
        with open_file(path) as file:
            start = file.read(8 + UNTIL + len(_OURS)) or b""
    except FileNotFoundError:
        return ""
    except Damaged as error:
        return str(error).removeprefix("it is ").removeprefix("it ")
    except OSError as error:
        return error.strerror or type(error).__name__
    ours = start[8:].startswith(HEAD) and start[8 + UNTIL :] == _OURS
    return "" if ours else "another kind of file"


class Bundle:
    """A file that is being read; a context manager.

    Args:
        path: where it is.

    Attributes:
        nbytes: the file's size.
        meta: its texts.
        tensors: what it has, by name.

    Raises:
        Foreign: it is no file of ours, or of another version.
        Damaged: it isn't what it should be.
        OSError: it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_file(path)
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        self.nbytes = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._at(0, min(8, self.nbytes)).tobytes(), "little")
        start = self._at(8, max(min(UNTIL + len(_OURS), self.nbytes - 8), 0)).tobytes()
        if not start.startswith(HEAD) or start[UNTIL:] != _OURS:
            raise Foreign("it is another kind of file")
        if self.nbytes > MAX_FILE or length > MAX_HEADER:
            raise Damaged("it is too large")
        if length > self.nbytes - 8:
            raise Damaged("it is cut short")
        text = bytearray(self._at(8, length).data)
        table = table_of(text)
        meta = table.pop("__metadata__", None)
        if type(meta) is not dict or any(type(each) is not str for each in meta.values()):
            raise Damaged("its metadata aren't texts")
        if meta.get("format") != _FORMAT:
            raise Foreign("it is another kind of file")
        if meta.get("version") != _VERSION:
            raise Foreign(f"its format is {str(meta.get('version'))[:20]!r}, not {_VERSION!r}")
        if len(table) > MAX_TENSORS:
            raise Damaged("it has too many tensors")
        self.meta: dict[str, str] = meta
        self._data = 8 + length
        places = tiled(table, self.nbytes - self._data)
        self.tensors = {name: entry for name, (entry, _) in places.items()}
        self._starts = {name: start for name, (_, start) in places.items()}
        self._checksum = bytes(text[len(HEAD) : UNTIL])
        text[len(HEAD) : UNTIL] = ZEROS
        self._zeroed = bytes(text)

    def verify(
        self,
        told: Callable[[int, int], None] = _untold,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read it once from end to end and compare with its checksum.

        Raises:
            Damaged: it differs.
            Stopped: ``stopped`` said so.
            OSError: it can't be read.
        """
        sum_ = xxhash.xxh3_64(self._zeroed)
        at = self._data
        while at < self.nbytes:
            if stopped():
                raise Stopped
            piece = self._at(at, min(_SPAN, self.nbytes - at))
            sum_.update(piece.data)
            at += len(piece)
            told(at, self.nbytes)
        if sum_.hexdigest().encode() != self._checksum:
            raise Damaged("its checksum is wrong")

    def read(self, name: str) -> Tensor:
        """One of its tensors.

        Raises:
            KeyError: it has none of that name.
            Damaged: the file was cut short meanwhile.
            OSError: it can't be read.
        """
        entry = self.tensors[name]
        data = self._at(self._data + self._starts[name], entry.nbytes)
        return Tensor(entry.dtype, entry.shape, data)

    def _at(self, start: int, count: int) -> np.ndarray:
        """So many bytes from a place on, uint8."""
        data = np.empty(count, np.uint8)
        self._file.seek(start)
        at = 0
        while at < count:
            read = self._file.readinto(data.data[at : at + _SPAN])
            if not read:
                raise Damaged("it is cut short")
            at += read
        return data

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

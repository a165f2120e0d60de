"""What processes wrote to a store since one of them looked: one small file that all append to.

Listing a store before each write would cost more than small pages do. The file begins with a random
number, by which a new one is told from that which it replaces; a record is the bytes of a file
that is about to be written. It is a hint: where it is missing or strange, the store is listed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

RECORD = 8
"""Bytes of the number at the beginning and of each record, a little-endian integer."""

LONG = 1 << 16
"""Bytes of a file that is replaced by a new one."""

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Ledger:
    """See the module; one process's view of it.

    Args:
        path: the file; its directory need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = b""
        self._at = 0

    def mark(self) -> bool:
        """Let news begin here; False when they can't be told."""
        for _ in range(2):
            whole = self._read()
            if RECORD <= len(whole) <= LONG:
                self._number, self._at = whole[:RECORD], len(whole)
                return True
            self._renew()
        return False

    def note(self, nbytes: int) -> None:
        """Tell all processes, this one too, that so many bytes are about to be written."""
        with suppress(OSError):
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | _FLAGS)
            try:
                os.write(handle, nbytes.to_bytes(RECORD, "little"))
            finally:
                os.close(handle)
            return
        self._number = b""  # or it would be missing from this one's own news

    def news(self) -> int | None:
        """Bytes that were noted since the mark; None when that can't be told."""
        whole = self._read()
        if not self._number or whole[:RECORD] != self._number or not self._at <= len(whole) <= LONG:
            return None
        records = whole[self._at : len(whole) // RECORD * RECORD]
        return int(np.frombuffer(records, "<u8").sum())

    def _read(self) -> bytes:
        """The file's content; ``b""`` when there is none, a little more than ``LONG`` at most."""
        try:
            handle = os.open(self._path, os.O_RDONLY | _FLAGS)
        except OSError:
            return b""
        try:
            return os.read(handle, LONG + RECORD)
        except OSError:
            return b""
        finally:
            os.close(handle)

    def _renew(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
            try:
                os.write(handle, os.urandom(RECORD))
            finally:
                os.close(handle)

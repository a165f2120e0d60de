"""Pages, strips and snapshots on disk: they outlive the kernel and are shared by several.

A *store* is one directory, a *shelf* in it what belongs to one model. The files are the truth: what
is kept in memory is made from their names, and several processes use one store without knowing of
each other. Neither MLX nor the trie is known here; ``keys`` says how things are named.

Whatever goes wrong, a full disk, a damaged file, a directory that others may write to, costs what
was stored and is told once. It never gives wrong content, and never raises. Files can be read by
their user only: ids can be turned back into text.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import TYPE_CHECKING

from mlx_jupyter.cache import store_shelf
from mlx_jupyter.cache.store_budget import Room
from mlx_jupyter.cache.store_faults import Faults
from mlx_jupyter.cache.store_file import Content
from mlx_jupyter.cache.store_format import Tensor
from mlx_jupyter.cache.store_listing import Entry, Listings, Usage, remove
from mlx_jupyter.cache.store_reading import Reading
from mlx_jupyter.cache.store_shelf import Shelf
from mlx_jupyter.cache.store_writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Content", "Entry", "Faults", "Reading", "Shelf", "Store", "Tensor", "Usage"]

QUEUE = 256 << 20
"""Bytes that may wait to be written."""

CLOSING = 5.0
"""Seconds that closing waits for what is queued."""


class Store:
    """See the module. Any thread; in a process forked from the one that made it, it is off.

    Args:
        directory: need not be there; it is made when something is first written.
        budget: bytes that all files together may take.
        now: seconds since the epoch.
        queue_bytes: bytes that may wait to be written.

    Attributes:
        directory: as given.
        budget: as given.
        now: as given.
        faults: what went wrong so far.
        listings: of the files.
        writer: writes them.
    """

    def __init__(
        self,
        directory: Path,
        *,
        budget: int,
        now: Callable[[], float] = time.time,
        queue_bytes: int = QUEUE,
    ) -> None:
        self.directory = directory
        self.budget = budget
        self.now = now
        self.faults = Faults()
        self.listings = Listings(directory)
        self._room = Room(self.listings, budget, self.faults, now)
        self.writer = Writer(self._room, self.faults, queue_bytes, now)
        self._process = os.getpid()
        self._refused = store_shelf.refusal(directory)
        if self._refused:
            self.faults.note("directory", f"No cached tokens are stored: {self._refused}.")
        weakref.finalize(self, _abandon, self.writer, self._process)

    @property
    def on(self) -> bool:
        """Whether things can be stored and found."""
        return not (self._refused or self.writer.closed or self._process != os.getpid())

    def shelf(self, fingerprint: str, name: str = "") -> Shelf:
        """What belongs to one model.

        Args:
            fingerprint: equal for exactly the models whose pages can stand for each other.
            name: for lists of what is stored.
        """
        if self.on:
            self.writer.do(self._room.tidy)
        return Shelf(self, fingerprint, name)

    def usage(self) -> Usage:
        """What all files take."""
        each = self.models().values()
        return Usage(sum(u.files for u in each), sum(u.nbytes for u in each))

    def models(self) -> dict[str, Usage]:
        """What each model's files take, by its name; those of one name are told apart."""
        found: dict[str, Usage] = {}
        for listing in self.listings if self.on else ():
            number = listing.directory.name[:8]
            name = store_shelf.label(listing.directory) or number
            found[f"{name} ({number})" if name in found else name] = listing.usage()
        return found

    def clear(self) -> Usage:
        """Remove everything for good, also what is queued; what was removed."""
        if not self.on:
            return Usage()
        self.writer.drop(lambda _: True)
        self._room.sweep()
        files = nbytes = 0
        for listing in self.listings:
            for entry in listing.entries():
                if remove(entry.path, self.faults):
                    files += 1
                    nbytes += entry.nbytes
            store_shelf.take_down(listing.directory)
        return Usage(files, nbytes)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what is queued now is done; False when it isn't after ``timeout`` seconds."""
        return self._process == os.getpid() and self.writer.flush(timeout)

    def close(self, timeout: float = CLOSING) -> bool:
        """Write what is queued within ``timeout`` seconds, drop the rest; whether all was done.

        From then on nothing is stored or found. May be called again.
        """
        return self._process != os.getpid() or self.writer.close(timeout)


def _abandon(writer: Writer, process: int) -> None:
    """A store that nobody closed: what waits is dropped, its thread ends."""
    if process == os.getpid():
        writer.abandon()

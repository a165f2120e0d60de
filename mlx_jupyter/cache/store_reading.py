"""Reads stored things in order, ahead of who uses them, on threads of its own.

Both sides wait in queues implemented in C, so that an interrupt at any moment leaves nothing held.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from mlx_jupyter.latch import GLANCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from mlx_jupyter.cache.store_file import Content
    from mlx_jupyter.cache.store_listing import Entry

    Read = Callable[[Entry, Callable[[], bool]], Content | None]

AHEAD = 64 << 20
"""Bytes that are read ahead unless it is said otherwise: a few pages."""


THREADS = 4
"""Files that are read at once: copying and checking one keeps a processor busy."""


PATIENCE = 2.0
"""Seconds that a thread has to end its read of a piece; a disk that takes longer doesn't answer."""


class _Pump:
    """What the threads work on; they keep it alive, and nothing else of the reading.

    A thread takes a permit, then the next file: so the one that the user waits for is always being
    read or was, however many later ones are done before it.
    """

    def __init__(self, read: Read, entries: Sequence[Entry], permits: int) -> None:
        self._read = read
        self._entries = entries
        self._next = itertools.count()
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(permits):
            self._permits.put(None)
        self.read: queue.SimpleQueue[tuple[int, Content | None]] = queue.SimpleQueue()
        self.cancelled = False

    def run(self) -> None:
        while True:
            self._permits.get()
            number = next(self._next)
            if self.cancelled or number >= len(self._entries):
                self._permits.put(None)  # for the other threads
                return
            content: Content | None = None
            try:
                content = self._read(self._entries[number], lambda: self.cancelled)
            finally:
                self.read.put((number, content))

    def taken(self) -> None:
        """The user has one more now."""
        self._permits.put(None)

    def cancel(self) -> None:
        self.cancelled = True
        self._permits.put(None)
        self.read.put((-1, None))

    def let_go(self) -> None:
        """Free what nobody took."""
        with suppress(queue.Empty):
            while True:
                self.read.get_nowait()


class Reading:
    """``for entry, content in reading`` within ``with reading``: once, in the order asked for.

    ``content`` is None for what isn't there (any more) or is damaged. Leaving the block ends the
    threads, also when an exception or an interrupt does.

    Args:
        read: reads one; told by its second argument, it may end early with None.
        entries: what to read.
        ahead_bytes: files' bytes that may be read but not taken yet; one file always may.
        told_to_stop: looked at while a file keeps the user waiting; True cancels the reading.

    Attributes:
        hung: after the block: a read of a disk that doesn't answer was left alone with its thread.
            It may still end, and what it reads into must not be used any more.
    """

    def __init__(
        self,
        read: Read,
        entries: Sequence[Entry],
        ahead_bytes: int = AHEAD,
        told_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.hung = False
        self._told_to_stop = told_to_stop
        largest = max((entry.nbytes for entry in entries), default=1)
        permits = max(1, min(ahead_bytes // max(largest, 1), len(entries)))
        threads = min(THREADS, os.cpu_count() or 1, permits)
        self._entries = entries
        self._pump = _Pump(read, entries, permits)
        self._done: dict[int, Content | None] = {}
        self._at = 0
        self._threads = [
            threading.Thread(target=self._pump.run, name="mlx-read-ahead", daemon=True)
            for _ in range(threads)
        ]
        # For an interrupt between the threads' start and the block.
        self._finalizer = weakref.finalize(self, self._pump.cancel)

    @property
    def cancelled(self) -> bool:
        """Whether it was ended early."""
        return self._pump.cancelled

    def cancel(self) -> None:
        """End it early, from any thread: the iteration stops, with what was read already."""
        self._pump.cancel()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __iter__(self) -> Self:
        assert self._threads[0].ident is not None, "a reading is used in its with block"
        return self

    def __next__(self) -> tuple[Entry, Content | None]:
        while self._at not in self._done:
            if self._at >= len(self._entries) or self._pump.cancelled:
                raise StopIteration
            try:
                number, content = self._pump.read.get(timeout=GLANCE)
            except queue.Empty:
                if self._told_to_stop():
                    self._pump.cancel()
                continue
            self._done[number] = content
        if self._pump.cancelled:
            raise StopIteration
        found = self._entries[self._at], self._done.pop(self._at)
        self._at += 1
        self._pump.taken()
        return found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pump.cancel()
        try:
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(PATIENCE)
        finally:
            self.hung = any(thread.is_alive() for thread in self._threads)
            self._at = len(self._entries)
            self._done.clear()
            self._pump.let_go()

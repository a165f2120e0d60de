"""Reads stored things in order, ahead of who uses them, on a thread of its own.

Both sides wait in queues implemented in C, so that an interrupt at any moment leaves nothing held.
"""

from __future__ import annotations

import queue
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from mlx_jupyter.cache.store_format import Content
    from mlx_jupyter.cache.store_listing import Entry

    Read = Callable[[Entry, Callable[[], bool]], Content | None]

AHEAD = 64 << 20
"""Bytes that are read ahead unless it is said otherwise: a few pages."""


class _Pump:
    """What the thread works on; the thread keeps it alive, and nothing else of the reading."""

    def __init__(self, read: Read, entries: Sequence[Entry], ahead: int) -> None:
        self._read = read
        self._entries = entries
        self._ahead = ahead
        self._taken: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.read: queue.SimpleQueue[tuple[Entry, Content | None] | None] = queue.SimpleQueue()
        self.cancelled = False

    def run(self) -> None:
        try:
            held = 0
            for entry in self._entries:
                while held and held + entry.nbytes > self._ahead and not self.cancelled:
                    held -= self._taken.get()
                if self.cancelled:
                    break
                self.read.put((entry, self._read(entry, lambda: self.cancelled)))
                held += entry.nbytes
        finally:
            self.read.put(None)

    def taken(self, entry: Entry) -> None:
        """The user has this one now."""
        self._taken.put(entry.nbytes)

    def let_go(self) -> None:
        """Free what nobody took."""
        with suppress(queue.Empty):
            while True:
                self.read.get_nowait()

    def cancel(self) -> None:
        self.cancelled = True
        self._taken.put(0)
        self.read.put(None)


class Reading:
    """``for entry, content in reading`` within ``with reading``: once, in the order asked for.

    ``content`` is None for what isn't there (any more) or is damaged. Leaving the block ends the
    thread, also when an exception or an interrupt does.

    Args:
        read: reads one; told by its second argument, it may end early with None.
        entries: what to read.
        ahead_bytes: files' bytes that may be read but not taken yet; one file always may.
    """

    def __init__(self, read: Read, entries: Sequence[Entry], ahead_bytes: int = AHEAD) -> None:
        self._pump = _Pump(read, entries, ahead_bytes)
        self._over = False
        self._thread = threading.Thread(target=self._pump.run, name="mlx-read-ahead", daemon=True)
        # For an interrupt between the thread's start and the block.
        self._finalizer = weakref.finalize(self, self._pump.cancel)

    @property
    def cancelled(self) -> bool:
        """Whether it was ended early."""
        return self._pump.cancelled

    def cancel(self) -> None:
        """End it early, from any thread: the iteration stops, with what was read already."""
        self._pump.cancel()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __iter__(self) -> Self:
        assert self._thread.ident is not None, "a reading is used in its with block"
        return self

    def __next__(self) -> tuple[Entry, Content | None]:
        found = None if self._over or self._pump.cancelled else self._pump.read.get()
        if found is None or self._pump.cancelled:
            self._over = True
            raise StopIteration
        self._pump.taken(found[0])
        return found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pump.cancel()
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self._thread.join()  # a second one lets go of a disk that doesn't answer
            raise
        finally:
            self._over = True
            self._pump.let_go()

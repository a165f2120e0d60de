"""Keeps a store's directory within its budget, together with the other kernels that use it.

A process writes only what fits into what it listed last together with what all of them noted in the
ledger since, so that several at once pass the budget by no more than what each is writing. One
evicts at a time: a lock on a file, never waited for by a reader. Eviction unlinks, so that whoever
has a file open keeps its bytes.

What goes first is ``retention``'s choice over the files of all models. Its clock is in minutes: a
notebook asks about once a minute, which makes ages here and in memory, where the clock counts
requests, mean about the same.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from mlx_jupyter.cache.retention import Item, choose
from mlx_jupyter.cache.store_ledger import Ledger
from mlx_jupyter.cache.store_listing import remove
from mlx_jupyter.cache.trie import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from mlx_jupyter.cache.store_faults import Faults
    from mlx_jupyter.cache.store_listing import Entry, Listings

MINUTE = 60.0
"""Seconds in one tick of retention's clock."""

GRACE = 60
"""Minutes after which what hangs on a missing page is useless. Before, the page may be in the
memory of a kernel that didn't write it yet."""

SLACK = 16
"""Evicting frees a further 1/SLACK of the budget, so that not every page written needs it."""

PATIENCE = 2.0
"""Seconds to wait for another process that evicts, before a page isn't written at all."""

STALE = 86_400.0
"""Seconds after which a half-written file is stale where locks can't tell."""

_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class Room:
    """The bytes of one store's directory; any thread.

    Args:
        listings: of its models.
        budget: bytes that all files together may take.
        faults: where failures are noted.
        now: seconds since the epoch.
    """

    def __init__(
        self,
        listings: Listings,
        budget: int,
        faults: Faults,
        now: Callable[[], float],
    ) -> None:
        self._listings = listings
        self._budget = budget
        self._faults = faults
        self._now = now
        self._ledger = Ledger(listings.directory / "ledger")
        self._known: int | None = None  # bytes of all files when the ledger was marked

    def total(self) -> int:
        """Bytes of all files as they are now."""
        return sum(shard.nbytes for listing in self._listings for _, shard in listing.shards())

    def make(self, nbytes: int, wait: Callable[[float], bool]) -> bool:
        """Make room for a file, and note that it is taken; False when there can't be.

        Args:
            nbytes: of the file.
            wait: waits so many seconds; True when waiting is over for good.
        """
        if nbytes > self._budget:
            return False
        until = time.monotonic() + PATIENCE
        while not self._fits(nbytes):
            freed = self.evict(self._budget - self._budget // SLACK - nbytes)
            if freed is None:
                if wait(0.01) or time.monotonic() > until:
                    return False
            elif not freed and not self._fits(nbytes):
                return False
        self._ledger.note(nbytes)
        return True

    def _fits(self, nbytes: int) -> bool:
        """Whether a file fits; all files are only listed when it seems that it doesn't."""
        news = self._ledger.news()
        if self._known is None or news is None or self._known + news + nbytes > self._budget:
            # Marked first: what comes meanwhile is rather counted twice than not at all.
            marked = self._ledger.mark()
            total = self.total()
            self._known = total if marked else None
            return total + nbytes <= self._budget
        return True

    def shrink(self, nbytes: int) -> bool:
        """Free so many bytes and more, within the budget or not; whether anything was freed."""
        total = self.total()
        return bool(self.evict(total - max(nbytes, total // SLACK)))

    def evict(self, keep: int) -> int | None:
        """Evict until at most ``keep`` bytes are left.

        Returns:
            bytes that were freed; None when another process is at it.
        """
        with _lock(self._listings.directory / "lock") as mine:
            if not mine:
                return None
            # Listed anew: no directory's time tells of a file's last use.
            entries = [list(listing.entries(again=True)) for listing in self._listings]
            flat = [entry for shelf in entries for entry in shelf]
            need = sum(entry.nbytes for entry in flat) - max(keep, 0)
            freed = 0
            for key in choose(items(entries, self._now()), need, int(self._now() / MINUTE)):
                if remove(flat[key].path, self._faults):
                    freed += flat[key].nbytes
            self.sweep()
            return freed

    def tidy(self) -> None:
        """Remove what killed processes left, and what a larger budget had room for."""
        self.sweep()
        if not self._fits(0):
            self.evict(self._budget)

    def sweep(self) -> None:
        """Remove half-written files whose process is gone."""
        for listing in self._listings:
            for name, shard in listing.shards():
                for part in shard.parts:
                    path = listing.directory / name / part
                    with suppress(OSError):
                        if self._is_stale(path):
                            path.unlink()

    def _is_stale(self, path: Path) -> bool:
        """Whether nobody writes a file any more: a writer holds a lock until its end."""
        handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            old = self._now() - os.fstat(handle).st_mtime > STALE
            return error.errno not in _BUSY and old
        else:
            return True
        finally:
            os.close(handle)


def items(shelves: Iterable[Sequence[Entry]], now: float) -> list[Item]:
    """What retention needs to know of the files of each model, in their order.

    Names tell what hangs on what, but for branches that part within a page: there any page that
    holds the row before will do.
    """
    described: list[Item] = []
    for entries in shelves:
        described += _Described(entries, len(described), int(now / MINUTE)).items()
    return described


class _Described:
    """The files of one model, linked."""

    def __init__(self, entries: Sequence[Entry], first: int, clock: int) -> None:
        self._entries = entries
        self._first = first
        self._clock = clock
        self._at: dict[tuple[str, bytes], list[int]] = {}  # by kind and parent
        self._leading: dict[tuple[bytes, int], int] = {}  # rows up to a page boundary
        self._up: dict[tuple[bytes, int], bytes] = {}  # a boundary's boundary before
        for i, entry in enumerate(entries):
            self._at.setdefault((entry.kind, entry.parent), []).append(i)
            if entry.child is not None:
                self._up[entry.child, entry.end] = entry.parent
                if entry.kind == "rows":
                    self._leading[entry.child, entry.end] = i
        self._rows = any(entry.kind == "rows" for entry in entries)
        self._stateful = any(entry.kind == "state" for entry in entries)
        self._states: dict[tuple[bytes, int], int | None] = {}

    def items(self) -> list[Item]:
        broken: dict[int, bool] = {}
        made: dict[int, Item] = {}
        # What something hangs on begins before it.
        order = sorted(range(len(self._entries)), key=lambda i: self._hook(self._entries[i]))
        for i in order:
            entry = self._entries[i]
            page = self._page(entry)
            missing = self._rows and self._hook(entry) > 0
            broken[i] = missing if page is None else broken[page]
            prior = self._prior(entry) if entry.kind == "state" else None
            used = int(entry.used / MINUTE)
            fresh = self._clock - used <= GRACE
            replay = entry.end - (entry.start if entry.kind == "rows" else 0)
            made[i] = Item(
                self._first + i,
                entry.kind,
                entry.nbytes,
                entry.end,
                replay if prior is None else entry.end - self._entries[prior].end,
                used,
                None if page is None else self._first + page,
                useless=broken[i] and not fresh,
                reachable=not broken[i],
                prior=None if prior is None else self._first + prior,
                alone=fresh or not self._stateful,
            )
        return [made[i] for i in range(len(self._entries))]

    @staticmethod
    def _hook(entry: Entry) -> int:
        """Where the rows end that it needs."""
        return entry.start if entry.kind == "rows" else entry.end

    def _page(self, entry: Entry) -> int | None:
        """The page that holds the last row it needs."""
        at = self._hook(entry)
        if at == entry.base:
            return self._leading.get((entry.parent, at))
        holders = [
            i
            for i in self._at.get(("rows", entry.parent), ())
            if self._entries[i].start < at <= self._entries[i].end
        ]
        return max(
            holders,
            key=lambda i: (self._entries[i].end == at, self._entries[i].start),
            default=None,
        )

    def _prior(self, entry: Entry) -> int | None:
        """The nearest snapshot before one."""
        near = self._snapshot(entry.parent, entry.end)
        return near if near is not None else self._before(entry.parent, entry.base)

    def _snapshot(self, parent: bytes, below: int) -> int | None:
        """The last one before a position of those that hang on a boundary."""
        near = (i for i in self._at.get(("state", parent), ()) if self._entries[i].end < below)
        return max(near, key=lambda i: self._entries[i].end, default=None)

    def _before(self, boundary: bytes, at: int) -> int | None:
        """The last snapshot up to a boundary."""
        passed: list[tuple[bytes, int]] = []
        found: int | None = None
        while at > 0:
            if (boundary, at) in self._states:
                found = self._states[boundary, at]
                break
            passed.append((boundary, at))
            up = self._up.get((boundary, at))
            if up is None:
                break
            found = self._snapshot(up, at + 1)
            if found is not None:
                break
            boundary, at = up, at - PAGE
        self._states.update(dict.fromkeys(passed, found))
        return found


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Whether this process alone evicts. Where locks don't work several may: they free too much."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
    except OSError:  # a full disk may have no room even for it
        yield True
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield error.errno not in _BUSY
        else:
            yield True
    finally:
        os.close(handle)

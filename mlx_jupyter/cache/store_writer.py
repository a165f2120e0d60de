"""Writes to the store in the background: one thread, a queue that is bounded in bytes.

Whoever puts something in never waits and never touches the disk. What is queued belongs to the
writer until it is written or dropped: its buffers are neither copied nor let go of before.

A file is written under another name, then renamed, so that nobody finds half of it. There is no
``fsync``: after a power cut a file may be torn, which its checksum tells, and what was lost can be
computed again; waiting for the disk at each page would cost more than that. While it is written its
writer holds a lock on it, so that what a killed process left is told from what is being written.

A disk that is full is evicted from once. A page that can't be written then is given up, and so are
those of the next minute.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mlx_jupyter.cache import store_format
from mlx_jupyter.latch import Latch, holding

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mlx_jupyter.cache.store_budget import Room
    from mlx_jupyter.cache.store_faults import Faults
    from mlx_jupyter.cache.store_format import Sheet
    from mlx_jupyter.cache.store_listing import Entry

PAUSE = 60.0
"""Seconds without writing after the disk refused."""

FULL = (errno.ENOSPC, errno.EDQUOT)


class Job(Protocol):
    """A piece of work for the thread."""

    def run(self, writer: Writer) -> None:
        """Do it."""


@dataclass(slots=True)
class Put:
    """One thing to write.

    Attributes:
        entry: what it will be.
        sheet: its content.
        prepare: makes its directory.
        dropped: it isn't wanted any more.
    """

    entry: Entry
    sheet: Sheet = field(repr=False)
    prepare: Callable[[], None]
    dropped: bool = False
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.entry.path

    def run(self, writer: Writer) -> None:
        """Write it, unless it is there."""
        writer.write(self)


@dataclass(frozen=True, slots=True)
class Do:
    """Something small; its failure is noted."""

    work: Callable[[], None]

    def run(self, writer: Writer) -> None:
        """Do it."""
        writer.attempt(self.work)


@dataclass(slots=True)
class Flush:
    """Tells that all before it is done, or that it never will be."""

    over: Latch = field(default_factory=Latch)
    done: bool = False

    def run(self, writer: Writer) -> None:  # noqa: ARG002
        """Tell."""
        self.done = True
        self.over.set()


class Writer:
    """See the module.

    Args:
        room: keeps the budget.
        faults: where failures are noted.
        limit: bytes that may wait.
        now: seconds since the epoch.
    """

    def __init__(self, room: Room, faults: Faults, limit: int, now: Callable[[], float]) -> None:
        self._room = room
        self._faults = faults
        self._limit = limit
        self._now = now
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: dict[Path, Put] = {}
        self._nbytes = 0
        self._gate = threading.RLock()  # over what waits
        self._landing = threading.RLock()  # between the last look at ``dropped`` and the rename
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stopping = Latch()
        self._resume = 0.0

    @property
    def closed(self) -> bool:
        """Whether it takes nothing more."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Bytes that are queued or being written."""
        return self._nbytes

    @property
    def paused(self) -> bool:
        """Whether the disk refused just now. A clock that was set back ends it too."""
        return self._resume - PAUSE <= self._now() < self._resume

    def put(self, job: Put) -> bool:
        """Queue a thing; False when there is no room for it in the queue."""

        def queued() -> bool:
            if self.paused:
                return False
            if (known := self._waiting.get(job.path)) is not None:
                return not known.dropped
            if self._waiting and self._nbytes + job.sheet.nbytes > self._limit:
                return False
            if not self._post(job):
                return False
            self._waiting[job.path] = job
            self._nbytes += job.sheet.nbytes
            return True

        return holding(self._gate, queued)

    def do(self, work: Callable[[], None]) -> None:
        """Have something small done in its turn; nothing once it is closed."""
        holding(self._gate, lambda: self._post(Do(work)))

    def drop(self, unwanted: Callable[[Entry], bool]) -> None:
        """Such things of what waits or is being written don't get there any more."""

        def mark() -> None:
            for job in self._waiting.values():
                job.dropped = job.dropped or unwanted(job.entry)

        holding(self._landing, lambda: holding(self._gate, mark))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what is queued now is done; False when it isn't after ``timeout`` seconds."""
        mark = Flush()

        def queued() -> bool:
            if self._thread is None or self._stopping.is_set():
                return False
            self._jobs.put(mark)
            return True

        if not holding(self._gate, queued):
            return not self._waiting
        mark.over.wait(timeout)
        return mark.done

    def close(self, timeout: float) -> bool:
        """Take nothing more, write what waits within ``timeout`` seconds and drop the rest.

        Returns:
            whether everything was written. A thread that a disk holds up ends when that answers.
        """
        self._closed = True
        try:
            done = self.flush(timeout)
        finally:
            self.abandon()
        if done and self._thread is not None:
            self._thread.join()
        return done

    def abandon(self) -> None:
        """Take nothing more and drop what waits."""
        self._closed = True

        def drain() -> None:
            self._stopping.set()
            with suppress(queue.Empty):
                while True:
                    job = self._jobs.get_nowait()
                    if isinstance(job, Put):
                        self._forget(job)
                    elif isinstance(job, Flush):
                        job.over.set()
            self._jobs.put(None)

        holding(self._gate, drain)

    def _post(self, job: Job) -> bool:
        """Queue a job, with the gate held; False when nobody will do it."""
        if self._closed:
            return False
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name="mlx-pages", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending
                return False
            self._thread = thread
        self._jobs.put(job)
        return True

    def _forget(self, job: Put) -> None:
        if self._waiting.get(job.path) is job:  # else an interrupt came before it was counted
            del self._waiting[job.path]
            self._nbytes -= job.sheet.nbytes

    # --- on the thread ------------------------------------------------------------------------

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.run(self)
            except Exception as error:
                self._faults.note("bug", f"The page store failed: {error!r}")
            del job  # its buffers are somebody's memory

    def attempt(self, work: Callable[[], None]) -> None:
        """Do something; a failure of the disk is noted."""
        try:
            work()
        except OSError as error:
            self._faults.note("unreadable", f"Stored pages can't be managed: {error}")

    def write(self, job: Put) -> None:
        """Write a thing, touch it if it is there, or give it up."""
        try:
            if not (job.dropped or self.paused or self._stopping.is_set()):
                self._write(job)
        finally:
            holding(self._gate, lambda: self._forget(job))

    def _write(self, job: Put) -> None:
        tried_before = False
        while True:
            try:
                if not touch(job.path, self._now()) and self._room.make(
                    job.sheet.nbytes, self._stopping.wait
                ):
                    self._land(job)
            except OSError as error:
                full = error.errno in FULL and not tried_before
                if full and self._room.shrink(job.sheet.nbytes):
                    tried_before = True
                    continue
                self._resume = self._now() + PAUSE
                self._faults.note("full", f"Cached tokens can't be stored now: {error}")
            return

    def _land(self, job: Put) -> None:
        try:
            part, file = _opened(job.path.parent)
        except FileNotFoundError:
            job.prepare()
            part, file = _opened(job.path.parent)
        try:
            with file:  # and with it the lock
                job.sheet.seal()
                store_format.write(file, job.sheet)
                touch(part, self._now())
                holding(self._landing, lambda: job.dropped or part.replace(job.path))
        finally:
            with suppress(OSError):  # it has its other name by now, unless something went wrong
                part.unlink()


def touch(path: Path, now: float) -> bool:
    """Note that a file is used now; False when it isn't there."""
    try:
        os.utime(path, (now, now), follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _opened(directory: Path) -> tuple[Path, io.FileIO]:
    """A new file under a name of its own, unbuffered and locked."""
    while True:
        path = directory / f".{os.urandom(8).hex()}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
        file = io.FileIO(handle, "wb")
        with suppress(OSError):  # where locks don't work, age tells what is stale
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists():
            return path, file
        file.close()  # taken for stale before it was locked

"""Interrupts that never tear anything: SIGINT becomes a message, not an exception.

A ``KeyboardInterrupt`` raised at an arbitrary bytecode could leave a lock held (the one that the
engine needs to report a token) or a half-sent display message. While a cell follows a request the
signal's handler only puts a note into a queue that is safe in signal handlers; the cell's thread
waits on that queue, so it wakes at once, and raises when everything has been put in order.
"""

from __future__ import annotations

import signal
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from mlx_jupyter.engine.request import Terminal
from mlx_jupyter.latch import GLANCE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

    from mlx_jupyter.engine.request import Event

INTERVAL = 0.05  # seconds between two updates of a cell
PATIENCE = 2.0  # seconds after which a further interrupt is raised where it lands
GRACE = 0.5  # seconds after an interrupted cell in which a second press is let go


class Job(Protocol):
    """What can be followed: a request's ticket, a model's load."""

    def batches(self, interval: float = ...) -> Iterator[list[Event]]:
        """The events up to the terminal one, in batches."""
        ...


class _Echo:
    """The handler left behind by an interrupted cell.

    A second press a moment later would land in the kernel's own code that sends the error and the
    reply, and the cell would never end on the screen. After the grace it is the previous handler.
    """

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self._until = time.monotonic() + GRACE

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self._until:
            signal.signal(signal.SIGINT, self.previous)
            if callable(self.previous):
                self.previous(number, frame)


class Interrupts:
    """Context: collects SIGINTs instead of raising them.

    Outside the main thread, where Python gives no signals, it does nothing.
    """

    def __init__(self) -> None:
        self._news: SimpleQueue[list[Event] | None] = SimpleQueue()
        self._previous: Any = None
        self._installed = False
        self._first = 0.0
        self.count = 0

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if isinstance(previous, _Echo):
                previous = previous.previous
            if previous is not None and previous is not signal.SIG_IGN:
                self._previous = previous
                self._installed = True
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._installed:
            after = _Echo(self._previous) if self.count else self._previous
            signal.signal(signal.SIGINT, after)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler. Someone who insists for seconds gets the exception after all."""
        self.count += 1
        now = time.monotonic()
        self._first = self._first or now
        if self.count > 1 and now - self._first > PATIENCE:
            signal.default_int_handler(number, frame)
        self._news.put(None)

    def follow(self, job: Job) -> Iterator[list[Event]]:
        """The job's events in batches; ends early when an interrupt comes.

        A thread of its own waits on the job, so that this one waits on nothing but the queue.
        """
        if self.count:
            return
        threading.Thread(
            target=self._read, args=(job,), name="mlx-jupyter-reader", daemon=True
        ).start()
        while not self.count:
            try:
                batch = self._news.get(timeout=GLANCE)
            except Empty:
                continue
            if batch is None:
                return
            yield batch
            if isinstance(batch[-1], Terminal):
                return

    def _read(self, job: Job) -> None:
        for batch in job.batches(INTERVAL):
            self._news.put(batch)

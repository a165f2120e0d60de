"""Waiting and excluding that an interrupt can end at any moment without leaving a lock held.

A ``KeyboardInterrupt`` can be raised wherever Python code calls something: also between a lock's
acquisition and the block that would release it (inside ``threading.Event`` and ``Condition``, and
from Python 3.14 on at any ``with lock``). Whoever wants the lock next then hangs, which here would
be the engine. So waiters share no lock with the engine: each waits in a queue of its own,
implemented in C, and what both sides touch are single operations of built-in containers.

A signal that lands just before a wait in C, or on another thread, doesn't end that wait, and its
handler runs only when Python goes on. So every wait looks up now and then.
"""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

Bell = queue.SimpleQueue[None]
"""What one waiter waits on."""

T = TypeVar("T")

GLANCE = 0.1
"""Seconds of waiting after which a signal is noticed that didn't end the wait."""


def heard(bell: Bell, timeout: float | None = None) -> bool:
    """Wait for a bell; False when ``timeout`` seconds passed first."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = GLANCE if end is None else end - time.monotonic()
        try:
            bell.get(timeout=max(min(GLANCE, left), 0))
        except queue.Empty:
            if end is not None and time.monotonic() >= end:
                return False
        else:
            return True


class Latch:
    """An event that is set once and stays set; any number of waiters, any number of times."""

    def __init__(self) -> None:
        self._waiters: set[Bell] = set()
        self._set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it and wake everyone."""
        self._set = True
        for waiter in self._waiters.copy():
            waiter.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False when ``timeout`` seconds passed first."""
        if self._set:
            return True
        bell: Bell = queue.SimpleQueue()
        try:
            self._waiters.add(bell)
            if not self._set:  # else it was set before it could see the bell
                heard(bell, timeout)
        finally:
            self._waiters.discard(bell)
        return self._set


def holding(lock: threading.RLock, work: Callable[[], T]) -> T:
    """Do ``work`` while holding ``lock``; an interrupt at any moment leaves it free.

    The lock knows its owner, so that giving back what wasn't acquired yet is told apart.
    """
    try:
        lock.acquire()
        return work()
    finally:
        try:  # noqa: SIM105 - suppress() would be a call, and thus a place for an interrupt
            lock.release()
        except RuntimeError:
            pass  # interrupted before it was acquired

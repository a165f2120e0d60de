"""Waiting that an interrupt can end at any moment without leaving a lock held.

``threading.Event`` and ``Condition`` take their lock in Python code: a ``KeyboardInterrupt`` that
is raised just after the lock was taken leaves it taken, and whoever sets the event then hangs,
which here would be the engine. These wait in a queue implemented in C, one for each waiter, so
that an interrupted waiter leaves nothing but garbage behind.
"""

from __future__ import annotations

import contextlib
import queue
import threading

Bell = queue.SimpleQueue[None]
"""What one waiter waits on."""


class Latch:
    """An event that is set once and stays set; any number of waiters, any number of times."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # `with` on a C lock can't be interrupted half-way
        self._waiters: list[Bell] = []
        self._set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it and wake everyone."""
        with self._lock:
            self._set = True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False when ``timeout`` seconds passed first."""
        bell: Bell = queue.SimpleQueue()
        with self._lock:
            if self._set:
                return True
            self._waiters.append(bell)
        try:
            bell.get(timeout=timeout)
        except queue.Empty:
            with self._lock, contextlib.suppress(ValueError):
                self._waiters.remove(bell)
        return self._set

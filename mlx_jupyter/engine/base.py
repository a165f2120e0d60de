"""What an engine is made of: one thread, what it works with, and the tickets that it owes an end.

Posting and ending are kept together here, since each ticket must end exactly once, however the
two meet.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, TypeVar

from mlx_jupyter.engine.thread import EngineThread
from mlx_jupyter.errors import EngineClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_jupyter.engine.request import Ticket
    from mlx_jupyter.engine.thread import Job
    from mlx_jupyter.engine.workshop import Workshop

_E = TypeVar("_E", bound="EngineBase")


class EngineBase:
    """A workshop with its thread; ends when closed, when nobody holds it, or with the process.

    Args:
        shop: what the thread works with.
    """

    def __init__(self, shop: Workshop) -> None:
        self._shop = shop
        self._tickets: dict[int, Ticket] = {}  # single operations only: many threads share it
        self._numbers = itertools.count(1)
        self._thread = EngineThread(at_end=shop.abandon, idle=shop.idle)
        self._finalizer = weakref.finalize(self, _end_for_good, self._thread, self._tickets)

    def _post(self, ticket: Ticket, job: Callable[[Ticket, Callable[[], None]], Job]) -> Ticket:
        number = next(self._numbers)

        def forget() -> None:
            self._tickets.pop(number, None)

        self._tickets[number] = ticket
        try:
            self._thread.post(job(ticket, forget))
        except EngineClosed:
            forget()
            raise
        except BaseException:
            # Interrupted, perhaps after the job was queued; then it ends before this call comes.
            ticket.cancel()
            self._thread.post(_Then(forget))
            raise
        return ticket

    def close(self) -> None:
        """End: cancel what runs, refuse what is queued, free the memory. Idempotent; waits."""
        _end(self._thread, self._tickets)
        self._finalizer.detach()

    def __enter__(self: _E) -> _E:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Then:
    """A job that comes after another one."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.run = function

    def refuse(self, error: Exception) -> None:
        del error
        self.run()


def _end(thread: EngineThread, tickets: dict[int, Ticket]) -> None:
    """End an engine's thread; waits."""
    thread.shut()  # first, so that no request comes in that nobody cancels
    for ticket in tickets.copy().values():
        ticket.cancel()
    thread.close()


def _end_for_good(thread: EngineThread, tickets: dict[int, Ticket]) -> None:
    """At exit, or when the engine was dropped. A busy thread would abort the process's exit."""
    try:
        _end(thread, tickets)
    except KeyboardInterrupt:
        _end(thread, tickets)

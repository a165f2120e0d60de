"""A request followed event by event."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from mlx_jupyter.engine.request import Failed
from mlx_jupyter.errors import Cancelled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_jupyter.engine.request import Event, Ticket


class Stream:
    """Iterator over a ticket's events; a failure is raised.

    Closing or dropping it, started or not, cancels the request, and so does an interrupt, which
    raises ``Cancelled``. Usable as a context manager.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._events = ticket.events()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            event = next(self._events)
        except KeyboardInterrupt:
            self._ticket.cancel()
            raise Cancelled(self._ticket.settle()) from None
        if isinstance(event, Failed):
            raise event.fresh()
        return event

    def close(self) -> None:
        """Cancel the request; there are no more events."""
        self._ticket.cancel()
        self._events = iter(())

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never made
            self._ticket.cancel()

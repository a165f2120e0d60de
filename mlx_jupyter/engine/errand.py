"""Work on the engine thread that somebody waits for, tells of its progress and can be cancelled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_jupyter.engine.request import Failed, Kept, Loading
from mlx_jupyter.engine.serve import TicketJob
from mlx_jupyter.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_jupyter.conversation.answer import Answer

A_WHILE = 0.3
"""Seconds after which progress is told."""


@dataclass(slots=True)
class Errand(TicketJob):
    """A ticket's piece of work on the engine thread.

    Attributes:
        work: does it; what it gives ends the ticket.
    """

    work: Callable[[Errand], Any]

    def _done(self) -> Kept:
        self.pause()
        return Kept(self.work(self))

    def pause(self) -> None:
        """Raise ``Interrupted`` when the ticket was cancelled."""
        if self.ticket.cancelled:
            raise Interrupted

    def stopped(self) -> bool:
        """Whether the ticket was cancelled."""
        return self.ticket.cancelled

    def told(self, text: str) -> Callable[[int, int], None]:
        """Reports how much of something is done, once it takes a while."""
        began = self.shop.clock()

        def tell(done: int, total: int) -> None:
            if self.shop.clock() - began > A_WHILE:
                self.ticket.emit(Loading(text, done, total))

        return tell

    def _partial(self) -> Answer:
        return self.ticket.partial()

    def _failed(self, error: Exception) -> Failed:
        return Failed(error)

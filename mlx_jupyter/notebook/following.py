"""Follows tickets in a cell: one, or those of several models one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_jupyter.errors import Cancelled, LLMError
from mlx_jupyter.notebook.interrupt import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_jupyter.conversation.answer import Answer
    from mlx_jupyter.engine.engine import Engine
    from mlx_jupyter.engine.request import Ticket
    from mlx_jupyter.notebook.chat import Exchange
    from mlx_jupyter.notebook.columns import Board
    from mlx_jupyter.notebook.display import Screen


def follow(ticket: Ticket, interrupts: Interrupts, screen: Screen) -> None:
    """Show the ticket's events until its end or an interrupt; nothing runs on unseen."""
    try:
        for batch in interrupts.follow(ticket):
            screen.show(batch)
    except BaseException:
        ticket.cancel()
        raise


def run_each(
    engine: Engine,
    exchanges: Sequence[Exchange],
    board: Board,
    finish: Callable[[Ticket, Screen, Exchange], Answer],
) -> tuple[tuple[Answer, ...], LLMError | Cancelled | None]:
    """Send each exchange when the one before it has ended, each to its own column.

    A model that fails doesn't keep the others from answering; an interrupt does.

    Args:
        engine: answers them.
        exchanges: one for each model.
        board: their columns, in the same order.
        finish: keeps and shows what became of a ticket.

    Returns:
        The answers that there are, the one that an interrupt cut short last, and what to raise:
        the first failure, or the interrupt.
    """
    answers: list[Answer] = []
    failures: list[LLMError] = []
    with Interrupts() as interrupts:
        for exchange, screen in zip(exchanges, board.screens, strict=True):
            if interrupts.count:
                break
            try:
                request = engine.request(exchange.prompt, owner=exchange.owner, **exchange.how)
                ticket = engine.submit(request)
                follow(ticket, interrupts, screen)
                answers.append(finish(ticket, screen, exchange))
            except LLMError as error:
                failures.append(error)
                screen.tell(f"{type(error).__name__}: {error}")
        board.close()
    if interrupts.count and answers:
        cancelled = Cancelled(answers[-1])
        count = f"{len(answers)} of {len(exchanges)} models answered"
        cancelled.args = (f"Interrupted; {count}, what there is is kept.",)
        return tuple(answers), cancelled
    return tuple(answers), failures[0] if failures else None

"""Saving, restoring and forgetting a conversation: between its turns and the engine.

Each is a ticket that the caller follows, so that it shows progress and can be interrupted; an
interrupt leaves everything as it was. Knows no IPython and no MLX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_jupyter.conversation.conversation import turns_of
from mlx_jupyter.conversation.saved import Saved
from mlx_jupyter.conversation.turn import check_name
from mlx_jupyter.errors import BadRequest, Cancelled

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from mlx_jupyter.conversation.turn import Turn
    from mlx_jupyter.engine.engine import Engine
    from mlx_jupyter.engine.request import Ticket


def save(engine: Engine, name: str, path: str | PathLike[str] | None = None) -> Ticket:
    """Write a branch's turns, and what is cached of them, to a file.

    Args:
        engine: has the branch.
        name: of the branch.
        path: the file; None for a private place of its own.

    Raises:
        BadRequest: there is no such branch, or it has no turns.
    """
    turns = turns_of(engine)
    name = check_name(name)
    log = turns.log(name)
    if not log:
        raise BadRequest(f"@{name} has no turns yet, so there is nothing to save.")
    return engine.submit_save(Saved.of(name, log), turns.messages(log[-1].id), path)


def restore(
    engine: Engine,
    name: str | None,
    path: str | PathLike[str] | None = None,
    model: str | None = None,
) -> Ticket:
    """Bring a saved conversation back as a branch that goes on like any other.

    Args:
        engine: gets the branch.
        name: of the branch; None for the one in the file.
        path: the file; None for the private place of that name.
        model: loaded if the file has pages and no model is there; None for the default one.

    Raises:
        BadRequest: neither a name nor a file, or the name is taken.
    """
    turns = turns_of(engine)
    if name is None and path is None:
        raise BadRequest("Say which conversation: its name, or its file.")
    if name is not None:
        turns.check_free(name)
    call = turns.caller()
    session = call.session if call is not None else None

    def put(saved: Saved) -> None:
        turns.revive(saved.name, saved.log(session))

    return engine.submit_restore(None if name is None else check_name(name), path, put, model)


def forget(engine: Engine, name: str) -> Ticket:
    """Remove what is cached of a branch for good; the branch itself goes with ``forgotten``.

    What other branches and cells still reach stays. A name without a branch removes what a saved
    file or an earlier branch of that name has left.
    """
    own, others = turns_of(engine).around(name)
    return engine.submit_forget(check_name(name), _paths(own), _paths(others))


def forgotten(engine: Engine, name: str) -> None:
    """Take the branch away, if it is there."""
    turns = turns_of(engine)
    if check_name(name) in turns.branches:
        turns.drop(name)


def wait(ticket: Ticket, undone: str) -> Any:
    """What a ticket ends with; waits.

    Raises:
        Cancelled: interrupted; ``undone`` says what didn't happen.
        LLMError: it failed.
    """
    from mlx_jupyter.engine.request import Failed, Kept

    try:
        ticket.wait()
    except KeyboardInterrupt:
        ticket.cancel()
        ticket.wait()  # nothing half-done runs on unseen
    outcome = ticket.outcome
    if isinstance(outcome, Failed):
        raise outcome.fresh()
    if isinstance(outcome, Kept):
        return outcome.value
    error = Cancelled(ticket.partial())
    error.args = (f"Interrupted; {undone}.",)
    raise error


def _paths(turns: Iterable[Turn]) -> list[tuple[str, tuple[int, ...]]]:
    """(model, ids) of each turn's prompt and answer, where they are known."""
    return [
        (turn.answer.model, turn.answer.prompt_ids + tuple(turn.answer.tokens))
        for turn in turns
        if turn.answer.prompt_ids
    ]

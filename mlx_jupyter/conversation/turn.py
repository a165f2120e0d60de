"""What the tree of turns is made of: calls, turns, places, branches and their names. Plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_jupyter.errors import BadRequest

if TYPE_CHECKING:
    from mlx_jupyter.conversation.answer import Answer, Message


@dataclass(frozen=True, slots=True)
class Call:
    """Who asks.

    Attributes:
        session: the client's session, so that a copied notebook isn't the first one.
        cell: the cell's id.
        index: how many calls this run of the cell made before.
        run: names this run of the cell; not part of the identity. Without it a call whose index
            isn't above the last one's begins a new run.
    """

    session: str
    cell: str
    index: int
    run: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer.

    Attributes:
        id: unique among the kernel's turns.
        parent: the turn before; None for the first.
        question: the user's message.
        answer: what the model made of it, the partial one after a cancel.
        call: who asked; None for clients without cell ids.
        system: the system prompt given with this turn; it holds from here on.
    """

    id: int
    parent: int | None
    question: Message
    answer: Answer
    call: Call | None = None
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn will go.

    Attributes:
        branch: name of the branch; made at the commit when there is none.
        parent: the turn it hangs on; None at the root.
        call: who asks.
        fresh: whether it is the first turn of a new run that replaces an older one's.
        origin: where the branch starts when this turn makes it, such as ``"demo~1"``.
    """

    branch: str
    parent: int | None
    call: Call | None = None
    fresh: bool = False
    origin: str | None = None


@dataclass(slots=True)
class Run:
    """The turns that the last run of a cell made on a branch, in order."""

    name: str
    index: int
    turns: list[int]


@dataclass(slots=True)
class Branch:
    """A tip and what reruns need.

    ``runs`` is by (session, cell); ``loose`` are turns without a call; ``ends`` are replaced
    turns that were the last of their cell's run; ``source`` is the branch it was forked from.
    """

    tip: int | None = None
    runs: dict[tuple[str, str], Run] = field(default_factory=dict)
    loose: set[int] = field(default_factory=set)
    ends: set[int] = field(default_factory=set)
    source: str | None = None


def check_name(name: str) -> str:
    """A branch's name without its ``@``.

    Raises:
        BadRequest: it isn't a word of letters, digits, ``_``, ``-`` and ``.``.
    """
    bare = name.removeprefix("@")
    if not re.fullmatch(r"\w[\w.-]*", bare):
        raise BadRequest(f"{name!r} is no branch name; take letters, digits, '_', '-' and '.'.")
    return bare


def split(ref: str) -> tuple[str, int]:
    """``"demo~2"`` as (name, turns back).

    Raises:
        BadRequest: it has another form.
    """
    name, tilde, back = ref.partition("~")
    if tilde and not (back.isascii() and back.isdigit()):
        raise BadRequest(f"{ref!r} names no turn; write BRANCH or BRANCH~N, N turns back.")
    return check_name(name), int(back or 0)


def goes_on(run: Run, call: Call) -> bool:
    """Whether a call belongs to the same run of its cell as the turns of ``run``."""
    if run.name and call.run:
        return run.name == call.run
    return call.index > run.index


def index_of(turn: Turn) -> int:
    """Which call of its cell made a turn; 0 for one without a cell."""
    return turn.call.index if turn.call else 0

"""Between a command and the turns: what to send, whom it belongs to, where the answer is kept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_jupyter import runtime
from mlx_jupyter.conversation.answer import Message
from mlx_jupyter.conversation.conversation import turns_of
from mlx_jupyter.notebook.config import SAMPLING
from mlx_jupyter.notebook.reports import Page, Report
from mlx_jupyter.units import human_bytes

if TYPE_CHECKING:
    from mlx_jupyter.conversation.answer import Answer
    from mlx_jupyter.conversation.turn import Place, Turn
    from mlx_jupyter.conversation.turns import Turns
    from mlx_jupyter.engine.engine import Engine
    from mlx_jupyter.notebook.commands import Ask
    from mlx_jupyter.notebook.identity import Calls


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question on its way.

    Attributes:
        prompt: for ``Engine.request``: the text, or the conversation with the question at its end.
        how: its other arguments.
        owner: the branch or cell that keeps the result reachable.
        continued: it goes on where an earlier turn of its branch ended.
    """

    prompt: str | tuple[Message, ...]
    how: dict[str, Any]
    owner: str | None
    continued: bool = False
    _turns: Turns | None = None
    _place: Place | None = None
    _system: str | None = None

    def keep(self, answer: Answer) -> None:
        """Add the answer to its branch, if it has one."""
        if self._turns is not None and self._place is not None:
            self._turns.commit(self._place, self.question, answer, self._system)

    @property
    def question(self) -> Message:
        """The user's message."""
        last = self.prompt if isinstance(self.prompt, str) else self.prompt[-1]
        return Message("user", last) if isinstance(last, str) else last


class Chat:
    """The branches of the kernel's engine."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def attach(self, engine: Engine) -> Turns:
        """The engine's turns, told from now on who asks (``Conversation.ask`` in a cell too)."""
        turns = turns_of(engine)
        turns.caller = self._calls.next
        return turns

    def exchanges(self, ask: Ask, engine: Engine) -> tuple[Exchange, ...]:
        """What a command sends to each of its models, and where the answers go.

        All models are asked the same. On a branch, the first one's answer is the branch's turn;
        each other one's goes to a branch beside it, ``NAME.MODEL``, that starts at the same place.

        Raises:
            BadRequest: ``--from`` names no turn, or another conversation has the branch's name.
        """
        turns = self.attach(engine)
        call = self._calls.next()
        how: dict[str, Any] = {
            name: value for name in SAMPLING if (value := getattr(ask, name)) is not None
        }
        how |= {"stop": ask.stop} if ask.stop else {}
        how |= {"context": ask.context} if ask.context is not None else {}
        how |= {"adapter": ask.adapter} if ask.adapter is not None else {}
        named = [{"model": model} for model in ask.models] or [{}]
        if ask.branch is None:
            how |= {"raw": True} if ask.raw else {}
            how |= {"system": ask.system} if ask.system is not None else {}
            owner, label = self._calls.owner(call), self._calls.label(call)
            return tuple(
                Exchange(
                    ask.prompt,
                    {**how, **model, "label": f"{label} {model['model']}" if i else label},
                    f"{owner}/{model['model']}" if i else owner,
                )
                for i, model in enumerate(named)
            )
        origin = f"{ask.origin.branch}~{ask.origin.back}" if ask.origin is not None else None
        place = turns.start(ask.branch, call, origin)
        messages = (*turns.messages(place.parent, ask.system), Message("user", ask.prompt))
        continued = place.parent is not None and not place.fresh
        beside = [turns.beside(place, f"{place.branch}.{_word(m)}") for m in ask.models[1:]]
        return tuple(
            Exchange(messages, {**how, **model}, f"@{at.branch}", continued, turns, at, ask.system)
            for model, at in zip(named, (place, *beside), strict=True)
        )

    # --- looking -----------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The branches, in the order in which they were made."""
        engine = runtime.current()
        return list(turns_of(engine).branches) if engine is not None else []

    def branches(self, engine: Engine) -> Report:
        """``%llm branches``."""
        turns = turns_of(engine)
        rows = []
        for name in turns.branches:
            log, stale = turns.log(name), len(turns.stale(name))
            last = _clip(log[-1].question.content) if log else ""
            rows.append((f"@{name}", str(len(log)), str(stale) if stale else "", last))
        if not rows:
            return Report(title="No branches yet. %%llm @name begins one.", data=())
        note = ""
        if any(row[2] for row in rows):
            note = "Stale turns take their place again when their cells are run."
        head = ("branch", "turns", "stale", "last question")
        return Report(head=head, rows=tuple(rows), note=note, data=tuple(turns.branches))

    def log(self, branch: str, engine: Engine) -> Report:
        """``%llm log @branch``.

        Raises:
            BadRequest: no such branch.
        """
        log = turns_of(engine).log(branch)
        rows = []
        for number, turn in enumerate(log, 1):
            if turn.system is not None:
                rows.append((str(number), "system", turn.system))
            rows.append((str(number), "user", turn.question.content))
            rows.append((str(number), "assistant", _told(turn)))
        return Report(title=f"@{branch}", rows=tuple(rows), data=log)

    def drop(self, branch: str, engine: Engine) -> Page:
        """``%llm drop @branch``.

        Raises:
            BadRequest: no such branch.
        """
        turns_of(engine).drop(branch)
        engine.release(f"@{branch}")
        return Page(f"@{branch} is forgotten.", branch)

    def pin(self, branch: str, engine: Engine, *, on: bool) -> Page:
        """``%llm pin @branch`` and ``%llm unpin @branch``.

        Raises:
            BadRequest: nothing is cached for it, or it isn't pinned.
        """
        if on:
            held = engine.pin(f"@{branch}")
            return Page(f"@{branch} is pinned; {human_bytes(held)} of it are stored now.", held)
        engine.unpin(f"@{branch}")
        return Page(f"@{branch} may be given up again when room is needed.", branch)


def _told(turn: Turn) -> str:
    return turn.answer.text + (" (interrupted)" if turn.answer.finish == "cancelled" else "")


def _word(model: str) -> str:
    """A model's name as a part of a branch's."""
    return re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2])


def _clip(text: str, room: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= room else line[: room - 1] + "…"

"""A conversation from Python: the same branches that ``%%llm @name`` continues.

Asking commits a turn when there is an answer, the partial one after a cancel too; a failed
request changes nothing.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from mlx_jupyter.conversation.answer import Answer, Message
from mlx_jupyter.conversation.turns import Turn, Turns
from mlx_jupyter.errors import BadRequest, Cancelled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    class Generator(Protocol):
        """What a conversation needs of an engine."""

        def generate(
            self,
            prompt: Sequence[Message],
            *,
            model: str | None = None,
            owner: str | None = None,
            **options: Any,
        ) -> Answer:
            """Answer a list of messages."""


_turns: weakref.WeakKeyDictionary[Any, Turns] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def turns_of(engine: Any) -> Turns:
    """The turns of all conversations with an engine."""
    with _lock:
        return _turns.setdefault(engine, Turns())


class Conversation:
    """A branch of turns with a model.

    Args:
        engine: answers the questions.
        name: the branch, an existing one or a new one; a free name is chosen when not given.
        system: the system prompt of the turns to come.

    Attributes:
        name: the branch's name.
        system: the system prompt of the turns to come; None keeps the branch's.
    """

    def __init__(
        self, engine: Generator, name: str | None = None, system: str | None = None
    ) -> None:
        self._engine = engine
        self._tree = turns_of(engine)
        self.name = self._tree.open(name)
        self.system = system

    def ask(
        self, text: str, *, model: str | None = None, system: str | None = None, **options: Any
    ) -> Answer:
        """Ask the next question and wait for the answer.

        Args:
            text: the question.
            model: which model answers; the current one when None.
            system: a system prompt from this turn on.
            **options: as in ``Engine.generate``: ``max_tokens``, ``temperature``, ``seed``, …

        Raises:
            BadRequest: an empty question or a bad option.
            Cancelled: interrupted; the partial answer is the branch's last turn.
            LLMError: the request failed; the conversation is as it was.
        """
        if not isinstance(text, str) or not text.strip():
            raise BadRequest("The question is empty. Write something for the model to answer.")
        question = Message("user", text)
        given = system if system is not None else self.system
        place = self._tree.start(self.name, self._tree.caller())
        messages = (*self._tree.messages(place.parent, given), question)
        try:
            answer = self._engine.generate(messages, model=model, owner=f"@{self.name}", **options)
        except Cancelled as cancelled:
            self._tree.commit(place, question, cancelled.answer, given)
            raise
        self._tree.commit(place, question, answer, given)
        return answer

    def fork(self, name: str, back: int = 0) -> Conversation:
        """A new branch that starts ``back`` turns before this one's end.

        Raises:
            BadRequest: the name belongs to another conversation, or there are fewer turns.
        """
        self._tree.fork(self.name, name, back)
        return Conversation(self._engine, name, self.system)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns from the first to the last."""
        return self._tree.log(self.name) if self.name in self._tree.branches else ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as messages, the system prompt first."""
        tip = self._tree.branches.get(self.name)
        return self._tree.messages(tip, self.system)

    def __len__(self) -> int:
        return len(self.turns)

    def __repr__(self) -> str:
        return f"Conversation(@{self.name}, {len(self)} turns)"

"""A conversation from Python: the same branches that ``%%llm @name`` continues.

Asking commits a turn when there is an answer, the partial one after a cancel too; a failed
request changes nothing.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, cast

from mlx_jupyter.conversation.answer import Answer, Message
from mlx_jupyter.conversation.turns import Turns
from mlx_jupyter.errors import BadRequest, Cancelled

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike
    from typing import Protocol

    from mlx_jupyter.cache.forgetting import Removed
    from mlx_jupyter.conversation.turn import Turn
    from mlx_jupyter.engine.keeping import Receipt

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

    def save(self, path: str | PathLike[str] | None = None) -> Receipt:
        """Write the turns and what is cached of them to a file that only its user can read.

        Args:
            path: the file, with the suffix ``.llm.safetensors`` unless it has one; None for a
                private place, from which ``restore`` brings the conversation back by its name.

        Raises:
            BadRequest: there are no turns, another kind of file is there, or it can't be written.
            Cancelled: interrupted; what was there is there still.
        """
        from mlx_jupyter.conversation import keeping

        ticket = keeping.save(cast("Any", self._engine), self.name, path)
        receipt: Receipt = keeping.wait(ticket, f"@{self.name} isn't saved")
        return receipt

    @classmethod
    def restore(
        cls, engine: Any, path: str | PathLike[str] | None = None, name: str | None = None
    ) -> Conversation:
        """A conversation that ``save`` wrote, as a branch that goes on like any other.

        A file is taken as hostile. Its turns come back whatever model is loaded; the pages in it
        are used where the model is exactly the one that made them. Those of a file given by its
        path are compared with what the model computes, in a sample, and used by this conversation
        alone: whoever made the file on purpose could still have put other numbers in them.

        Args:
            engine: gets the conversation.
            path: the file; None for the private place of that name.
            name: of the branch; None for the one in the file.

        Raises:
            BadRequest: the name is taken, there is no such file, or it isn't a sound one of ours.
            Cancelled: interrupted; nothing came back.
        """
        from mlx_jupyter.conversation import keeping

        restored = keeping.wait(keeping.restore(engine, name, path), "nothing is restored")
        return cls(engine, restored.name)

    def forget(self) -> Removed:
        """Remove the conversation for good, in memory and on disk, earlier versions included.

        Pages that other conversations and cells still reach stay, and so do files that were saved
        to a place of their own. What other kernels have computed for themselves is theirs.
        """
        from mlx_jupyter.conversation import keeping

        ticket = keeping.forget(cast("Any", self._engine), self.name)
        removed: Removed = keeping.wait(ticket, f"@{self.name} is still there")
        keeping.forgotten(cast("Any", self._engine), self.name)
        return removed

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

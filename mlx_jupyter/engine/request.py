"""A request, its options, its events and the ticket through which a caller follows it.

A ticket always ends with exactly one terminal event (``Done`` or ``Failed``). Any number of
readers may read the events or wait for the end, any number of times: events are kept, never
consumed. The stream is unbounded, so a reader that went away can't hold up the engine.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from mlx_jupyter.conversation.answer import Answer, Message
from mlx_jupyter.engine.options import DEFAULTS as DEFAULTS
from mlx_jupyter.engine.options import Options as Options
from mlx_jupyter.engine.options import whole
from mlx_jupyter.errors import BadRequest
from mlx_jupyter.latch import Bell, Latch, heard
from mlx_jupyter.models.messages import normalise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_jupyter.models.info import ModelInfo

Source = Literal["cached", "prefilled", "generated"]


@dataclass(frozen=True, slots=True)
class Request:
    """What to answer.

    Exactly one of ``messages``, ``text`` and ``tokens`` is given.

    Attributes:
        messages: a conversation, rendered by the model's chat template.
        text: a raw prompt: control tokens in it are parsed, no template.
        tokens: ids as they are.
        options: sampling options and limits.
        model: short name or source; the current model when None, the default one when none is
            loaded.
        adapter: a directory with weights that go on top of the model's; None for none.
        owner: the cell or branch that keeps the result reachable (replaced at its next request).
        label: how to show the owner to people; the owner itself when None.
    """

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    options: Options = field(default_factory=Options)
    model: str | None = None
    adapter: str | None = None
    owner: str | None = None
    label: str | None = None

    def checked(self) -> Request:
        """The request in plain Python values.

        Raises:
            BadRequest: it is malformed, as far as that can be told without the model.
        """
        given = (self.messages, self.text, self.tokens)
        if sum(x is not None for x in given) != 1:
            raise BadRequest("A request takes one of messages, text and tokens.")
        for name in ("text", "model", "adapter", "owner", "label"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise BadRequest(f"{name} takes text, not {value!r}.")
        tokens = None if self.tokens is None else _ids(self.tokens)
        if self.text == "" or tokens == ():
            raise BadRequest("The prompt is empty. Write something for the model to answer.")
        messages = None if self.messages is None else normalise(self.messages)
        return replace(self, messages=messages, tokens=tokens, options=self.options.checked())


def _ids(tokens: Any) -> tuple[int, ...]:
    try:
        given = tuple(tokens)
    except TypeError:
        raise BadRequest(f"tokens takes a list of ids, not {tokens!r}.") from None
    return tuple(_id(each) for each in given)


def _id(value: Any) -> int:
    token = whole(value)
    if token is None:
        raise BadRequest(f"tokens takes ids (whole numbers), not {value!r}.")
    if not 0 <= token < 2**31:
        raise BadRequest(f"{token} is no token id.")
    return token


@dataclass(frozen=True, slots=True)
class Loading:
    """A model is being fetched or loaded; ``done`` of ``total`` in units named by ``text``."""

    text: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Prefill:
    """``done`` of ``total`` prompt tokens are in the cache, ``cached`` of them restored."""

    done: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: the token id.
        text: text that became certain with it (may be empty while a character or a possible
            stop string is incomplete).
        logprob: natural log-probability under the raw logits.
        source: where it came from.
    """

    id: int
    text: str
    logprob: float
    source: Source = "generated"


@dataclass(frozen=True, slots=True)
class Tail:
    """Text that was held back and became certain with the end token; the last before the end."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The end: the answer, also after a cancel (``answer.finish == "cancelled"``)."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Failed:
    """The end: the request failed; the engine is sound. ``answer`` is what there was by then."""

    error: Exception
    answer: Answer | None = None

    def fresh(self) -> Exception:
        """The error, to raise once more: without the frames that the last raise left in it."""
        return self.error.with_traceback(None)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a load: the model is there."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Kept:
    """The end of a save, a restore or a removal of a conversation: ``value`` says what was done."""

    value: Any


Terminal = Done | Failed | Loaded | Kept
Event = Loading | Prefill | Token | Tail | Terminal


class Ticket:
    """The caller's side of a submitted request; all methods may be called from any thread."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt_ids: tuple[int, ...] = ()
        self.model = request.model or ""
        self.seed = 0
        self._cancel = Latch()
        self._ended = Latch()
        self._readers: set[Bell] = set()
        self._events: list[Event] = []

    # --- the engine's side -------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Append an event; a terminal one ends the ticket. Events after the end are a bug."""
        assert not self._ended.is_set(), "event after the terminal one"
        self._events.append(event)
        if isinstance(event, Terminal):
            self._ended.set()
        for reader in self._readers.copy():
            if reader.empty():
                reader.put(None)

    # --- the caller's side -------------------------------------------------------------------

    def cancel(self) -> None:
        """Ask the engine to stop at the next safe point; returns at once."""
        self._cancel.set()

    @property
    def cancelled(self) -> bool:
        """Whether a stop was asked for."""
        return self._cancel.is_set()

    @property
    def ended(self) -> bool:
        """Whether the terminal event is there."""
        return self._ended.is_set()

    @property
    def outcome(self) -> Terminal | None:
        """The terminal event, once it is there."""
        last = self._events[-1] if self._events else None
        return last if isinstance(last, Terminal) else None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when ``timeout`` seconds passed first."""
        return self._ended.wait(timeout)

    def events(self) -> Iterator[Event]:
        """Every event from the first to the terminal one, as they come."""
        for batch in self.batches(0.0):
            yield from batch

    def batches(self, interval: float = 0.05) -> Iterator[list[Event]]:
        """The events in batches: the first as soon as it is there, then one each ``interval`` s.

        Waking once a batch and not once a token keeps the reader from slowing the engine down
        (both share Python's lock).
        """
        bell: Bell = queue.SimpleQueue()
        seen = 0
        try:
            self._readers.add(bell)
            while True:
                while len(self._events) == seen:
                    heard(bell)
                if seen and interval:
                    self._ended.wait(interval)
                batch = self._events[seen:]
                seen += len(batch)
                yield batch
                if isinstance(batch[-1], Terminal):
                    return
        finally:
            self._readers.discard(bell)

    def result(self, timeout: float | None = None) -> Answer:
        """Wait for the answer.

        Raises:
            TimeoutError: ``timeout`` seconds passed.
            LLMError: the request failed.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError("the request is still running")
        outcome = self.outcome
        if isinstance(outcome, Failed):
            raise outcome.fresh()
        assert isinstance(outcome, Done), "a load has no answer"
        return outcome.answer

    def settle(self, timeout: float = 0.05) -> Answer:
        """After a cancel: the final answer if it comes within ``timeout`` s, else a partial one.

        The engine may still be finishing the chunk in flight; the prompt goes back to the user
        meanwhile.
        """
        self._ended.wait(timeout)
        outcome = self.outcome
        if isinstance(outcome, Done):
            return outcome.answer
        if isinstance(outcome, Failed) and outcome.answer is not None:
            return outcome.answer
        return self.partial()

    def partial(self) -> Answer:
        """What has been generated so far, as a cancelled answer without statistics."""
        events = self._events.copy()
        tokens = [e for e in events if isinstance(e, Token)]
        text = "".join(e.text for e in events if isinstance(e, Token | Tail))
        ids = tuple(t.id for t in tokens)
        return Answer(
            text=text,
            tokens=ids,
            prompt_ids=self.prompt_ids,
            finish="cancelled",
            model=self.model,
            seed=self.seed,
            messages=self.conversation(text, ids),
            logprobs=tuple(t.logprob for t in tokens),
        )

    def conversation(self, text: str, ids: tuple[int, ...] | None) -> tuple[Message, ...]:
        """The request's messages with the answer's; none for raw and token prompts."""
        messages = self.request.messages or ()
        return (*messages, Message("assistant", text, ids, self.model)) if messages else ()

"""A request, its options, its events and the ticket through which a caller follows it.

A ticket always ends with exactly one terminal event (``Done`` or ``Failed``). Any number of
readers may read the events or wait for the end, any number of times: events are kept, never
consumed. The stream is unbounded, so a reader that went away can't hold up the engine.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from mlx_jupyter.conversation.answer import Answer, Message
from mlx_jupyter.engine.latch import Bell, Latch
from mlx_jupyter.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_jupyter.models.info import ModelInfo

Source = Literal["cached", "prefilled", "generated"]


@dataclass(frozen=True, slots=True)
class Options:
    """Sampling options and limits. ``None`` means the model's default, then ours.

    Attributes:
        max_tokens: exact upper bound of generated tokens.
        temperature: 0 is greedy.
        top_p: nucleus sampling, in (0, 1].
        top_k: 0 is off.
        min_p: in [0, 1]; 0 is off.
        repetition_penalty: > 0; 1 is off. Sees the whole context, cached tokens included.
        seed: of the sampling; drawn at random when not given.
        stop: generation ends before any of these strings.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, **options: Any) -> Options:
        """Options by name, checked.

        Raises:
            BadRequest: an unknown name, a wrong type or a value out of range.
        """
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise BadRequest(f"Unknown option {name!r}. Known: {', '.join(sorted(known))}.")
        stop = options.pop("stop", ()) or ()
        if isinstance(stop, str):
            stop = (stop,)
        made = cls(stop=tuple(stop), **options)
        made.check()
        return made

    def check(self) -> None:
        """Raise ``BadRequest`` when a value has a wrong type or is out of range."""
        _integer("max_tokens", self.max_tokens, 1, None)
        _number("temperature", self.temperature, 0, 100)
        _number("top_p", self.top_p, 0, 1, open_low=True)
        _integer("top_k", self.top_k, 0, None)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        _integer("seed", self.seed, 0, 2**64 - 1)
        for s in self.stop:
            if not isinstance(s, str) or not s:
                raise BadRequest(f"stop takes non-empty strings, not {s!r}.")

    def over(self, defaults: Options) -> Options:
        """These options, with what they leave open taken from ``defaults``."""
        left_open = {
            f.name: getattr(defaults, f.name)
            for f in fields(self)
            if getattr(self, f.name) in (None, ())
        }
        return replace(self, **left_open)


DEFAULTS = Options(
    max_tokens=1024, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0
)
"""Ours: greedy, so that rerunning a cell gives the same answer unless asked otherwise."""


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} takes a number, not {value!r}.")
    if not low <= value <= high or (open_low and value == low):
        raise BadRequest(
            f"{name} must be {'above' if open_low else 'from'} {low} to {high}, not {value}."
        )


def _integer(name: str, value: Any, low: int, high: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name} takes a whole number, not {value!r}.")
    if value < low or (high is not None and value > high):
        raise BadRequest(f"{name} must be at least {low}, not {value}.")


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
        owner: the cell or branch that keeps the result reachable (replaced at its next request).
        label: how to show the owner to people; the owner itself when None.
    """

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    options: Options = field(default_factory=Options)
    model: str | None = None
    owner: str | None = None
    label: str | None = None


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
class Done:
    """The end: the answer, also after a cancel (``answer.finish == "cancelled"``)."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Failed:
    """The end: the request failed; the engine is sound. ``answer`` is what there was by then."""

    error: Exception
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a load: the model is there."""

    info: ModelInfo


Terminal = Done | Failed | Loaded
Event = Loading | Prefill | Token | Terminal


class Ticket:
    """The caller's side of a submitted request; all methods may be called from any thread."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt_ids: tuple[int, ...] = ()
        self.model = request.model or ""
        self.seed = 0
        self._cancel = Latch()
        self._ended = Latch()
        self._lock = threading.Lock()
        self._readers: list[Bell] = []
        self._events: list[Event] = []

    # --- the engine's side -------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Append an event; a terminal one ends the ticket. Events after the end are a bug."""
        with self._lock:
            assert not self._ended.is_set(), "event after the terminal one"
            self._events.append(event)
            readers = list(self._readers)
        if isinstance(event, Terminal):
            self._ended.set()
        for reader in readers:
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
        with self._lock:
            self._readers.append(bell)
        seen = 0
        try:
            while True:
                while len(self._events) == seen:
                    bell.get()
                if seen and interval:
                    self._ended.wait(interval)
                batch = self._events[seen:]
                seen += len(batch)
                yield batch
                if isinstance(batch[-1], Terminal):
                    return
        finally:
            with self._lock:
                self._readers.remove(bell)

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
            raise outcome.error
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
        tokens = [e for e in list(self._events) if isinstance(e, Token)]
        return Answer(
            text="".join(t.text for t in tokens),
            tokens=tuple(t.id for t in tokens),
            prompt_ids=self.prompt_ids,
            finish="cancelled",
            model=self.model,
            seed=self.seed,
            logprobs=tuple(t.logprob for t in tokens),
        )

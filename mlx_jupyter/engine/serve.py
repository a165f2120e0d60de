"""The jobs of the engine thread: serve one request, load one model.

Each ends its ticket with exactly one terminal event, after the cache is sound again and what
changed is published: whoever sees the end may ask for the next thing at once.
"""

from __future__ import annotations

import logging
import secrets
import sys
import traceback
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_jupyter.conversation.answer import Answer
from mlx_jupyter.engine.context import in_force
from mlx_jupyter.engine.options import DEFAULTS, Options
from mlx_jupyter.engine.pipeline import Run
from mlx_jupyter.engine.request import (
    Done,
    Failed,
    Loaded,
    Loading,
    Request,
    Terminal,
    Ticket,
)
from mlx_jupyter.engine.sampling import Sampling
from mlx_jupyter.engine.stats import Moments
from mlx_jupyter.engine.text import TextStream
from mlx_jupyter.errors import BadRequest, ComputeError, ContextOverflow, Interrupted, LLMError
from mlx_jupyter.latch import holding
from mlx_jupyter.models import adapters
from mlx_jupyter.models.codec import codec_of
from mlx_jupyter.models.shortage import is_shortage
from mlx_jupyter.models.sources import DEFAULT_MODEL
from mlx_jupyter.models.template import encode_raw, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_jupyter.cache.plan import Cause, Plan
    from mlx_jupyter.cache.session import Session
    from mlx_jupyter.cache.view import MarkKind
    from mlx_jupyter.engine.workshop import Workshop
    from mlx_jupyter.models.pool import LoadedModel

log = logging.getLogger(__name__)

SWITCH_INTERVAL = 0.0002
"""Seconds between two switches of Python's lock while a request runs. At Python's own 5 ms a busy
main thread (a streaming cell) halves the decode speed; at this it costs a few per cent."""


def prompt_ids(
    shop: Workshop, loaded: LoadedModel, request: Request
) -> tuple[tuple[int, ...], np.ndarray, tuple[tuple[int, MarkKind], ...]]:
    """The prompt's ids (as a tuple and as int32) and the offsets that will be come back to.

    Args:
        shop: what the engine works with.
        loaded: the model that it is for.
        request: as ``as_served`` gave it.

    Raises:
        BadRequest: the tokenizer is missing, the template refuses, an id is out of range.
    """
    marks: tuple[tuple[int, MarkKind], ...] = ()
    tokenizer = loaded.tokenizer  # once: another thread may be unloading the model
    if request.tokens is not None:
        ids = request.tokens
        if loaded.vocabulary and max(ids) >= loaded.vocabulary:
            raise BadRequest(
                f"Token {max(ids)} is outside the vocabulary of {loaded.vocabulary:,}."
            )
    elif loaded.gone:
        raise not_loaded(loaded.info.name)
    elif tokenizer is None:
        raise BadRequest("The model was given without a tokenizer: only tokens= works.")
    elif request.text is not None:
        text = request.text
        ids = holding(shop.tokenizing, lambda: encode_raw(tokenizer, text))
    else:
        clock, messages = shop.filters.clock, request.messages or ()
        rendered = holding(shop.tokenizing, lambda: render(tokenizer, messages, clock=clock))
        ids, marks = rendered.ids, rendered.marks
    if not ids:
        raise BadRequest("The prompt is empty. Write something for the model to answer.")
    return ids, np.asarray(ids, np.int32), marks


def as_served(
    shop: Workshop, loaded: LoadedModel, request: Request
) -> tuple[Request, tuple[Cause, ...]]:
    """The request as a model gets it, and what the filters left out.

    An answer that another model made goes by its text: its ids are of another vocabulary, or were
    another model's way to spell it.
    """
    tokenizer = loaded.tokenizer
    if request.messages is None or tokenizer is None:
        return request, ()
    own = {"", loaded.info.name, *loaded.aliases}
    if any(message.model not in own for message in request.messages):
        messages = (m if m.model in own else replace(m, ids=None) for m in request.messages)
        request = replace(request, messages=tuple(messages))
    return shop.filters.apply(request, codec_of(tokenizer).template)


def not_loaded(name: str | None) -> BadRequest:
    """The error of what needs a model that is there already."""
    which = "No model is loaded yet" if name is None else f"{name} is not loaded"
    return BadRequest(f"{which}: run %llm load {name or 'NAME'}, or a prompt, first.")


def adapted(
    shop: Workshop,
    request: Request,
    progress: Callable[[str, int, int], None],
    cancelled: Callable[[], bool],
    *,
    current: bool,
) -> LoadedModel:
    """The model that a request names with its adapter, loaded if need be.

    Raises:
        BadModel: there is no sound adapter there, or it belongs to another model.
        BadRequest: the model was given as an object.
    """
    assert request.adapter is not None
    adapter = adapters.resolve(request.adapter)
    base = shop.find(request.model)
    if base is not None and base.files is None:
        raise BadRequest(f"{base.info.name} was given as an object: it takes no adapter.")
    name = request.model or (base.info.name if base is not None else DEFAULT_MODEL)
    return shop.load(name, progress, cancelled, adapter, current=current)


@dataclass(slots=True)
class TicketJob(ABC):
    """What a ticket asks for, as a job: whatever happens, one terminal event.

    Attributes:
        forget: called just before the end is told.
    """

    shop: Workshop
    ticket: Ticket
    forget: Callable[[], None]

    def run(self) -> None:
        """Do it."""
        self._end(self._outcome())  # no frame of the try below may be left by then

    def _outcome(self) -> Terminal:
        try:
            return self._done()
        except Interrupted:
            return Done(self._partial())
        except LLMError as error:
            return self._failed(error)
        except BaseException as error:  # the model's code may raise anything
            log.debug("a job failed", exc_info=True)
            text = str(error)
            failure = ComputeError(type(error).__name__ + (f": {text}" if text else ""))
            failure.__cause__ = error
            return self._failed(failure)

    def refuse(self, error: Exception) -> None:
        """It isn't done: the engine ended before its turn came."""
        if not self.ticket.ended:
            self._end(self._failed(error))

    @abstractmethod
    def _done(self) -> Terminal:
        """Do it and say how it ended, or raise."""

    @abstractmethod
    def _partial(self) -> Answer:
        """What there is now, with its statistics."""

    def _failed(self, error: Exception) -> Failed:
        return Failed(error, self._partial())

    def _end(self, end: Terminal) -> None:
        if isinstance(end, Failed):
            _detach(end.error)
        self.forget()
        self.ticket.emit(end)


@dataclass(slots=True)
class Serve(TicketJob):
    """Serves a ticket's request.

    Attributes:
        submitted: when it was submitted, by the shop's clock.
    """

    submitted: float
    _moments: Moments = field(init=False)
    _running: Run | None = None

    def __post_init__(self) -> None:
        self._moments = Moments(self.submitted)

    def _done(self) -> Done:
        with _quick_switches():
            return Done(self._answer())

    def _answer(self) -> Answer:
        ticket, shop, moments = self.ticket, self.shop, self._moments
        if ticket.cancelled:
            raise Interrupted
        moments.started = shop.clock()
        loaded = self._model()
        moments.loaded = shop.clock()
        ticket.model = loaded.info.name
        options = ticket.request.options.over(Options(**loaded.defaults)).over(DEFAULTS)
        ticket.seed = secrets.randbelow(2**32) if options.seed is None else options.seed
        request, filtered = as_served(shop, loaded, ticket.request)
        ids, id_array, marks = prompt_ids(shop, loaded, request)
        ticket.prompt_ids = ids
        limit = in_force(shop, loaded, options.context)
        if len(ids) > limit.tokens:
            raise ContextOverflow(len(ids), limit.tokens, limit.origin)
        run = self._running = self._run(loaded, options, ids, limit.tokens)
        cache, tree = shop.cache_of(loaded), shop.tree(loaded.info.name)
        room = min(run.max_tokens, run.limit - len(ids))
        owner, label = ticket.request.owner, ticket.request.label
        mx.reset_peak_memory()
        moments.rendered = shop.clock()
        try:
            session = self._served(
                run,
                lambda: cache.open(
                    id_array,
                    room=room,
                    marks=marks,
                    owner=owner,
                    label=label,
                    cancelled=self._cancelled,
                ),
                lambda: shop.publish_watched(loaded),
            )
        finally:
            if shop.trace is not None:
                shop.trace.request(ids, run.tokens, owner, marks)
            led = np.asarray([*ids, *run.tokens], np.int32)
            loaded.row_bytes = cache.live.row_bytes() or loaded.row_bytes
            shop.trails.note(owner, loaded.info.name, led)
            shop.publish(loaded, ended=True, compute=run.pressure.compute if run.pressure else None)
        answer = self._made(run, session.plan, session.node)
        why = shop.explained(answer.why, loaded, request, id_array, marks, tree)
        after = shop.tree(loaded.info.name)
        shop.remember(loaded, request, id_array, marks, answer, after)
        return replace(answer, why=(*why, *filtered))

    def _served(
        self, run: Run, opened: Callable[[], Session], begun: Callable[[], None]
    ) -> Session:
        """Run in a session; once more in another one when memory was refused in the first.

        Raises:
            OutOfMemory: it was refused again, or after the first token.
        """
        for last in (False, True):
            try:
                with opened() as session:
                    begun()
                    run(session)
                return session
            except Exception as error:
                if not is_shortage(error):
                    raise
                _detach(error)  # its frames hold arrays
                assert run.pressure is not None
                run.pressure.refused()
                if last or run.tokens:
                    raise run.pressure.exhausted(str(error)) from error
                log.info("memory was refused; the request is tried once more: %s", error)
        raise AssertionError

    def _partial(self) -> Answer:
        run, answer = self._running, self.ticket.partial()
        if run is None:
            return replace(answer, timing=self._moments.timing(self.shop.clock()))
        return replace(answer, usage=run.usage(), timing=run.timing())

    def _model(self) -> LoadedModel:
        """The model that the request names, loaded if need be."""
        request, shop = self.ticket.request, self.shop
        if request.adapter is None:
            loaded = shop.find(request.model)
            if loaded is None:
                name = request.model or shop.wanted or DEFAULT_MODEL
                current = request.model is None
                loaded = shop.load(name, self._progress, self._cancelled, current=current)
            shop.used(loaded)
            return loaded
        return adapted(shop, request, self._progress, self._cancelled, current=False)

    def _progress(self, text: str, done: int, total: int) -> None:
        self.ticket.emit(Loading(text, done, total))

    def _cancelled(self) -> bool:
        return self.ticket.cancelled

    def _run(self, loaded: LoadedModel, options: Options, ids: tuple[int, ...], limit: int) -> Run:
        tokenizer = loaded.tokenizer
        if options.stop and tokenizer is None:
            raise BadRequest("The model was given without a tokenizer: stop strings don't work.")
        assert options.max_tokens is not None
        return Run(
            model=loaded.model,
            ids=ids,
            limit=limit,
            max_tokens=options.max_tokens,
            chunk=loaded.info.prefill_chunk,
            ends=frozenset(tokenizer.eos_token_ids) if tokenizer is not None else frozenset(),
            sampling=Sampling(options, self.ticket.seed, ids),
            text=TextStream(tokenizer.detokenizer if tokenizer is not None else None, options.stop),
            ticket=self.ticket,
            clock=self.shop.clock,
            think_end=tuple(getattr(tokenizer, "think_end_tokens", None) or ()),
            moments=self._moments,
            pressure=self.shop.pressure(loaded, len(ids)),
        )

    def _made(self, run: Run, plan: Plan, node: int | None) -> Answer:
        text = "".join(run.pieces)
        tokens = tuple(run.tokens)
        kept = None if run.text.stopped_by is not None else tokens
        return Answer(
            text=text,
            tokens=tokens,
            prompt_ids=self.ticket.prompt_ids,
            finish=run.finish,
            usage=run.usage(),
            timing=run.timing(),
            model=self.ticket.model,
            seed=self.ticket.seed,
            stopped_by=run.text.stopped_by,
            messages=self.ticket.conversation(text, kept),
            why=plan.why,
            logprobs=tuple(run.logprobs),
            node=node,
            peak_bytes=max(mx.get_peak_memory(), run.pressure.peak if run.pressure else 0),
        )


@dataclass(slots=True)
class Load(TicketJob):
    """Loads the model that a ticket names."""

    def _done(self) -> Loaded:
        if self.ticket.cancelled:
            raise Interrupted
        request = self.ticket.request

        def progress(text: str, done: int, total: int) -> None:
            self.ticket.emit(Loading(text, done, total))

        def cancelled() -> bool:
            return self.ticket.cancelled

        if request.adapter is not None:
            return Loaded(adapted(self.shop, request, progress, cancelled, current=True).info)
        return Loaded(self.shop.load(request.model or DEFAULT_MODEL, progress, cancelled).info)

    def _partial(self) -> Answer:
        return self.ticket.partial()

    def _failed(self, error: Exception) -> Failed:
        return Failed(error)


def _detach(error: BaseException) -> None:
    """Clear the frames of a kept error: their locals would keep arrays alive."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__


@contextmanager
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)

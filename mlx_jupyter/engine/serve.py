"""The jobs of the engine thread: serve one request, load one model.

Each ends its ticket with exactly one terminal event, after the cache is sound again and what
changed is published: whoever sees the end may ask for the next thing at once.
"""

from __future__ import annotations

import logging
import secrets
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_jupyter.conversation.answer import Answer, Message
from mlx_jupyter.engine.pipeline import Run
from mlx_jupyter.engine.request import (
    DEFAULTS,
    Done,
    Failed,
    Loaded,
    Loading,
    Options,
    Request,
    Terminal,
    Ticket,
)
from mlx_jupyter.engine.sampling import Sampling
from mlx_jupyter.engine.text import TextStream
from mlx_jupyter.errors import BadRequest, ComputeError, ContextOverflow, LLMError
from mlx_jupyter.models.sources import DEFAULT_MODEL, Interrupted
from mlx_jupyter.models.template import encode_raw, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_jupyter.cache.plan import Plan
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

    Raises:
        BadRequest: the tokenizer is missing, the template refuses, an id is out of range.
    """
    marks: tuple[tuple[int, MarkKind], ...] = ()
    if request.tokens is not None:
        ids = request.tokens
        vocabulary = getattr(getattr(loaded.model, "args", None), "vocab_size", None)
        if vocabulary and max(ids) >= vocabulary:
            raise BadRequest(f"Token {max(ids)} is outside the vocabulary of {vocabulary:,}.")
    elif loaded.tokenizer is None:
        raise BadRequest("The model was given without a tokenizer: only tokens= works.")
    else:
        with shop.tokenizing:
            if request.text is not None:
                ids = encode_raw(loaded.tokenizer, request.text)
            else:
                rendered = render(loaded.tokenizer, request.messages or ())
                ids, marks = rendered.ids, rendered.marks
    if not ids:
        raise BadRequest("The prompt is empty. Write something for the model to answer.")
    return ids, np.asarray(ids, np.int32), marks


@dataclass(slots=True)
class Serve:
    """Serves a ticket's request."""

    shop: Workshop
    ticket: Ticket
    submitted: float
    forget: Callable[[], None]
    _running: Run | None = None

    def refuse(self, error: Exception) -> None:
        """The engine ended before the request's turn came."""
        self.forget()
        self.ticket.emit(Failed(error, self.ticket.partial()))

    def run(self) -> None:
        """Serve it; whatever happens, one terminal event."""
        with _quick_switches():
            end = self._outcome()
        _end(self.ticket, end, self.forget)

    def _outcome(self) -> Done | Failed:
        try:
            return Done(self._answer())
        except Interrupted:
            return Done(self.ticket.partial())
        except LLMError as error:
            return Failed(error, self._partial())
        except Exception as error:
            log.debug("the request failed", exc_info=True)
            failure = ComputeError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            return Failed(failure, self._partial())

    def _answer(self) -> Answer:
        ticket, shop = self.ticket, self.shop
        if ticket.cancelled:
            return ticket.partial()
        started = shop.clock()
        loaded = self._model()
        ticket.model = loaded.info.name
        options = ticket.request.options.over(Options(**loaded.defaults)).over(DEFAULTS)
        ticket.seed = secrets.randbelow(2**32) if options.seed is None else options.seed
        ids, id_array, marks = prompt_ids(shop, loaded, ticket.request)
        ticket.prompt_ids = ids
        if len(ids) > loaded.info.context:
            raise ContextOverflow(len(ids), loaded.info.context, loaded.info.context_origin)
        run = self._running = self._run(loaded, options, ids, started)
        cache = shop.cache_of(loaded)
        room = min(run.max_tokens, run.limit - len(ids))
        owner, label = ticket.request.owner, ticket.request.label
        mx.reset_peak_memory()
        try:
            with cache.open(id_array, room=room, marks=marks, owner=owner, label=label) as session:
                run(session)
        finally:
            if shop.trace is not None:
                shop.trace.request(ids, run.tokens, owner, marks)
            shop.publish(loaded, ended=True)
        return self._made(run, session.plan, session.node)

    def _partial(self) -> Answer:
        """What there was when the request failed, with its statistics."""
        answer = self.ticket.partial()
        if self._running is None:
            return answer
        return replace(answer, usage=self._running.usage(), timing=self._running.timing())

    def _model(self) -> LoadedModel:
        """The model that the request names, loaded if need be."""
        name = self.ticket.request.model
        loaded = self.shop.find(name)
        if loaded is None:
            loaded = self.shop.load(name or DEFAULT_MODEL, self._progress, self._cancelled)
        return loaded

    def _progress(self, text: str, done: int, total: int) -> None:
        self.ticket.emit(Loading(text, done, total))

    def _cancelled(self) -> bool:
        return self.ticket.cancelled

    def _run(
        self, loaded: LoadedModel, options: Options, ids: tuple[int, ...], started: float
    ) -> Run:
        tokenizer = loaded.tokenizer
        if options.stop and tokenizer is None:
            raise BadRequest("The model was given without a tokenizer: stop strings don't work.")
        assert options.max_tokens is not None
        return Run(
            model=loaded.model,
            ids=ids,
            limit=loaded.info.context,
            max_tokens=options.max_tokens,
            chunk=loaded.info.prefill_chunk,
            ends=frozenset(tokenizer.eos_token_ids) if tokenizer is not None else frozenset(),
            sampling=Sampling(options, self.ticket.seed, ids),
            text=TextStream(tokenizer.detokenizer if tokenizer is not None else None, options.stop),
            ticket=self.ticket,
            clock=self.shop.clock,
            submitted=self.submitted,
            started=started,
            think_end=tuple(getattr(tokenizer, "think_end_tokens", None) or ()),
        )

    def _made(self, run: Run, plan: Plan, node: int | None) -> Answer:
        text = "".join(run.pieces)
        tokens = tuple(run.tokens)
        messages = self.ticket.request.messages or ()
        if messages:
            kept = None if run.text.stopped_by is not None else tokens
            messages = (*messages, Message("assistant", text, kept))
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
            messages=messages,
            why=plan.why,
            logprobs=tuple(run.logprobs),
            node=node,
            peak_bytes=mx.get_peak_memory(),
        )


@dataclass(slots=True)
class Load:
    """Loads the model that a ticket names."""

    shop: Workshop
    ticket: Ticket
    submitted: float
    forget: Callable[[], None]

    def refuse(self, error: Exception) -> None:
        """The engine ended before the load's turn came."""
        self.forget()
        self.ticket.emit(Failed(error))

    def run(self) -> None:
        """Load it; whatever happens, one terminal event."""
        end = self._outcome()
        _end(self.ticket, end, self.forget)

    def _outcome(self) -> Loaded | Done | Failed:
        try:
            if self.ticket.cancelled:
                raise Interrupted
            loaded = self.shop.load(
                self.ticket.request.model or DEFAULT_MODEL,
                lambda text, done, total: self.ticket.emit(Loading(text, done, total)),
                lambda: self.ticket.cancelled,
            )
            return Loaded(loaded.info)
        except Interrupted:
            return Done(self.ticket.partial())
        except Exception as error:
            if isinstance(error, LLMError):
                return Failed(error)
            log.debug("the load failed", exc_info=True)
            failure = ComputeError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            return Failed(failure)


def _end(ticket: Ticket, end: Terminal, forget: Callable[[], None]) -> None:
    """Send the terminal event."""
    if isinstance(end, Failed):
        _detach(end.error)
    forget()
    ticket.emit(end)


def _detach(error: BaseException) -> None:
    """Clear the frames of a kept error: their locals would keep arrays alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


@contextmanager
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)

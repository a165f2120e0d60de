"""The engine's front door: load, submit, ask. Safe to use from any thread.

Everything that touches MLX runs as a job on one thread, in the order of submission. ``status``,
``tree`` and ``plan`` read what was last published and never wait for a request.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
from operator import index
from typing import TYPE_CHECKING, Any

from mlx_jupyter import blas

# A real BLAS must be in place before the first import of mlx, which the modules below do.
blas.ensure()

import mlx.core as mx  # noqa: E402

from mlx_jupyter.cache.match import decide, match  # noqa: E402
from mlx_jupyter.cache.view import TreeView  # noqa: E402
from mlx_jupyter.engine.labels import Labels  # noqa: E402
from mlx_jupyter.engine.request import (  # noqa: E402
    Done,
    Failed,
    Loaded,
    Options,
    Request,
    Ticket,
)
from mlx_jupyter.engine.serve import Load, Serve, prompt_ids  # noqa: E402
from mlx_jupyter.engine.status import MemoryUse, Status  # noqa: E402
from mlx_jupyter.engine.thread import EngineThread  # noqa: E402
from mlx_jupyter.engine.workshop import Workshop  # noqa: E402
from mlx_jupyter.errors import BadRequest, Cancelled, ModelNotFound  # noqa: E402
from mlx_jupyter.models.messages import normalise  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from mlx_jupyter.cache.plan import Plan
    from mlx_jupyter.conversation.answer import Answer, Message
    from mlx_jupyter.engine.request import Event
    from mlx_jupyter.models.info import ModelInfo

    Prompt: TypeAlias = str | Sequence[Message | Mapping[str, Any]]

log = logging.getLogger(__name__)


class Engine:
    """A kernel-resident engine: models, their prefix caches, and the thread that runs them.

    Args:
        model: an ``nn.Module`` of one's own with mlx-lm cache layers; else models are loaded by
            name.
        tokenizer: its tokenizer; without one only token prompts work.
        cache_bytes: what a model's live cache, pages and snapshots may take together; by default
            a share of what is free once the weights are in.
        memory_limit: MLX's memory limit in bytes; MLX's own default when None.
        context: tokens that fit, where that is less than the model's own limit.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model: Any | None = None,
        tokenizer: Any | None = None,
        *,
        cache_bytes: int | None = None,
        memory_limit: int | None = None,
        context: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if context is not None and context < 1:
            raise BadRequest(f"context must be at least 1, not {context}.")
        self._shop = Workshop(
            cache_bytes=cache_bytes, memory_limit=memory_limit, context=context, clock=clock
        )
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards _tickets
        self._labels = Labels()
        self._thread = EngineThread()
        atexit.register(self.close)
        if model is not None:
            # Lazy arrays can be evaluated by the thread that made them only: this one.
            mx.eval(model.parameters())
            self._thread.call(lambda: self._shop.adopt(model, tokenizer))

    # --- models ------------------------------------------------------------------------------

    def load(self, name: str) -> ModelInfo:
        """Load a model and make it the current one.

        Args:
            name: an alias, a directory, a GGUF file or a Hugging Face id.

        Raises:
            ModelNotFound, BadModel, ModelDoesNotFit: it can't be loaded; what was loaded stays.
        """
        ticket = self.submit_load(name)
        try:
            ticket.wait()
        except KeyboardInterrupt:
            ticket.cancel()
            raise
        outcome = ticket.outcome
        if isinstance(outcome, Failed):
            raise outcome.error
        if isinstance(outcome, Done):
            raise Cancelled(outcome.answer)
        assert isinstance(outcome, Loaded)
        return outcome.info

    def submit_load(self, name: str) -> Ticket:
        """Queue a load; its events are ``Loading`` and at last ``Loaded`` or ``Failed``."""
        return self._post(Ticket(Request(model=name)), Load)

    def models(self) -> tuple[ModelInfo, ...]:
        """Loaded models, the current one first."""
        return self._shop.published.models

    def unload(self, name: str | None = None) -> list[str]:
        """Unload a model, or all when None, and its cache; the names that went."""
        return self._thread.call(lambda: self._shop.unload(name))

    # --- asking ------------------------------------------------------------------------------

    def submit(self, request: Request) -> Ticket:
        """Queue a request; returns at once.

        Raises:
            BadRequest: the request is malformed (what needs the model to be found out comes as a
                ``Failed`` event).
            EngineClosed: the engine has ended.
        """
        given = (request.messages, request.text, request.tokens)
        if sum(x is not None for x in given) != 1:
            raise BadRequest("A request takes one of messages, text and tokens.")
        if not any(given):
            raise BadRequest("The prompt is empty. Write something for the model to answer.")
        request.options.check()
        return self._post(Ticket(request), Serve)

    def _post(self, ticket: Ticket, job: type[Serve] | type[Load]) -> Ticket:
        number = next(self._numbers)
        with self._lock:
            self._tickets[number] = ticket

        def forget() -> None:
            with self._lock:
                self._tickets.pop(number, None)

        try:
            self._thread.post(job(self._shop, ticket, self._clock(), forget))
        except BaseException:
            forget()
            raise
        return ticket

    def request(
        self,
        prompt: Prompt | None = None,
        *,
        tokens: Sequence[int] | None = None,
        system: str | None = None,
        model: str | None = None,
        raw: bool = False,
        owner: str | None = None,
        label: str | None = None,
        **options: Any,
    ) -> Request:
        """A checked request from what ``generate`` takes.

        Raises:
            BadRequest: something is missing, unknown or out of range.
        """
        common: dict[str, Any] = {
            "options": Options.of(**options),
            "model": model,
            "owner": owner,
            "label": label,
        }
        if (prompt is None) == (tokens is None):
            raise BadRequest("Give either a prompt or tokens.")
        if prompt is None:
            assert tokens is not None
            ids = tuple(_token(t) for t in tokens)
            return Request(tokens=ids, **common)
        if raw:
            if not isinstance(prompt, str):
                raise BadRequest("raw takes the prompt as one text.")
            return Request(text=prompt, **common)
        messages = normalise(prompt, system)
        return Request(messages=messages, **common)

    def generate(self, prompt: Prompt | None = None, **how: Any) -> Answer:
        """Answer a prompt; waits for the end.

        Args:
            prompt: one user message's text, or a conversation as messages.
            how: ``tokens`` (ids instead of a prompt), ``system``, ``model``, ``raw``, ``owner``,
                ``label`` and the sampling options (``engine.request.Options``).

        Raises:
            BadRequest, ContextOverflow, ModelNotFound, ComputeError: and the like, see ``errors``.
            Cancelled: ``KeyboardInterrupt`` in this thread; the partial answer is in it.
        """
        ticket = self.submit(self.request(prompt, **how))
        try:
            ticket.wait()
        except KeyboardInterrupt:
            ticket.cancel()
            raise Cancelled(ticket.settle()) from None
        return ticket.result()

    def stream(self, prompt: Prompt | None = None, **how: Any) -> Iterator[Event]:
        """Answer a prompt event by event; arguments as ``generate``'s.

        Closing the iterator cancels the request.

        Yields:
            ``Loading``, ``Prefill`` and ``Token`` events, at last ``Done``; a failure is raised.
        """
        ticket = self.submit(self.request(prompt, **how))
        return self._follow(ticket)

    @staticmethod
    def _follow(ticket: Ticket) -> Iterator[Event]:
        try:
            for event in ticket.events():
                if isinstance(event, Failed):
                    raise event.error
                yield event
        except KeyboardInterrupt:
            ticket.cancel()
            raise Cancelled(ticket.settle()) from None
        finally:
            ticket.cancel()

    def plan(self, prompt: Prompt | None = None, **how: Any) -> Plan:
        """How ``generate`` would serve this prompt now; computes nothing, waits for nothing.

        Raises:
            BadRequest: also when no model is loaded yet, since its tokenizer is needed.
        """
        request = self.request(prompt, **how)
        loaded = self._shop.find(request.model)
        if loaded is None:
            raise BadRequest("No model is loaded yet: run %llm load NAME, or a prompt, first.")
        _, ids, _ = prompt_ids(self._shop, loaded, request)
        view = self._shop.published.trees.get(loaded.info.name) or TreeView()
        found = match(view.root, ids, view.live, lambda node: bool(node.active))
        return decide(found, view.needs, view.rates)

    # --- looking -----------------------------------------------------------------------------

    def status(self) -> Status:
        """Models and memory now."""
        from mlx_jupyter.models import memory

        published = self._shop.published
        trees = published.trees.values()
        measured = memory.measured()
        current = published.models[0] if published.models else None
        with self._lock:
            waiting = len(self._tickets)
        return Status(
            models=published.models,
            memory=MemoryUse(
                weights=sum(m.weight_bytes for m in published.models),
                live=sum(t.live_bytes for t in trees),
                stored=sum(t.stored_bytes for t in trees),
                budget=sum(t.budget for t in trees),
                active=measured.active,
                cache=measured.cache,
                peak=measured.peak,
                limit=measured.limit,
            ),
            context=current.context if current else 0,
            context_origin=current.context_origin if current else "no model is loaded",
            blas=blas.status(),
            device=measured.device,
            requests=published.requests,
            waiting=waiting,
            closed=self._thread.ended.is_set(),
        )

    def tree(self, model: str | None = None) -> TreeView:
        """The prefix cache of a model (the current one when None), as last published.

        Raises:
            ModelNotFound: no such model is loaded.
        """
        loaded = self._shop.find(model)
        if loaded is None:
            if model is None:
                return TreeView()
            names = [m.name for m in self.models()]
            raise ModelNotFound(model, [f"loaded: {', '.join(names) or 'none'}"])
        view = self._shop.published.trees.get(loaded.info.name) or TreeView(model=loaded.info.name)
        with self._shop.tokenizing:
            return self._labels.fill(view, loaded.tokenizer)

    def check(self) -> None:
        """Raise ``AssertionError`` when an invariant of a cache is broken (tests, bug reports)."""
        self._thread.call(self._shop.check)

    def pin(self, name: str) -> int:
        """Never give up what a branch (``"@name"``) or cell needs; bytes that this holds now.

        Pinned bytes count in the budget; when they fill it, everything else is recomputed.

        Raises:
            BadRequest: nothing is cached for it.
        """
        pinned: int = self._thread.call(lambda: self._shop.pin(name))
        return pinned

    def unpin(self, name: str) -> None:
        """Let a pinned branch or cell be given up again when room is needed.

        Raises:
            BadRequest: it isn't pinned.
        """
        self._thread.call(lambda: self._shop.unpin(name))

    # --- giving up ---------------------------------------------------------------------------

    def release(self, owner: str) -> None:
        """The cell or branch is gone: what only it needed goes first when room is needed."""
        self._thread.call(lambda: self._shop.release(owner))

    def evict(self, bytes: int | None = None) -> int:  # noqa: A002 - the public name
        """Give up at least so many bytes of cache now, all of it when None; bytes freed."""
        freed: int = self._thread.call(lambda: self._shop.evict(bytes))
        return freed

    def clear(self) -> None:
        """Forget all cached tokens; models stay loaded."""
        self._thread.call(self._shop.clear)

    def close(self) -> None:
        """End: cancel what runs, refuse what is queued, free the memory. Idempotent; waits."""
        atexit.unregister(self.close)
        with self._lock:
            running = list(self._tickets.values())
        for ticket in running:
            ticket.cancel()
        self._thread.close()
        self._shop.abandon()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _token(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise BadRequest(f"tokens takes ids (whole numbers), not {value!r}.")
    token = index(value)
    if token < 0 or token >= 2**31:
        raise BadRequest(f"{token} is no token id.")
    return token

"""The engine's front door: load, submit, ask. Safe to use from any thread.

Everything that touches MLX runs as a job on one thread, in the order of submission. ``status``,
``tree`` and ``plan`` read what was last published and never wait for a request.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_jupyter import blas

# A real BLAS must be in place before the first import of mlx, which the modules below do.
blas.ensure()

from mlx_jupyter.cache.lending import usable  # noqa: E402
from mlx_jupyter.cache.match import decide, match  # noqa: E402
from mlx_jupyter.cache.view import TreeView  # noqa: E402
from mlx_jupyter.engine import keeping, removal  # noqa: E402
from mlx_jupyter.engine.keeping import Errand, chosen  # noqa: E402
from mlx_jupyter.engine.labels import Labels  # noqa: E402
from mlx_jupyter.engine.options import Options  # noqa: E402
from mlx_jupyter.engine.request import (  # noqa: E402
    Done,
    Failed,
    Loaded,
    Request,
    Ticket,
)
from mlx_jupyter.engine.serve import Load, Serve, not_loaded, prompt_ids  # noqa: E402
from mlx_jupyter.engine.status import Status  # noqa: E402
from mlx_jupyter.engine.stream import Stream  # noqa: E402
from mlx_jupyter.engine.thread import EngineThread, Job  # noqa: E402
from mlx_jupyter.engine.workshop import Workshop  # noqa: E402
from mlx_jupyter.errors import BadRequest, Cancelled, EngineClosed, ModelNotFound  # noqa: E402
from mlx_jupyter.latch import holding  # noqa: E402
from mlx_jupyter.models.lazy import evaluate  # noqa: E402
from mlx_jupyter.models.messages import normalise  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from typing import TypeAlias

    from mlx_jupyter.cache.plan import Plan
    from mlx_jupyter.cache.preview import Preview
    from mlx_jupyter.conversation.answer import Answer, Message
    from mlx_jupyter.conversation.saved import Saved
    from mlx_jupyter.engine.history import Sample
    from mlx_jupyter.engine.verify import Verification
    from mlx_jupyter.models.info import ModelInfo

    Prompt: TypeAlias = str | Sequence[Message | Mapping[str, Any]]


class Engine:
    """A kernel-resident engine: models, their prefix caches, and the thread that runs them.

    It ends when it is closed, when nobody holds it or waits for it any more, or with the process.
    A process that was forked from the one that made it can't use it.

    Args:
        model: an ``nn.Module`` of one's own with mlx-lm cache layers; else models are loaded by
            name.
        tokenizer: its tokenizer; without one only token prompts work.
        cache_bytes: what a model's live cache, pages and snapshots may take together; by default
            a share of what is free once the weights are in.
        memory_limit: MLX's memory limit in bytes; MLX's own default when None.
        context: tokens that fit, where that is less than the model's own limit.
        store: where cached tokens of models loaded by name outlive the engine: a directory, by
            default ``pages`` in the package's cache directory; False for nowhere. The environment
            variable ``MLX_JUPYTER_STORE=off`` turns it off too.
        store_bytes: what the store may take on disk.
        exact: exactness mode: go on only from where a forward pass ended, so that a warm run is
            bit-equal to a cold replay of the same passes. It can be switched at any time.
        trace: a file to write what was asked to, for ``benchmarks/retention.py``: token ids, no
            text, readable by its user only.
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
        store: bool | str | PathLike[str] | None = None,
        store_bytes: int | None = None,
        exact: bool = False,
        trace: str | PathLike[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if context is not None and context < 1:
            raise BadRequest(f"context must be at least 1, not {context}.")
        if store_bytes is not None and store_bytes < 0:
            raise BadRequest(f"store_bytes must not be negative, but it is {store_bytes}.")
        self._shop = Workshop(
            cache_bytes=cache_bytes,
            memory_limit=memory_limit,
            context=context,
            clock=clock,
            store=store,
            store_bytes=store_bytes,
            exact=exact,
            trace=trace,
        )
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}  # single operations only: many threads share it
        self._numbers = itertools.count(1)
        self._labels = Labels()
        self._thread = EngineThread(at_end=self._shop.abandon, idle=self._shop.idle)
        self._finalizer = weakref.finalize(self, _end_for_good, self._thread, self._tickets)
        if model is not None:
            try:
                evaluate(model)  # lazy arrays can be evaluated by the thread that made them only
                self._thread.call(lambda: self._shop.adopt(model, tokenizer))
            except BaseException:
                self.close()
                raise

    # --- models ------------------------------------------------------------------------------

    def load(self, name: str) -> ModelInfo:
        """Load a model and make it the current one.

        Args:
            name: an alias, a directory, a GGUF file or a Hugging Face id.

        Raises:
            ModelNotFound, BadModel, ModelDoesNotFit: it can't be loaded; what was loaded stays.
        """
        ticket = self._load_ticket(name)
        try:
            self._post(ticket, self._load_job)
            ticket.wait()
        except KeyboardInterrupt:
            ticket.cancel()
            raise
        outcome = ticket.outcome
        if isinstance(outcome, Failed):
            raise outcome.fresh()
        if isinstance(outcome, Done):
            if self._thread.closed:
                raise EngineClosed
            raise Cancelled(outcome.answer)
        assert isinstance(outcome, Loaded)
        return outcome.info

    def submit_load(self, name: str) -> Ticket:
        """Queue a load; its events are ``Loading`` and at last ``Loaded`` or ``Failed``."""
        return self._post(self._load_ticket(name), self._load_job)

    @staticmethod
    def _load_ticket(name: str) -> Ticket:
        if not isinstance(name, str) or not name:
            raise BadRequest(f"A model's name is text, not {name!r}.")
        return Ticket(Request(model=name))

    def _load_job(self, ticket: Ticket, forget: Callable[[], None]) -> Load:
        return Load(self._shop, ticket, forget)

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
        return self._post(Ticket(request.checked()), self._serve_job)

    def _serve_job(self, ticket: Ticket, forget: Callable[[], None]) -> Serve:
        return Serve(self._shop, ticket, forget, self._clock())

    def _post(self, ticket: Ticket, job: Callable[[Ticket, Callable[[], None]], Job]) -> Ticket:
        number = next(self._numbers)

        def forget() -> None:
            self._tickets.pop(number, None)

        self._tickets[number] = ticket
        try:
            self._thread.post(job(ticket, forget))
        except EngineClosed:
            forget()
            raise
        except BaseException:
            # Interrupted, perhaps after the job was queued; then it ends before this call comes.
            ticket.cancel()
            self._thread.post(_Then(forget))
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
        if (prompt is None) == (tokens is None):
            raise BadRequest("Give either a prompt or tokens.")
        if raw and tokens is not None:
            raise BadRequest("raw goes with a prompt, not with tokens.")
        if system is not None and (raw or tokens is not None):
            raise BadRequest("A system prompt goes with messages, not with raw or tokens.")
        if system is not None and not isinstance(system, str):
            raise BadRequest(f"system takes text, not {system!r}.")
        if raw and not isinstance(prompt, str):
            raise BadRequest("raw takes the prompt as one text.")
        messages = None if raw or prompt is None else normalise(prompt, system)
        return Request(
            messages=messages,
            text=prompt if raw and isinstance(prompt, str) else None,
            tokens=tokens,  # type: ignore[arg-type] # checked next
            options=Options.of(**options),
            model=model,
            owner=owner,
            label=label,
        ).checked()

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
        ticket = Ticket(self.request(prompt, **how))
        try:
            self._post(ticket, self._serve_job)
            ticket.wait()
        except KeyboardInterrupt:
            ticket.cancel()
            raise Cancelled(ticket.settle()) from None
        return ticket.result()

    def stream(self, prompt: Prompt | None = None, **how: Any) -> Stream:
        """Answer a prompt event by event; arguments as ``generate``'s.

        Closing or dropping the iterator cancels the request.

        Yields:
            ``Loading``, ``Prefill`` and ``Token`` events, perhaps a ``Tail``, at last ``Done``; a
            failure is raised.
        """
        ticket = Ticket(self.request(prompt, **how))
        try:
            return Stream(self._post(ticket, self._serve_job))
        except KeyboardInterrupt:
            ticket.cancel()
            raise Cancelled(ticket.settle()) from None

    def plan(self, prompt: Prompt | None = None, **how: Any) -> Plan:
        """How ``generate`` would serve this prompt now; computes nothing, waits for nothing.

        Raises:
            BadRequest: also when the model isn't loaded yet, since its tokenizer is needed.
            EngineClosed: the engine has ended.
        """
        request = self.request(prompt, **how)
        loaded = self._shop.find(request.model)
        if loaded is None:
            raise EngineClosed if self._thread.closed else not_loaded(request.model)
        _, ids, marks = prompt_ids(self._shop, loaded, request)
        view = self._shop.tree(loaded.info.name)
        found = match(
            view.root,
            ids,
            view.live,
            lambda node: bool(node.active),
            exact=view.exact,
            usable=usable(request.owner),
        )
        plan = decide(found, view.needs, view.rates)
        return replace(plan, why=self._shop.explained(plan.why, loaded, request, ids, marks, view))

    # --- looking -----------------------------------------------------------------------------

    def status(self) -> Status:
        """Models and memory now."""
        from mlx_jupyter.models import memory

        published = self._shop.published
        measured = memory.measured()
        current = published.models[0] if published.models else None
        return Status(
            models=published.models,
            memory=self._shop.memory_use(measured),
            context=current.context if current else 0,
            context_origin=current.context_origin if current else "no model is loaded",
            blas=blas.status(),
            device=measured.device,
            store=self._shop.storage.use(),
            requests=published.requests,
            waiting=len(self._tickets),
            closed=self._thread.ended.is_set(),
        )

    def tree(self, model: str | None = None) -> TreeView:
        """The prefix cache of a model (the current one when None), as last published.

        Raises:
            ModelNotFound: no such model is loaded.
        """
        loaded = self._shop.find(model)
        tokenizer = loaded.tokenizer if loaded is not None else None
        if loaded is None or loaded.gone:
            if model is None:
                return TreeView()
            names = [m.name for m in self.models()]
            raise ModelNotFound(model, [f"loaded: {', '.join(names) or 'none'}"])
        view = self._shop.published.trees.get(loaded.info.name) or TreeView(model=loaded.info.name)
        return holding(self._shop.tokenizing, lambda: self._labels.fill(view, tokenizer))

    def history(self) -> tuple[Sample, ...]:
        """Memory over time: a sample for each change that was published, oldest first."""
        return self._shop.history.samples()

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call ``told`` after each change of what ``tree`` and ``status`` say.

        It is called on the engine's thread, which waits for it: it may only leave a note.

        Returns:
            A function that ends it.
        """
        return self._shop.watch(told)

    def preview(self, bytes: int, model: str | None = None) -> Preview:  # noqa: A002
        """What ``set_budget`` would give up, as plain data; gives up nothing.

        Raises:
            BadRequest: the number is negative.
        """
        return self._thread.call(lambda: self._shop.preview(_checked(bytes), model))

    @property
    def exact(self) -> bool:
        """Whether the next request is served in exactness mode."""
        return self._shop.exact

    @exact.setter
    def exact(self, on: bool) -> None:
        self._shop.exact = bool(on)

    def verify(self, model: str | None = None, *, seed: int | None = None) -> Verification:
        """Serve a cached sequence, drawn at random, and compute it again cold; how they differ.

        The cold run takes as long as computing all its tokens, and the memory of another live
        cache. ``KeyboardInterrupt`` stops it.

        Raises:
            BadRequest: nothing is cached.
        """
        stop = threading.Event()
        try:
            return self._thread.call(lambda: self._shop.verify(model, seed, stop.is_set))
        except KeyboardInterrupt:
            stop.set()
            raise

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

    # --- conversations as files --------------------------------------------------------------

    def submit_save(
        self, saved: Saved, messages: Sequence[Message], path: str | PathLike[str] | None = None
    ) -> Ticket:
        """Queue writing a conversation and what is cached of it to a file (``keeping.save``).

        Its events are ``Loading`` and at last ``Kept`` with a ``Receipt``, or ``Failed``.
        """
        where = None if path is None else chosen(path)
        return self._errand(lambda errand: keeping.save(errand, saved, messages, where))

    def submit_restore(
        self,
        name: str | None,
        path: str | PathLike[str] | None,
        put: Callable[[Saved], None],
        model: str | None = None,
    ) -> Ticket:
        """Queue bringing a conversation back (``keeping.restore``).

        Its events are ``Loading`` and at last ``Kept`` with a ``Restored``, or ``Failed``.
        """
        where = None if path is None else chosen(path)
        return self._errand(lambda errand: keeping.restore(errand, name, where, model, put))

    def submit_forget(
        self,
        name: str,
        gone: Sequence[tuple[str, Sequence[int]]],
        kept: Sequence[tuple[str, Sequence[int]]],
    ) -> Ticket:
        """Queue removing all that is cached of a conversation (``removal.forget``).

        Its events end with ``Kept`` with a ``Removed``, or ``Failed``.
        """
        return self._errand(lambda errand: removal.forget(errand, name, gone, kept))

    def _errand(self, work: Callable[[Errand], Any]) -> Ticket:
        return self._post(
            Ticket(Request()), lambda ticket, forget: Errand(self._shop, ticket, forget, work)
        )

    # --- giving up ---------------------------------------------------------------------------

    def release(self, owner: str) -> None:
        """The cell or branch is gone: what only it needed goes first when room is needed."""
        self._thread.call(lambda: self._shop.release(owner))

    def evict(self, bytes: int | None = None) -> int:  # noqa: A002 - the public name
        """Give up at least so many bytes of cache now, all of it when None; bytes freed."""
        freed: int = self._thread.call(lambda: self._shop.evict(bytes))
        return freed

    def set_budget(self, bytes: int, model: str | None = None) -> int:  # noqa: A002
        """Let a loaded model's cache (the current one's when None) take so much; bytes freed.

        It holds until the model is unloaded.

        Raises:
            BadRequest: the number is negative, or no such model is loaded.
        """
        freed: int = self._thread.call(lambda: self._shop.set_budget(_checked(bytes), model))
        return freed

    def clear(self) -> None:
        """Forget all cached tokens; models stay loaded."""
        self._thread.call(self._shop.clear)

    def settle_store(self, timeout: float = 60.0) -> bool:
        """Save what isn't on disk yet; whether all was within ``timeout`` seconds."""
        return self._thread.call(lambda: self._shop.settle_store(timeout))

    def clear_store(self) -> int:
        """Remove everything that is kept on disk, of every model and kernel; bytes freed.

        What is in memory stays, and is saved again after the next request: ``clear`` first to
        forget that too.
        """
        return self._thread.call(self._shop.clear_store)

    def close(self) -> None:
        """End: cancel what runs, refuse what is queued, free the memory. Idempotent; waits."""
        _end(self._thread, self._tickets)
        self._finalizer.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(nbytes: int) -> int:
    if nbytes < 0:
        raise BadRequest(f"A budget must not be negative, but it is {nbytes}.")
    return nbytes


class _Then:
    """A job that comes after another one."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.run = function

    def refuse(self, error: Exception) -> None:
        del error
        self.run()


def _end(thread: EngineThread, tickets: dict[int, Ticket]) -> None:
    """End an engine's thread; waits."""
    thread.shut()  # first, so that no request comes in that nobody cancels
    for ticket in tickets.copy().values():
        ticket.cancel()
    thread.close()


def _end_for_good(thread: EngineThread, tickets: dict[int, Ticket]) -> None:
    """At exit, or when the engine was dropped. A busy thread would abort the process's exit."""
    try:
        _end(thread, tickets)
    except KeyboardInterrupt:
        _end(thread, tickets)

"""The engine's front door: load, submit, ask. Safe to use from any thread.

Everything that touches MLX runs as a job on one thread, in the order of submission. ``status``,
``tree`` and ``plan`` read what was last published and never wait for a request.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_jupyter import blas

# A real BLAS must be in place before the first import of mlx, which the modules below do.
blas.ensure()

from mlx_jupyter.cache.lending import usable  # noqa: E402
from mlx_jupyter.cache.match import decide, match  # noqa: E402
from mlx_jupyter.cache.view import TreeView  # noqa: E402
from mlx_jupyter.engine.context import all_limits, checked_context, in_force  # noqa: E402
from mlx_jupyter.engine.filters import DEFAULT, checked_filters  # noqa: E402
from mlx_jupyter.engine.labels import Labels  # noqa: E402
from mlx_jupyter.engine.options import Options  # noqa: E402
from mlx_jupyter.engine.request import (  # noqa: E402
    Done,
    Failed,
    Loaded,
    Request,
    Ticket,
)
from mlx_jupyter.engine.serve import (  # noqa: E402
    Load,
    Serve,
    as_served,
    not_loaded,
    prompt_ids,
)
from mlx_jupyter.engine.status import Status  # noqa: E402
from mlx_jupyter.engine.stream import Stream  # noqa: E402
from mlx_jupyter.engine.upkeep import Upkeep  # noqa: E402
from mlx_jupyter.engine.workshop import Workshop  # noqa: E402
from mlx_jupyter.errors import BadRequest, Cancelled, EngineClosed, ModelNotFound  # noqa: E402
from mlx_jupyter.latch import holding  # noqa: E402
from mlx_jupyter.models.adapters import resolve  # noqa: E402
from mlx_jupyter.models.lazy import evaluate  # noqa: E402
from mlx_jupyter.models.messages import normalise  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from typing import TypeAlias

    from mlx_jupyter.cache.plan import Plan
    from mlx_jupyter.conversation.answer import Answer, Message
    from mlx_jupyter.models.info import ModelInfo

    Prompt: TypeAlias = str | Sequence[Message | Mapping[str, Any]]


class Engine(Upkeep):
    """A kernel-resident engine: models, their prefix caches, and the thread that runs them.

    It ends when it is closed, when nobody holds it or waits for it any more, or with the process.
    A process that was forked from the one that made it can't use it.

    Args:
        model: an ``nn.Module`` of one's own with mlx-lm cache layers; else models are loaded by
            name.
        tokenizer: its tokenizer; without one only token prompts work.
        cache_bytes: what a model's live cache, pages and snapshots may take together; by default
            a share of what is free once the weights are in.
        memory_limit: bytes that MLX's arrays may take together; only the machine bounds them when
            None. For it models are unloaded, caches shrunk and chunks shortened.
        context: tokens that fit, where that is less than the model's own limit.
        store: where cached tokens of models loaded by name outlive the engine: a directory, by
            default ``pages`` in the package's cache directory; False for nowhere. The environment
            variable ``MLX_JUPYTER_STORE=off`` turns it off too.
        store_bytes: what the store may take on disk.
        filters: what keeps prompts' beginnings the same, by name (``engine/filters.py``). It can be
            changed at any time.
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
        filters: Sequence[str] = DEFAULT,
        exact: bool = False,
        trace: str | PathLike[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        context = checked_context(context)
        if store_bytes is not None and store_bytes < 0:
            raise BadRequest(f"store_bytes must not be negative, but it is {store_bytes}.")
        shop = Workshop(
            cache_bytes=cache_bytes,
            memory_limit=memory_limit,
            context=context,
            filters=filters,
            clock=clock,
            store=store,
            store_bytes=store_bytes,
            exact=exact,
            trace=trace,
        )
        super().__init__(shop)
        self._clock = clock
        self._labels = Labels()
        if model is not None:
            try:
                evaluate(model)  # lazy arrays can be evaluated by the thread that made them only
                self._thread.call(lambda: self._shop.adopt(model, tokenizer))
            except BaseException:
                self.close()
                raise

    # --- models ------------------------------------------------------------------------------

    def load(self, name: str, *, adapter: str | PathLike[str] | None = None) -> ModelInfo:
        """Load a model and make it the current one.

        Args:
            name: an alias, a directory, a GGUF file or a Hugging Face id.
            adapter: a directory with LoRA weights of mlx-lm's to put on top. That makes a model of
                its own, ``NAME+ADAPTER``, with its own cache; the plain one stays loaded.

        Raises:
            ModelNotFound, BadModel, ModelDoesNotFit: it can't be loaded; what was loaded stays.
        """
        ticket = self._load_ticket(name, adapter)
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

    def submit_load(self, name: str, *, adapter: str | PathLike[str] | None = None) -> Ticket:
        """Queue a load; its events are ``Loading`` and at last ``Loaded`` or ``Failed``."""
        return self._post(self._load_ticket(name, adapter), self._load_job)

    @staticmethod
    def _load_ticket(name: str, adapter: str | PathLike[str] | None) -> Ticket:
        if not isinstance(name, str) or not name:
            raise BadRequest(f"A model's name is text, not {name!r}.")
        return Ticket(Request(model=name, adapter=place_of(adapter)))

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

    def request(
        self,
        prompt: Prompt | None = None,
        *,
        tokens: Sequence[int] | None = None,
        system: str | None = None,
        model: str | None = None,
        adapter: str | PathLike[str] | None = None,
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
            adapter=place_of(adapter),
            owner=owner,
            label=label,
        ).checked()

    def generate(self, prompt: Prompt | None = None, **how: Any) -> Answer:
        """Answer a prompt; waits for the end.

        Args:
            prompt: one user message's text, or a conversation as messages.
            how: ``tokens`` (ids instead of a prompt), ``system``, ``model``, ``adapter``, ``raw``,
                ``owner``, ``label`` and the sampling options (``engine.request.Options``).

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
        adapter = resolve(request.adapter) if request.adapter is not None else None
        loaded = self._shop.find(request.model, adapter)
        if loaded is None:
            raise EngineClosed if self._thread.closed else not_loaded(request.model)
        request, filtered = as_served(self._shop, loaded, request)
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
        why = self._shop.explained(plan.why, loaded, request, ids, marks, view)
        return replace(plan, why=(*why, *filtered))

    # --- settings ----------------------------------------------------------------------------

    @property
    def context(self) -> int | None:
        """The user's bound on the context, in tokens; None for none. It holds from now on.

        Raises:
            BadRequest: (when set) it isn't a whole number above 0.
        """
        return self._shop.context

    @context.setter
    def context(self, tokens: int | None) -> None:
        self._shop.context = checked_context(tokens)

    @property
    def filters(self) -> tuple[str, ...]:
        """The filters that are on, from the next request on.

        Raises:
            BadRequest: (when set) one of them isn't known.
        """
        return self._shop.filters.names

    @filters.setter
    def filters(self, names: Sequence[str]) -> None:
        self._shop.filters.names = checked_filters(names)

    # --- looking -----------------------------------------------------------------------------

    def status(self) -> Status:
        """Models and memory now."""
        from mlx_jupyter.models import memory

        published = self._shop.published
        measured = memory.measured()
        current = self._shop.find(None)
        limits = tuple(all_limits(self._shop, current)) if current is not None else ()
        loaded = (self._shop.find(info.name) for info in published.models)
        contexts = {m.info.name: in_force(self._shop, m) for m in loaded if m is not None}
        return Status(
            models=published.models,
            memory=self._shop.memory_use(measured),
            context=limits[0].tokens if limits else 0,
            context_origin=limits[0].origin if limits else "no model is loaded",
            blas=blas.status(),
            device=measured.device,
            store=self._shop.storage.use(),
            requests=published.requests,
            waiting=len(self._tickets),
            closed=self._thread.ended.is_set(),
            limits=limits,
            contexts=contexts,
            holdings=published.holdings,
            now=self._clock(),
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


def place_of(adapter: str | PathLike[str] | None) -> str | None:
    """A directory as text, absolute, since another thread may have another one by then.

    Raises:
        BadRequest: it is no place.
    """
    if adapter is None:
        return None
    if not isinstance(adapter, str | os.PathLike) or not str(adapter).strip():
        raise BadRequest(f"adapter takes a directory, not {adapter!r}.")
    return os.path.abspath(os.path.expanduser(os.fspath(adapter)))

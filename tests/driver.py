"""Drives a prefix cache with the real pipeline on this thread, without an engine.

``Bench`` puts one around a model of a family and compares every run with a cold one, ``FakeBench``
around the fake model, where it can also look at every stored row by itself.
"""

from __future__ import annotations

import functools
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import make_prompt_cache

from fakes import EOS, FakeModel, P, cold
from mlx_jupyter.cache.invariants import check_settled
from mlx_jupyter.cache.plan import Rates
from mlx_jupyter.cache.prefix_cache import PrefixCache
from mlx_jupyter.engine.pipeline import Run
from mlx_jupyter.engine.request import DEFAULTS, Request, Ticket
from mlx_jupyter.engine.sampling import Sampling
from mlx_jupyter.engine.text import TextStream
from tiny_models import FAMILIES, VOCAB, build, leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_jupyter.cache.pages import Mark
    from mlx_jupyter.cache.session import Session
    from mlx_jupyter.cache.store_shelf import Shelf

CHUNK = 16


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


@pytest.fixture(autouse=True, scope="module")
def uncompiled() -> Iterator[None]:
    """Without MLX's compiler: it would call g++ for seconds in each family. Import it to use it."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def new_cache(
    model, budget: int = 1 << 30, shelf: Shelf | None = None, host_budget: int = 0
) -> PrefixCache:
    return PrefixCache(
        lambda: make_prompt_cache(model),
        budget=budget,
        name="fake",
        shelf=shelf,
        host_budget=host_budget,
    )


def ask(
    cache: PrefixCache,
    model,
    ids: Sequence[int],
    count: int = 4,
    *,
    chunk: int = 16,
    owner: str | None = None,
    marks: Sequence[tuple[int, str]] = (),
    ticket: Ticket | None = None,
    think_end: tuple[int, ...] = (),
    watch: Callable[[PrefixCache], None] | None = None,
) -> Run:
    """Serve one request; the run, with what it generated and counted.

    Args:
        cache: the prefix cache.
        model: its model.
        ids: the prompt.
        count: tokens to generate at most.
        chunk: tokens of a full prefill step.
        owner: the cell or branch that asks.
        marks: (offset, kind) of the places to come back to.
        ticket: to cancel it by.
        think_end: ids that end the thinking.
        watch: called with the cache after open, whenever the session settles, and before close.
    """
    ids = tuple(int(i) for i in ids)
    ticket = ticket or Ticket(Request(tokens=ids))
    run = Run(
        model=model,
        ids=ids,
        limit=1 << 20,
        max_tokens=count,
        chunk=chunk,
        ends=frozenset({EOS}),
        sampling=Sampling(DEFAULTS, 0, ids),
        text=TextStream(None),
        ticket=ticket,
        clock=iter(range(1 << 30)).__next__,
        submitted=0,
        started=0,
        think_end=think_end,
    )
    room = count
    with cache.open(np.array(ids, np.int32), room=room, owner=owner, marks=marks) as session:
        if watch is not None:
            _watched(session, cache, watch)
        run(session)
        if watch is not None:
            cache.live.evaluate()
            watch(cache)
    return run


def _watched(session: Session, cache: PrefixCache, watch: Callable[[PrefixCache], None]) -> None:
    settle = session.settle

    def settle_and_watch() -> None:
        settle()
        watch(cache)

    session.settle = settle_and_watch
    watch(cache)


# --- benches ----------------------------------------------------------------------------------


class Watched:
    """A family's model that keeps the logits of its last calls and can be disturbed.

    Attributes:
        before_call: called with the number of tokens at the start of each forward pass.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.family = FAMILIES[name]
        self.model = built(name)
        self.before_call: Callable[[int], None] | None = None
        self.seen: list[mx.array] = []

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.model)

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        if self.before_call is not None:
            self.before_call(inputs.shape[1])
        logits = self.model(inputs, cache=cache)
        # Logits of a longer step are never evaluated; to keep them would pin what they come from.
        self.seen = [*self.seen, logits] if inputs.shape[1] == 1 else []
        return logits

    def cold(self, ids: Sequence[int], cache: list[Any] | None = None) -> np.ndarray:
        """Logits after each token, float32 of shape (tokens, vocab), with no reuse of anything."""
        cache = cache if cache is not None else self.make_cache()
        step = self.family.chunk or len(ids)
        parts = [
            self.model(mx.array([ids[at : at + step]]), cache=cache)[0]
            for at in range(0, len(ids), step)
        ]
        return np.array(mx.concatenate(parts), np.float32)


@functools.cache
def built(name: str) -> Any:
    """The family's model, built once."""
    return build(name)


class Always(Rates):
    """Rates by which computing is always dearer; measurements change nothing."""

    def __init__(self) -> None:
        super().__init__(prefill=1.0)

    def seen(self, **measured: float) -> Rates:
        del measured
        return self


class Bench:
    """A prefix cache around a watched model; every run is compared with a cold one.

    Attributes:
        leeway: how many times the family's tolerance logits may be off.
    """

    leeway = 1.0

    def __init__(self, name: str, budget: int = 1 << 30) -> None:
        self.model: Any = Watched(name)
        self.cache: PrefixCache = new_cache(self.model, budget)
        self.chunk = self.model.family.chunk or CHUNK

    def ask(
        self, ids: Sequence[int], count: int = 4, *, verify: bool = True, **options: Any
    ) -> Run:
        self.model.seen = []
        options = {"chunk": self.chunk, **options}
        run = ask(self.cache, self.model, ids, count, watch=check_settled, **options)
        self.audit()
        if verify and run.tokens and run.finish == "length":
            self._compare(list(ids), run)
        return run

    def cancelled(self, ids: Sequence[int], at: int, count: int = 6, **options: Any) -> Run:
        """Ask, and cancel at the start of the ``at``-th forward pass."""
        ticket = Ticket(Request(tokens=tuple(ids)))
        calls = 0

        def cancel(_: int) -> None:
            nonlocal calls
            if calls == at:
                ticket.cancel()
            calls += 1

        self.model.before_call = cancel
        try:
            return self.ask(ids, count, ticket=ticket, **options)
        finally:
            self.model.before_call = None

    def audit(self) -> None:
        """What must hold between any two requests."""
        audit(self.cache)

    def _compare(self, ids: list[int], run: Run) -> None:
        cold = self.model.cold([*ids, *run.tokens[:-1]])[len(ids) - 1 :]
        warm = np.concatenate([np.array(a[0], np.float32) for a in self.model.seen[-len(cold) :]])
        scale = float(np.abs(cold).max())
        allowed = self.leeway * self.model.family.tolerance * scale
        off = np.abs(warm - cold).max(axis=1)
        told = f"{run.cached} of {len(ids)} tokens reused, logits off by {off} at scale {scale:.1f}"
        assert off.max() <= allowed, told
        for token, row in zip(run.tokens, cold, strict=True):
            assert row.max() - row[token] <= 2 * allowed, told


class FakeBench(Bench):
    """A prefix cache around a fake model: ids are compared, and every stored row is looked at."""

    def __init__(
        self, kinds: tuple[str, ...], budget: int = 1 << 30, *, window: int = 32, chunk: int = 16
    ) -> None:
        self.model = FakeModel(kinds, window=window)
        self.model.seen = []
        self.cache = new_cache(self.model, budget)
        self.chunk = chunk
        self._right: dict[tuple[int, ...], list[int]] = {}

    def _compare(self, ids: list[int], run: Run) -> None:
        before, self.model.before_call = self.model.before_call, None
        right = self._right.get(tuple(ids), [])
        if len(right) < len(run.tokens):
            right = self._right[tuple(ids)] = cold(self.model, ids, len(run.tokens))
        self.model.before_call = before
        assert run.tokens == right[: len(run.tokens)], (run.cached, len(ids))

    def audit(self) -> None:
        super().audit()
        for node in self.cache.trie.nodes():
            tokens = np.concatenate([n.tokens for n in node.path()]).astype(np.int64)
            for page in node.pages:
                if page.residence == "device":
                    self._check_rows("rows", page.stacks, tokens, page.start)
            for strip in node.strips:
                self._check_rows("window", strip.stacks, tokens, strip.start)
            for mark in node.marks.values():
                self._check_states(mark, tokens)

    def _layers(self, kind: str) -> list[int]:
        return [i for i, k in enumerate(self.model.kinds) if k == kind]

    def _check_rows(self, kind: str, stacks: Any, tokens: np.ndarray, start: int) -> None:
        if not stacks:
            assert not self._layers(kind)
            return
        keys, values = (np.array(a)[:, 0] for a in stacks[0])
        places = np.arange(start, start + keys.shape[1])
        here, index = tokens[places], np.array(self._layers(kind))[:, None]
        assert (keys[..., 0] == here).all()
        assert (keys[..., 1] == places).all()
        assert (values[..., 0] == here + index).all()
        assert (values[..., 1] == 2 * places).all()

    def _check_states(self, mark: Mark, tokens: np.ndarray) -> None:
        places = np.arange(mark.at, dtype=np.int64)
        weights = (places * 7919 + 104_729) % P
        for index, state in zip(self._layers("state"), mark.states, strict=False):
            read = (tokens[: mark.at] + 1 + index) * weights % P
            assert state[0].item() == read.sum() % P, mark
            assert state[1].item() == mark.at, mark


def audit(cache: PrefixCache) -> None:
    """What must hold between any two requests."""
    cache.check()
    recorded = len(cache.live.ids)
    offsets = [leaf.offset for leaf in leaves(cache.live.layers) if hasattr(leaf, "offset")]
    assert offsets == [recorded] * len(offsets)
    assert cache.nbytes() <= cache.budget or cache.pins


@contextmanager
def torn(at: int) -> Iterator[None]:
    """Raise in the ``at``-th write into any layer's cache, with the layers before it written."""
    writes = 0
    from mlx_lm.models import deepseek_v41

    targets = [
        *((getattr(mlx_caches, name), "update_and_fetch") for name in WRITTEN),
        (mlx_caches.ArraysCache, "__setitem__"),
        (deepseek_v41.LayerCache, "update_window"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, method in targets:
            original = getattr(owner, method)

            def wrapped(*args: Any, original: Any = original) -> Any:
                nonlocal writes
                writes += 1
                if writes > at:
                    raise RuntimeError("boom")
                return original(*args)

            patch.setattr(owner, method, wrapped)
        yield


WRITTEN = ("KVCache", "RotatingKVCache", "ChunkedKVCache", "QuantizedKVCache", "ConcatenateKVCache")


def next_prompt(dice: random.Random, prompts: list[list[int]], known: list[list[int]]) -> list[int]:
    new = prompt(dice.randint(1, 24), dice.randrange(1 << 30))
    whole, asked = dice.choice(known)[:120], dice.choice(prompts)
    match dice.choice(["new", "repeat", "continue", "retry", "branch", "edit", "switch"]):
        case "new":
            return prompt(dice.randint(1, 90), dice.randrange(1 << 30))
        case "repeat":
            return prompts[-1]
        case "continue":
            return [*known[-1][:120], *new]
        case "retry":
            return [*asked[:-4], *new]
        case "branch":
            return [*whole[: dice.randint(1, len(whole))], *new]
        case "edit":
            at = dice.randrange(min(10, len(whole)))
            return [*whole[:at], (whole[at] + 1) % VOCAB, *whole[at + 1 :]]
        case _:
            return asked

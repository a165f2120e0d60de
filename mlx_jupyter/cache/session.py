"""One request's hold on the prefix cache: plan, restore, run, record.

    with cache.open(ids, room=max_tokens) as session:
        ...  # feed ids[session.start:] to the model with cache=session.layers
        session.advance(fed)   # after each dispatch: these ids are in the cache now
        session.settle()       # after their evaluation: snapshots due, room, budget

Every way out records exactly what the layers hold. When that can't be shown, the live cache is
let go of, not patched; what the pages hold stays.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx

from mlx_jupyter.cache import layers as ly
from mlx_jupyter.cache.match import decide
from mlx_jupyter.cache.pages import Mark

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import numpy as np

    from mlx_jupyter.cache.pages import Page
    from mlx_jupyter.cache.plan import Plan
    from mlx_jupyter.cache.prefix_cache import PrefixCache
    from mlx_jupyter.cache.view import MarkKind

log = logging.getLogger(__name__)

ROOM = 512
"""Rows are reserved in multiples of this, so that a growing conversation is seldom copied."""

PERIOD = 8192
"""Tokens between two periodic snapshots of a long prefill."""


class Session:
    """See the module.

    Attributes:
        plan: what is reused, restored and recomputed, and why.
        start: position that prefill begins at; ``plan.cached``.
        node: id of the trie node where the recorded path ends (after the session).
    """

    def __init__(
        self,
        cache: PrefixCache,
        ids: np.ndarray,
        *,
        room: int,
        marks: Sequence[tuple[int, MarkKind]],
        owner: str | None,
    ) -> None:
        found = cache.match(ids)
        self._cache = cache
        self._ids = ids
        self._total = -(-(len(ids) + room) // ROOM) * ROOM
        self._owner = owner
        self.plan: Plan = decide(found, stateful=cache.stateful)
        self.start = self.plan.cached
        self.node: int | None = None
        self.cancelled = False
        self._cuts = self._places(marks, found.known) if cache.stateful else {}

    def _places(self, marks: Sequence[tuple[int, MarkKind]], known: int) -> dict[int, MarkKind]:
        """Where snapshots are taken: offset → kind."""
        n = len(self._ids)
        cuts: dict[int, MarkKind] = dict.fromkeys(range(PERIOD, n, PERIOD), "periodic")
        cuts[n - 1] = "prompt"
        if known:
            cuts[known] = "branch"
        cuts.update(marks)
        return {at: kind for at, kind in cuts.items() if self.start < at < n}

    @property
    def layers(self) -> list[Any]:
        """The live cache, to pass to the model."""
        return self._cache.live

    def next_cut(self, at: int) -> int:
        """The nearest position after ``at`` where prefill has to pause for a snapshot."""
        return min((c for c in self._cuts if c > at), default=len(self._ids))

    def __enter__(self) -> Self:
        cache, plan = self._cache, self.plan
        try:
            self._restore()
        except BaseException:
            cache.drop_live()
            raise
        log.debug(
            "open: %d tokens, %d reused, %d restored, %d to compute",
            plan.prompt,
            plan.reused,
            plan.restored,
            plan.recomputed,
        )
        return self

    def _restore(self) -> None:
        cache, start, keep = self._cache, self.start, self.plan.reused
        pages = self._pages(keep, start)
        mark = self._mark_at(start)
        in_place = keep == start == len(cache.live_ids) > 0
        cache.needed = {id(page) for page in pages} | {id(mark)}
        try:
            cache.vacate(keep)
        finally:
            cache.needed = set()
        if not in_place:
            cache.rewind(keep)
            if pages:
                cache.read_in(pages, start, self._total)
                cache.live_ids.extend(self._ids[keep:start].tolist())
                for page in pages:
                    if page.end <= start:
                        page.now_live()
            cache.set_states(mark.states if mark else None)
        for index in cache.layout.rows:
            if ly.capacity(self.layers[index]) > 2 * self._total:
                ly.shrink(self.layers[index], self._total)
        cache.reserve(self._total)

    def _pages(self, keep: int, start: int) -> list[Page]:
        """The stored pages that cover ``[keep, start)``."""
        if keep == start:
            return []
        node, _ = self._cache.trie.match(self._ids[:start])
        return [p for n in node.path() for p in n.pages if p.end > keep and p.start < start]

    def _mark_at(self, start: int) -> Mark | None:
        """The snapshot to restore the states from; None at 0 and for the live tip itself."""
        if not start or not self._cache.stateful:
            return None
        node, _ = self._cache.trie.match(self._ids[:start])
        mark = node.marks.get(start)
        if mark is not None:
            mark.last_used = self._cache.clock
        return mark

    def advance(self, ids: Sequence[int]) -> None:
        """These ids were just dispatched to the model; their rows are in the layers."""
        self._cache.live_ids.extend(ids)

    def settle(self) -> None:
        """What was dispatched is evaluated: take a snapshot due, make room, keep the budget."""
        cache = self._cache
        cache.learn_groups()
        at = len(cache.live_ids)
        if at in self._cuts:
            mark = Mark.take(at, self._cuts[at], cache.live, cache.layout.states)
            mark.last_used = cache.clock
            cache.record(None, None, [mark])
        cache.reserve(self._total)
        cache.enforce()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cache = self._cache
        if not self._rows_whole():
            log.warning("the live cache was torn by an error and let go of; stored pages are kept")
            recorded = cache.trie.match(cache.live_array())[1]
            del cache.live_ids[recorded:]
            cache.drop_live()
        elif error is not None and cache.stateful:
            # The states may be ahead of the recorded offset: keep the rows and the snapshots.
            cache.learn_groups()
            cache.record(self._owner, None, ())
            cache.vacate(0)
            cache.forget_live()
        else:
            cache.learn_groups()
            tip: MarkKind = "interrupt" if self.cancelled else "answer"
            self.node = cache.record(self._owner, tip, ()).id
        cache.enforce()
        cache.fit_live()

    def _rows_whole(self) -> bool:
        """Bring the row layers to the recorded offset; False when one doesn't reach it."""
        cache = self._cache
        offset = len(cache.live_ids)
        try:
            mx.eval(ly.arrays_in(cache.live))
        except Exception:
            log.debug("evaluating the live cache failed", exc_info=True)
            return False
        rows = [cache.live[i] for i in cache.layout.rows]
        if any(layer.offset < offset for layer in rows):
            return False
        for layer in rows:
            ly.rewind(layer, offset)
        return True

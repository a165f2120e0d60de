"""One request's hold on the prefix cache: plan, restore, run, record.

    with cache.open(ids, room=max_tokens) as session:
        ...  # feed ids[session.start:] to the model with cache=session.layers
        session.advance(fed)   # after each dispatch: these ids are in the cache now
        session.settle()       # evaluates them: marks due, window rows, room, budget

Every way out records exactly what the layers hold. When that can't be shown, the live cache is
let go of, not patched; what is stored stays.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Self

from mlx_jupyter.cache import exact, lending
from mlx_jupyter.cache.match import decide
from mlx_jupyter.cache.needs import MARK_EVERY
from mlx_jupyter.cache.recording import keep_windows, record
from mlx_jupyter.cache.view import AWAY
from mlx_jupyter.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    import numpy as np

    from mlx_jupyter.cache.pages import Mark, Page, Placed, RowSource, Strip
    from mlx_jupyter.cache.plan import Plan
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache
    from mlx_jupyter.cache.view import MarkKind

log = logging.getLogger(__name__)

ROOM = 512
"""Rows are reserved in multiples of this, so that a growing conversation is seldom copied."""

PERIOD = 8192
"""Tokens between two periodic marks of a long prefill."""

BATCH = 16
"""Pages that are put in place together on a GPU, where launches cost more than copies."""

MEASURED = 256
"""Tokens below which a measurement says more about fixed costs than about the tokens."""

LOOK = 1024
"""Tokens that are read in before it is judged whether that is worth while."""

AHEAD = 2048
"""Rows that are reserved ahead of a generation, however long it may become."""

SETTLE = 256
"""Decode settles at absolute multiples of this, and before a window loses rows."""


class Session:
    """See the module.

    Attributes:
        plan: what is reused, restored and recomputed, and why.
        start: position that prefill begins at; ``plan.cached``.
        node: id of the trie node where the recorded path ends (after the session).
        cancelled: set by the pipeline when the request was cut short.
    """

    def __init__(
        self,
        cache: PrefixCache,
        ids: np.ndarray,
        *,
        room: int,
        marks: Sequence[tuple[int, MarkKind]],
        owner: str | None,
        cancelled: Callable[[], bool],
    ) -> None:
        self._cache = cache
        self._ids = ids
        self._total = _rounded(len(ids) + min(room, AHEAD))
        self._marks = marks
        self._owner = owner
        self._told_to_stop = cancelled
        self.node: int | None = None
        self.cancelled = False
        self._decide()

    def _decide(self) -> None:
        """Plan by what is there now."""
        cache = self._cache
        found = cache.match(self._ids, self._owner)
        self.plan: Plan = decide(found, cache.needs, cache.rates)
        if any(cause.code == "cost" for cause in self.plan.why):
            cache.rates = cache.rates.doubted()
        self.start = self.plan.cached
        self._cuts = self._places(self._marks, found.known)
        self._settled(self.start)

    def _places(self, marks: Sequence[tuple[int, MarkKind]], known: int) -> dict[int, MarkKind]:
        """Where marks are set: offset → kind. Models of full layers alone need none."""
        if not self._cache.needs.stateful and not self._cache.needs.windows:
            return {}
        n = len(self._ids)
        cuts: dict[int, MarkKind] = dict.fromkeys(range(PERIOD, n, PERIOD), "periodic")
        cuts[n - 1] = "prompt"
        if known:
            cuts[known] = "branch"
        cuts.update(marks)
        return {at: kind for at, kind in cuts.items() if max(self.start, 1) <= at < n}

    @property
    def layers(self) -> list[Any]:
        """The live cache, to pass to the model."""
        return self._cache.live.layers

    @property
    def due(self) -> bool:
        """Whether decode has to settle before its next step."""
        return self._cache.live.offset >= self._settle_at

    def next_cut(self, at: int) -> int:
        """The nearest position after ``at`` where prefill has to pause for a mark."""
        return min((c for c in self._cuts if c > at), default=len(self._ids))

    def __enter__(self) -> Self:
        looked = False
        try:
            while not self._restore():
                log.debug("open: something stored is gone, planning again")
                if not looked:  # another file may have it: a longer one, for a tip that grew
                    self._cache.tiers.adopt(self._ids)
                    looked = True
                self._decide()
        except Interrupted:
            self._cache.fit_live()
            self._cache.enforce()
            raise
        except BaseException:
            self._cache.drop_live()
            raise
        log.debug("open: %s", self.plan)
        return self

    def _restore(self) -> bool:
        """Bring the live cache to where the plan says; False when a file isn't there any more."""
        cache, live, start, keep = self._cache, self._cache.live, self.start, self.plan.reused
        in_place = keep == start == live.offset > 0
        pages, strips, marks = ([], [], []) if in_place else self._stored(keep, start)
        if self._owner is not None:
            # Its former tip is no longer asked for: it must not compete for bytes.
            cache.release(self._owner)
        if not cache.reader.fetch([*strips, *marks]):
            return False
        cache.needed = {
            id(thing) for thing in (*pages, *(s for s, _ in strips), *(m for m, _ in marks))
        }
        try:
            keep_windows(cache)
            cache.vacate(keep, self._total)
        finally:
            cache.needed = set()
        lending.shed(cache, self._ids, self._owner)
        if not in_place:
            live.rewind(keep)
            if pages and not self._read_in(pages):
                self._stop_short()
                return False
            live.set_windows(start, [strip for strip, _ in strips], self._since(start))
            live.set_states(marks[0][0].states if marks else ())
            cache.reader.used(thing.entry for thing in (*pages, *(s for s, _ in strips)))
        live.computed_from = start
        live.fit(self._total)
        cache.reserve(self._total)
        if start in self._cuts:
            self._keep(self._cuts[start])
        return True

    def _stored(
        self, keep: int, start: int
    ) -> tuple[list[Page], list[tuple[Strip, PathNode]], list[tuple[Mark, PathNode]]]:
        """What is read in: pages for ``[keep, start)``, window rows and states for ``start``."""
        if not start:
            return [], [], []
        cache = self._cache
        path = cache.path_to(self._ids[:start])
        pages = [
            p for n in path for p in n.pages if keep < start and p.end > keep and p.start < start
        ]
        spans = cache.needs.spans(start)
        strips = [
            (s, n)
            for n in path
            for s in n.strips
            if any(a < s.end and s.start < b for a, b in spans)
        ]
        marks = [(m, path[-1]) for m in path[-1].marks.values() if m.at == start]
        for strip, _ in strips:
            strip.last_used = cache.requests
        for mark, _ in marks:
            mark.last_used = cache.requests
        return pages, strips, marks

    def _read_in(self, pages: Sequence[Page]) -> bool:
        """Put pages behind what the live cache holds; False when a new plan is needed.

        A file may be gone, or reading turns out to be slower than computing.
        """
        cache, live = self._cache, self._cache.live
        keep, from_disk = live.offset, self.plan.read
        began = cache.now()
        reading = cache.reader.pages(pages, self._total, self._told_to_stop)
        try:
            with reading as read:
                for run in _runs(pages, BATCH if live.gpu else 1):
                    away = run[-1].residence in AWAY
                    if not self._put(run, read):
                        return False
                    tokens = live.offset - keep
                    if away and self._dear(tokens, cache.now() - began):
                        cache.rates = cache.rates.seen(read=(cache.now() - began) / tokens)
                        return False
        except Interrupted:
            self._stop_short()
            raise
        finally:
            if reading.hung:
                log.warning("A disk doesn't answer; what was in the live cache is let go of.")
                cache.drop_live()
        tokens = self.start - keep
        if tokens >= MEASURED:
            seconds = (cache.now() - began) / tokens
            cache.rates = (
                cache.rates.seen(read=seconds)
                if from_disk > tokens // 2
                else cache.rates.seen(restore=seconds)
            )
        return True

    def _put(self, run: Sequence[Page], read: Callable[[Page], RowSource | Placed | None]) -> bool:
        live = self._cache.live
        parts = []
        for page in run:
            rows = read(page)
            if rows is None:
                return False
            parts.append(rows)
        end = min(run[-1].end, self.start)
        live.read_in(parts, self._ids[live.offset : end], self._total)
        for page in run:
            if page.end <= end:
                page.now_live()
        return True

    def _dear(self, tokens: int, seconds: float) -> bool:
        """Whether reading so many tokens took longer than computing them, with some still to come.

        With windows or states the live cache can't stop just anywhere.
        """
        cache = self._cache
        return (
            tokens >= LOOK
            and cache.live.offset < self.start
            and 0 < cache.rates.prefill * tokens < seconds
            and not cache.needs.windows
            and not cache.needs.stateful
        )

    def _stop_short(self) -> None:
        """Leave the live cache where reading ended; with windows or states it can't stay there."""
        cache = self._cache
        if cache.needs.stateful or cache.needs.windows:
            cache.vacate(0, 0)
            cache.forget_live()

    def _since(self, start: int) -> int | None:
        """In exactness mode: the live cache's passes, and since when a ring has been turning."""
        cache = self._cache
        if not cache.exact:
            return None
        passes = exact.flags(cache.path_to(self._ids[:start]), start)
        cache.live.passes = bytearray(passes.tobytes())
        return exact.turning_since(passes)

    def advance(self, ids: Sequence[int]) -> None:
        """One pass over these ids was just dispatched; their rows are in the layers."""
        live = self._cache.live
        live.ids.extend(ids)
        if self._cache.exact:
            live.passes += bytes(len(ids) - 1) + b"\1"

    def settle(self) -> None:
        """Evaluate what was dispatched; set a mark due, store window rows, keep the budget."""
        cache = self._cache
        cache.live.evaluate()
        at = cache.live.offset
        mark = self._cuts.get(at)
        if mark is None and at > len(self._ids) and at % MARK_EVERY == 0:
            mark = "periodic"
        self._keep(mark)
        if at + SETTLE > self._total:
            self._total = _rounded(at + AHEAD)
        cache.reserve(self._total)
        cache.enforce(rests=False)

    def mark(self, kind: MarkKind) -> None:
        """Set a mark where the live cache stands now."""
        self._cache.live.evaluate()
        self._keep(kind)

    def _keep(self, mark: MarkKind | None) -> None:
        cache = self._cache
        self._settled(cache.live.offset)
        if cache.needs.windows or (mark and cache.needs.stateful):
            record(cache, mark=mark)
            cache.thin(self.start)

    def _settled(self, at: int) -> None:
        window = self._cache.needs.period or SETTLE
        self._settle_at = min((at // SETTLE + 1) * SETTLE, at + window)

    def measured(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens took so long to prefill; a few tell nothing."""
        if tokens >= MEASURED:
            self._cache.rates = self._cache.rates.seen(prefill=seconds / tokens)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cache = self._cache
        try:
            self._record(failed=error is not None)
        except Exception:
            # The answer is whole all the same; what couldn't be recorded is computed again.
            log.warning("the live cache couldn't be recorded and was let go of", exc_info=True)
            self._let_go()
        cache.fit_live()
        cache.enforce()
        cache.tiers.expect()

    def _record(self, *, failed: bool) -> None:
        cache = self._cache
        if not self._whole():
            log.warning("the live cache was torn by an error and let go of; stored pages are kept")
            self._let_go()
        elif failed and (cache.needs.stateful or cache.needs.windows):
            # Windows or states may be ahead of the recorded offset: keep the rows and the marks.
            cache.live.windowed = cache.live.offset  # what isn't stored by now can't be trusted
            record(cache, self._owner)
            cache.vacate(0, 0)
            cache.forget_live()
        else:
            tip: MarkKind = "interrupt" if self.cancelled else "answer"
            self.node = record(cache, self._owner, tip=tip).id
            cache.thin(self.start)

    def _let_go(self) -> None:
        """Forget the live cache; its rows are gone from the trie."""
        cache = self._cache
        recorded = cache.trie.match(cache.live.id_array())[1]
        del cache.live.ids[recorded:]
        cache.drop_live()

    def _whole(self) -> bool:
        """Bring the full layers to the recorded offset; False when that can't be done."""
        live = self._cache.live
        try:
            live.evaluate()
        except Exception:
            log.debug("evaluating the live cache failed", exc_info=True)
            return False
        return live.mend_rows()


def _runs(pages: Sequence[Page], batch: int) -> Iterator[Sequence[Page]]:
    """Consecutive pages on the device together, those elsewhere ``batch`` at a time."""
    at = 0
    while at < len(pages):
        away = pages[at].residence in AWAY
        end = at + 1
        while end < len(pages) and (pages[end].residence in AWAY) == away:
            if away and end - at == batch:
                break
            end += 1
        yield pages[at:end]
        at = end


def _rounded(tokens: int) -> int:
    return -(-tokens // ROOM) * ROOM

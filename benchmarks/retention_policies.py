"""What caches may do when the budget is full, for ``retention.py`` to compare.

``Ours`` is the product's: its description of the cache, its choice. The others judge *units*: the
stretch of a path between two places that can be restored (or two forks), its rows and the state at
its end. A unit that nothing hangs on goes whole; of one in the middle of a path its state alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_lm.models.cache import LRUPromptCache
from retention_sim import (
    Model,
    SimCache,
    SimMark,
    SimNode,
    SimPage,
    Thing,
    our_decoding,
    our_places,
)

from mlx_jupyter.cache import retention
from mlx_jupyter.cache.describe import items
from mlx_jupyter.cache.session import PERIOD
from mlx_jupyter.cache.trie import common_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_jupyter.cache.match import Match
    from mlx_jupyter.cache.trace import Step

Dropped = list[tuple[Thing, SimNode]]


class Ours:
    """The product's policy on the product's description."""

    marks_rows = False
    places = staticmethod(our_places)
    decoding = staticmethod(our_decoding)

    def give_up(self, cache: SimCache, need: int, leaving: dict[int, int]) -> Dropped:
        """See ``PrefixCache._give_up``."""
        described, things = items(cache, leaving)  # type: ignore[arg-type]
        return [things[key] for key in retention.choose(described, need, cache.requests)]  # type: ignore[misc]


@dataclass(slots=True, eq=False)
class Unit:
    """See the module.

    Attributes:
        node: the trie node that it lies in.
        start: first token.
        end: one past the last.
        pages: its pages that hold bytes of their own and aren't needed just now, with the bytes.
        mark: the mark at its end.
        above: the unit before it on its path.
        below: units that hang on it.
        place: a request can go on from its end: there is a state, if only in the live cache, or
            the model needs none.
        broken: rows of it or of one above are gone.
        kept: it can't go: it is being read in.
        live: it holds rows of the live cache.
        next_use: requests until it is wanted, as far as known.
    """

    node: SimNode
    start: int
    end: int
    pages: list[tuple[SimPage, int]]
    mark: SimMark | None
    above: Unit | None
    place: bool
    broken: bool
    below: set[Unit] = field(default_factory=set)
    kept: bool = False
    live: bool = False
    next_use: float = math.inf

    @property
    def state(self) -> int:
        """Bytes of the state."""
        return self.mark.nbytes if self.mark else 0

    @property
    def rows(self) -> int:
        """Bytes of the rows."""
        return sum(nbytes for _, nbytes in self.pages)

    @property
    def last_used(self) -> int:
        """Of the mark; of the rows where there is none."""
        used = [page.last_used for page, _ in self.pages]
        return self.mark.last_used if self.mark else max(used, default=self.node.last_used)

    def replay(self) -> int:
        """Tokens from the last place above that can be restored."""
        unit = self.above
        while unit is not None and not unit.place:
            unit = unit.above
        return self.end - (unit.end if unit else 0)


def units(cache: SimCache, leaving: dict[int, int]) -> list[Unit]:
    """The cache as units, those above before those below."""
    stateful = cache.needs.stateful
    made: list[Unit] = []
    last: dict[int, Unit | None] = {cache.trie.root.id: None}
    for node in cache.trie.nodes():
        assert node.parent is not None
        above, at = last[node.parent.id], node.start
        pages = list(node.pages)
        marks = sorted(
            m for m, mark in node.marks.items() if mark.nbytes or not stateful or mark is cache.tip
        )
        for end in dict.fromkeys([*marks, node.end]):
            own = []
            live = pinned = False
            broken = above is not None and above.broken
            while pages and pages[0].start < end:
                page = pages.pop(0)
                nbytes = leaving.get(id(page), page.nbytes)
                broken |= page.residence == "gone"
                live |= page.residence == "live" and id(page) not in leaving
                pinned |= id(page) in cache.needed
                if nbytes:
                    own.append((page, nbytes))
            mark = node.marks.get(end)
            pinned |= id(mark) in cache.needed
            place = not broken and (mark is not None or not stateful)
            unit = Unit(node, at, end, own, mark, above, place, broken, kept=pinned, live=live)
            if above is not None:
                above.below.add(unit)
            made.append(unit)
            above, at = unit, end
        last[node.id] = above
    for unit in reversed(made):
        held = unit.pages or unit.live or (unit.mark and (unit.state or unit.mark is cache.tip))
        if not held and not unit.below and unit.above is not None:
            unit.above.below.discard(unit)
    return made


class ByUnit:
    """Gives up the unit of the lowest value until there is room."""

    marks_rows = True
    places = staticmethod(our_places)
    decoding = staticmethod(our_decoding)

    def value(self, cache: SimCache, candidates: list[Unit]) -> list[tuple[float, ...]]:
        """The lower, the sooner a candidate goes."""
        raise NotImplementedError

    def give_up(self, cache: SimCache, need: int, leaving: dict[int, int]) -> Dropped:
        """See ``Policy``."""
        held = units(cache, leaving)
        self.prepare(cache, held)
        dropped: Dropped = []
        while need > 0:
            candidates = [u for u in held if not u.kept and self.gain(u, cache)]
            if not candidates:
                break
            # Rows behind the last state serve nothing: they go first, at no cost.
            useless = [u for u in candidates if not u.place]
            values = [] if useless else self.value(cache, candidates)
            worst = useless[-1] if useless else candidates[values.index(min(values))]
            need -= self._drop(worst, cache, dropped)
        return dropped

    def prepare(self, cache: SimCache, held: list[Unit]) -> None:
        """Look at everything once before units go."""

    @staticmethod
    def gain(unit: Unit, cache: SimCache) -> int:
        """Bytes that giving a unit up frees; 0 when it can't go."""
        del cache
        leaf = not unit.below and not unit.live
        return unit.state + (unit.rows if leaf else 0)

    @staticmethod
    def _drop(unit: Unit, cache: SimCache, dropped: Dropped) -> int:
        freed = unit.state
        if unit.state and unit.mark:
            dropped.append((unit.mark, unit.node))
        if cache.needs.stateful:
            unit.mark, unit.place = None, False
        if not unit.below and not unit.live:
            freed += unit.rows
            dropped += [(page, unit.node) for page, _ in unit.pages]
            unit.pages = []
            if unit.above is not None:
                unit.above.below.discard(unit)
            unit.kept = True
        return freed


class LeafLRU(ByUnit):
    """States every 8,192 tokens, near the end of the prompt, at forks and tips; oldest first.

    Then deepest, then largest. Forks are protected, and using a place refreshes that place only.
    """

    def places(self, step: Step, found: Match, start: int) -> dict[int, str]:  # type: ignore[override]
        """The grid, four tokens before the end, the fork."""
        n = len(step.ids)
        cuts = dict.fromkeys(range(PERIOD, n, PERIOD), "grid")
        cuts[n - 4] = "prompt"
        cuts[found.known] = "branch"
        return {at: kind for at, kind in cuts.items() if start < at < n}

    def decoding(self, start: int, end: int) -> Iterable[int]:  # type: ignore[override]
        """The grid."""
        return range((start // PERIOD + 1) * PERIOD, end, PERIOD)

    def value(self, cache: SimCache, candidates: list[Unit]) -> list[tuple[float, ...]]:
        """Age, depth, bytes."""
        return [
            (float(len(u.below) > 1), u.last_used, -u.end, -self.gain(u, cache)) for u in candidates
        ]


class Marconi(ByUnit):
    """Recency and, weighted by alpha, compute saved per byte, each scaled to [0, 1].

    The score of "Marconi: Prefix Caching for the Era of Hybrid LLMs" (MLSys 2025), on our marks;
    tokens stand for FLOPs. Units with more than one below stay.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def value(self, cache: SimCache, candidates: list[Unit]) -> list[tuple[float, ...]]:
        """The score."""
        ages = _unit_range([float(u.last_used) for u in candidates])
        saved = _unit_range([u.replay() / self.gain(u, cache) for u in candidates])
        forks = [float(len(u.below) > 1) for u in candidates]
        return [
            (fork, age + self.alpha * save)
            for fork, age, save in zip(forks, ages, saved, strict=True)
        ]


def _unit_range(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(v - low) / (high - low) if high > low else 1.0 for v in values]


class Clairvoyant(ByUnit):
    """Knows the requests to come: what is used never or last goes first, by replay per byte."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._uses: dict[int, list[tuple[int, int]]] = {}

    def give_up(self, cache: SimCache, need: int, leaving: dict[int, int]) -> Dropped:
        """Rows alone: page by page."""
        if cache.needs.stateful:
            return super().give_up(cache, need, leaving)
        self._look_ahead(cache)
        described, things = items(cache, leaving)  # type: ignore[arg-type]
        order: list[tuple[bool, float, int, int]] = []
        for item in described:
            page, node = things[item.key]
            reaches = (d for at, d in self._uses.get(node.id, ()) if at > page.start)  # type: ignore[union-attr]
            if not item.pinned:
                order.append((item.useless, min(reaches, default=math.inf), item.end, item.key))
        dropped: Dropped = []
        sizes = {item.key: item.nbytes for item in described}
        for *_, key in sorted(order, reverse=True):  # pages behind a page are wanted no sooner
            if need <= 0:
                break
            need -= sizes[key]
            dropped.append(things[key])  # type: ignore[arg-type]
        return dropped

    def _look_ahead(self, cache: SimCache) -> None:
        """Find for each node who comes how deep."""
        self._uses = uses = {}
        for distance, step in enumerate(self._steps[cache.step + 1 :], 1):
            node, at = cache.trie.root, 0
            while at < len(step.ids):
                child = node.child(int(step.ids[at]))
                if child is None:
                    break
                at += common_prefix(child.tokens, step.ids[at:])
                node = child
                uses.setdefault(node.id, []).append((min(at, len(step.ids) - 1), distance))
                if at < child.end:
                    break

    def prepare(self, cache: SimCache, held: list[Unit]) -> None:
        """Each coming request uses the deepest state on its path."""
        self._look_ahead(cache)
        self._restored_at(held)

    def _restored_at(self, held: list[Unit]) -> None:
        for unit in held:
            below = [u for u in unit.below if u.node is unit.node and u.place]
            limit = min((u.end for u in below), default=math.inf)
            for at, distance in self._uses.get(unit.node.id, ()):
                if unit.end <= at < limit and not any(
                    self._reaches(u, distance) for u in unit.below if u.node is not unit.node
                ):
                    _use(unit, distance)
                elif at < unit.end and unit.start == unit.node.start:
                    # It ends before the node's first state: one above serves it.
                    _use(unit.above, distance)

    def _reaches(self, unit: Unit, distance: int) -> bool:
        return any(d == distance for _, d in self._uses.get(unit.node.id, ()))

    def value(self, cache: SimCache, candidates: list[Unit]) -> list[tuple[float, ...]]:
        """Replay per byte over the time to the next use."""
        return [
            (u.replay() / self.gain(u, cache) / u.next_use, -u.next_use, -u.end) for u in candidates
        ]

    def _drop(self, unit: Unit, cache: SimCache, dropped: Dropped) -> int:  # type: ignore[override]
        if cache.needs.stateful and unit.next_use < math.inf:
            _use(unit.above, unit.next_use)  # whoever came for this state comes to one above
        freed = ByUnit._drop(unit, cache, dropped)
        unit.next_use = math.inf
        return freed


def _use(unit: Unit | None, distance: float) -> None:
    while unit is not None and not unit.place:
        unit = unit.above
    if unit is not None:
        unit.next_use = min(unit.next_use, distance)


class MlxLM:
    """mlx-lm's own ``LRUPromptCache``, filled as its server does.

    Takes steps in units, not scaled: it keeps a dictionary a token. The copy that runs isn't
    counted against its budget, and the number of its entries isn't limited.
    """

    def __init__(self, model: Model, budget: float, factor: int) -> None:
        self._model, self._factor = model, factor
        limit = 1 << 62 if math.isinf(budget) else int(budget)
        self._cache: Any = LRUPromptCache(max_size=1 << 30, max_bytes=limit)

    def request(self, step: Step) -> int:
        """Serve one request; how many tokens were prefilled."""
        ids = step.ids.tolist()
        found, rest = self._cache.fetch_nearest_cache("", ids)
        del found
        start = len(ids) - len(rest)
        for at, kind in step.marks:
            if at > start and kind in ("system", "prompt"):
                self._insert(ids[:at], "user" if kind == "prompt" else kind)
        self._insert(ids + step.generated[:-1].tolist(), "assistant")
        return max(1, len(rest) * self._factor)

    def _insert(self, ids: list[int], kind: str) -> None:
        tokens, model = len(ids) * self._factor, self._model
        layers = [_FakeLayer(tokens * model.row_bytes, trimmable=True)]
        if model.state_bytes:
            layers.append(_FakeLayer(model.state_bytes, trimmable=False))
        self._cache.insert_cache("", ids, layers, cache_type=kind)


@dataclass(slots=True)
class _FakeLayer:
    """As much of a cache layer as ``LRUPromptCache`` asks for."""

    nbytes: int
    trimmable: bool

    def is_trimmable(self) -> bool:
        return self.trimmable

    def trim(self, n: int) -> int:
        return n

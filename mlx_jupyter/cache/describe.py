"""Descriptions of a prefix cache: the view that is published, the items that retention judges."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from mlx_jupyter.cache.needs import joined
from mlx_jupyter.cache.pages import Mark, Page, Strip
from mlx_jupyter.cache.retention import BACK, INTERIOR, NEW, Item, recency
from mlx_jupyter.cache.trie import PAGE, Node
from mlx_jupyter.cache.view import MarkView, NodeView, PageView, StripView, TreeView

if TYPE_CHECKING:
    from mlx_jupyter.cache.prefix_cache import PrefixCache

_NO_ENDS = np.zeros(0, np.bool_)

_Node = Node[Page, Strip, Mark]
_Thing = Page | Strip | Mark


def describe(cache: PrefixCache, active: set[int]) -> TreeView:
    """The whole cache as plain data; ``active`` holds ``id()`` of the nodes on the live path."""
    order = list(cache.trie.nodes())
    made: dict[int, NodeView] = {}
    for node in reversed(order):  # children before parents; no recursion: paths can be deep
        made[node.id] = _node_view(cache, node, made, id(node) in active)
    return TreeView(
        model=cache.name,
        root=_node_view(cache, cache.trie.root, made, active=True),
        live=cache.live.offset,
        live_bytes=cache.live.nbytes(),
        stored_bytes=cache.stored_bytes(),
        host_bytes=cache.tally.host,
        budget=cache.budget,
        page_size=PAGE,
        clock=cache.requests,
        needs=cache.needs,
        rates=cache.rates,
        layers=cache.live.leaves.counts,
        version=cache.version,
        exact=cache.exact,
    )


def _node_view(
    cache: PrefixCache, node: _Node, made: dict[int, NodeView], active: bool
) -> NodeView:
    return NodeView(
        id=node.id,
        start=node.start,
        end=node.end,
        tokens=node.tokens,
        children=tuple(made[c.id] for c in node.children.values()),
        pages=tuple(
            PageView(p.start, p.end, p.residence, p.nbytes, p.last_used, p.lent) for p in node.pages
        ),
        strips=tuple(StripView(s.start, s.end, s.nbytes, s.residence) for s in node.strips),
        marks=tuple(
            MarkView(m.at, m.kind, m.residence, m.nbytes) for _, m in sorted(node.marks.items())
        ),
        uses=node.uses,
        last_used=node.last_used,
        owners=tuple(cache.labels.get(owner, owner) for owner in node.owners),
        active=active,
        ends=node.ends.copy() if cache.exact else _NO_ENDS,
    )


@dataclass(slots=True)
class _Below:
    """What lies at or below a node: the deepest owner's, pin's and mark's offsets (0: none).

    ``live`` is the deepest mark's whose states only the live cache holds, ``seen`` the request of
    the owner that asked last. ``tips`` is how much the tips are wanted together, ``asks`` the same
    with each tip less by the marks between the node and it, ``asked`` that for each of the node's
    own marks.
    """

    owner: int
    pin: int
    mark: int
    live: int
    seen: int
    tips: float
    asks: float
    asked: dict[int, float]


@dataclass(slots=True)
class _Above:
    """What lies on the path above: last page's and state's keys, a gap in the rows, last mark.

    ``under`` is whether an owner's tip, or the end of the request that is served, lies above.
    """

    page: int | None = None
    broken: bool = False
    mark: int = 0
    state: int | None = None
    under: bool = False


def items(
    cache: PrefixCache, leaving: dict[int, int]
) -> tuple[list[Item], dict[int, tuple[_Thing, _Node]]]:
    """Everything that holds bytes and could be given up.

    Args:
        cache: the cache.
        leaving: ``id()`` → bytes of live pages, and of the tip's mark, that are about to need bytes
            of their own.

    Returns:
        The items, and what each key stands for.
    """
    order = list(cache.trie.nodes())
    running = _running(cache)
    below = _below(order, cache, leaving, running)
    described: list[Item] = []
    things: dict[int, tuple[_Thing, _Node]] = {}
    above: dict[int, _Above] = {cache.trie.root.id: _Above()}
    strips: dict[int, int] = {}  # id() of a strip -> its key
    used: set[int] = set()  # strips that some mark needs
    windows, stateful = cache.needs.windows, cache.needs.stateful
    marked = stateful or bool(windows)  # only marks are restored

    def add(thing: _Thing, node: _Node, item: Item) -> None:
        things[item.key] = (thing, node)
        described.append(item)

    for node in order:
        assert node.parent is not None
        over, under = above[node.parent.id], below[node.id]
        here = above[node.id] = _Above(over.page, over.broken, over.mark, over.state, over.under)
        breaks = node.end + 1
        holds = [(node.start, over.page)]  # from where on which page holds the last row
        tips = [*node.owners.values(), *([running[1]] if node is running[0] else ())]
        first = 0 if over.under else min(tips, default=1 << 62)  # what lies behind is under a tip
        here.under = over.under or bool(tips)
        for page in node.pages:
            if page.residence == "gone" and not here.broken:
                here.broken, breaks = True, page.start
            nbytes = leaving.get(id(page), page.nbytes)
            if nbytes:
                key = len(described)
                add(
                    page,
                    node,
                    Item(
                        key,
                        "rows",
                        nbytes,
                        page.end,
                        page.tokens,
                        page.last_used,
                        here.page,
                        useless=here.broken or (marked and under.mark <= page.start),
                        reachable=under.owner > page.start,
                        pinned=id(page) in cache.needed or under.pin > page.start,
                        asked=under.tips,
                        under=page.start >= first,
                        alone=not marked or under.live > page.start,
                    ),
                )
                here.page = key
                holds.append((page.start + 1, key))
        for strip in node.strips:
            if strip.nbytes:
                key = strips[id(strip)] = len(described)
                near = max((at for at in node.marks if at < strip.end), default=over.mark)
                add(
                    strip,
                    node,
                    Item(
                        key,
                        "window",
                        strip.nbytes,
                        strip.end,
                        max(strip.end - near, strip.tokens),
                        strip.last_used,
                        useless=over.broken or breaks <= strip.start,
                        reachable=under.owner > strip.start,
                        pinned=id(strip) in cache.needed or under.pin > strip.start,
                        asked=_interior(cache, node is running[0], strip),
                        under=strip.start >= first,
                    ),
                )
        for at, mark in sorted(node.marks.items()):
            whole, needed = _window(cache, node, at, strips)
            nbytes = leaving.get(id(mark), mark.nbytes)
            if nbytes or (windows and whole and not stateful):
                key = len(described)
                add(
                    mark,
                    node,
                    Item(
                        key,
                        "state",
                        nbytes,
                        at,
                        at - here.mark,
                        mark.last_used,
                        _holder(holds, at),
                        useless=over.broken or breaks < at or not whole,
                        reachable=under.owner >= at,
                        pinned=id(mark) in cache.needed or under.pin >= at,
                        prior=here.state,
                        place=mark.kind,
                        asked=under.asked[at],
                        under=at > first,
                        needs=needed,
                    ),
                )
                here.state = key if whole else here.state
            elif whole:
                used |= set(needed)  # its states lie elsewhere
            here.mark = at if whole else here.mark
    used |= {key for item in described if not item.useless for key in item.needs}
    for key in set(strips.values()) - used:
        if described[key].last_used < cache.requests:
            described[key] = replace(described[key], useless=True)
    return described, things


def _holder(holds: list[tuple[int, int | None]], at: int) -> int | None:
    """The page that holds the last row before ``at``."""
    return holds[bisect_right(holds, at, key=lambda hold: hold[0]) - 1][1]


def _running(cache: PrefixCache) -> tuple[_Node | None, int]:
    """Where the prompt that was asked for last leads to, as far as it is known: node, offset."""
    node, at = cache.trie.match(cache.asked)
    return (node, at) if at else (None, 0)


def _interior(cache: PrefixCache, running: bool, strip: Strip) -> float:
    """How much a strip of the running request that no mark needs yet is wanted.

    The next mark will need those behind the live cache's end; in the others an edit may fall.
    """
    coming = any(a < strip.end for a, _ in cache.needs.spans(cache.live.offset))
    return recency(0) * (1.0 if running and coming else BACK**INTERIOR)


def _window(
    cache: PrefixCache, node: _Node, at: int, keys: dict[int, int]
) -> tuple[bool, tuple[int, ...]]:
    """Whether the window rows for ``at`` are all held, and the keys of the strips they lie in."""
    spans = cache.needs.spans(at)
    if not spans:
        return True, ()
    held: list[Strip] = []
    step: _Node | None = node
    while step is not None and step.end > spans[0][0]:
        for a, b in spans:
            first = bisect_right(step.strips, a, key=lambda s: s.end)
            held += takewhile(lambda s: s.start < b, step.strips[first:])  # noqa: B023 - at once
        step = step.parent
    whole = cache.needs.windows_held(at, joined((s.start, s.end) for s in held))
    return whole, tuple(keys[id(s)] for s in held if id(s) in keys)


def _below(
    order: list[_Node],
    cache: PrefixCache,
    leaving: dict[int, int],
    running: tuple[_Node | None, int],
) -> dict[int, _Below]:
    clock = cache.requests
    result: dict[int, _Below] = {}
    for node in reversed(order):
        children = [result[c.id] for c in node.children.values()]
        wanted = {at: recency(clock - node.last_used) for at in node.owners.values()}
        seen = max([node.last_used if wanted else 0, *(c.seen for c in children)])
        if node is running[0] and seen < clock:  # else it has its tip by now
            wanted[running[1]] = recency(0)
            seen = clock
        tips, asks = sum(c.tips for c in children), sum(c.asks for c in children)
        asked: dict[int, float] = {}
        for at in sorted(wanted.keys() | node.marks.keys(), reverse=True):
            tips += wanted.get(at, 0.0)
            asks += wanted.get(at, 0.0)
            if at in node.marks:
                new = NEW * recency(clock - seen) if node.marks[at].kind == "system" else 0.0
                asked[at] = asks + new
                asks *= BACK
        pinned = [at for owner, at in node.owners.items() if owner in cache.pins]
        live = [
            at
            for at, m in node.marks.items()
            if cache.needs.stateful and not leaving.get(id(m), m.nbytes)
        ]
        result[node.id] = _Below(
            owner=max([*wanted, *(c.owner for c in children)], default=0),
            pin=max([*pinned, *(c.pin for c in children)], default=0),
            mark=max([*node.marks, *(c.mark for c in children)], default=0),
            live=max([*live, *(c.live for c in children)], default=0),
            seen=seen,
            tips=tips,
            asks=asks,
            asked=asked,
        )
    return result

"""Descriptions of a prefix cache: the view that is published, the items that retention judges."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mlx_jupyter.cache.needs import Span, joined
from mlx_jupyter.cache.pages import Mark, Page, Strip
from mlx_jupyter.cache.retention import Item
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
            PageView(p.start, p.end, p.residence, p.nbytes, p.last_used) for p in node.pages
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


INTERIOR = 3
"""What the window rows of the latest turn that no mark needs count as: an edit may come there."""


@dataclass(slots=True)
class _Below:
    """What lies at or below a node: the deepest owner's, pin's and mark's offsets (0: none).

    ``live`` is the deepest mark's whose states only the live cache holds, ``seen`` the request of
    the owner that asked last, ``back`` how many marks lie between the node and the nearest tip,
    ``backs`` the same for each of its own marks, ``places`` for all that a strip of the node could
    be needed for.
    """

    owner: int
    pin: int
    mark: int
    live: int
    seen: int
    back: int
    backs: dict[int, int]
    places: list[tuple[int, int]]


@dataclass(slots=True)
class _Above:
    """What lies on the path above: last page's and state's keys, a gap in the rows, last mark."""

    page: int | None = None
    broken: bool = False
    mark: int = 0
    state: int | None = None


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
    reach = max((w.size for w in cache.needs.windows), default=0)
    below = _below(order, cache.pins, leaving, reach, _whole_windows(cache, order))
    described: list[Item] = []
    things: dict[int, tuple[_Thing, _Node]] = {}
    above: dict[int, _Above] = {cache.trie.root.id: _Above()}
    stateful = cache.needs.stateful

    def add(thing: _Thing, node: _Node, item: Item) -> None:
        things[item.key] = (thing, node)
        described.append(item)

    for node in order:
        assert node.parent is not None
        over, under = above[node.parent.id], below[node.id]
        here = above[node.id] = _Above(over.page, over.broken, over.mark, over.state)
        breaks = node.end + 1
        holds = [(node.start, over.page)]  # from where on which page holds the last row
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
                        useless=here.broken or (stateful and under.mark <= page.start),
                        reachable=under.owner > page.start,
                        pinned=id(page) in cache.needed or under.pin > page.start,
                        seen=under.seen,
                        alone=not stateful or under.live > page.start,
                    ),
                )
                here.page = key
                holds.append((page.start + 1, key))
        for strip in node.strips:
            add(
                strip,
                node,
                Item(
                    len(described),
                    "window",
                    strip.nbytes,
                    strip.end,
                    strip.end,  # without it nothing up to here can be restored by itself
                    strip.last_used,
                    _holder(holds, strip.end),
                    useless=over.broken
                    or breaks <= strip.start
                    or (strip.last_used < cache.requests and not _needed(under, strip, reach)),
                    reachable=under.owner > strip.start,
                    pinned=id(strip) in cache.needed or under.pin > strip.start,
                    seen=under.seen,
                    back=min(_needed(under, strip, reach), default=INTERIOR),
                ),
            )
        for at, mark in sorted(node.marks.items()):
            if nbytes := leaving.get(id(mark), mark.nbytes):
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
                        useless=over.broken or breaks < at,
                        reachable=under.owner >= at,
                        pinned=id(mark) in cache.needed or under.pin >= at,
                        prior=here.state,
                        place=mark.kind,
                        seen=under.seen,
                        back=under.backs[at],
                    ),
                )
                here.state = key
            here.mark = at
    return described, things


def _holder(holds: list[tuple[int, int | None]], at: int) -> int | None:
    """The page that holds the last row before ``at``."""
    return holds[bisect_right(holds, at, key=lambda hold: hold[0]) - 1][1]


def _needed(under: _Below, strip: Strip, reach: int) -> list[int]:
    """For each mark that needs rows of the strip: the marks between it and a tip."""
    return [back for at, back in under.places if strip.start < at < strip.end + reach]


def _whole_windows(cache: PrefixCache, order: list[_Node]) -> set[tuple[int, int]]:
    """(node, offset) of the marks whose window rows are all held."""
    whole: set[tuple[int, int]] = set()
    if not cache.needs.windows:
        return whole
    held: dict[int, list[Span]] = {cache.trie.root.id: []}
    for node in order:
        assert node.parent is not None
        spans = joined([*held[node.parent.id], *((s.start, s.end) for s in node.strips)])
        held[node.id] = spans
        whole |= {(node.id, at) for at in node.marks if cache.needs.windows_held(at, spans)}
    return whole


def _below(
    order: list[_Node],
    pins: set[str],
    leaving: dict[int, int],
    reach: int,
    whole: set[tuple[int, int]],
) -> dict[int, _Below]:
    result: dict[int, _Below] = {}
    for node in reversed(order):
        children = [result[c.id] for c in node.children.values()]
        tips = set(node.owners.values())
        back, backs = min([c.back for c in children if c.owner], default=0), {}
        for at in sorted(tips | node.marks.keys(), reverse=True):
            back = 0 if at in tips else back
            if at in node.marks:
                backs[at] = back
                back += 1
        pinned = [at for owner, at in node.owners.items() if owner in pins]
        live = [at for at, m in node.marks.items() if not leaving.get(id(m), m.nbytes)]
        result[node.id] = _Below(
            owner=max([*tips, *(c.owner for c in children)], default=0),
            pin=max([*pinned, *(c.pin for c in children)], default=0),
            mark=max([*node.marks, *(c.mark for c in children)], default=0),
            live=max([*live, *(c.live for c in children)], default=0),
            seen=max([node.last_used if tips else 0, *(c.seen for c in children)]),
            back=back,
            backs=backs,
            places=[
                *((at, n) for at, n in backs.items() if (node.id, at) in whole),
                *(place for c in children for place in c.places if place[0] < node.end + reach),
            ],
        )
    return result

"""Descriptions of a prefix cache: the view that is published, the items that retention judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_jupyter.cache.pages import Mark, Page, Strip
from mlx_jupyter.cache.retention import Item
from mlx_jupyter.cache.trie import PAGE, Node
from mlx_jupyter.cache.view import MarkView, NodeView, PageView, StripView, TreeView

if TYPE_CHECKING:
    from mlx_jupyter.cache.prefix_cache import PrefixCache

_Node = Node[Page, Strip, Mark]
_Thing = Page | Strip | Mark


def describe(cache: PrefixCache, active: set[int]) -> TreeView:
    """The whole cache as plain data; ``active`` holds ``id()`` of the nodes on the live path."""
    order = list(cache.trie.nodes())
    made: dict[int, NodeView] = {}
    for node in reversed(order):  # children before parents; no recursion: paths can be deep
        made[node.id] = _node_view(node, made, id(node) in active)
    return TreeView(
        model=cache.name,
        root=_node_view(cache.trie.root, made, active=True),
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
    )


def _node_view(node: _Node, made: dict[int, NodeView], active: bool) -> NodeView:
    return NodeView(
        id=node.id,
        start=node.start,
        end=node.end,
        tokens=node.tokens,
        children=tuple(made[c.id] for c in node.children.values()),
        pages=tuple(
            PageView(p.start, p.end, p.residence, p.nbytes, p.last_used) for p in node.pages
        ),
        strips=tuple(StripView(s.start, s.end, s.nbytes) for s in node.strips),
        marks=tuple(
            MarkView(m.at, m.kind, "device" if m.nbytes else "live", m.nbytes)
            for _, m in sorted(node.marks.items())
        ),
        uses=node.uses,
        last_used=node.last_used,
        owners=tuple(node.owners),
        active=active,
    )


@dataclass(slots=True)
class _Below:
    """What lies at or below a node: the deepest owner's, pin's and mark's offsets (0: none)."""

    owner: int
    pin: int
    mark: int


@dataclass(slots=True)
class _Above:
    """What lies on the path above: the last page's key, whether one is missing, the last mark."""

    page: int | None = None
    broken: bool = False
    mark: int = 0


def items(
    cache: PrefixCache, leaving: dict[int, int]
) -> tuple[list[Item], dict[int, tuple[_Thing, _Node]]]:
    """Everything that holds bytes and could be given up.

    Args:
        cache: the cache.
        leaving: ``id(page)`` → bytes of live pages that are about to need bytes of their own.

    Returns:
        The items, and what each key stands for.
    """
    order = list(cache.trie.nodes())
    below = _below(order, cache.pins)
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
        here = above[node.id] = _Above(over.page, over.broken, over.mark)
        breaks = node.end + 1
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
                    ),
                )
                here.page = key
        for strip in node.strips:
            add(
                strip,
                node,
                Item(
                    len(described),
                    "window",
                    strip.nbytes,
                    strip.end,
                    strip.tokens,
                    strip.last_used,
                    useless=over.broken or breaks < strip.end,
                    reachable=under.owner >= strip.end,
                    pinned=id(strip) in cache.needed or under.pin >= strip.end,
                ),
            )
        for at, mark in sorted(node.marks.items()):
            if mark.nbytes:
                add(
                    mark,
                    node,
                    Item(
                        len(described),
                        "state",
                        mark.nbytes,
                        at,
                        at - here.mark,
                        mark.last_used,
                        useless=over.broken or breaks < at,
                        reachable=under.owner >= at,
                        pinned=id(mark) in cache.needed or under.pin >= at,
                    ),
                )
            here.mark = at
    return described, things


def _below(order: list[_Node], pins: set[str]) -> dict[int, _Below]:
    result: dict[int, _Below] = {}
    for node in reversed(order):
        children = [result[c.id] for c in node.children.values()]
        result[node.id] = _Below(
            max([*node.owners.values(), *(c.owner for c in children)], default=0),
            max(
                [*(at for o, at in node.owners.items() if o in pins), *(c.pin for c in children)],
                default=0,
            ),
            max([*node.marks, *(c.mark for c in children)], default=0),
        )
    return result

"""Descriptions of a prefix cache: the view that is published, the items that retention judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_jupyter.cache.pages import Mark, Page
from mlx_jupyter.cache.retention import Item
from mlx_jupyter.cache.trie import PAGE, Node
from mlx_jupyter.cache.view import MarkView, NodeView, PageView, TreeView

if TYPE_CHECKING:
    from mlx_jupyter.cache.prefix_cache import PrefixCache

_Node = Node[Page, Mark]


def describe(cache: PrefixCache, active: set[int]) -> TreeView:
    """The whole cache as plain data; ``active`` holds ``id()`` of the nodes on the live path."""
    order = list(cache.trie.nodes())
    made: dict[int, NodeView] = {}
    for node in reversed(order):  # children before parents; no recursion: paths can be deep
        made[node.id] = _node_view(node, made, id(node) in active)
    root = _node_view(cache.trie.root, made, active=True)
    return TreeView(
        model=cache.name,
        root=root,
        live=len(cache.live_ids),
        live_bytes=cache.live_bytes(),
        stored_bytes=cache.stored_bytes(),
        budget=cache.budget,
        page_size=PAGE,
        clock=cache.clock,
        layers=cache.layout.counts,
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
    """What lies at or below a node: the deepest owner's and snapshot's offsets (0: none)."""

    owner: int
    mark: int


def items(
    cache: PrefixCache, leaving: dict[int, int]
) -> tuple[list[Item], dict[int, tuple[Page | Mark, _Node]]]:
    """Everything that holds bytes and could be given up.

    Args:
        cache: the cache.
        leaving: ``id(page)`` → bytes of live pages that are about to need bytes of their own.

    Returns:
        The items, and what each key stands for.
    """
    order = list(cache.trie.nodes())
    below = _below(order)
    described: list[Item] = []
    things: dict[int, tuple[Page | Mark, _Node]] = {}
    tails: dict[
        int, tuple[int | None, bool, int]
    ] = {}  # node -> (last page item, broken, last mark)
    for node in order:
        assert node.parent is not None
        before, broken, marked = tails.get(node.parent.id, (None, False, 0))
        under = below[node.id]
        for page in node.pages:
            broken = broken or page.residence == "gone"
            nbytes = leaving.get(id(page), page.nbytes)
            if not nbytes:
                continue
            key = len(described)
            described.append(
                Item(
                    key,
                    "rows",
                    nbytes,
                    page.end,
                    page.tokens,
                    page.last_used,
                    before,
                    useless=broken or (cache.stateful and under.mark <= page.start),
                    reachable=under.owner > page.start,
                    pinned=id(page) in cache.needed,
                )
            )
            things[key] = (page, node)
            before = key
        for at, mark in sorted(node.marks.items()):
            if mark.nbytes:
                key = len(described)
                described.append(
                    Item(
                        key,
                        "state",
                        mark.nbytes,
                        at,
                        at - marked,
                        mark.last_used,
                        useless=broken,
                        reachable=under.owner >= at,
                        pinned=id(mark) in cache.needed,
                    )
                )
                things[key] = (mark, node)
            marked = at
        tails[node.id] = (before, broken, marked)
    return described, things


def _below(order: list[_Node]) -> dict[int, _Below]:
    result: dict[int, _Below] = {}
    for node in reversed(order):
        children = [result[c.id] for c in node.children.values()]
        result[node.id] = _Below(
            max([*node.owners.values(), *(c.owner for c in children)], default=0),
            max([*node.marks, *(c.mark for c in children)], default=0),
        )
    return result

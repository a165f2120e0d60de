"""What another budget would cost: the policy run over the description, and nothing moved.

It follows what a cache does when its budget changes (``making_room``): spare rows of the live cache
go first, then the end of the live cache where that alone is too large, then what the policy finds
least worth its bytes. Whether something that has no file yet will have one by then is a guess.

Used on the engine thread, between requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from mlx_jupyter.cache import making_room, retention
from mlx_jupyter.cache.describe import items
from mlx_jupyter.cache.pages import Mark, Page

if TYPE_CHECKING:
    from mlx_jupyter.cache.pages import Strip
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache
    from mlx_jupyter.cache.retention import Item
    from mlx_jupyter.cache.view import Residence

    Thing = Page | Strip | Mark

Kind = Literal["rows", "window", "state"]


@dataclass(frozen=True, slots=True)
class Leaving:
    """A page, strip or snapshot that would go.

    Attributes:
        node: the trie node that it belongs to.
        kind: "rows" (a page), "window" (a strip), "state" (a snapshot).
        start: position of its first token.
        end: one past its last; a snapshot has ``start == end``.
        nbytes: what it takes now; 0 for rows of the live cache.
        to: where it would be then: "host", "disk", "gone", or "device" for pinned rows that leave
            the live cache.
    """

    node: int
    kind: Kind
    start: int
    end: int
    nbytes: int
    to: Residence


@dataclass(frozen=True, slots=True)
class Preview:
    """What a budget would do.

    Attributes:
        budget: the budget, in bytes.
        leaving: what would go, in order.
        before: bytes of live cache, pages and snapshots now.
        after: the same then; more than ``budget`` where what is pinned doesn't fit. Roughly, when
            pinned rows have to leave the live cache: what a copy takes is known when it is made.
    """

    budget: int
    leaving: tuple[Leaving, ...] = ()
    before: int = 0
    after: int = 0


def preview(cache: PrefixCache, budget: int) -> Preview:
    """What would go if the budget were so many bytes; moves nothing."""
    before, live = cache.nbytes(), cache.live
    if before <= budget:
        return Preview(budget, (), before, before)
    described, things = items(cache, {})
    live_bytes = live.nbytes() - _spare_bytes(cache)
    pin = making_room.pinned_live(cache)
    keep = making_room.live_that_fits(cache, budget, live_bytes)
    path = cache.live_path()
    going: list[Leaving] = []
    stored = cache.stored_bytes()
    if keep < live.offset:
        going = [
            Leaving(
                node.id, "rows", page.start, page.end, 0, _after_live(cache, page, node, pin, keep)
            )
            for node in path
            for page in node.pages
            if page.residence == "live" and page.end > keep
        ]
        live_bytes = live.row_bytes() * keep if keep else 0
        if not keep:
            stored += live.row_bytes() * pin
        if live.leaves.rows:
            described = _cut_off(described, things, {n.id: n.end for n in path}, max(keep, pin))
    for key in retention.choose(described, live_bytes + stored - budget, cache.requests):
        thing, node = things[key]
        stored -= thing.nbytes
        going.append(_leaving(cache, thing, node, useless=described[key].useless))
    return Preview(budget, tuple(going), before, live_bytes + stored)


def _leaving(cache: PrefixCache, thing: Thing, node: PathNode, *, useless: bool) -> Leaving:
    to = _elsewhere(thing)
    if to == "gone" and not useless:
        to = cache.tiers.refuge(node)
    if isinstance(thing, Mark):
        return Leaving(node.id, "state", thing.at, thing.at, thing.nbytes, to)
    kind: Kind = "rows" if isinstance(thing, Page) else "window"
    return Leaving(node.id, kind, thing.start, thing.end, thing.nbytes, to)


def _elsewhere(thing: Thing) -> Residence:
    """Where a thing is besides the device."""
    if thing.host is not None:
        return "host"
    return "disk" if (thing.entry if isinstance(thing, Mark) else thing.twin) else "gone"


def _after_live(cache: PrefixCache, page: Page, node: PathNode, pin: int, keep: int) -> Residence:
    """Where the rows of the live cache would be that go when it is cut, or let go of."""
    if not keep and page.start < pin:
        return "device"
    to = _elsewhere(page)
    return cache.tiers.refuge(node) if to == "gone" and not keep else to


def _spare_bytes(cache: PrefixCache) -> int:
    """Bytes of the live cache's buffers behind its last row."""
    return sum(
        sum(a.nbytes for a in layer.arrays) * (layer.capacity - layer.offset) // layer.capacity
        for layer in cache.live.leaves.rows
        if layer.capacity
    )


def _cut_off(
    described: list[Item],
    things: dict[int, tuple[Thing, PathNode]],
    live: dict[int, int],
    keep: int,
) -> list[Item]:
    """The items as they are once the live cache's rows from ``keep`` on are gone.

    Args:
        described: the items now.
        things: what each key stands for.
        live: id → end of the nodes that the live cache leads through.
        keep: rows that stay.
    """

    def hangs(node: PathNode) -> bool:
        return max((live[n.id] for n in node.path() if n.id in live), default=0) > keep

    return [
        replace(item, useless=True) if item.end > keep and hangs(things[item.key][1]) else item
        for item in described
    ]

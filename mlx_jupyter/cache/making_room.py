"""Keeps a prefix cache within its budget: what is given up, and how the live cache is cut.

Nothing that is pinned is given up, not even where it stands in the live cache only; pinned bytes
come out of the budget first. What has a file is only given up in memory.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_jupyter.cache import retention
from mlx_jupyter.cache.describe import items
from mlx_jupyter.cache.ghosts import forget_oldest
from mlx_jupyter.cache.pages import Mark, Page, Strip, capture
from mlx_jupyter.cache.recording import keep_windows
from mlx_jupyter.cache.trie import PAGE

if TYPE_CHECKING:
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache

log = logging.getLogger(__name__)

EVERYTHING = 1 << 62


def enforce(cache: PrefixCache, *, rests: bool) -> None:
    """Give up pages, strips and snapshots until the budget holds.

    MLX's cache of free buffers counts, and goes first. ``rests``: as for ``give_up``.
    """
    over = cache.nbytes() - cache.budget
    if over + mx.get_cache_memory() > 0:
        mx.clear_cache()
    give_up(cache, over, {}, rests=rests)


def evict(cache: PrefixCache, nbytes: int | None) -> int:
    """Give up at least ``nbytes``, or everything that isn't pinned; bytes freed."""
    before = cache.nbytes()
    target = before if nbytes is None else nbytes
    give_up(cache, target, {}, rests=True)
    if before - cache.nbytes() < target:
        let_live_go(cache)
        give_up(cache, target - (before - cache.nbytes()), {})
    mx.clear_cache()
    return before - cache.nbytes()


def give_up(cache: PrefixCache, need: int, leaving: dict[int, int], *, rests: bool = False) -> None:
    """Give up at least ``need`` bytes, or all that may go.

    Args:
        cache: whose.
        need: bytes.
        leaving: ``id()`` → bytes of live pages, and of the tip's mark, that are about to need bytes
            of their own.
        rests: no request is at work, so that the live cache keeps the states where it stands.
    """
    if need <= 0:
        return
    before = cache.stored_bytes()
    described, things = items(cache, leaving)
    chosen = retention.choose(described, need, cache.requests)
    useless = {item.key for item in described if item.useless}
    cache.tiers.keep([things[key] for key in chosen if key not in useless])
    for key in chosen:
        thing, node = things[key]
        if isinstance(thing, Page):
            thing.leave()
        elif isinstance(thing, Strip):
            _give_up_strip(thing, node)
        else:
            _give_up_mark(cache, thing, node, rests=rests)
    prune(cache)
    log.debug("gave up %d bytes, %d were needed", before - cache.stored_bytes(), need)


def _give_up_strip(strip: Strip, node: PathNode) -> None:
    strip.release()
    if not strip.elsewhere:
        node.strips.remove(strip)


def _give_up_mark(cache: PrefixCache, mark: Mark, node: PathNode, *, rests: bool) -> None:
    cache.tally.nbytes -= mark.nbytes
    mark.hold([])
    if cache.tip is mark:
        cache.tip = None
    if rests and cache.tip is None and mark.at == cache.live.offset and node in cache.live_path():
        cache.tip = mark
    elif not mark.elsewhere:
        cache.drop_mark(node, mark)


def prune(cache: PrefixCache) -> None:
    """Forget the oldest of what is known but held nowhere in memory."""
    live = {id(n) for n in cache.live_path()}
    forget_oldest(cache.trie, live, rows=bool(cache.live.leaves.rows))


# --- the live cache ---------------------------------------------------------------------------


def fit_live(cache: PrefixCache) -> None:
    """Between requests: shrink the live cache, cut it or let go of it, when it is too large.

    Pinned to its end, it stays.
    """
    live = cache.live
    if cache.nbytes() <= cache.budget:
        return
    live.shrink()
    keep = live_that_fits(cache, cache.budget, live.nbytes())
    if keep == live.offset:
        return
    if keep:
        _cut_live(cache, keep)
    else:
        log.debug("live cache of %d bytes is over the budget: let go", live.nbytes())
        let_live_go(cache)
    prune(cache)


def live_that_fits(cache: PrefixCache, budget: int, nbytes: int) -> int:
    """How many tokens of the live cache may stay, which takes ``nbytes``; 0: it has to go."""
    live = cache.live
    room, pin = budget - _pinned_bytes(cache), pinned_live(cache)
    if nbytes <= room or pin == live.offset:
        return live.offset
    row_bytes = live.row_bytes()
    if not row_bytes or cache.needs.stateful or cache.needs.windows:
        return 0
    return min(max(room // row_bytes // PAGE * PAGE, pin, 0), live.offset)


def let_live_go(cache: PrefixCache) -> None:
    """Between requests: forget the live cache; what is pinned of it is stored first."""
    pin = pinned_live(cache)
    if pin:
        keep_windows(cache)
    path = cache.live_path()
    held = path if cache.live.leaves.rows else []  # without full layers pages hold nothing
    pages = [(p, n) for n in held for p in n.pages if p.residence == "live"]
    kept = [page for page, _ in pages if page.start < pin]
    tips = [(m, n) for n in path for m in n.marks.values() if m is cache.tip]
    cache.tiers.keep([*(each for each in pages if each[0].start >= pin), *tips])
    if kept:
        capture(kept, cache.live.full_layers(), gpu=cache.live.gpu)
    if cache.tip is not None and cache.tip.at <= pin:
        cache.take(cache.tip)
        cache.tip = None
    cache.drop_live()


def _cut_live(cache: PrefixCache, keep: int) -> None:
    """Give up the rows of the live cache from ``keep`` on."""
    for node in cache.live_path():
        cache.trie.split_pages(node, keep)
        for page in node.pages:
            if page.start >= keep and page.residence == "live":
                page.leave()
    cache.live.rewind(keep)
    cache.live.shrink()


def pinned_live(cache: PrefixCache) -> int:
    """How far into the live cache a pinned path leads."""
    live = {id(node): node.end for node in cache.live_path()}
    ends = [
        min(at, max((live.get(id(n), 0) for n in node.path()), default=0))
        for node in cache.trie.nodes()
        for owner, at in node.owners.items()
        if owner in cache.pins
    ]
    return min(max(ends, default=0), cache.live.offset)


def _pinned_bytes(cache: PrefixCache) -> int:
    """Bytes outside the live cache that stay whatever happens."""
    described, things = items(cache, {})
    chosen = retention.choose(described, EVERYTHING, cache.requests)
    return cache.stored_bytes() - sum(things[key][0].nbytes for key in chosen)

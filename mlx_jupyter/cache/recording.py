"""Puts what the live cache holds into the trie: its path, its new window rows, its marks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlx_jupyter.cache import exact, lending
from mlx_jupyter.cache.needs import joined, without
from mlx_jupyter.cache.pages import Mark, Strip, joined_pages
from mlx_jupyter.cache.trie import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlx_jupyter.cache.needs import Span
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache
    from mlx_jupyter.cache.view import MarkKind


def record(
    cache: PrefixCache,
    owner: str | None = None,
    tip: MarkKind | None = None,
    mark: MarkKind | None = None,
) -> PathNode:
    """Put the live path into the trie: its rows are live, its new window rows stored.

    Args:
        cache: whose.
        owner: whose tip this is; its former one is released.
        tip: kind of the mark at the end of a request, where the live states stand.
        mark: kind of a mark on the way; states are copied.

    Returns:
        The node that the path ends in.
    """
    live, trie = cache.live, cache.trie
    offset = live.offset
    if not offset:
        return trie.root
    live.learn_order()
    node = trie.insert(live.id_array())
    path = node.path()
    if cache.exact:
        _note_passes(cache, path)
    if offset < node.end:
        trie.split_pages(node, offset)
    for step in path:
        step.uses += tip is not None
        step.last_used = cache.requests
        for page in step.pages:
            if page.end <= offset:
                page.now_live()
                page.last_used = cache.requests
        step.pages = joined_pages(step.pages)
    if cache.borrowers:
        lending.spread(path)
    _store_windows(cache, path, anew=cache.exact)
    if (mark or tip) and (cache.needs.stateful or cache.needs.windows):
        _mark(cache, node, mark or tip or "answer", copy=mark is not None)
    if owner is not None:
        cache.release(owner)
        node.owners[owner] = offset
    return node


def _note_passes(cache: PrefixCache, path: Sequence[PathNode]) -> None:
    """Note what computed the live path; snapshots of other passes' states go."""
    passes = np.array(cache.live.passes, np.bool_)
    unchanged = exact.note(path, passes, cache.live.computed_from)
    for node in path:
        for mark in list(node.marks.values()):
            if mark.at <= len(passes) and not unchanged(mark.at):
                cache.drop_mark(node, mark)


def _mark(cache: PrefixCache, node: PathNode, kind: MarkKind, *, copy: bool) -> None:
    """A mark where the live cache stands; without ``copy`` its states are the live ones."""
    at, stateful = cache.live.offset, cache.needs.stateful
    mark = node.marks.get(at) or Mark(at, kind)
    mark.last_used = cache.requests
    if stateful and not mark.states:
        if copy:
            cache.take(mark)
        else:
            cache.tip = mark
    node.marks[at] = mark  # now that it is whole


def keep_windows(cache: PrefixCache) -> None:
    """Store the window rows that the live cache still has and nothing else holds (any more)."""
    if cache.live.leaves.windows:
        cache.live.windowed = min(cache.live.windowed, cache.live.first_window_row())
        _store_windows(cache, cache.live_path(), anew=False)


def _store_windows(cache: PrefixCache, path: Sequence[PathNode], *, anew: bool) -> None:
    """Copy the window rows since the last time into strips along the live path.

    With ``anew`` they take the place of those that are there.
    """
    live = cache.live
    if not live.leaves.windows:
        return
    for node in path:
        span = max(node.start, live.windowed), min(node.end, live.offset)
        if span[0] >= span[1]:
            continue
        if anew:
            _drop_strips(cache, node, span)
        for a, b in without(span, joined((s.start, s.end) for s in node.strips)):
            for start, end in _by_page(a, b):
                strip = Strip(start, end, cache.tally)
                strip.hold(live.window_rows(start, end))
                strip.last_used = cache.requests
                node.strips.append(strip)
        node.strips.sort(key=lambda s: s.start)
    live.windowed = live.offset


def _drop_strips(cache: PrefixCache, node: PathNode, span: Span) -> None:
    for edge in span:
        cache.trie.split_strips(node, edge)
    for strip in [s for s in node.strips if span[0] <= s.start < span[1]]:
        strip.drop()
        node.strips.remove(strip)


def _by_page(start: int, end: int) -> Iterator[Span]:
    while start < end:
        stop = min(end, (start // PAGE + 1) * PAGE)
        yield start, stop
        start = stop

"""Pages whose numbers someone else computed: lent to one conversation, kept apart from the rest.

A file that a user was given may hold wrong rows for the right tokens. What comes from one is *lent*
to the owner that restored it: no other cell or branch goes on from it, nothing of it is written to
the store, and what is computed on top of it is lent as well. When someone else needs the same
tokens they are computed here, and take the place of the lent ones.

Pages carry the mark. A strip or a snapshot is lent when it lies behind a lent page of its path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_jupyter.cache.pages import Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from mlx_jupyter.cache.pages import Thing
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache


def usable(owner: str | None) -> Callable[[Any], bool]:
    """Whether an owner may go on from a page, or the view of one."""
    return lambda page: page.lent is None or (page.lent == owner != "")


def start(path: Sequence[PathNode], owner: str | None = None) -> int | None:
    """Where the first page of a path begins that is lent to someone else; None when none is."""
    mine = usable(owner)
    return next((p.start for node in path for p in node.pages if not mine(p)), None)


def is_lent(cache: PrefixCache, thing: Thing, node: PathNode) -> bool:
    """Whether a thing is lent, or was computed on top of something lent."""
    if not cache.borrowers:
        return False
    first = start(node.path())
    return first is not None and (thing.at if isinstance(thing, Mark) else thing.end) > first


def end(cache: PrefixCache, owner: str) -> None:
    """An owner is gone: nobody may use what was lent to it."""
    for node in cache.trie.nodes() if owner in cache.borrowers else ():
        for page in node.pages:
            page.lent = "" if page.lent == owner else page.lent


def spread(path: Sequence[PathNode]) -> None:
    """What a session has just recorded behind a lent page is lent too."""
    lent: str | None = None
    for node in path:
        for page in node.pages:
            page.lent = lent = lent if page.lent is None else page.lent


def shed(cache: PrefixCache, ids: np.ndarray, owner: str | None) -> None:
    """Before a prompt is computed: give up what is lent to someone else along it.

    Nothing of that may be in the live cache any more.
    """
    if not cache.borrowers:
        return
    path, known = cache.path_to(ids), cache.trie.match(ids)[1]
    first = start(path, owner)
    if first is None or first >= known:
        return
    for node in path:
        for edge in (first, known):
            cache.trie.split_pages(node, edge)
            cache.trie.split_strips(node, edge)
        for page in node.pages:
            if first <= page.start < known:
                page.leave()
                page.lent = None
        for strip in [s for s in node.strips if first <= s.start < known]:
            strip.drop()
            node.strips.remove(strip)
        for mark in [m for m in node.marks.values() if first < m.at <= known]:
            cache.drop_mark(node, mark)

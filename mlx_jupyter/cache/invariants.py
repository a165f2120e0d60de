"""What must hold of a prefix cache between sessions, checked: for tests and bug reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_jupyter.cache.pages import Mark, Page, Strip
    from mlx_jupyter.cache.prefix_cache import PrefixCache
    from mlx_jupyter.cache.trie import Node


def own_bytes(node: Node[Page, Strip, Mark]) -> int:
    """Bytes that a node's pages, strips and marks hold."""
    pages, strips = sum(p.nbytes for p in node.pages), sum(s.nbytes for s in node.strips)
    return pages + strips + sum(m.nbytes for m in node.marks.values())


def check(cache: PrefixCache) -> None:
    """Raise ``AssertionError`` when an invariant is broken."""
    cache.trie.check()
    offset = cache.live.offset
    for at in cache.live.leaves.offsets():
        assert at == offset, f"a layer stands at {at}, recorded are {offset}"
    node, known = cache.trie.match(cache.live.id_array())
    assert known == offset, "the live path left the trie"
    on_path = {id(n) for n in node.path()}
    held = 0
    for node in cache.trie.nodes():
        for page in node.pages:
            is_live = id(node) in on_path and page.end <= offset
            assert (page.residence == "live") == is_live, (node, page, offset)
        if cache.needs.stateful:
            for mark in node.marks.values():
                assert bool(mark.states) or mark is cache.tip, (node, mark.at)
        held += own_bytes(node)
    assert held == cache.stored_bytes(), (held, cache.stored_bytes())
    assert cache.nbytes() <= cache.budget or not held, (cache.nbytes(), cache.budget)

"""Paths whose rows were all given up: they stay known for a while, to explain a later miss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_jupyter.cache.invariants import own_bytes
from mlx_jupyter.cache.pages import things

if TYPE_CHECKING:
    from mlx_jupyter.cache.pages import Mark, Page, Strip
    from mlx_jupyter.cache.trie import Node, Trie

GHOST_TOKENS = 1 << 14
GHOST_NODES = 128
"""How much of given-up paths stays known."""


def forget_oldest(trie: Trie[Page, Strip, Mark], live: set[int], *, rows: bool) -> None:
    """Forget the oldest given-up leaves beyond what is kept for explanations.

    Args:
        trie: the trie.
        live: ``id()`` of the nodes on the live path, which stay.
        rows: whether the model has full layers; without them pages hold nothing.
    """
    while ghosts := [
        n for n in trie.nodes() if not n.children and id(n) not in live and _is_ghost(n, rows)
    ]:
        ghosts.sort(key=lambda n: n.last_used)
        tokens, count = sum(len(n.tokens) for n in ghosts), len(ghosts)
        if tokens <= GHOST_TOKENS and count <= GHOST_NODES:
            return
        # A removal can merge the parent and make it a leaf: look again afterwards.
        for node in ghosts:
            if tokens <= GHOST_TOKENS and count <= GHOST_NODES:
                break
            if node.children or not _is_ghost(node, rows):
                continue  # a removal before it merged its parent into it
            tokens, count = tokens - len(node.tokens), count - 1
            trie.remove(node)


def _is_ghost(node: Node[Page, Strip, Mark], rows: bool) -> bool:
    held = rows and any(page.residence != "gone" for page in node.pages)
    copied = any(thing.host for thing in things(node))
    return not own_bytes(node) and not held and not copied

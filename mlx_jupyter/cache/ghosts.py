"""Paths that hold nothing in memory: known for a while, to explain a miss or to be read again.

Of what was given up altogether a little is kept, to say later why it is computed again. Of what
lies on disk more is kept: it would be found there again, but without its owners and pins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_jupyter.cache.invariants import own_bytes
from mlx_jupyter.cache.pages import things

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_jupyter.cache.pages import Mark, Page, Strip
    from mlx_jupyter.cache.trie import Node, Trie
    from mlx_jupyter.cache.view import Residence

    _Node = Node[Page, Strip, Mark]

GHOST_TOKENS = 1 << 14
GHOST_NODES = 128
"""How much of given-up paths stays known."""

AWAY_TOKENS = 1 << 20
AWAY_NODES = 1024
"""How much stays known of paths that lie on disk only."""


def forget_oldest(trie: Trie[Page, Strip, Mark], live: set[int], *, rows: bool) -> None:
    """Forget the oldest leaves without anything in memory beyond what is kept.

    Args:
        trie: the trie.
        live: ``id()`` of the nodes on the live path, which stay.
        rows: whether the model has full layers; without them pages hold nothing.
    """
    _forget(trie, live, lambda n: _is_ghost(n, rows, away=False), GHOST_TOKENS, GHOST_NODES)
    _forget(trie, live, lambda n: _is_ghost(n, rows, away=True), AWAY_TOKENS, AWAY_NODES)


def _forget(
    trie: Trie[Page, Strip, Mark],
    live: set[int],
    is_ghost: Callable[[_Node], bool],
    most_tokens: int,
    most_nodes: int,
) -> None:
    while ghosts := [
        n for n in trie.nodes() if not n.children and id(n) not in live and is_ghost(n)
    ]:
        ghosts.sort(key=lambda n: n.last_used)
        tokens, count = sum(len(n.tokens) for n in ghosts), len(ghosts)
        if tokens <= most_tokens and count <= most_nodes:
            return
        # A removal can merge the parent and make it a leaf: look again afterwards.
        for node in ghosts:
            if tokens <= most_tokens and count <= most_nodes:
                break
            if node.children or not is_ghost(node):
                continue  # a removal before it merged its parent into it
            tokens, count = tokens - len(node.tokens), count - 1
            trie.remove(node)


def _is_ghost(node: _Node, rows: bool, *, away: bool) -> bool:
    """Whether a node holds nothing in memory; ``away``: it may lie on disk."""
    none: tuple[Residence, ...] = ("gone", "disk") if away else ("gone",)
    held = rows and any(page.residence not in none for page in node.pages)
    copied = any(thing.host for thing in things(node))
    return not own_bytes(node) and not held and not copied

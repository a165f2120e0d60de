"""Exactness mode: a warm run is bit-equal to a cold replay of the same forward passes.

The last bits of a row depend on the pass that computed it: on its width and on what it attended
to. So in this mode each place where a pass ended is noted in the trie (``Node.ends``), and a prompt
is matched only up to such a place. All rows before it then come from passes over tokens of the
prompt itself, so that a fresh cache that is led through the same passes holds the same bits, as far
as the backend computes the same thing twice.

What was computed while the mode was off has no such places and is computed again, once. When a
stretch is computed again by other passes, what hung on its old bits loses its places.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_jupyter.cache.pages import Mark, Page, Strip
    from mlx_jupyter.cache.trie import Node, Trie

    _Node = Node[Page, Strip, Mark]


def forget(trie: Trie[Page, Strip, Mark]) -> None:
    """No stored place is exact any more."""
    for node in trie.nodes():
        node.ends[:] = False


def flags(path: Sequence[_Node], end: int) -> np.ndarray:
    """For each of a path's first ``end`` tokens whether a pass ended there, bool."""
    return np.concatenate([np.zeros(0, np.bool_), *(node.ends for node in path)])[:end]


def places(passes: np.ndarray) -> np.ndarray:
    """The offsets, ascending, at which passes ended."""
    return np.flatnonzero(passes) + 1


def turning_since(passes: np.ndarray) -> int:
    """Where the last pass of several tokens ended; the passes after it took one token each.

    From there on a sliding window's buffer has been used as a ring.
    """
    alone = passes.copy()
    alone[1:] &= passes[:-1]
    others = places(~alone)  # where a token ends that wasn't a pass of its own
    return int(others[-1]) if len(others) else 0


def note(path: Sequence[_Node], passes: np.ndarray, start: int) -> Callable[[int], bool]:
    """Note the passes that computed the live path; what hung on other bits loses its places.

    A shared row is stored once, as it was computed last. So where sequences part within a pass, the
    one that was computed before goes on from the start of that pass only.

    Args:
        path: the nodes along the live path, the last one maybe longer than it.
        passes: bool, shape (live tokens,): where passes ended.
        start: tokens that were there before the first of the request's passes.

    Returns:
        Whether the rows before an offset are those that were stored before.
    """
    old = flags(path, len(passes))
    differs = np.flatnonzero(old[start:] != passes[start:])
    same = start + int(differs[0]) if len(differs) else len(passes)

    def unchanged(at: int) -> bool:
        return at <= start or (at <= same and bool(passes[at - 1]))

    for node, below in pairwise([*path, None]):
        assert node is not None
        node.ends[: len(passes) - node.start] = passes[node.start : node.end]
        others = [child for child in node.children.values() if child is not below]
        for child in others if not unchanged(min(node.end, len(passes))) else ():
            for each in _subtree(child):
                each.ends[:] = False
    if not unchanged(len(passes)):
        path[-1].ends[len(passes) - path[-1].start :] = False
    return unchanged


def _subtree(node: _Node) -> Iterator[_Node]:
    waiting = [node]
    while waiting:
        at = waiting.pop()
        yield at
        waiting.extend(at.children.values())

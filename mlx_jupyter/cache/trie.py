"""A compressed radix trie over token ids. Pure data structure: no MLX, no policy.

Invariants (``Trie.check`` raises when one is broken):

* a node's edge is never empty (but for the root), children start with distinct tokens;
* nodes exist only where sequences diverge or end: an inner node has two children or more;
* a node's pages cover its edge without gaps or overlap, in order, none across a page boundary;
* its strips lie within its edge, in order, without overlap;
* a mark's or an owner's offset lies in ``(start, end]`` of its node;
* ``ends`` has one flag for each token of the edge: whether a place may be restored exactly right
  after it (``exact.py``).

Pages, strips and marks are opaque here but for their place: the former two can split themselves.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = 256
"""Tokens in a full page; page boundaries are absolute multiples of it."""


class PageLike(Protocol):
    """What the trie needs of a page: its place, and to be cut in two."""

    start: int
    end: int

    def split(self, at: int) -> tuple[Self, Self]:
        """Two pages, ``[start, at)`` and ``[at, end)``."""


class MarkLike(Protocol):
    """What the trie needs of a mark: its offset."""

    at: int


P = TypeVar("P", bound=PageLike)
S = TypeVar("S", bound=PageLike)
M = TypeVar("M", bound=MarkLike)


class Node(Generic[P, S, M]):
    """One node: the edge ``[start, end)`` that leads to it and what is stored along it."""

    __slots__ = (
        "children",
        "ends",
        "id",
        "last_used",
        "marks",
        "owners",
        "pages",
        "parent",
        "start",
        "strips",
        "tokens",
        "uses",
    )

    def __init__(
        self, number: int, parent: Node[P, S, M] | None, start: int, tokens: np.ndarray
    ) -> None:
        self.id = number
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.ends = np.zeros(len(tokens), np.bool_)
        self.children: dict[int, Node[P, S, M]] = {}
        self.pages: list[P] = []
        self.strips: list[S] = []
        self.marks: dict[int, M] = {}
        self.owners: dict[str, int] = {}
        self.uses = 0
        self.last_used = 0

    @property
    def end(self) -> int:
        """One past the edge's last position."""
        return self.start + len(self.tokens)

    def child(self, token: int) -> Node[P, S, M] | None:
        """The child whose edge begins with ``token``."""
        return self.children.get(token)

    def path(self) -> list[Node[P, S, M]]:
        """Nodes from the root's child down to this one."""
        nodes: list[Node[P, S, M]] = []
        node: Node[P, S, M] | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def __repr__(self) -> str:
        return f"Node({self.id}, [{self.start}, {self.end}), {len(self.children)} children)"


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two 1-D arrays."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


class Trie(Generic[P, S, M]):
    """The tree. ``page(start, end)`` makes the pages of new edges; ids count from ``first``."""

    def __init__(self, page: Callable[[int, int], P], first: int = 0) -> None:
        self._page = page
        self.next_number = first
        self.root: Node[P, S, M] = self._node(None, 0, np.zeros(0, np.int32))

    def _node(self, parent: Node[P, S, M] | None, start: int, tokens: np.ndarray) -> Node[P, S, M]:
        tokens.flags.writeable = False
        node: Node[P, S, M] = Node(self.next_number, parent, start, tokens)
        self.next_number += 1
        return node

    def match(self, tokens: np.ndarray) -> tuple[Node[P, S, M], int]:
        """The deepest node that shares a prefix with ``tokens``, and that prefix's length.

        The length is in ``(node.start, node.end]``, or 0 at the root.
        """
        node, at = self.root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            at += common_prefix(child.tokens, tokens[at:])
            node = child
            if at < child.end:
                break
        return node, at

    def insert(self, tokens: np.ndarray) -> Node[P, S, M]:
        """Make the path of ``tokens`` exist; the node that it ends in (maybe inside its edge).

        A leaf that ``tokens`` goes on from is lengthened; where they diverge the edge is split.
        """
        node, at = self.match(tokens)
        if at == len(tokens):
            return node
        rest = np.array(tokens[at:], np.int32)
        if at < node.end:
            node = self.split(node, at)
        elif node is not self.root and not node.children:
            joined = np.concatenate([node.tokens, rest])
            joined.flags.writeable = False
            node.tokens = joined
            node.ends = np.concatenate([node.ends, np.zeros(len(rest), np.bool_)])
            node.pages.extend(self._pages(at, len(tokens)))
            return node
        leaf = self._node(node, at, rest)
        leaf.pages = self._pages(at, len(tokens))
        node.children[int(rest[0])] = leaf
        return leaf

    def _pages(self, start: int, end: int) -> list[P]:
        cuts = [start, *range((start // PAGE + 1) * PAGE, end, PAGE), end]
        return [self._page(a, b) for a, b in pairwise(cuts) if a < b]

    def split(self, node: Node[P, S, M], at: int) -> Node[P, S, M]:
        """Cut the edge of ``node`` at ``at``; the new upper node, which owns ``[start, at)``."""
        assert node.parent is not None
        assert node.start < at < node.end
        self.split_pages(node, at)
        self.split_strips(node, at)
        cut = at - node.start
        upper = self._node(node.parent, node.start, node.tokens[:cut].copy())
        lower_tokens = node.tokens[cut:].copy()
        lower_tokens.flags.writeable = False
        upper.ends, node.ends = node.ends[:cut].copy(), node.ends[cut:].copy()
        upper.uses, upper.last_used = node.uses, node.last_used
        upper.pages = [p for p in node.pages if p.end <= at]
        upper.strips = [s for s in node.strips if s.end <= at]
        upper.marks = {m: mark for m, mark in node.marks.items() if m <= at}
        upper.owners = {who: o for who, o in node.owners.items() if o <= at}
        node.parent.children[int(upper.tokens[0])] = upper
        node.parent, node.start, node.tokens = upper, at, lower_tokens
        node.pages = [p for p in node.pages if p.start >= at]
        node.strips = [s for s in node.strips if s.start >= at]
        node.marks = {m: mark for m, mark in node.marks.items() if m > at}
        node.owners = {who: o for who, o in node.owners.items() if o > at}
        upper.children[int(node.tokens[0])] = node
        return upper

    @staticmethod
    def split_pages(node: Node[P, S, M], at: int) -> None:
        """Make ``at`` a boundary between pages of ``node``."""
        _split(node.pages, at)

    @staticmethod
    def split_strips(node: Node[P, S, M], at: int) -> None:
        """Make ``at`` a boundary between strips of ``node``."""
        _split(node.strips, at)

    def remove(self, leaf: Node[P, S, M]) -> None:
        """Take a leaf out; a parent that is left with one child is merged with it."""
        assert leaf.parent is not None
        assert not leaf.children
        parent = leaf.parent
        del parent.children[int(leaf.tokens[0])]
        leaf.parent = None
        if parent.parent is not None and len(parent.children) == 1:
            self._merge(parent)

    def _merge(self, node: Node[P, S, M]) -> None:
        """Join a node with its only child; the child goes on."""
        (child,) = node.children.values()
        assert node.parent is not None
        joined = np.concatenate([node.tokens, child.tokens])
        joined.flags.writeable = False
        child.tokens, child.start, child.parent = joined, node.start, node.parent
        child.ends = np.concatenate([node.ends, child.ends])
        child.pages = node.pages + child.pages
        child.strips = node.strips + child.strips
        child.marks = node.marks | child.marks
        child.owners = node.owners | child.owners
        node.parent.children[int(joined[0])] = child

    def nodes(self) -> Iterator[Node[P, S, M]]:
        """All nodes but the root, parents before children."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def check(self) -> None:
        """Raise ``AssertionError`` when an invariant is broken."""
        assert self.root.start == self.root.end == 0
        for node in self.nodes():
            parent = node.parent
            assert parent is not None, node
            assert len(node.tokens) > 0, node
            assert len(node.ends) == len(node.tokens), node
            assert node.start == parent.end, node
            assert parent.children[int(node.tokens[0])] is node, node
            assert len(node.children) != 1, f"{node} should be merged"
            at = node.start
            for page in node.pages:
                assert page.start == at < page.end, (node, page)
                assert page.start // PAGE == (page.end - 1) // PAGE, (node, page)
                at = page.end
            assert at == node.end, (node, "pages end at", at)
            at = node.start
            for strip in node.strips:
                assert at <= strip.start < strip.end <= node.end, (node, strip)
                at = strip.end
            for offset, mark in node.marks.items():
                assert offset == mark.at, node
                assert node.start < offset <= node.end, (node, offset)
            for owner, offset in node.owners.items():
                assert node.start < offset <= node.end, (node, owner, offset)


Piece = TypeVar("Piece", bound=PageLike)


def _split(pieces: list[Piece], at: int) -> None:
    for i, piece in enumerate(pieces):
        if piece.start < at < piece.end:
            pieces[i : i + 1] = piece.split(at)
            return

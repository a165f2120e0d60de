"""An immutable description of a prefix cache, for widgets, tests, plans and ``%llm tree``.

The engine thread publishes a new ``TreeView`` after each change; every other thread only reads
what was published and never waits for the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from mlx_jupyter.cache.needs import Needs
from mlx_jupyter.cache.plan import Rates

if TYPE_CHECKING:
    from collections.abc import Iterator

Residence = Literal["live", "device", "host", "disk", "gone"]
AWAY: tuple[Residence, ...] = ("host", "disk")
"""Residences that rows have to be read from."""

MarkKind = Literal[
    "system", "turn", "prompt", "thinking", "answer", "branch", "periodic", "interrupt"
]


@dataclass(frozen=True, slots=True)
class PageView:
    """Rows of tokens ``[start, end)``: at most 256, boundaries at absolute multiples of 256.

    ``lent`` names the one owner that may use them (``lending.py``).
    """

    start: int
    end: int
    residence: Residence
    nbytes: int
    last_used: int
    lent: str | None = None


@dataclass(frozen=True, slots=True)
class StripView:
    """Stored rows of the window layers for the tokens ``[start, end)``."""

    start: int
    end: int
    nbytes: int
    residence: Residence = "device"


@dataclass(frozen=True, slots=True)
class MarkView:
    """A place to come back to; its bytes are those of the state layers' snapshot there."""

    at: int
    kind: MarkKind
    residence: Residence
    nbytes: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of the trie: the edge ``[start, end)`` that leads to it and what it holds.

    Attributes:
        id: stable over the node's life, and never used again.
        start: absolute position of the edge's first token.
        end: one past its last token (the root has ``start == end == 0``).
        tokens: int32, shape (end - start,), read-only.
        children: in the order of their first use.
        pages: cover ``[start, end)`` without gaps; given-up ones have residence ``"gone"``.
        strips: window rows within the edge, in order; only those worth keeping are there.
        marks: by ascending ``at``, each in ``(start, end]``.
        uses: requests that restored or wrote rows of this node.
        last_used: the request counter at the last such use.
        owners: the cells and branches whose tip lies here.
        active: on the path that the live cache holds.
        text: the edge decoded, filled in by ``Engine.tree``; lossy where a character is split.
        ends: bool, shape (end - start,), read-only: after which tokens exactness mode may restore.
    """

    id: int
    start: int
    end: int
    tokens: np.ndarray
    children: tuple[NodeView, ...] = ()
    pages: tuple[PageView, ...] = ()
    strips: tuple[StripView, ...] = ()
    marks: tuple[MarkView, ...] = ()
    uses: int = 0
    last_used: int = 0
    owners: tuple[str, ...] = ()
    active: bool = False
    text: str = ""
    ends: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))

    def child(self, token: int) -> NodeView | None:
        """The child whose edge begins with ``token``."""
        return next((c for c in self.children if c.tokens[0] == token), None)

    @property
    def held(self) -> int:
        """Tokens of the edge whose rows are somewhere (not gone)."""
        return sum(p.end - p.start for p in self.pages if p.residence != "gone")

    @property
    def nbytes(self) -> int:
        """Bytes of its own that the node holds (live rows count 0)."""
        pages, strips = sum(p.nbytes for p in self.pages), sum(s.nbytes for s in self.strips)
        return pages + strips + sum(m.nbytes for m in self.marks)


def _empty_root() -> NodeView:
    return NodeView(id=0, start=0, end=0, tokens=np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class TreeView:
    """A whole prefix cache at one moment.

    Attributes:
        model: the model's short name.
        root: the root node; everything hangs below it.
        live: tokens that the live cache holds.
        live_bytes: bytes of the live cache's buffers, spare rows included.
        stored_bytes: bytes of pages and snapshots outside the live cache.
        host_bytes: bytes of those in the host's memory, where that isn't the device's.
        budget: bytes that ``live_bytes + stored_bytes`` may reach.
        page_size: tokens in a full page.
        clock: the request counter, the unit of ``last_used``.
        needs: what restoring at a position takes besides full rows.
        rates: what restoring and prefilling cost here.
        layers: how many leaf caches of each kind, such as ``(("rows", 30),)``.
        version: grows with every published change.
        exact: in exactness mode.
    """

    model: str = ""
    root: NodeView = field(default_factory=_empty_root)
    live: int = 0
    live_bytes: int = 0
    stored_bytes: int = 0
    host_bytes: int = 0
    budget: int = 0
    page_size: int = 256
    clock: int = 0
    needs: Needs = field(default_factory=Needs)
    rates: Rates = field(default_factory=Rates)
    layers: tuple[tuple[str, int], ...] = ()
    version: int = 0
    exact: bool = False

    def nodes(self) -> Iterator[NodeView]:
        """All nodes but the root, parents before children."""
        stack = list(reversed(self.root.children))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

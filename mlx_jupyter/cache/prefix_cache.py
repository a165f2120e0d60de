"""The prefix cache of one model: a trie of what is stored around one live cache.

Used on the engine thread only. What holds between sessions (``check`` raises otherwise):

* every layer of the live cache stands at the same offset, ``live.offset``;
* the path of ``live.ids`` is in the trie, and its pages up to that offset are exactly the ``live``
  pages;
* bytes are counted from the buffers themselves; live cache, pages, strips and snapshots together
  stay within the budget.

A request opens a session (``session.py``), which moves the live cache to where the plan says,
lets the pipeline run, and records what was really computed.
"""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_jupyter.cache import exact, lending, making_room
from mlx_jupyter.cache.describe import describe
from mlx_jupyter.cache.invariants import check, own_bytes
from mlx_jupyter.cache.live import Live
from mlx_jupyter.cache.match import Match, decide, match
from mlx_jupyter.cache.needs import joined, lattice, without
from mlx_jupyter.cache.pages import Mark, Page, Strip, Tally, capture, host_bytes
from mlx_jupyter.cache.plan import Plan, Rates
from mlx_jupyter.cache.reading import Reader
from mlx_jupyter.cache.session import Session
from mlx_jupyter.cache.tiers import Tiers
from mlx_jupyter.cache.trie import Node, Trie

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_jupyter.cache.needs import Span
    from mlx_jupyter.cache.store_shelf import Shelf
    from mlx_jupyter.cache.view import MarkKind, TreeView

log = logging.getLogger(__name__)

PathNode = Node[Page, Strip, Mark]


class PrefixCache:
    """See the module.

    Args:
        make: makes an empty mlx-lm cache for the model.
        budget: bytes that live cache, pages and snapshots may take together.
        name: the model's short name, for descriptions.
        clock: monotonic seconds, for what restoring costs.
        shelf: where what the model computed outlives memory; None for nowhere.
        host_budget: bytes of the host's memory, where that isn't the device's, that what leaves the
            device may take.
    """

    def __init__(
        self,
        make: Callable[[], list[Any]],
        *,
        budget: int,
        name: str = "",
        clock: Callable[[], float] = time.perf_counter,
        shelf: Shelf | None = None,
        host_budget: int = 0,
    ) -> None:
        self.budget = budget
        self.name = name
        self.now = clock
        self.rates = Rates()
        self.pins: set[str] = set()
        self.borrowers: set[str] = set()
        self.labels: dict[str, str] = {}
        self.live = Live(make)
        self.needs = self.live.leaves.needs
        self.trie = self._empty_trie()
        self.requests = 0
        self.version = 0
        self.needed: set[int] = set()
        self.asked = np.zeros(0, np.int32)
        self.tip: Mark | None = None
        self.tiers = Tiers(self, shelf, host_budget)
        self.reader = Reader(self, shelf)
        self._exact = False

    def _empty_trie(self, first: int = 0) -> Trie[Page, Strip, Mark]:
        self.tally = tally = Tally()
        return Trie(lambda start, end: Page(start, end, tally), first)

    @property
    def exact(self) -> bool:
        """Exactness mode (``exact.py``). Switched on, it computes once more what was there."""
        return self._exact

    @exact.setter
    def exact(self, on: bool) -> None:
        if on and not self._exact:
            exact.forget(self.trie)
            self.tiers.lost()  # a file doesn't know by which passes it was computed
            self.live.passes = bytearray(self.live.offset)
        self._exact = on

    # --- asking ------------------------------------------------------------------------------

    def match(self, ids: np.ndarray, owner: str | None = None) -> Match:
        """What is known of a prompt, as far as this owner may use it."""
        path = {id(n) for n in self.live_path()}
        on_path: Callable[[PathNode], bool] = lambda n: id(n) in path  # noqa: E731
        return match(
            self.trie.root,
            ids,
            self.live.offset,
            on_path,
            exact=self.exact,
            usable=lending.usable(owner),
        )

    def plan(self, ids: np.ndarray, owner: str | None = None) -> Plan:
        """How a prompt of this owner would be served now."""
        return decide(self.match(ids, owner), self.needs, self.rates)

    def path_to(self, ids: np.ndarray) -> list[PathNode]:
        """The nodes along the longest known prefix of ``ids``."""
        return self.trie.match(ids)[0].path()

    def live_path(self) -> list[PathNode]:
        """The nodes along the live cache's ids, as far as they are recorded."""
        return self.path_to(self.live.id_array())

    def nbytes(self) -> int:
        """Bytes of the live cache and of all that is stored."""
        return self.live.nbytes() + self.stored_bytes()

    def stored_bytes(self) -> int:
        """Bytes of pages, strips and snapshots outside the live cache."""
        return self.tally.nbytes

    def view(self) -> TreeView:
        """An immutable description of now."""
        self.version += 1
        return describe(self, {id(n) for n in self.live_path()})

    # --- working -----------------------------------------------------------------------------

    def open(
        self,
        ids: Sequence[int] | np.ndarray,
        *,
        room: int = 0,
        marks: Sequence[tuple[int, MarkKind]] = (),
        owner: str | None = None,
        label: str | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Session:
        """A session for a prompt; use it as a context manager.

        Args:
            ids: the prompt, at least one token.
            room: tokens that may be generated; rows for them are reserved.
            marks: (offset, kind) where a conversation will come back to.
            owner: the cell or branch that keeps the result reachable.
            label: how the owner is shown.
            cancelled: looked at while stored pages are read.
        """
        self.requests += 1
        if owner is not None:
            self.labels[owner] = label or owner
        self.asked = prompt = np.asarray(ids, np.int32)
        self.tiers.changed()
        self.tiers.adopt(prompt)
        return Session(self, prompt, room=room, marks=marks, owner=owner, cancelled=cancelled)

    def vacate(self, keep: int, total: int) -> None:
        """Move what the live cache holds beyond ``keep`` tokens into pages of its own.

        What the policy finds least worth its bytes is given up instead. The states of the tip,
        which the next token changes, are copied. Afterwards the live cache is cut to ``total``
        rows; until then its buffers are held beside the copies.
        """
        path = self.live_path()
        for node in path:
            if node.start < keep < node.end:
                self.trie.split_pages(node, keep)
        leaving = [p for n in path for p in n.pages if p.start >= keep and p.residence == "live"]
        row_bytes = self.live.row_bytes()
        sizes = {id(p): p.tokens * row_bytes for p in leaving}
        if self.tip is not None:
            sizes[id(self.tip)] = self.live.state_bytes()
        after = self.nbytes() - self.live.spare_bytes(total) + sum(sizes.values())
        making_room.give_up(self, after - self.budget, sizes)
        staying = [page for page in leaving if page.residence == "live"]
        if staying:
            capture(staying, self.live.full_layers(), gpu=self.live.gpu)
        if self.tip is not None:
            self.take(self.tip)
            self.tip = None

    def thin(self, since: int) -> None:
        """Give up what lies between the places of the live path that are worth coming back to.

        Periodic marks thin out with their distance from the tip; window rows are kept for the
        latest turn (from ``since`` on) and where a mark needs them.
        """
        if not self.needs.windows and not self.needs.stateful:
            return
        path = self.live_path()
        for node in path:
            for mark in list(node.marks.values()):
                if mark.kind == "periodic" and not lattice(mark.at, self.live.offset):
                    self.drop_mark(node, mark)
        places = [*(at for n in path for at in _places(n)), self.live.offset, since]
        kept = joined(
            [
                *(span for at in places for span in self.needs.spans(at)),
                *self._needed_elsewhere(path),
                (since, 1 << 62),
            ]
        )
        for node in path:
            if not list(without((node.start, node.end), kept)):
                continue
            for edge in (edge for span in kept for edge in span):
                self.trie.split_strips(node, edge)
            for strip in list(node.strips):
                if not any(a < strip.end and strip.start < b for a, b in kept):
                    strip.drop()
                    node.strips.remove(strip)

    def _needed_elsewhere(self, path: Sequence[PathNode]) -> Iterator[Span]:
        """The window rows of a path that marks of other branches need."""
        reach = max((w.size for w in self.needs.windows), default=0)
        for node, below in pairwise([*path, None]):
            assert node is not None
            waiting = [child for child in node.children.values() if child is not below]
            while waiting:
                other = waiting.pop()
                for at in _places(other):
                    yield from ((a, min(b, node.end)) for a, b in self.needs.spans(at))
                if other.end < node.end + reach:
                    waiting.extend(other.children.values())

    def take(self, mark: Mark) -> None:
        """Copy the live states, which stand there, into a mark."""
        mark.take(self.live.leaves.states)
        self.tally.nbytes += mark.nbytes

    def drop_mark(self, node: PathNode, mark: Mark) -> None:
        """Take a mark out, with its states."""
        del node.marks[mark.at]
        self.tally.nbytes -= mark.nbytes
        self.tally.host -= host_bytes(mark.host)
        if mark is self.tip:
            self.tip = None

    def release(self, owner: str) -> None:
        """The cell or branch doesn't need its path any more; it stays until room is needed."""
        for node in self.trie.nodes():
            node.owners.pop(owner, None)

    def owns(self, owner: str) -> bool:
        """Whether some path is kept for this owner."""
        return any(owner in node.owners for node in self.trie.nodes())

    def pin(self, owner: str) -> int:
        """Keep an owner's path whatever happens; bytes outside the live cache that it holds."""
        self.pins.add(owner)
        tips = [node for node in self.trie.nodes() if owner in node.owners]
        return sum(own_bytes(node) for tip in tips for node in tip.path())

    def unpin(self, owner: str) -> bool:
        """Let retention judge an owner's path again; whether it was pinned."""
        pinned = owner in self.pins
        self.pins.discard(owner)
        self.fit_live()
        self.enforce()
        return pinned

    def drop_live(self) -> None:
        """Forget the live cache and the rows that only it holds."""
        for node in self.live_path():
            for page in node.pages:
                if page.residence == "live":
                    if self.live.leaves.rows:
                        page.leave()
                    else:
                        page.capture(())  # without full layers it holds nothing: nothing is lost
        self.forget_live()

    def forget_live(self) -> None:
        """Start with an empty live cache; nothing in the trie may be ``live`` any more."""
        if self.tip is not None:
            node, _ = self.trie.match(self.live.id_array()[: self.tip.at])
            if not self.tip.elsewhere:
                node.marks.pop(self.tip.at, None)
            self.tip = None
        self.live.reset()

    # --- giving up ---------------------------------------------------------------------------

    def enforce(self, *, rests: bool = True) -> None:
        """Give up pages, strips and snapshots until the budget holds.

        ``rests``: no request is at work.
        """
        making_room.enforce(self, rests=rests)

    def fit_live(self) -> None:
        """Between requests: shrink the live cache, cut it or let go of it, when it is too large."""
        making_room.fit_live(self)

    def spare(self, nbytes: int) -> None:
        """In a session: give up at least so many bytes of pages and snapshots, if they are there.

        The live cache, which is at work, stays.
        """
        making_room.give_up(self, nbytes, {})

    def evict(self, nbytes: int | None = None) -> int:
        """Give up at least ``nbytes`` now, or everything that isn't pinned; bytes freed."""
        return making_room.evict(self, nbytes)

    def reserve(self, total: int) -> None:
        """Give the live cache room for ``total`` rows, as far as the budget goes."""
        row_bytes = self.live.row_bytes()
        if row_bytes:
            total = min(total, max(self.live.offset, self.budget // row_bytes))
        self.live.reserve(total)

    def clear(self) -> None:
        """Forget everything."""
        self.tip = None
        self.live.reset()
        self.tiers.changed()
        # Numbers go on, so that a node is never taken for a forgotten one.
        self.trie = self._empty_trie(self.trie.next_number)
        mx.clear_cache()

    def check(self) -> None:
        """Raise ``AssertionError`` when an invariant is broken."""
        check(self)


def _places(node: PathNode) -> Iterator[int]:
    """Where a node's sequences are come back to: its marks, and tips that have none (an error)."""
    yield from node.marks
    yield from node.owners.values()

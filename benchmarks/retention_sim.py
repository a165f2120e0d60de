"""A prefix cache without arrays: the product's own trie, match, plan and policy over byte counts.

Moves pages and snapshots as ``PrefixCache`` and ``Session`` do; only the arrays are missing. What
is set as a mark and what is given up is a policy's choice (``retention_policies.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mlx_jupyter.cache.ghosts import forget_oldest
from mlx_jupyter.cache.match import Match, decide, match
from mlx_jupyter.cache.needs import MARK_EVERY, Needs, lattice
from mlx_jupyter.cache.session import PERIOD, ROOM
from mlx_jupyter.cache.trie import Node, Trie

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_jupyter.cache.trace import Step


@dataclass(frozen=True, slots=True)
class Model:
    """What a model's cache weighs: bytes of a token's rows, bytes of a state (0: rows alone)."""

    row_bytes: int
    state_bytes: int = 0


class SimPage:
    """Stands for ``pages.Page``."""

    __slots__ = ("end", "entry", "last_used", "nbytes", "residence", "start")

    twin = None
    """No page lies in a file."""

    def __init__(self, start: int, end: int) -> None:
        self.entry = None
        self.start, self.end = start, end
        self.residence = "live"
        self.nbytes = 0
        self.last_used = 0

    @property
    def tokens(self) -> int:
        """How many tokens' rows it holds."""
        return self.end - self.start

    def split(self, at: int) -> tuple[SimPage, SimPage]:
        """Two pages."""
        parts = SimPage(self.start, at), SimPage(at, self.end)
        for part in parts:
            part.residence, part.last_used = self.residence, self.last_used
            part.nbytes = self.nbytes * part.tokens // self.tokens
        return parts


class SimMark:
    """Stands for ``pages.Mark``."""

    __slots__ = ("at", "kind", "last_used", "nbytes")

    def __init__(self, at: int, kind: str, nbytes: int, last_used: int) -> None:
        self.at, self.kind, self.nbytes, self.last_used = at, kind, nbytes, last_used

    @property
    def residence(self) -> str:
        """Where its states are."""
        return "device" if self.nbytes else "live"


SimNode = Node[SimPage, SimPage, SimMark]
Thing = SimPage | SimMark


class Policy(Protocol):
    """What differs between caches."""

    def places(self, step: Step, found: Match, start: int) -> dict[int, str]:
        """Offset → kind of the marks to set while the prompt is prefilled from ``start`` on."""

    def decoding(self, start: int, end: int) -> Iterable[int]:
        """Where marks are set while ``[start, end)`` is generated."""

    def give_up(
        self, cache: SimCache, need: int, leaving: dict[int, int]
    ) -> Sequence[tuple[Thing, SimNode]]:
        """What to drop so that ``need`` bytes are freed, as far as that can be."""


def our_places(step: Step, found: Match, start: int) -> dict[int, str]:
    """Marks as the product sets them (``Session``)."""
    n = len(step.ids)
    cuts: dict[int, str] = dict.fromkeys(range(PERIOD, n, PERIOD), "periodic")
    cuts[n - 1] = "prompt"
    if found.known:
        cuts[found.known] = "branch"
    cuts.update(step.marks)
    return {at: kind for at, kind in cuts.items() if start < at < n}


def our_decoding(start: int, end: int) -> Iterable[int]:
    """As ``Session.settle`` does."""
    return range((start // MARK_EVERY + 1) * MARK_EVERY, end, MARK_EVERY)


class SimCache:
    """See the module.

    Attributes:
        clock: requests so far.
        needed: ``id()`` of what is being read in and can't be given up.
        step: index of the request that is served now.
    """

    def __init__(self, model: Model, budget: float, policy: Policy) -> None:
        self.model, self.budget, self.policy = model, budget, policy
        self.needs = Needs(stateful=model.state_bytes > 0)
        self.trie: Trie[SimPage, SimPage, SimMark] = Trie(SimPage)
        self.clock = 0
        self.step = -1
        self.needed: set[int] = set()
        self.pins: set[str] = set()
        self.live = np.zeros(0, np.int32)
        self.capacity = 0
        self.tip: SimMark | None = None

    # --- bytes -------------------------------------------------------------------------------

    def live_bytes(self) -> int:
        """Bytes of the live cache."""
        return self.capacity * self.model.row_bytes + self.model.state_bytes

    def stored_bytes(self) -> int:
        """Bytes of what is stored beside it."""
        return sum(
            sum(p.nbytes for p in n.pages) + sum(m.nbytes for m in n.marks.values())
            for n in self.trie.nodes()
        )

    def nbytes(self) -> int:
        """All bytes."""
        return self.live_bytes() + self.stored_bytes()

    # --- a request ---------------------------------------------------------------------------

    def request(self, step: Step) -> int:
        """Serve one request; how many tokens were prefilled."""
        self.clock += 1
        self.step += 1
        active = {id(n) for n in self.live_path()}
        found = match(self.trie.root, step.ids, len(self.live), lambda n: id(n) in active)
        plan = decide(found, self.needs)
        keep, start = plan.reused, plan.cached
        cuts = self.policy.places(step, found, start)
        owner = None if step.owner is None else str(step.owner)
        if owner is not None:
            self._release(owner)
        self._restore(step, keep, start)
        for at in sorted(cuts):
            self.live = step.ids[:at]
            self._record(None, cuts[at], copy=True)
            self._enforce()
        # The last token that was generated is never fed.
        whole = np.concatenate([step.ids, step.generated[:-1]])
        for at in self.policy.decoding(len(step.ids), len(whole)):
            self.live = whole[:at]
            self._record(None, "periodic", copy=True)
            self._enforce()
        self.live = whole
        self._record(owner, "answer", copy=False)
        self._enforce()
        if self.live_bytes() > self.budget:
            self.capacity = len(self.live)
        if self.live_bytes() > self.budget:
            self._drop_live()
        return plan.recomputed

    def live_path(self) -> list[SimNode]:
        """The nodes along the live cache's ids."""
        return self.trie.match(self.live)[0].path()

    def _restore(self, step: Step, keep: int, start: int) -> None:
        ids, room = step.ids, len(step.generated)
        path = self.trie.match(ids[:start])[0].path() if start else []
        if keep == start == len(self.live) > 0:
            pages, mark = [], None
        else:
            pages = [
                p
                for n in path
                for p in n.pages
                if keep < start and p.end > keep and p.start < start
            ]
            mark = path[-1].marks.get(start) if path else None
        self.needed = {id(thing) for thing in (*pages, mark)}
        self._vacate(keep)
        self.needed = set()
        if mark is not None:
            mark.last_used = self.clock
        for page in pages:
            if page.end <= start:
                page.residence, page.nbytes = "live", 0
        self.live = ids[:start]
        total = -(-(len(ids) + room) // ROOM) * ROOM
        if self.capacity > 2 * total or self.capacity < total:
            self.capacity = total
        self._enforce()

    def _vacate(self, keep: int) -> None:
        path = self.live_path()
        for node in path:
            if node.start < keep < node.end:
                self.trie.split_pages(node, keep)
        leaving = [p for n in path for p in n.pages if p.start >= keep and p.residence == "live"]
        sizes = {id(p): p.tokens * self.model.row_bytes for p in leaving}
        if self.tip is not None:
            sizes[id(self.tip)] = self.model.state_bytes
        self._give_up(self.nbytes() + sum(sizes.values()) - self.budget, sizes)
        for page in leaving:
            if page.residence == "live":
                page.residence, page.nbytes = "device", page.tokens * self.model.row_bytes
        if self.tip is not None:
            self.tip.nbytes = self.model.state_bytes
            self.tip = None

    def _record(self, owner: str | None, kind: str, *, copy: bool) -> None:
        at = len(self.live)
        node = self.trie.insert(self.live)
        if at < node.end:
            self.trie.split_pages(node, at)
        for step in node.path():
            step.last_used = self.clock
            for page in step.pages:
                if page.end <= at:
                    page.residence, page.nbytes, page.last_used = "live", 0, self.clock
            step.pages = _joined(step.pages)
        present = node.marks.get(at)
        if present is not None and (present.nbytes or not self.needs.stateful):
            present.last_used = self.clock
        else:
            nbytes = self.model.state_bytes if copy else 0
            node.marks[at] = SimMark(at, kind, nbytes, self.clock)
            if not copy and self.needs.stateful:
                self.tip = node.marks[at]
        self._thin()
        if owner is not None:
            self._release(owner)
            node.owners[owner] = at

    def _release(self, owner: str) -> None:
        for node in self.trie.nodes():
            node.owners.pop(owner, None)

    def _thin(self) -> None:
        for node in self.live_path():
            for mark in list(node.marks.values()):
                if mark.kind == "periodic" and not lattice(mark.at, len(self.live)):
                    del node.marks[mark.at]

    def _drop_live(self) -> None:
        for node in self.live_path():
            for page in node.pages:
                if page.residence == "live":
                    page.residence = "gone"
        if self.tip is not None:
            node, _ = self.trie.match(self.live[: self.tip.at])
            node.marks.pop(self.tip.at, None)
            self.tip = None
        self.live, self.capacity = self.live[:0], 0

    # --- giving up ---------------------------------------------------------------------------

    def _enforce(self) -> None:
        self._give_up(self.nbytes() - self.budget, {})

    def _give_up(self, need: float, leaving: dict[int, int]) -> None:
        if need <= 0:
            return
        for thing, node in self.policy.give_up(self, int(need), leaving):
            assert id(thing) not in self.needed, thing
            if isinstance(thing, SimMark):
                del node.marks[thing.at]
                self.tip = None if thing is self.tip else self.tip
            else:
                thing.residence, thing.nbytes = "gone", 0
        forget_oldest(self.trie, {id(n) for n in self.live_path()}, rows=True)


def _joined(pages: list[SimPage]) -> list[SimPage]:
    from mlx_jupyter.cache.pages import joined_pages

    joined: list[Any] = joined_pages(pages)  # type: ignore[arg-type]
    return joined

"""A prefix cache without arrays: the product's own trie, match, plan and policy over byte counts.

Moves pages and snapshots as ``PrefixCache`` and ``Session`` do; only the arrays are missing. What
is set as a mark and what is given up is a policy's choice (``retention_policies.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mlx_jupyter.cache.ghosts import forget_oldest
from mlx_jupyter.cache.match import Match, decide, match
from mlx_jupyter.cache.needs import MARK_EVERY, Needs, lattice
from mlx_jupyter.cache.session import AHEAD, PERIOD, ROOM, SETTLE
from mlx_jupyter.cache.trie import PAGE, Node, Trie

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

    host = twin = None
    """No page lies in a file or anywhere else."""

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

    host = None

    def __init__(self, at: int, kind: str, nbytes: int, last_used: int) -> None:
        self.at, self.kind, self.nbytes, self.last_used = at, kind, nbytes, last_used

    @property
    def residence(self) -> str:
        """Where its states are."""
        return "device" if self.nbytes else "live"


SimNode = Node[SimPage, SimPage, SimMark]
Thing = SimPage | SimMark


class Policy(Protocol):
    """What differs between caches.

    Attributes:
        marks_rows: marks are set for models of rows alone, too.
    """

    marks_rows: bool

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
    return {at: kind for at, kind in cuts.items() if max(start, 1) <= at < n}


def our_decoding(start: int, end: int) -> Iterable[int]:
    """As ``Session.settle`` does."""
    return range((start // MARK_EVERY + 1) * MARK_EVERY, end, MARK_EVERY)


class SimCache:
    """See the module.

    Attributes:
        requests: requests so far.
        asked: the prompt of the last one.
        needed: ``id()`` of what is being read in and can't be given up.
        step: index of the request that is served now.
        chunk: tokens of a prefill between two looks at the budget.
    """

    def __init__(self, model: Model, budget: float, policy: Policy, *, chunk: int = 2048) -> None:
        self.chunk = chunk
        self.asked = np.zeros(0, np.int32)
        self._total = 0
        self._marking = policy.marks_rows or model.state_bytes > 0
        self.model, self.budget, self.policy = model, budget, policy
        self.needs = Needs(stateful=model.state_bytes > 0)
        self.trie: Trie[SimPage, SimPage, SimMark] = Trie(SimPage)
        self.requests = 0
        self.step = -1
        self.needed: set[int] = set()
        self.pins: set[str] = set()
        self.live = np.zeros(0, np.int32)
        self.capacity = 0
        self.tip: SimMark | None = None

    # --- bytes -------------------------------------------------------------------------------

    def live_bytes(self) -> int:
        """Bytes of the live cache."""
        states = self.model.state_bytes if len(self.live) else 0
        return self.capacity * self.model.row_bytes + states

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
        self.requests += 1
        self.step += 1
        self.asked = step.ids
        active = {id(n) for n in self.live_path()}
        found = match(self.trie.root, step.ids, len(self.live), lambda n: id(n) in active)
        plan = decide(found, self.needs)
        n, start = len(step.ids), plan.cached
        cuts = self.policy.places(step, found, start) if self._marking else {}
        owner = None if step.owner is None else str(step.owner)
        if owner is not None:
            self._release(owner)
        self._total = rounded(n + min(len(step.generated), AHEAD))
        self._restore(step.ids, plan.reused, start)
        if start in cuts:
            self._record(None, cuts[start], copy=True)
        chunks = range((start // self.chunk + 1) * self.chunk, n - 1, self.chunk)
        for at in sorted({*cuts, *chunks, n - 1} - {*range(start + 1)}):
            self._settle(step.ids[:at], cuts.get(at))
        # The last token that was generated is never fed.
        whole = np.concatenate([step.ids, step.generated[:-1]])
        marks = {*self.policy.decoding(n, len(whole))} if self._marking else ()
        for at in range(-(-n // SETTLE) * SETTLE, len(whole), SETTLE):
            self._settle(whole[:at], "periodic" if at in marks else None)
        self.live = whole
        self.capacity = max(self.capacity, len(whole))
        self._record(owner, "answer", copy=False)
        self._fit_live()
        self._enforce(rests=True)
        return plan.recomputed

    def _settle(self, ids: np.ndarray, mark: str | None) -> None:
        """These are in the live cache now: a mark that is due, room, budget."""
        self.live = ids
        if mark:
            self._record(None, mark, copy=True)
        if len(ids) + SETTLE > self._total:
            self._total = rounded(len(ids) + AHEAD)
        self._reserve()
        self._enforce()

    def _reserve(self) -> None:
        fits = int(self.budget // self.model.row_bytes) if self.budget < math.inf else 1 << 60
        self.capacity = max(self.capacity, min(self._total, max(len(self.live), fits)))

    def live_path(self) -> list[SimNode]:
        """The nodes along the live cache's ids."""
        return self.trie.match(self.live)[0].path()

    def _restore(self, ids: np.ndarray, keep: int, start: int) -> None:
        in_place = keep == start == len(self.live) > 0
        path = self.trie.match(ids[:start])[0].path() if start and not in_place else []
        pages = [
            p for n in path for p in n.pages if keep < start and p.end > keep and p.start < start
        ]
        mark = path[-1].marks.get(start) if path else None
        self.needed = {id(thing) for thing in (*pages, mark)}
        self._vacate(keep)
        self.needed = set()
        if mark is not None:
            mark.last_used = self.requests
        for page in pages:
            if page.end <= start:
                page.residence, page.nbytes = "live", 0
        if keep < start and self.capacity < max(start, self._total):
            self.capacity = max(start, self._total)
        self.live = ids[:start]
        if self.capacity > 2 * self._total:
            self.capacity = self._total
        self._reserve()

    def _vacate(self, keep: int) -> None:
        path = self.live_path()
        for node in path:
            if node.start < keep < node.end:
                self.trie.split_pages(node, keep)
        leaving = [p for n in path for p in n.pages if p.start >= keep and p.residence == "live"]
        sizes = {id(p): p.tokens * self.model.row_bytes for p in leaving}
        if self.tip is not None:
            sizes[id(self.tip)] = self.model.state_bytes
        spare = self.capacity - self._total if self.capacity > 2 * self._total else 0
        after = self.nbytes() - spare * self.model.row_bytes + sum(sizes.values())
        self._give_up(after - self.budget, sizes)
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
            step.last_used = self.requests
            for page in step.pages:
                if page.end <= at:
                    page.residence, page.nbytes, page.last_used = "live", 0, self.requests
            step.pages = _joined(step.pages)
        if self._marking:
            self._mark(node, at, kind, copy=copy)
        self._thin()
        if owner is not None:
            self._release(owner)
            node.owners[owner] = at

    def _mark(self, node: SimNode, at: int, kind: str, *, copy: bool) -> None:
        present = node.marks.get(at)
        if present is not None and (present.nbytes or not self.needs.stateful):
            present.last_used = self.requests
        else:
            nbytes = self.model.state_bytes if copy else 0
            node.marks[at] = SimMark(at, kind, nbytes, self.requests)
            if not copy and self.needs.stateful:
                self.tip = node.marks[at]

    def _release(self, owner: str) -> None:
        for node in self.trie.nodes():
            node.owners.pop(owner, None)

    def _thin(self) -> None:
        for node in self.live_path():
            for mark in list(node.marks.values()):
                if mark.kind == "periodic" and not lattice(mark.at, len(self.live)):
                    del node.marks[mark.at]

    def _fit_live(self) -> None:
        """When all is over the budget: the live cache without spare room, cut, or let go of."""
        if self.nbytes() <= self.budget:
            return
        self.capacity = len(self.live)
        if self.live_bytes() <= self.budget:
            return
        stateful = self.needs.stateful
        keep = 0 if stateful else int(self.budget // self.model.row_bytes) // PAGE * PAGE
        for node in self.live_path():
            for page in node.pages:
                if page.start >= keep and page.residence == "live":
                    page.residence = "gone"
        if self.tip is not None:
            node, _ = self.trie.match(self.live[: self.tip.at])
            node.marks.pop(self.tip.at, None)
            self.tip = None
        self.live, self.capacity = self.live[:keep], keep
        self._prune()

    # --- giving up ---------------------------------------------------------------------------

    def _enforce(self, *, rests: bool = False) -> None:
        self._give_up(self.nbytes() - self.budget, {}, rests=rests)

    def _give_up(self, need: float, leaving: dict[int, int], *, rests: bool = False) -> None:
        if need <= 0:
            return
        for thing, node in self.policy.give_up(self, int(need), leaving):
            assert id(thing) not in self.needed, thing
            if not isinstance(thing, SimMark):
                thing.residence, thing.nbytes = "gone", 0
                continue
            thing.nbytes = 0
            self.tip = None if thing is self.tip else self.tip
            if rests and self.tip is None and thing.at == len(self.live) and self._on_path(node):
                self.tip = thing  # the live cache keeps the states
            else:
                del node.marks[thing.at]
        self._prune()

    def _on_path(self, node: SimNode) -> bool:
        return any(step is node for step in self.live_path())

    def _prune(self) -> None:
        forget_oldest(self.trie, {id(n) for n in self.live_path()}, rows=True)  # type: ignore[arg-type]


def _joined(pages: list[SimPage]) -> list[SimPage]:
    """As ``pages.joined_pages``, which looks at more than there is here."""
    result: list[SimPage] = []
    for page in pages:
        last = result[-1] if result else None
        if (
            last is not None
            and last.residence == page.residence == "live"
            and last.start // PAGE == page.start // PAGE
        ):
            last.end, last.last_used = page.end, max(last.last_used, page.last_used)
        else:
            result.append(page)
    return result


def rounded(tokens: int) -> int:
    """Up to the next multiple of ``ROOM``."""
    return -(-tokens // ROOM) * ROOM

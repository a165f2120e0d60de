"""What to give up when the budget is full: a pure policy over a description.

No MLX and no cache in here, so that ``benchmarks/retention.py`` can run the policy on traces.

What can no longer serve any restore goes first. Of the rest that with the lowest value does:
P(wanted again) × tokens to prefill again ÷ bytes that giving it up frees. All three depend on what
else is held:

* a page may go only when nothing hangs on it: what is behind a missing page is useless;
* with a snapshot go the rows that only it made useful; they count in its bytes;
* with a snapshot gone, whoever comes for it goes on from the one before: that one is wanted more,
  and the one behind is further to prefill.

P(wanted again) is a heuristic. It falls with the requests since a cell or branch that leads through
the place last asked, and with the number of places between it and that branch's tip; what was used
itself of late is wanted more, what nothing leads to hardly ever.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

BACK = 0.5
"""How much less the next place back from a tip is wanted: edits reach back a few turns only."""

OWN = 0.1
"""Weight of a place's own last use against that of the branches which lead through it."""

STRAY = 0.2
"""How much what no cell or branch leads to is wanted, against its own last use alone."""

PERIODIC = 0.3
"""How much a snapshot set for its distance alone is wanted, against one where a turn ends."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that holds bytes and may be given up.

    Attributes:
        key: names it; unique.
        kind: "rows" (a page), "window" (a strip), "state" (a snapshot).
        nbytes: what giving it up frees.
        end: the absolute position that it reaches; deeper goes first among equals.
        replay: tokens to prefill again, should it be wanted after all: those of a page, those
            from the place before to a snapshot, all up to a strip.
        last_used: request counter at its last use.
        before: key of the page that it needs, if that is an item too: the one before a page, the
            one that holds a snapshot's last row.
        useless: can no longer serve any restore.
        reachable: a cell or branch still leads through it.
        pinned: never given up.
        prior: for a snapshot, key of the one before it on its path, if that is an item too.
        place: why a snapshot was set; ``""`` for rows.
        seen: request counter at the last request of the cells and branches that lead through it;
            0 when that isn't known.
        back: marks between it (for a strip: the mark that needs it) and the nearest of their tips.
        alone: a page that serves restores without a snapshot; False makes it useless when
            nothing hangs on it any more.
    """

    key: int
    kind: Literal["rows", "window", "state"]
    nbytes: int
    end: int
    replay: int
    last_used: int
    before: int | None = None
    useless: bool = False
    reachable: bool = True
    pinned: bool = False
    prior: int | None = None
    place: str = ""
    seen: int = 0
    back: int = 0
    alone: bool = True


def wanted(item: Item, clock: int) -> float:
    """Chance that it is wanted again, up to a factor: only the order of the values matters.

    Hyperbolic in the age, so that what is recent wins but a long replay still counts.
    """
    weight = PERIODIC if item.place == "periodic" else 1.0
    own = weight / (1 + max(clock - item.last_used, 0))
    if not item.reachable:
        return STRAY * own
    tips = weight / (1 + max(clock - (item.seen or item.last_used), 0))
    return tips if item.kind == "rows" else tips * BACK ** min(item.back, 64) + OWN * own


def choose(items: Iterable[Item], need: int, clock: int) -> list[int]:
    """Keys to give up, in order, so that at least ``need`` bytes are freed (or all that may go)."""
    return _Choice(items, clock).until(need) if need > 0 else []


_Rank = tuple[bool, float, int]
"""What goes first comes first: whether it serves anything, its value, its depth."""


class _Choice:
    """What is still held while things are given up one by one."""

    def __init__(self, items: Iterable[Item], clock: int) -> None:
        self._items = {item.key: item for item in items}
        self._clock = clock
        self._gone: set[int] = set()
        self._hanging = dict.fromkeys(self._items, 0)  # how many held items need a page
        self._prior = {key: item.prior for key, item in self._items.items()}
        self._start = {key: item.end - item.replay for key, item in self._items.items()}
        self._passed: dict[int, float] = {}  # P of given-up snapshots whose users come here now
        for item in self._items.values():
            if item.before in self._hanging:
                self._hanging[item.before] += 1

    def until(self, need: int) -> list[int]:
        """Give up until ``need`` bytes are free; the keys in order."""
        heap = [(self._rank(key), key) for key in self._items if self._may_go(key)]
        heapq.heapify(heap)
        chosen: list[int] = []
        while heap and need > 0:
            rank, key = heapq.heappop(heap)
            now = self._rank(key)
            if now > rank:  # its value grew since it was ranked
                heapq.heappush(heap, (now, key))
                continue
            item = self._items[key]
            chosen.append(key)
            need -= item.nbytes
            page = self._let_go(item)
            if page is not None:
                heapq.heappush(heap, (self._rank(page), page))
        return chosen

    def _may_go(self, key: int) -> bool:
        item = self._items[key]
        free = item.kind != "rows" or item.useless or not self._hanging[key]
        return free and not item.pinned

    def _let_go(self, item: Item) -> int | None:
        """Note that an item is gone; the page that may go now, if one may."""
        self._gone.add(item.key)
        if item.kind == "state" and not item.useless:
            prior, _ = self._before(item.key)
            if prior is not None:
                passed = wanted(item, self._clock) + self._passed.get(item.key, 0.0)
                self._passed[prior] = self._passed.get(prior, 0.0) + passed
        page = item.before
        if page not in self._hanging:
            return None
        self._hanging[page] -= 1
        fresh = page not in self._gone and not self._items[page].useless
        return page if fresh and self._may_go(page) else None

    def _rank(self, key: int) -> _Rank:
        item = self._items[key]
        if item.useless or not (item.kind != "rows" or item.alone or self._hanging[key]):
            return False, 0.0, -item.end
        value = wanted(item, self._clock) * item.replay / max(item.nbytes, 1)
        if item.kind == "state":
            _, start = self._before(key)
            chance = wanted(item, self._clock) + self._passed.get(key, 0.0)
            value = chance * (item.end - start) / max(self._frees(item), 1)
        return True, value, -item.end

    def _before(self, key: int) -> tuple[int | None, int]:
        """The nearest held snapshot before one, and where prefilling it again starts."""
        passed = [key]
        prior = self._prior[key]
        while prior in self._gone:
            passed.append(prior)
            prior = self._prior[prior]
        start = self._start[passed[-1]]
        for each in passed:  # the next one who asks has a short way
            self._prior[each], self._start[each] = prior, start
        return prior, start

    def _frees(self, item: Item) -> int:
        """Bytes of a snapshot and of the rows that nothing else needs."""
        freed, page = item.nbytes, item.before
        while page in self._hanging and self._hanging[page] == 1 and page not in self._gone:
            held = self._items[page]
            if held.pinned or held.alone:
                break
            freed += held.nbytes
            page = held.before
        return freed

"""What to give up when the budget is full: a pure policy over a description.

No MLX and no cache in here, so that ``benchmarks/retention.py`` can run the policy on traces.

What can no longer serve any restore goes first. Of the rest that with the lowest value does:
P(wanted again) × tokens to prefill again ÷ bytes that giving it up frees. All three depend on what
else is held:

* a page may go only when nothing hangs on it: what is behind a missing page is useless;
* with a snapshot go the rows that only it made useful; they count in its bytes;
* window rows go with all snapshots that need them, which are judged together: a window that lacks
  a strip is worth nothing, and one of two that overlap frees little;
* with a snapshot gone, whoever comes for it goes on from the one before: that one is wanted more,
  and the one behind is further to prefill.

P(wanted again) is a heuristic. Each cell or branch asks for the end of its path, the less the more
requests were made since it last did, and for each place back half as much; what several ask for is
wanted by all of them together. What nothing leads to any more is hardly ever wanted, unless it lies
below the end of a path that may go on as before.

Tried and left: ages weighed by the reuse distances that the session showed (of four means of
``benchmarks/retention.py`` one better by 2 %, three worse), the strongest tip instead of the sum
(worse on states, the same on rows), each window's snapshot judged by itself.
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

NEW = 0.1
"""How much the end of a system prompt is wanted for new conversations, against a tip below it:
about one request in ten begins one."""

STRAY = 0.02
"""How much what no cell or branch leads to is wanted, against its own last use alone. Sampled
answers don't come again: what a rerun has replaced is hardly ever asked for."""

UNDER = 0.2
"""The same for what lies below a tip: cells that run again without sampling come by it."""

PERIODIC = 0.3
"""How much a snapshot set for its distance alone is wanted, against one where a turn ends."""

INTERIOR = 3
"""As how many marks back window rows count that no mark needs: an edit may fall there."""


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
        useless: can no longer serve any restore; a page or strip at once when nothing needs it.
        reachable: a cell or branch still leads through it.
        pinned: never given up.
        prior: for a snapshot, key of the one before it on its path, if that is an item too.
        place: why a snapshot was set; ``""`` for rows.
        asked: how much those that lead through it want it: for each, ``recency`` of its last
            request, times ``BACK`` for each mark between; None when that isn't known.
        under: no cell or branch leads through it, but one ends above it.
        alone: a page that serves restores without a snapshot; False makes it useless when
            nothing hangs on it any more.
        needs: for a snapshot, keys of the strips that going on from it takes.
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
    asked: float | None = None
    under: bool = False
    alone: bool = True
    needs: tuple[int, ...] = ()


def recency(age: int) -> float:
    """Chance of what was asked for ``age`` requests ago, up to a factor.

    Hyperbolic, so that what is recent wins but a long replay still counts.
    """
    return 1 / (1 + max(age, 0))


def wanted(item: Item, clock: int) -> float:
    """Chance that it is wanted again, up to a factor: only the order of the values matters."""
    weight = PERIODIC if item.place == "periodic" else 1.0
    own = recency(clock - item.last_used)
    if not item.reachable:
        return weight * own * (UNDER if item.under else STRAY)
    asked = own if item.asked is None else item.asked
    return asked if item.kind == "rows" else weight * (asked + OWN * own)


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
        self._users: dict[int, set[int]] = {}  # held snapshots that need a strip
        self._prior = {key: item.prior for key, item in self._items.items()}
        self._start = {key: item.end - item.replay for key, item in self._items.items()}
        self._passed: dict[int, float] = {}  # P of given-up snapshots whose users come here now
        self._heap: list[tuple[_Rank, int]] = []
        for item in self._items.values():
            if item.before in self._hanging:
                self._hanging[item.before] += 1
            if not item.useless:
                for strip in item.needs:
                    self._users.setdefault(strip, set()).add(item.key)

    def until(self, need: int) -> list[int]:
        """Give up until ``need`` bytes are free; the keys in order."""
        self._heap = [(self._rank(key), key) for key in self._items if self._may_go(key)]
        heapq.heapify(self._heap)
        chosen: list[int] = []
        while self._heap and need > 0:
            rank, key = heapq.heappop(self._heap)
            if key in self._gone:
                continue
            now = self._rank(key)
            if now > rank:  # its value grew since it was ranked
                heapq.heappush(self._heap, (now, key))
                continue
            item = self._items[key]
            together = sorted(self._users.get(key, ()), key=self._end, reverse=True)
            for each in [self._items[user] for user in together] or [item]:
                if each.nbytes:  # else only strips go with it
                    chosen.append(each.key)
                    need -= each.nbytes
                self._let_go(each)
        return chosen

    def _may_go(self, key: int) -> bool:
        item = self._items[key]
        if item.pinned:
            return False
        if item.kind == "rows":
            return item.useless or not self._hanging[key]
        if item.kind == "window":
            return not any(self._items[user].pinned for user in self._users.get(key, ()))
        # What holds nothing but its window goes with a strip of it.
        return bool(item.nbytes) or item.useless or not any(s in self._items for s in item.needs)

    def _end(self, key: int) -> tuple[int, int]:
        return self._items[key].end, key

    def _let_go(self, item: Item) -> None:
        """Note that an item is gone, and look again at what that changes."""
        self._gone.add(item.key)
        if item.kind == "state" and not item.useless:
            prior, _ = self._before(item.key)
            if prior is not None:
                self._passed[prior] = self._passed.get(prior, 0.0) + self._chance(item)
            for strip in item.needs:
                self._users[strip].discard(item.key)
                if strip in self._items:
                    self._look_at(strip)
        page = item.before
        if page in self._hanging:
            self._hanging[page] -= 1
            if not self._items[page].useless:
                self._look_at(page)

    def _chance(self, item: Item) -> float:
        """That of a snapshot, with those who come for one that is gone."""
        return wanted(item, self._clock) + self._passed.get(item.key, 0.0)

    def _look_at(self, key: int) -> None:
        """Rank an item anew, if it may go."""
        if key not in self._gone and self._may_go(key):
            heapq.heappush(self._heap, (self._rank(key), key))

    def _rank(self, key: int) -> _Rank:
        item = self._items[key]
        if self._is_useless(item):
            return False, 0.0, -item.end
        if users := self._users.get(key):
            value = self._together(users)
        elif item.kind == "state":
            _, start = self._before(key)
            value = self._chance(item) * (item.end - start) / max(self._frees(item), 1)
        else:
            value = wanted(item, self._clock) * item.replay / max(item.nbytes, 1)
        return True, value, -item.end

    def _together(self, users: set[int]) -> float:
        """The value of snapshots that go together, since they need the same strip."""
        lost, freed = 0.0, 0
        starts: dict[int, int] = {}
        strips: set[int] = set()
        for key in sorted(users, key=self._end):
            item = self._items[key]
            prior, start = self._before(key)
            starts[key] = starts.get(prior, start) if prior is not None else start
            lost += self._chance(item) * (item.end - starts[key])
            freed += item.nbytes + self._rows_behind(item)
            strips.update(item.needs)
        for strip in strips:
            held = self._items.get(strip)
            if held is not None and not held.pinned and self._users[strip] <= users:
                freed += held.nbytes
        return lost / max(freed, 1)

    def _is_useless(self, item: Item) -> bool:
        if item.key in self._users:  # of a window: as long as something needs it, it stays
            return not self._users[item.key]
        unused = item.kind == "rows" and not item.alone and not self._hanging[item.key]
        return item.useless or unused

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
        """Bytes of a snapshot, of the rows and of the window that nothing else needs."""
        alone = (s for s in item.needs if s in self._items and self._users[s] == {item.key})
        strips = sum(self._items[s].nbytes for s in alone if not self._items[s].pinned)
        return item.nbytes + strips + self._rows_behind(item)

    def _rows_behind(self, item: Item) -> int:
        """Bytes of the rows that only a snapshot made useful."""
        freed, page = 0, item.before
        while page in self._hanging and self._hanging[page] == 1 and page not in self._gone:
            held = self._items[page]
            if held.pinned or held.alone:
                break
            freed += held.nbytes
            page = held.before
        return freed

"""What to give up when the budget is full: a pure policy over a description.

No MLX and no cache in here, so that a simulator can run the policy on a recorded trace.

Order of giving up: first what can no longer serve any restore, then what no open cell or branch
can reach, then the lowest P(reuse) × replay cost ÷ bytes. Within a chain of pages only the
deepest may go, since everything behind a missing page is useless; with it gone the one before it
becomes a candidate.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that holds bytes and may be given up.

    Attributes:
        key: names it; unique.
        kind: "rows" (a page), "window" (a strip), "state" (a snapshot).
        nbytes: what giving it up frees.
        end: the absolute position that it reaches; deeper goes first among equals.
        replay: tokens to prefill again, should it be wanted after all.
        last_used: request counter at its last use.
        before: key of the page that comes before it on its path, if that is an item too.
        useless: can no longer serve any restore.
        reachable: a cell or branch still leads through it.
        pinned: never given up.
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


def reuse_probability(age: int) -> float:
    """Chance that something last used ``age`` requests ago is wanted again, up to a factor.

    A heuristic: hyperbolic, so that what is recent wins but a long replay still counts. Only the
    order of the scores matters.
    """
    return 1.0 / (1.0 + age)


def rank(item: Item, clock: int) -> tuple[int, float, int]:
    """Sort key: what to give up first comes first."""
    group = 0 if item.useless else 2 if item.reachable else 1
    value = reuse_probability(clock - item.last_used) * item.replay / max(item.nbytes, 1)
    return group, value, -item.end


def choose(items: Iterable[Item], need: int, clock: int) -> list[int]:
    """Keys to give up, in order, so that at least ``need`` bytes are freed (or all that may go)."""
    if need <= 0:
        return []
    by_key = {item.key: item for item in items}
    behind: dict[int, int] = {}  # page -> how many held items depend on it
    for item in by_key.values():
        if item.before is not None and item.before in by_key:
            behind[item.before] = behind.get(item.before, 0) + 1
    heap = [
        (rank(item, clock), item.key)
        for item in by_key.values()
        if not item.pinned and (item.useless or not behind.get(item.key))
    ]
    heapq.heapify(heap)
    chosen: list[int] = []
    while heap and need > 0:
        _, key = heapq.heappop(heap)
        item = by_key[key]
        chosen.append(key)
        need -= item.nbytes
        if item.before is not None and item.before in by_key:
            behind[item.before] -= 1
            parent = by_key[item.before]
            if not behind[item.before] and not parent.pinned and not parent.useless:
                heapq.heappush(heap, (rank(parent, clock), parent.key))
    return chosen

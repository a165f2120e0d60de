"""From token ids to a plan: what is known, what is held, where to restore. Pure, no MLX.

The engine thread asks about the trie itself, other threads about the published view: both have
the same shape, so there is one decision for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mlx_jupyter.cache.exact import places
from mlx_jupyter.cache.needs import Needs, Span, joined
from mlx_jupyter.cache.plan import Cause, CauseCode, Plan, Rates
from mlx_jupyter.cache.trie import common_prefix
from mlx_jupyter.cache.view import AWAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class _Page(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def residence(self) -> str: ...


class _Node(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def ends(self) -> np.ndarray: ...
    @property
    def children(self) -> Any: ...
    @property
    def pages(self) -> Iterable[_Page]: ...
    @property
    def strips(self) -> Any: ...
    @property
    def marks(self) -> Any: ...
    def child(self, token: int) -> Any:
        """The child whose edge begins with ``token``."""


@dataclass(frozen=True, slots=True)
class Match:
    """What the trie knows of a prompt.

    Attributes:
        prompt: tokens in the prompt.
        known: length of the longest stored prefix.
        held: of which this many leading tokens have rows somewhere.
        common: of which this many are in the live cache, in place.
        live: tokens in the live cache.
        snapshots: offsets up to ``held`` where states can be restored, ascending.
        windows: positions up to ``known`` whose window rows are stored, as joined spans.
        at_leaf: the known prefix ends where a stored sequence ends.
        away: positions up to ``held`` whose pages aren't in the device's memory, as joined spans.
        exact: in exactness mode, the offsets up to ``known`` that may be restored, ascending.
    """

    prompt: int
    known: int
    held: int
    common: int
    live: int
    snapshots: tuple[int, ...]
    windows: tuple[Span, ...]
    at_leaf: bool
    away: tuple[Span, ...] = ()
    exact: np.ndarray | None = None


def _anybody(page: Any) -> bool:
    del page
    return True


def match(
    root: _Node,
    ids: np.ndarray,
    live: int,
    active: Callable[[Any], bool],
    *,
    exact: bool = False,
    usable: Callable[[Any], bool] = _anybody,
) -> Match:
    """Walk ``ids`` down from ``root``.

    Args:
        root: the trie's root, or its view.
        ids: int32, shape (prompt,).
        live: tokens in the live cache.
        active: whether a node lies on the path of the live cache.
        exact: note where passes ended.
        usable: whether who asks may go on from a page.
    """
    known = held = common = 0
    broken = False
    snapshots: list[int] = []
    windows: list[Span] = []
    passes: list[np.ndarray] = []
    away: list[Span] = []
    node, at_leaf = root, False
    while known < len(ids):
        child = node.child(int(ids[known]))
        if child is None:
            at_leaf = node is not root and not node.children
            break
        known += common_prefix(child.tokens, ids[known : child.end])
        if active(child):
            common = min(known, live)
        for page in child.pages:
            if page.start >= known or broken:
                break
            broken = page.residence == "gone" or not usable(page)
            held = held if broken else min(page.end, known)
            if page.residence in AWAY:
                away.append((page.start, held))
        if child.strips:
            windows += [(s.start, min(s.end, known)) for s in child.strips if s.start < known]
        if exact:
            passes.append(child.start + places(child.ends[: known - child.start]))
        if child.marks:
            snapshots += [at for at in _offsets(child.marks) if at <= held]
        node = child
        if known < child.end:
            break
    return Match(
        prompt=len(ids),
        known=known,
        held=held,
        common=min(common, held),
        live=live,
        snapshots=tuple(sorted(snapshots)),
        windows=tuple(joined(windows)),
        at_leaf=at_leaf,
        away=tuple(joined(away)),
        exact=np.concatenate([np.zeros(0, np.intp), *passes]) if exact else None,
    )


def _offsets(marks: Mapping[int, Any] | Iterable[Any]) -> list[int]:
    """Offsets of the marks that have a snapshot of their own."""
    values: Iterable[Any] = marks.values() if isinstance(marks, Mapping) else marks
    return [m.at for m in values if m.residence != "live"]


def decide(found: Match, needs: Needs, rates: Rates | None = None) -> Plan:
    """The plan: the cheapest of the positions that every layer can be restored at.

    One token at least is left to evaluate. Rows restore anywhere, windows where their rows are
    stored, states only where a snapshot is; everything where the live cache stands now. Cheapest
    is the furthest, unless reading rows in costs more than computing them. In exactness mode only
    the places where a pass ended count.
    """
    rates = rates or Rates()
    furthest = min(found.held, found.prompt - 1)
    limit = needs.furthest(furthest, found.windows)
    rounded = _rounded(found, needs, limit)
    choices = {0}
    if needs.stateful:
        choices |= {
            p for p in found.snapshots if p <= limit and needs.windows_held(p, found.windows)
        }
    else:
        stops = [found.common, *(start for start, _ in found.away)]
        for stop in stops:
            place = needs.furthest(min(stop, furthest), found.windows)
            choices.add(_rounded(found, needs, place))
        choices.add(rounded)
    if found.live == found.common <= furthest:
        choices.add(found.live)
    if found.exact is not None:
        chunked = any(w.kind == "chunked" for w in needs.windows)
        choices = {
            p for p in choices if not p or (p in found.exact and (not chunked or p == found.live))
        }

    def read(place: int) -> int:
        spans = ((max(a, found.common), min(b, place)) for a, b in found.away)
        return sum(max(b - a, 0) for a, b in spans)

    def cost(place: int) -> tuple[float, int]:
        restored = place - min(found.common, place)
        from_away = read(place)
        return rates.cost(restored - from_away, found.prompt - place, from_away), -place

    start = min(choices, key=cost)
    reused = min(found.common, start)
    return Plan(
        prompt=found.prompt,
        reused=reused,
        restored=start - reused,
        recomputed=found.prompt - start,
        read=read(start),
        why=_why(
            found, start, max(choices), max(rounded, *choices), max(limit, *choices), furthest
        ),
    )


def _rounded(found: Match, needs: Needs, limit: int) -> int:
    """In exactness mode, the last place up to ``limit`` that may be restored; else ``limit``."""
    if found.exact is None:
        return limit
    if any(w.kind == "chunked" for w in needs.windows):
        return 0  # its buffer holds more rows than a restore puts back: other shapes, other bits
    within = found.exact[found.exact <= limit]
    return next((int(p) for p in within[::-1] if needs.windows_held(int(p), found.windows)), 0)


def _why(
    found: Match, start: int, best: int, rounded: int, limit: int, furthest: int
) -> tuple[Cause, ...]:
    """Reasons for every token from ``start`` on, in the order of their positions."""
    known = min(found.known, found.prompt - 1)
    steps: tuple[tuple[CauseCode, int, int, str], ...] = (
        ("cost", start, best, "computing again is faster than reading in, from token {:,}"),
        ("snapshot", best, rounded, "the nearest place to go on from is token {:,}"),
        ("exact", rounded, limit, "exact: rounded down to where a pass ended, token {:,}"),
        ("window", limit, furthest, "sliding-window rows are kept up to token {:,}"),
        ("evicted", furthest, known, "given up from token {:,} on"),
    )
    causes = [
        Cause(code, text.format(at), end - at, at) for code, at, end, text in steps if at < end
    ]
    new = found.prompt - found.known
    if not new:
        causes.append(Cause("seed", "the last token is always evaluated", 1, found.prompt - 1))
    elif not found.known:
        causes.append(Cause("first", "nothing like it was seen before", new, 0))
    elif found.at_leaf:
        causes.append(Cause("extended", f"new from token {found.known:,}", new, found.known))
    else:
        causes.append(
            Cause(
                "diverged",
                f"differs from what is stored from token {found.known:,}",
                new,
                found.known,
            )
        )
    return tuple(causes)

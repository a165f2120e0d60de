"""Which rows a restore takes: pure arithmetic over positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Span = tuple[int, int]
"""Positions ``[start, end)``."""

MARK_EVERY = 1024
"""Tokens between two periodic marks in decode; the finest spacing of the lattice."""


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a layer.

    Attributes:
        kind: ``"sliding"``: the last ``size`` tokens; ``"chunked"``: those since the last multiple
            of ``size``.
        size: in tokens.
        keep: the first tokens that a sliding window never loses; they count in ``size``.
    """

    kind: Literal["sliding", "chunked"]
    size: int
    keep: int = 0

    def needs(self, at: int) -> tuple[Span, ...]:
        """The rows that standing at ``at`` takes."""
        if self.kind == "chunked":
            spans: tuple[Span, ...] = ((at // self.size * self.size, at),)
        else:
            kept = min(self.keep, at)
            spans = ((0, kept), (max(kept, at - (self.size - self.keep)), at))
        return tuple((a, b) for a, b in spans if a < b)


@dataclass(frozen=True, slots=True)
class Needs:
    """What restoring a model's cache at a position takes, besides the rows of full layers.

    Attributes:
        windows: the different windows of its layers.
        stateful: some layer can be restored only where a snapshot is.
    """

    windows: tuple[Window, ...] = ()
    stateful: bool = False

    @property
    def period(self) -> int | None:
        """Tokens that decode may make before window rows are lost; None without windows."""
        return min((w.size - w.keep - 1 for w in self.windows), default=None)

    def spans(self, at: int) -> list[Span]:
        """All window rows that standing at ``at`` takes, joined."""
        return joined(span for w in self.windows for span in w.needs(at))

    def windows_held(self, at: int, held: Sequence[Span]) -> bool:
        """Whether the window rows for ``at`` are among ``held`` (joined spans)."""
        return all(any(a <= s and e <= b for a, b in held) for s, e in self.spans(at))

    def furthest(self, limit: int, held: Sequence[Span]) -> int:
        """The largest position up to ``limit`` whose window rows are held."""
        if not self.windows:
            return limit
        ends = {limit, *(min(b, limit) for _, b in held)}
        chunks = {w.size for w in self.windows if w.kind == "chunked"}
        places = ends | {end // size * size for end in ends for size in chunks}
        return max((p for p in places if self.windows_held(p, held)), default=0)


def joined(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, overlapping and touching ones made one."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def without(span: Span, held: Sequence[Span]) -> Iterator[Span]:
    """The parts of ``span`` that are not among ``held`` (joined spans)."""
    at, end = span
    for a, b in held:
        if b <= at:
            continue
        if a >= end:
            break
        if at < a:
            yield at, a
        at = max(at, b)
    if at < end:
        yield at, end


def lattice(at: int, tip: int) -> bool:
    """Whether the periodic mark at ``at`` stays when the path has grown to ``tip``.

    The spacing doubles with every doubling of the distance from the tip. Each coarser lattice is
    part of the finer ones, so that thinning never opens a hole wider than its own spacing.
    """
    step = MARK_EVERY
    distance = max((tip - at) // step, 1)
    return at % (step << (distance.bit_length() - 1)) == 0

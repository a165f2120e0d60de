"""Pages: the rows of up to 256 tokens, and where they live; and marks: snapshots of states.

A page's residence is ``live`` (its rows are in the model's live cache, no bytes of its own),
``device`` (arrays of its own) or ``gone``. It changes only through the methods here.

A page stores K and V stacked over the layers that are alike, so that a long conversation is few
buffers: for each group of layers K of shape (layers, batch, heads, tokens, width) and V likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_jupyter.cache import layers as ly
from mlx_jupyter.cache.trie import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlx_jupyter.cache.view import MarkKind, Residence

Groups = tuple[tuple[int, ...], ...]
"""Indices of the row layers, grouped by equal shape and dtype."""


def group_layers(cache: Sequence[Any], rows: Sequence[int]) -> Groups:
    """Row layers that can be stored stacked; the cache must have content."""
    groups: dict[Any, list[int]] = {}
    for index in rows:
        groups.setdefault(ly.rows_signature(cache[index]), []).append(index)
    return tuple(tuple(g) for g in groups.values())


def _compact(arrays: list[mx.array]) -> mx.array:
    """The arrays stacked, in a buffer of their own."""
    stacked = mx.stack(arrays)
    # A stack of one is only a reshape and would keep the whole live buffer.
    return ly.compact(stacked) if len(arrays) == 1 else stacked


class Tally:
    """Bytes that the pages and marks of one cache hold, kept up as they change."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0


class Page:
    """Rows of the tokens ``[start, end)``; its own bytes are counted in ``tally``."""

    __slots__ = ("end", "last_used", "nbytes", "residence", "stacks", "start", "tally")

    def __init__(self, start: int, end: int, tally: Tally, residence: Residence = "live") -> None:
        self.start = start
        self.end = end
        self.tally = tally
        self.residence = residence
        self.stacks: tuple[ly.Rows, ...] = ()
        self.nbytes = 0
        self.last_used = 0

    @property
    def tokens(self) -> int:
        """How many tokens' rows it holds."""
        return self.end - self.start

    def hold(self, stacks: tuple[ly.Rows, ...]) -> None:
        """Own these rows (compact, evaluated here): for each group K and V."""
        mx.eval(stacks)
        self.stacks = stacks
        self.nbytes = mx.get_array_buffer_size(stacks)
        self.tally.nbytes += self.nbytes
        self.residence = "device"

    def capture(self, cache: Sequence[Any], groups: Groups) -> None:
        """Live → device: copy the rows out of the live cache."""
        assert self.residence == "live", self
        views = [[ly.rows(cache[i], self.start, self.end) for i in group] for group in groups]
        self.hold(
            tuple(
                (_compact([k for k, _ in group]), _compact([v for _, v in group]))
                for group in views
            )
        )

    def layer_rows(self, groups: Groups) -> Iterator[tuple[int, ly.Rows]]:
        """Each row layer's index and its rows, lazily cut from the stacks."""
        assert self.residence == "device", self
        for group, (keys, values) in zip(groups, self.stacks, strict=True):
            for place, index in enumerate(group):
                yield index, (keys[place], values[place])

    def now_live(self) -> None:
        """The rows are in the live cache now; the page's own arrays are given up."""
        self._release("live")

    def drop(self) -> None:
        """Give the rows up."""
        self._release("gone")

    def _release(self, residence: Residence) -> None:
        self.stacks = ()
        self.tally.nbytes -= self.nbytes
        self.nbytes = 0
        self.residence = residence

    def split(self, at: int) -> tuple[Page, Page]:
        """Two pages, ``[start, at)`` and ``[at, end)``, each with compact arrays of its own."""
        assert self.start < at < self.end
        parts = tuple(
            Page(a, b, self.tally, self.residence) for a, b in ((self.start, at), (at, self.end))
        )
        cut = at - self.start
        for part, where in zip(parts, (slice(None, cut), slice(cut, None)), strict=True):
            part.last_used = self.last_used
            if self.residence == "device":
                part.hold(
                    tuple(
                        (ly.compact(k[..., where, :]), ly.compact(v[..., where, :]))
                        for k, v in self.stacks
                    )
                )
        if self.residence == "device":
            self.drop()
        upper, lower = parts
        return upper, lower

    def __repr__(self) -> str:
        return f"Page([{self.start}, {self.end}) {self.residence})"


def joined(pages: Sequence[Page]) -> list[Page]:
    """The pages with neighbouring live ones of one full page made one again."""
    result: list[Page] = []
    for page in pages:
        last = result[-1] if result else None
        if (
            last is not None
            and last.residence == page.residence == "live"
            and last.start // PAGE == page.start // PAGE
        ):
            last.end = page.end
            last.last_used = max(last.last_used, page.last_used)
        else:
            result.append(page)
    return result


@dataclass(slots=True)
class Mark:
    """The state layers' content at one offset.

    Attributes:
        at: tokens that the states cover.
        kind: why it was taken.
        states: by layer index, compact copies; None while the live cache itself stands here.
        nbytes: bytes of its own.
        last_used: the request counter at the last use.
    """

    at: int
    kind: MarkKind
    states: dict[int, Any] | None = None
    nbytes: int = 0
    last_used: int = 0

    @classmethod
    def take(cls, at: int, kind: MarkKind, cache: Sequence[Any], states: Sequence[int]) -> Mark:
        """Snapshot the state layers of a cache that stands at ``at``."""
        copies = {i: ly.snapshot(cache[i]) for i in states}
        return cls(at, kind, copies, ly.nbytes(list(copies.values())))

"""What is stored outside the live cache, and where it lives: pages, strips and marks.

A *page* holds the full layers' rows of up to 256 tokens. Its residence is ``live`` (the rows are in
the model's live cache, no bytes of its own), ``device`` (arrays of its own), ``host`` (a copy in
the host's memory, where that isn't the device's), ``disk`` (a file has them) or ``gone``; it
changes only through the methods here. A *strip* holds the window layers' rows of up to 256 tokens,
in arrays of its own or elsewhere, since a live window soon loses them. A *mark* holds the state
layers' content at one offset. Whatever lies in memory may have its twin in a file: then giving it
up costs nothing.

Rows are stored stacked over the layers that are alike, so that a long conversation is few buffers:
for each group of layers its arrays with the layers on the leading axis, in place of the batch of 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import mlx.core as mx

from mlx_jupyter.cache import layers as ly
from mlx_jupyter.cache.arrays import buffer_bytes, compact
from mlx_jupyter.cache.packing import cut
from mlx_jupyter.cache.packing import nbytes as packed_bytes
from mlx_jupyter.cache.trie import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlx_jupyter.cache.packing import Packed
    from mlx_jupyter.cache.store_listing import Entry
    from mlx_jupyter.cache.trie import Node
    from mlx_jupyter.cache.view import MarkKind, Residence

T = TypeVar("T")

CAPTURED_TOGETHER = 32
"""Pages that are captured at once on a GPU; their rows exist twice for that moment."""

Stacks = tuple[ly.Rows, ...]
"""For each group of like layers its rows, stacked."""


class RowSource(Protocol):
    """Rows of consecutive tokens that can be put behind those of the live cache."""

    def within(self, start: int, end: int) -> Stacks:
        """The stacks of the part within ``[start, end)``."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The rows ``[start, end)``, which are in the live cache's buffers already."""

    start: int
    end: int


def host_bytes(packed: Packed | None) -> int:
    """Bytes of a copy in the host's memory, if there is one."""
    return 0 if packed is None else packed_bytes(packed)


def group(rows: Sequence[tuple[T, ly.Rows]]) -> dict[Any, list[tuple[T, ly.Rows]]]:
    """What belongs to rows, with them, by what can be stacked; in a stable order."""
    groups: dict[Any, list[tuple[T, ly.Rows]]] = {}
    for key, arrays in rows:
        groups.setdefault(ly.signature(arrays), []).append((key, arrays))
    return groups


def stack(layers: Sequence[ly.RowsLayer | ly.WindowLayer], start: int, end: int) -> Stacks:
    """The rows ``[start, end)`` of all layers, stacked by group; compact, evaluated."""
    groups = group([(layer, layer.rows(start, end)) for layer in layers]).values()
    stacks = tuple(
        tuple(_stacked([arrays[i] for _, arrays in members]) for i in range(len(members[0][1])))
        for members in groups
    )
    mx.eval(stacks)
    return stacks


def _stacked(arrays: list[mx.array]) -> mx.array:
    # One array alone wouldn't be copied and would keep the whole live buffer.
    return compact(arrays[0]) if len(arrays) == 1 else mx.concatenate(arrays, axis=0)


def compacted(stacks: Stacks, start: int, end: int) -> Stacks:
    """The tokens ``[start, end)`` of stacked rows in arrays of their own, evaluated."""
    copies = tuple(tuple(map(compact, ly.cut(arrays, start, end))) for arrays in stacks)
    mx.eval(copies)
    return copies


def unstack(stacks: Stacks) -> Iterator[ly.Rows]:
    """Each layer's rows, as views, in the order that ``stack`` grouped the layers."""
    for arrays in stacks:
        # One call for all layers: a slice each would cost more than the copy that follows.
        yield from zip(*(mx.split(a, int(a.shape[0]), axis=0) for a in arrays), strict=True)


class LooseRows:
    """Rows of the tokens ``[start, end)`` in arrays that nothing counts, maybe lazily."""

    __slots__ = ("end", "stacks", "start")

    def __init__(self, start: int, end: int, stacks: Stacks) -> None:
        self.start = start
        self.end = end
        self.stacks = stacks

    def within(self, start: int, end: int) -> Stacks:
        """The stacks of the part within ``[start, end)``, as views."""
        a, b = max(start, self.start) - self.start, min(end, self.end) - self.start
        if (a, b) == (0, self.end - self.start):
            return self.stacks
        return tuple(ly.cut(arrays, a, b) for arrays in self.stacks)

    def part(self, start: int, end: int) -> LooseRows:
        """The rows of the tokens ``[start, end)``."""
        return LooseRows(start, end, self.within(start, end))


class Tally:
    """Bytes that the stored things of one cache hold, kept up as they change.

    Attributes:
        nbytes: in the device's memory.
        host: in the host's, where that is another one.
    """

    __slots__ = ("host", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self.host = 0


class _Stored(LooseRows):
    """Rows of the tokens ``[start, end)`` in arrays of their own, counted in ``tally``."""

    __slots__ = ("entry", "host", "last_used", "nbytes", "tally")

    def __init__(self, start: int, end: int, tally: Tally) -> None:
        super().__init__(start, end, ())
        self.tally = tally
        self.nbytes = 0
        self.last_used = 0
        self.entry: Entry | None = None
        self.host: Packed | None = None

    def to_host(self, packed: Packed | None) -> None:
        """Have this copy in the host's memory; None: have none any more."""
        self.tally.host += host_bytes(packed) - host_bytes(self.host)
        self.host = packed

    @property
    def elsewhere(self) -> bool:
        """Whether the rows are somewhere else than in arrays."""
        return self.host is not None or self.twin is not None

    @property
    def twin(self) -> Entry | None:
        """The file that has all its rows, maybe more."""
        entry = self.entry
        covers = entry is not None and entry.start <= self.start and self.end <= entry.end
        return entry if covers else None

    @property
    def tokens(self) -> int:
        """How many tokens' rows it holds."""
        return self.end - self.start

    def hold(self, stacks: Stacks) -> None:
        """Own these rows (compact and evaluated)."""
        self.stacks = stacks
        self.nbytes = int(mx.get_array_buffer_size(stacks)) if stacks else 0
        self.tally.nbytes += self.nbytes

    def release(self) -> None:
        """Give the rows up."""
        self.stacks = ()
        self.tally.nbytes -= self.nbytes
        self.nbytes = 0

    def layer_rows(self, start: int, end: int) -> Iterator[ly.Rows]:
        """Each layer's rows of the part within ``[start, end)``, lazily."""
        return unstack(self.within(start, end))

    def _twin(self, start: int, end: int) -> Self:
        """An empty one of its kind."""
        twin = type(self)(start, end, self.tally)
        twin.last_used, twin.entry = self.last_used, self.entry
        return twin

    def split(self, at: int) -> tuple[Self, Self]:
        """Two of its kind, ``[start, at)`` and ``[at, end)``, with arrays of their own."""
        assert self.start < at < self.end
        parts = self._twin(self.start, at), self._twin(at, self.end)
        if self.stacks:
            # Both copies before anything is counted: a copy can fail for lack of memory.
            copies = [
                compacted(self.stacks, p.start - self.start, p.end - self.start) for p in parts
            ]
            for part, stacks in zip(parts, copies, strict=True):
                part.hold(stacks)
            self.release()
        if self.host is not None:
            for part in parts:
                part.to_host(cut(self.host, part.start - self.start, part.end - self.start))
            self.to_host(None)
        return parts


class Strip(_Stored):
    """Rows of the window layers."""

    __slots__ = ()

    @property
    def residence(self) -> Residence:
        """Where its rows are."""
        if self.stacks:
            return "device"
        return "disk" if self.host is None else "host"

    def drop(self) -> None:
        """Give the rows up in all memory."""
        self.release()
        self.to_host(None)


class Page(_Stored):
    """Rows of the full layers.

    Attributes:
        lent: the one owner that may use rows that came from outside (``lending.py``).
    """

    __slots__ = ("lent", "residence")

    def __init__(self, start: int, end: int, tally: Tally) -> None:
        super().__init__(start, end, tally)
        self.residence: Residence = "live"
        self.lent: str | None = None

    def capture(self, stacks: Stacks) -> None:
        """Live → device: own a copy of the rows in the live cache."""
        assert self.residence == "live", self
        self.hold(stacks)
        self.residence = "device"

    def now_live(self) -> None:
        """The rows are in the live cache now; the page's own arrays are given up."""
        self.release()
        self.to_host(None)
        self.residence = "live"

    def leave(self) -> None:
        """Give the arrays up; what is nowhere else is gone."""
        self.release()
        if self.host is not None:
            self.residence = "host"
        else:
            self.residence = "disk" if self.twin else "gone"

    def found(self, entry: Entry) -> None:
        """A file has the rows."""
        assert not self.stacks, self
        self.entry = entry
        self.residence = "disk"

    def lose(self) -> None:
        """What lies elsewhere can't be read."""
        self.entry = None
        self.to_host(None)
        self.residence = "gone"

    def fill(self, stacks: Stacks, lent: str | None) -> None:
        """New or gone → device: own rows that came from outside, maybe lent to an owner."""
        assert self.residence in ("live", "gone"), self
        self.hold(stacks)
        self.residence = "device"
        self.lent = lent

    def _twin(self, start: int, end: int) -> Self:
        twin = super()._twin(start, end)
        twin.residence, twin.lent = self.residence, self.lent
        return twin

    def __repr__(self) -> str:
        return f"Page([{self.start}, {self.end}) {self.residence})"


def capture(pages: Sequence[Page], layers: Sequence[ly.RowsLayer], *, gpu: bool) -> None:
    """Move pages' rows out of the live cache into arrays of their own.

    On a GPU the launches dominate: rows of many pages are stacked at once, then cut. On a CPU each
    page is stacked by itself, which copies once.
    """
    if not gpu:
        for page in pages:
            page.capture(stack(layers, page.start, page.end))
        return
    for i in range(0, len(pages), CAPTURED_TOGETHER):
        run = pages[i : i + CAPTURED_TOGETHER]
        start = run[0].start
        whole = stack(layers, start, run[-1].end)
        for page in run:
            page.capture(compacted(whole, page.start - start, page.end - start))


def joined_pages(pages: Sequence[Page]) -> list[Page]:
    """The pages with neighbouring live ones of one full page made one again."""
    result: list[Page] = []
    for page in pages:
        last = result[-1] if result else None
        if (
            last is not None
            and last.residence == page.residence == "live"
            and last.lent == page.lent
            and last.start // PAGE == page.start // PAGE
        ):
            last.entry = _entry_of_both(last, page)
            last.end = page.end
            last.last_used = max(last.last_used, page.last_used)
        else:
            result.append(page)
    return result


def _entry_of_both(first: Page, second: Page) -> Entry | None:
    """The file that has both pages' rows, or that of the first where it ends with it.

    A file that goes on after the first page may do so with another branch's tokens.
    """
    twin, own = second.twin, first.entry
    if twin is not None and twin.start <= first.start:
        return twin
    return own if own is not None and own.end == first.end else None


def joined_stacks(parts: Sequence[RowSource], start: int, end: int) -> Stacks:
    """The rows ``[start, end)`` of consecutive parts in one stack a group, lazily."""
    stacks = [part.within(start, end) for part in parts]
    return tuple(
        tuple(mx.concatenate(list(arrays), axis=-2) for arrays in zip(*group, strict=True))
        for group in zip(*stacks, strict=True)
    )


@dataclass(slots=True)
class Mark:
    """A place to come back to; for state layers, their content there.

    Attributes:
        at: tokens that it covers.
        kind: why it is there.
        states: for each state layer a compact copy; empty while the live cache itself stands here,
            and for models without state layers.
        nbytes: bytes of its own.
        last_used: the request counter at the last use.
        entry: the file that has the states.
        host: a copy in the host's memory.
    """

    at: int
    kind: MarkKind
    states: list[Any] = field(default_factory=list)
    nbytes: int = 0
    last_used: int = 0
    entry: Entry | None = None
    host: Packed | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether the states are somewhere else than in arrays."""
        return self.host is not None or self.entry is not None

    @property
    def residence(self) -> Residence:
        """Where the states are; for models without state layers, "live"."""
        if self.states:
            return "device"
        if self.host is not None:
            return "host"
        return "disk" if self.entry else "live"

    def hold(self, states: list[Any]) -> None:
        """Own these states (compact and evaluated)."""
        self.states = states
        self.nbytes = buffer_bytes(states)

    def take(self, layers: Sequence[ly.StateLayer]) -> None:
        """Snapshot the layers, which stand at ``at``."""
        self.hold([layer.snapshot() for layer in layers])


Thing = Page | Strip | Mark


def things(node: Node[Page, Strip, Mark]) -> list[Thing]:
    """All that a node holds."""
    return [*node.pages, *node.strips, *node.marks.values()]

"""A sequence's pages, strips and snapshots from a file, checked, and put into a cache.

A file's description says where its tensors belong; what they must look like says the model that is
loaded (``Likeness``). Nothing is put in that isn't exactly that, nothing takes the place of what is
there already, and the trie's places come from the token ids alone.

Used on the engine thread.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import mlx.core as mx
import numpy as np

from mlx_jupyter.cache.needs import joined, without
from mlx_jupyter.cache.packing import (
    Unpackable,
    pack_rows,
    pack_states,
    unpack_rows,
    unpack_states,
)
from mlx_jupyter.cache.pages import Mark, Page, Strip, Tally, compacted, stack
from mlx_jupyter.cache.store_file import Damaged
from mlx_jupyter.cache.trie import PAGE
from mlx_jupyter.cache.view import MarkKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlx_jupyter.cache.bundle import Bundle
    from mlx_jupyter.cache.live import Live
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache
    from mlx_jupyter.cache.store_format import Tensor
    from mlx_jupyter.models.tensors import Entry

_LONGEST = 1 << 20
"""Characters of a snapshot's plan."""

_MARKS = 1 << 14


@dataclass(frozen=True, slots=True)
class Likeness:
    """What a model's things look like, learnt from the model itself.

    Attributes:
        order: the order of its layers in the stacks.
        rows: dtype and shape of one token's rows, by tensor.
        windows: the same for window layers.
        states: dtype and shape of a snapshot's tensors.
        plan: a snapshot's plan.
    """

    order: str
    rows: dict[str, tuple[str, tuple[int, ...]]]
    windows: dict[str, tuple[str, tuple[int, ...]]]
    states: dict[str, tuple[str, tuple[int, ...]]]
    plan: str

    @classmethod
    def of(cls, live: Live) -> Likeness:
        """As in a live cache that holds a token or more."""
        live.learn_order()
        last = live.offset - 1
        rows = pack_rows(stack(live.full_layers(), 0, 1)) if live.leaves.rows else {}
        windows = pack_rows(live.window_rows(last, last + 1)) if live.leaves.windows else {}
        states, meta = pack_states([s.snapshot() for s in live.leaves.states])
        return cls(live.order, _shapes(rows), _shapes(windows), _shapes(states), meta["plan"])


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@dataclass(slots=True)
class Luggage:
    """Things from a file, in arrays of their own, not yet in any cache.

    Attributes:
        ids: the sequence, int32.
        pages: from the beginning on, without gaps.
        strips: in order.
        marks: in order; for state layers with their states.
    """

    ids: np.ndarray
    pages: list[Page] = field(default_factory=list)
    strips: list[Strip] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Plan:
    order: str
    rows: list[tuple[int, int]]
    windows: list[tuple[int, int]]
    marks: list[tuple[int, MarkKind, str | None]]


def unpacked(
    bundle: Bundle,
    description: str,
    ids: np.ndarray,
    like: Likeness,
    cache: PrefixCache,
    *,
    room: int,
    strict: bool,
    stopped: Callable[[], None],
) -> Luggage:
    """Read what a file has for a model.

    Args:
        bundle: the file.
        description: as ``packed`` gave it.
        ids: as ``packed`` was given them.
        like: what it must look like.
        cache: whose layers a snapshot is put on; stays as it is.
        room: bytes that may be read; what lies behind is left.
        strict: take a snapshot only where it looks exactly like this model's.
        stopped: called between two things; may raise.

    Raises:
        Damaged: the description isn't one, or the things aren't this model's.
        OSError: the file can't be read.
    """
    plan = _described(description, len(ids))
    if plan.order != like.order:
        raise Damaged("its pages belong to other layers")
    luggage, tally = Luggage(ids), Tally()
    reach = 0
    for start, end in plan.rows:
        stopped()
        tensors = _tensors(bundle, f"rows.{start}.", like.rows, end - start)
        room -= sum(np.asarray(t.data).nbytes for t in tensors.values())
        if room < 0:
            break
        page = Page(start, end, tally)
        page.capture(unpack_rows(tensors, 0, end - start))
        luggage.pages.append(page)
        reach = end
    limit = reach if like.rows else len(ids)
    for start, end in plan.windows:
        stopped()
        tensors = _tensors(bundle, f"window.{start}.", like.windows, end - start)
        room -= sum(np.asarray(t.data).nbytes for t in tensors.values())
        if room < 0 or end > limit:
            break
        strip = Strip(start, end, tally)
        strip.hold(unpack_rows(tensors, 0, end - start))
        luggage.strips.append(strip)
    snapshots = _by_offset(bundle.tensors)
    for at, kind, states in plan.marks:
        stopped()
        mark = Mark(at, kind)
        if cache.needs.stateful:
            entries = snapshots.get(str(at), {})
            if states is None or (strict and not _alike(states, entries, like)):
                continue
            tensors = {name: bundle.read(f"state.{at}.{name}") for name in entries}
            try:
                mark.hold(unpack_states(tensors, {"plan": states}, cache.live.fresh_states()))
            except Unpackable:
                continue
            room -= mark.nbytes
        if room < 0 or at > limit:
            break
        luggage.marks.append(mark)
    return luggage


def _described(description: str, tokens: int) -> _Plan:
    try:
        table = json.loads(description)
        order, rows, windows, marks = (
            table[name] for name in ("order", "rows", "windows", "marks")
        )
        plan = _Plan(
            order,
            [(start, end) for start, end in rows],
            [(start, end) for start, end in windows],
            [(at, kind, states) for at, kind, states in marks],
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Damaged("its pages aren't described") from None
    places = (*(each for span in (*plan.rows, *plan.windows) for each in span),)
    whole = all(type(each) is int for each in (*places, *(at for at, _, _ in plan.marks)))
    if not whole or type(order) is not str:
        raise Damaged("its pages aren't described")
    at = 0
    for start, end in plan.rows:
        if start != at or not _one_page(start, end, tokens):
            raise Damaged("its pages leave gaps")
        at = end
    at = 0
    for start, end in plan.windows:
        if start < at or not _one_page(start, end, tokens):
            raise Damaged("its window rows overlap")
        at = end
    at = 0
    if len(plan.marks) > _MARKS:
        raise Damaged("it has too many marks")
    for place, kind, states in plan.marks:
        if not at < place <= tokens or kind not in get_args(MarkKind):
            raise Damaged("its marks are nowhere")
        if states is not None and (type(states) is not str or len(states) > _LONGEST):
            raise Damaged("a snapshot isn't described")
        at = place
    return plan


def _one_page(start: int, end: int, tokens: int) -> bool:
    return 0 <= start < end <= tokens and start // PAGE == (end - 1) // PAGE


def _tensors(
    bundle: Bundle, prefix: str, like: Mapping[str, tuple[str, tuple[int, ...]]], tokens: int
) -> dict[str, Tensor]:
    """Rows of so many tokens; what they must look like is compared before anything is read."""
    for name, (dtype, shape) in like.items():
        entry = bundle.tensors.get(prefix + name)
        wanted = (*shape[:-2], tokens, shape[-1])
        if entry is None or (entry.dtype, entry.shape) != (dtype, wanted):
            raise Damaged("its pages aren't this model's")
    return {name: bundle.read(prefix + name) for name in like}


def _by_offset(tensors: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    """The tensors of each snapshot."""
    found: dict[str, dict[str, Entry]] = {}
    for name, entry in tensors.items():
        kind, _, rest = name.partition(".")
        at, _, rest = rest.partition(".")
        if kind == "state":
            found.setdefault(at, {})[rest] = entry
    return found


def _alike(plan: str, entries: Mapping[str, Entry], like: Likeness) -> bool:
    """Whether a snapshot is one of this model's, and holds real numbers alone.

    A whole number could be taken for a place in a table.
    """
    shapes = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    real = all(dtype in ("F32", "F16", "BF16") for dtype, _ in like.states.values())
    return real and plan == like.plan and shapes == like.states


def put_in(cache: PrefixCache, luggage: Luggage, owner: str, lent: str | None) -> int:
    """Make a cache hold what it has not yet; so many tokens of the sequence are held then.

    Args:
        cache: what it has on disk is taken first.
        luggage: emptied.
        owner: the branch whose path it is.
        lent: the owner that alone may use what is put in; None: everyone.
    """
    ids = luggage.ids
    cache.tiers.adopt(ids)
    known = cache.trie.match(ids)[1]
    rows = bool(cache.live.leaves.rows)
    held = _held(cache.path_to(ids[:known]), known)
    reach = luggage.pages[-1].end if luggage.pages else 0
    if not rows:
        reach = max((x.end for x in luggage.strips), default=0)
        reach = max([reach, *(mark.at for mark in luggage.marks)])
    if reach > known:
        cache.trie.insert(ids[:reach])
    path = cache.path_to(ids[: max(reach, known)])
    first = held if reach > held else reach
    if lent is not None:
        cache.borrowers.add(lent)
    for node in path:
        if reach > held:
            _put_pages(cache, node, luggage.pages, (held, reach), known, lent)
        for strip in luggage.strips:
            if lent is None or strip.start >= first:
                _put_strip(cache, node, strip)
        node.strips.sort(key=lambda s: s.start)
        for mark in luggage.marks:
            if node.start < mark.at <= node.end and (lent is None or mark.at > first):
                _put_mark(cache, node, mark)
        node.last_used = max(node.last_used, cache.requests)
    end = max(held, reach)
    if path and end:
        cache.release(owner)
        node = cache.path_to(ids[:end])[-1]
        node.owners[owner] = end
        cache.labels[owner] = owner
    cache.tiers.changed()
    cache.enforce()
    return _held(cache.path_to(ids[:end]), end)


def _held(path: Sequence[PathNode], known: int) -> int:
    """Up to where rows are somewhere."""
    gaps = (p.start for node in path for p in node.pages if p.residence == "gone")
    return min(known, next(gaps, known))


def _put_pages(
    cache: PrefixCache,
    node: PathNode,
    pages: Sequence[Page],
    span: tuple[int, int],
    known: int,
    lent: str | None,
) -> None:
    """Fill a node's empty pages within a span."""
    for edge in (*span, known, *(page.end for page in pages)):
        cache.trie.split_pages(node, edge)
    for page in node.pages:
        new = page.start >= known and page.residence == "live"
        if not span[0] <= page.start < span[1] or not (new or page.residence == "gone"):
            continue
        if not cache.live.leaves.rows:
            page.fill((), lent)
            continue
        source = next(p for p in pages if p.start <= page.start and page.end <= p.end)
        if (source.start, source.end) == (page.start, page.end):
            stacks = source.stacks
            source.stacks = ()
        else:
            a, b = page.start - source.start, page.end - source.start
            stacks = compacted(source.stacks, a, b)
        page.fill(stacks, lent)


def _put_strip(cache: PrefixCache, node: PathNode, strip: Strip) -> None:
    span = max(strip.start, node.start), min(strip.end, node.end)
    if span[0] >= span[1]:
        return
    for start, end in list(without(span, joined((s.start, s.end) for s in node.strips))):
        made = Strip(start, end, cache.tally)
        made.hold(compacted(strip.stacks, start - strip.start, end - strip.start))
        made.last_used = cache.requests
        node.strips.append(made)


def _put_mark(cache: PrefixCache, node: PathNode, mark: Mark) -> None:
    if mark.at in node.marks:
        return
    made = Mark(mark.at, mark.kind, last_used=cache.requests)
    if cache.needs.stateful:
        made.hold(mark.states)
        cache.tally.nbytes += made.nbytes
    node.marks[mark.at] = made


def finite(luggage: Luggage) -> bool:
    """Whether all its numbers are numbers."""
    arrays = [a for thing in (*luggage.pages, *luggage.strips) for g in thing.stacks for a in g]
    return all(
        bool(mx.isfinite(array).all().item())
        for array in arrays
        if mx.issubdtype(array.dtype, mx.floating)
    )

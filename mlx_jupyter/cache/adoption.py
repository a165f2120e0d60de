"""Finds on a shelf what a prompt could use and puts it into the trie, as things that lie on disk.

So a kernel that has just started, or one beside another, knows what was computed elsewhere; the
plan then judges it like anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_jupyter.cache import keys
from mlx_jupyter.cache.needs import joined, without
from mlx_jupyter.cache.pages import Mark, Strip
from mlx_jupyter.cache.trie import PAGE, common_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from mlx_jupyter.cache.needs import Span
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache
    from mlx_jupyter.cache.store_listing import Entry
    from mlx_jupyter.cache.store_shelf import Shelf

SIBLINGS = 32
"""Files of a kind on one boundary whose ids are read, last used first, to find the longest shared
part."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The tokens ``[start, end)`` of the prompt are in this file."""

    start: int
    end: int
    entry: Entry


def adopt(cache: PrefixCache, shelf: Shelf, ids: np.ndarray) -> None:
    """Make the trie know what the shelf has of a prompt beyond what is held already.

    Args:
        cache: its trie grows.
        shelf: of the cache's model.
        ids: int32, shape (prompt,).
    """
    rows = bool(cache.live.leaves.rows)
    known = cache.trie.match(ids)[1]
    at = _held(cache.path_to(ids), known) if rows else 0
    pages: list[_Piece] = []
    others: list[_Piece] = []
    # Window rows that a request had no use for were let go of, but not on the shelf.
    back = max((window.size for window in cache.needs.windows), default=0)
    first = max(min(at, len(ids) - 1) - back, 0) if rows else 0
    for entry_base, found in _boundaries(shelf, ids, first // PAGE * PAGE, at if rows else None):
        pieces = _matched(shelf, ids, max(entry_base, at), entry_base, found)
        covered = _covering([p for p in pieces if p.entry.kind == "rows"], at)
        pages += covered
        others += [p for p in pieces if p.entry.kind != "rows"]
        at = covered[-1].end if covered else at
        if rows and at < entry_base + PAGE:
            break
    reach = at if rows else max((p.end for p in others), default=0)
    others = [p for p in others if p.end <= reach]
    if not pages and not others:
        return
    if reach > known:
        cache.trie.insert(ids[:reach])
    path = cache.path_to(ids[:reach])
    for node in path:
        if reach > known or pages:
            _add_pages(cache, node, pages, known)
        _add_strips(cache, node, [p for p in others if p.entry.kind == "window"])
        for piece in others:
            if piece.entry.kind == "state" and node.start < piece.end <= node.end:
                mark = node.marks.setdefault(piece.end, Mark(piece.end, "turn"))
                if mark is not cache.tip:
                    mark.entry = piece.entry
        node.last_used = max(node.last_used, cache.requests)


def _held(path: Sequence[PathNode], known: int) -> int:
    """Up to where rows are somewhere."""
    for node in path:
        for page in node.pages:
            if page.residence == "gone":
                return min(page.start, known)
    return known


def _boundaries(
    shelf: Shelf, ids: np.ndarray, base: int, held: int | None
) -> Iterator[tuple[int, tuple[Entry, ...]]]:
    """Each boundary from ``base`` on with what hangs on it.

    With rows that are held up to ``held``, the first bare one behind them is the last.
    """
    chain = keys.chains(shelf.root, ids[:base])[-1]
    while base < len(ids):
        found = shelf.find(chain)
        if held is not None and not found and base + PAGE > held:
            return
        yield base, found
        if base + PAGE > len(ids):
            return
        chain = keys.chain(chain, ids[base : base + PAGE])
        base += PAGE


def _matched(
    shelf: Shelf, ids: np.ndarray, at: int, base: int, found: Sequence[Entry]
) -> list[_Piece]:
    """The parts of the files on one boundary that the prompt shares; rows are wanted from ``at``.

    Files of other sequences are only looked into where those of this one leave a gap.
    """
    pieces: list[_Piece] = []
    others: list[Entry] = []
    wanted: dict[tuple[keys.Kind, int, int], bytes] = {}  # thousands may begin a conversation
    for entry in found:
        place = entry.kind, entry.start, entry.end
        if entry.end <= len(ids) and place not in wanted:
            tokens = ids[base : entry.end]
            wanted[place] = keys.entry(entry.parent, tokens, entry.kind, entry.start)
        if entry.key == wanted.get(place):
            pieces.append(_Piece(entry.start, entry.end, entry))
        elif entry.kind != "state":
            others.append(entry)
    end = min(base + PAGE, len(ids))
    pieces += _shared(shelf, ids, base, others, "rows", _gaps(pieces, "rows", (at, end)))
    if any(entry.kind == "rows" for entry in found):  # strips behind the last row are no use
        end = min(end, max([at, *(p.end for p in pieces if p.entry.kind == "rows")]))
    pieces += _shared(shelf, ids, base, others, "window", _gaps(pieces, "window", (base, end)))
    return pieces


def _gaps(pieces: Sequence[_Piece], kind: keys.Kind, span: Span) -> list[Span]:
    """What of a span is in none of them."""
    return list(without(span, joined((p.start, p.end) for p in pieces if p.entry.kind == kind)))


def _shared(
    shelf: Shelf,
    ids: np.ndarray,
    base: int,
    entries: Sequence[Entry],
    kind: keys.Kind,
    gaps: Sequence[Span],
) -> list[_Piece]:
    """The parts of other sequences' files that the prompt shares and that may fill gaps."""
    near = [
        entry
        for entry in entries
        if entry.kind == kind and any(a < entry.end and entry.start < b for a, b in gaps)
    ]
    pieces: list[_Piece] = []
    for entry in sorted(near, key=lambda e: -e.used)[:SIBLINGS]:
        theirs = shelf.tokens(entry)
        same = 0 if theirs is None else common_prefix(theirs, ids[base:])
        if base + same > entry.start:
            pieces.append(_Piece(entry.start, base + same, entry))
    return pieces


def _covering(pieces: Sequence[_Piece], at: int) -> list[_Piece]:
    """Pieces that lead on from ``at`` without a gap, as few as will do."""
    chosen: list[_Piece] = []
    while True:
        usable = [p for p in pieces if p.start <= at < p.end]
        if not usable:
            return chosen
        best = max(usable, key=lambda p: p.end)
        chosen.append(_Piece(at, best.end, best.entry))
        at = best.end


def _add_pages(cache: PrefixCache, node: PathNode, pieces: Sequence[_Piece], known: int) -> None:
    for piece in pieces:
        for edge in (piece.start, piece.end):
            cache.trie.split_pages(node, edge)
        for page in node.pages:
            within = piece.start <= page.start and page.end <= piece.end
            if within and (page.residence == "gone" or page.start >= known):
                page.found(piece.entry)
    if not cache.live.leaves.rows:
        for page in node.pages:
            if page.start >= known and page.residence == "live":
                page.capture(())  # without full layers it holds nothing


def _add_strips(cache: PrefixCache, node: PathNode, pieces: Sequence[_Piece]) -> None:
    for piece in pieces:
        span = max(piece.start, node.start), min(piece.end, node.end)
        if span[0] >= span[1]:
            continue
        for start, end in list(without(span, joined((s.start, s.end) for s in node.strips))):
            strip = Strip(start, end, cache.tally)
            strip.entry = piece.entry
            node.strips.append(strip)
        node.strips.sort(key=lambda s: s.start)

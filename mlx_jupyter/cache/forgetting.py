"""Removes sequences for good, from memory and from the store, but not what others still need.

What goes is everything behind the place where a sequence parts from all that stay: there nothing
else can lie. A file that holds rows from both sides of that place is written anew without them.

Used on the engine thread, between requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_jupyter.cache import keys
from mlx_jupyter.cache.packing import cut
from mlx_jupyter.cache.pages import Mark, Page, capture, things
from mlx_jupyter.cache.trie import PAGE, common_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache
    from mlx_jupyter.cache.store_listing import Entry
    from mlx_jupyter.cache.store_shelf import Shelf

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds to wait for what is queued to be written, before it is looked for."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What is gone.

    Attributes:
        tokens: whose rows were held in memory or known to be on disk.
        memory: bytes in memory.
        disk: bytes on disk.
        files: how many.
    """

    tokens: int = 0
    memory: int = 0
    disk: int = 0
    files: int = 0

    def __add__(self, other: Removed) -> Removed:
        return Removed(
            self.tokens + other.tokens,
            self.memory + other.memory,
            self.disk + other.disk,
            self.files + other.files,
        )


def forget(
    cache: PrefixCache | None,
    shelf: Shelf | None,
    owner: str,
    gone: Sequence[np.ndarray],
    kept: Sequence[np.ndarray],
) -> Removed:
    """Remove an owner's sequences.

    Args:
        cache: of the model; None when it isn't loaded.
        shelf: of the model; None when nothing of it is kept on disk.
        owner: it has no path afterwards.
        gone: int32, the sequences.
        kept: int32, what must stay besides the paths of all other owners.
    """
    staying = list(kept)
    going = list(gone)
    if cache is not None:
        for node in cache.trie.nodes():
            for who, at in node.owners.items():
                ids = np.concatenate([each.tokens for each in node.path()])[:at]
                (going if who == owner else staying).append(ids)
        cache.pins.discard(owner)
        cache.release(owner)
        cache.labels.pop(owner, None)
    removed = Removed()
    for ids in going:
        parts_at = max((common_prefix(ids, other) for other in staying), default=0)
        if parts_at == len(ids):
            continue
        if shelf is not None:
            removed += _from_shelf(cache, shelf, ids, parts_at)
        if cache is not None:
            removed += _from_memory(cache, ids, parts_at)
    if cache is not None:
        cache.tiers.changed()
        mx.clear_cache()
    return removed


# --- memory -------------------------------------------------------------------------------------


def _from_memory(cache: PrefixCache, ids: np.ndarray, parts_at: int) -> Removed:
    """Take out of the trie what lies behind a place of a sequence."""
    nbytes, tokens = cache.nbytes() + cache.tally.host, _held(cache)
    if common_prefix(cache.live.id_array(), ids) > parts_at:
        _leave_live(cache, parts_at)
    while True:
        node, known = cache.trie.match(ids)
        if known <= parts_at:
            nbytes -= cache.nbytes() + cache.tally.host
            return Removed(tokens - _held(cache), nbytes)
        while node.children:
            node = next(iter(node.children.values()))
        if node.start < parts_at:
            cache.trie.split(node, parts_at)
        _empty(cache, node)
        cache.trie.remove(node)


def _held(cache: PrefixCache) -> int:
    """Tokens whose rows are somewhere."""
    pages = (page for node in cache.trie.nodes() for page in node.pages)
    return sum(page.tokens for page in pages if page.residence != "gone")


def _empty(cache: PrefixCache, node: PathNode) -> None:
    """Give up all that a node holds."""
    for page in node.pages:
        page.release()
        page.to_host(None)
    for strip in node.strips:
        strip.drop()
    for mark in list(node.marks.values()):
        cache.drop_mark(node, mark)


def _leave_live(cache: PrefixCache, keep: int) -> None:
    """Cut the live cache; where it can't be, store what stays of it and let it go."""
    live = cache.live
    for node in cache.live_path():
        cache.trie.split_pages(node, keep)
    pages = [p for node in cache.live_path() for p in node.pages if p.residence == "live"]
    if keep and not cache.needs.stateful and not cache.needs.windows:
        for page in pages:
            if page.start >= keep:
                page.leave()
        live.rewind(keep)
        live.shrink()
        return
    kept = [page for page in pages if page.end <= keep]
    if kept and live.leaves.rows:
        capture(kept, live.full_layers(), gpu=live.gpu)
    cache.drop_live()


# --- disk ---------------------------------------------------------------------------------------


def _from_shelf(cache: PrefixCache | None, shelf: Shelf, ids: np.ndarray, parts_at: int) -> Removed:
    """Remove the files of what lies behind a place of a sequence."""
    shelf.flush(PATIENCE)
    found = list({entry.key: entry for entry in _behind(shelf, ids, parts_at)}.values())
    if not found:
        return Removed()
    shortened = {
        entry.key: key
        for entry in found
        if entry.kind != "state"
        and entry.start < parts_at
        and (key := _shorten(shelf, entry, ids, parts_at)) is not None
    }
    if shortened:
        shelf.flush(PATIENCE)
    chain = keys.chains(shelf.root, ids[: keys.base(parts_at)])[-1] if shortened else b""
    there = {entry.key: entry for entry in shelf.find(chain)}
    replaced = {old: there.get(new) for old, new in shortened.items()}
    if cache is not None:
        _let_go(cache, {entry.key for entry in found}, replaced)
    tokens = 0
    if cache is None:  # else the trie tells
        tokens = sum(e.end - max(e.start, parts_at) for e in found if e.kind == "rows")
    nbytes = sum(entry.nbytes for entry in found)
    nbytes -= sum(entry.nbytes for entry in replaced.values() if entry is not None)
    return Removed(tokens, 0, nbytes, shelf.forget([entry.key for entry in found]))


def _behind(shelf: Shelf, ids: np.ndarray, parts_at: int) -> Iterator[Entry]:
    """The files of a sequence that hold something behind a place of it, and all that go on."""
    base = parts_at // PAGE * PAGE
    chain = keys.chains(shelf.root, ids[:base])[-1]
    while base <= len(ids):
        for entry in shelf.find(chain):
            if base > parts_at or _shared(shelf, entry, ids) > parts_at:
                yield entry
                yield from _after(shelf, entry)
        if base + PAGE > len(ids):
            return
        chain = keys.chain(chain, ids[base : base + PAGE])
        base += PAGE


def _shared(shelf: Shelf, entry: Entry, ids: np.ndarray) -> int:
    """How many tokens a file's sequence shares with another one that reaches its base."""
    tokens = shelf.tokens(entry)
    return 0 if tokens is None else entry.base + common_prefix(tokens, ids[entry.base :])


def _after(shelf: Shelf, entry: Entry) -> Iterator[Entry]:
    """All files whose sequences go on from a file's."""
    waiting = [entry.child] if entry.child is not None else []
    seen = set(waiting)
    while waiting:
        for other in shelf.find(waiting.pop()):
            yield other
            if other.child is not None and other.child not in seen:
                seen.add(other.child)
                waiting.append(other.child)


def _shorten(shelf: Shelf, entry: Entry, ids: np.ndarray, parts_at: int) -> bytes | None:
    """Have a file's rows up to a place written as a file of their own; its key."""
    content = shelf.read(entry)
    if content is None:
        return None
    tensors, meta = cut((content.tensors, content.meta), 0, parts_at - entry.start)
    base = keys.base(parts_at)
    parent = keys.chains(shelf.root, ids[:base])[-1]
    tokens = ids[base:parts_at]
    if not shelf.put(entry.kind, parent, tokens, entry.start, tensors, meta):
        return None
    return keys.entry(parent, tokens, entry.kind, entry.start)


def _let_go(cache: PrefixCache, gone: set[bytes], replaced: dict[bytes, Entry | None]) -> None:
    """Nothing in the trie may rely on a file that goes."""
    for node in list(cache.trie.nodes()):
        for thing in things(node):
            entry = thing.entry
            if entry is None or entry.key not in gone:
                continue
            thing.entry = replaced.get(entry.key)
            if thing.elsewhere or thing.residence in ("live", "device"):
                continue
            if isinstance(thing, Page):
                thing.lose()
            elif isinstance(thing, Mark):
                if thing is not cache.tip:
                    cache.drop_mark(node, thing)
            elif not thing.stacks:
                node.strips.remove(thing)

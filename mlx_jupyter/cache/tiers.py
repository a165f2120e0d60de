"""Moves stored things between memory and the shelf of their model: saved when idle, read on demand.

Things are written while nobody waits, whatever the budget: then giving one up in memory costs
nothing, and a killed kernel loses little. What has no file yet when room is needed is written
first, if reading it back will be cheaper than computing it. Memory is given up only when the file
is there. In exactness mode nothing moves: a file doesn't know by which passes it was computed.

Used on the engine thread.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from mlx_jupyter.cache import keys
from mlx_jupyter.cache.adoption import adopt
from mlx_jupyter.cache.packing import (
    Unpackable,
    pack_rows,
    pack_states,
    unpack_rows,
    unpack_states,
)
from mlx_jupyter.cache.pages import Mark, Page, Strip, stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from mlx_jupyter.cache.pages import Stacks
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache
    from mlx_jupyter.cache.store_format import Content, Tensor
    from mlx_jupyter.cache.store_listing import Entry
    from mlx_jupyter.cache.store_shelf import Shelf

log = logging.getLogger(__name__)

Thing = Page | Strip | Mark

WORTH = 64
"""Tokens below which a sequence is computed sooner than it is worth a file."""

_ORDER = "order"

PAUSE = 0.05
"""Seconds that an idle step waits for the disk; a request may wait as long."""

PATIENCE = 10.0
"""Seconds that giving up waits for the disk, before what isn't written is lost."""


class Tiers:
    """See the module.

    Args:
        cache: whose things move.
        shelf: its model's; None: nothing outlives memory.
    """

    def __init__(self, cache: PrefixCache, shelf: Shelf | None) -> None:
        self._cache = cache
        self._shelf = shelf
        self._waiting: list[tuple[Thing, PathNode]] | None = None

    @property
    def shelf(self) -> Shelf | None:
        """Where things go now; None where they don't."""
        return None if self._cache.exact else self._shelf

    def changed(self) -> None:
        """There may be new things to save."""
        self._waiting = None

    def lost(self) -> None:
        """The shelf was emptied: nothing has a file any more."""
        for node in self._cache.trie.nodes():
            for page in node.pages:
                if page.residence == "disk":
                    page.lose()
                page.entry = None
            for strip in list(node.strips):
                strip.entry = None
                if not strip.stacks:
                    node.strips.remove(strip)
            for mark in list(node.marks.values()):
                mark.entry = None
                if self._cache.needs.stateful and not mark.states and mark is not self._cache.tip:
                    self._cache.drop_mark(node, mark)
        self._waiting = []  # what is in memory is saved again after the next request, not at once

    # --- finding -----------------------------------------------------------------------------

    def adopt(self, ids: np.ndarray) -> None:
        """Put into the trie what the shelf has of a prompt."""
        if self.shelf is not None:
            adopt(self._cache, self.shelf, ids)

    # --- saving ------------------------------------------------------------------------------

    def save_next(self) -> bool:
        """Have one more thing written; whether there may be another one."""
        shelf = self.shelf
        if shelf is None:
            return False
        if self._waiting is None:
            self._waiting = self._unsaved()
        while self._waiting:
            thing, node = self._waiting[-1]
            place = self._place(shelf, thing, node)
            self._settle(shelf, thing, place)
            if _twin(thing) is None:
                # One at a time: what waits to be written takes memory beside the budget.
                if not shelf.flush(PAUSE):
                    return True
                if not self._put(shelf, thing, place):
                    self._waiting = []  # the disk is full or off: later, if there is a later
                    return False
                self._waiting.pop()
                return True
            self._waiting.pop()
        return False

    def save_all(self, until: Callable[[], bool]) -> None:
        """Have everything written that isn't, the last used first, until ``until`` says stop."""
        self.changed()
        while not until() and self.save_next():
            pass

    def note(self) -> None:
        """Note which files are there by now."""
        shelf = self.shelf
        if shelf is not None:
            for thing, node in self._unsaved():
                self._settle(shelf, thing, self._place(shelf, thing, node))

    def _unsaved(self) -> list[tuple[Thing, PathNode]]:
        """What has no file, the most important last: what was used last, from its beginning on."""
        found: list[tuple[int, int, Thing, PathNode]] = []
        for node in self._cache.trie.nodes():
            if _short(node):
                continue
            marks = node.marks.values() if self._cache.needs.stateful else ()
            held = (p for p in node.pages if p.residence in ("live", "device"))
            pages = held if self._cache.live.leaves.rows else ()
            for thing in (*pages, *node.strips, *marks):
                if _twin(thing) is None:
                    at = thing.at if isinstance(thing, Mark) else thing.end
                    found.append((thing.last_used, -at, thing, node))
        found.sort(key=lambda each: each[:2])
        return [(thing, node) for _, _, thing, node in found]

    def _place(self, shelf: Shelf, thing: Thing, node: PathNode) -> _Place:
        kind: keys.Kind = "state"
        if not isinstance(thing, Mark):
            kind = "rows" if isinstance(thing, Page) else "window"
        start, end = (thing.at,) * 2 if isinstance(thing, Mark) else (thing.start, thing.end)
        ids = np.concatenate([each.tokens for each in node.path()])[:end]
        base = keys.base(end)
        return _Place(kind, keys.chains(shelf.root, ids[:base])[-1], ids[base:], start)

    @staticmethod
    def _settle(shelf: Shelf, thing: Thing, place: _Place) -> None:
        """Note the file of a thing if it is there by now."""
        key = keys.entry(place.parent, place.tokens, place.kind, place.start)
        for entry in shelf.find(place.parent):
            if entry.key == key:
                before, thing.entry = thing.entry, entry
                if before is not None and before.start == entry.start and before.end < entry.end:
                    shelf.forget([before.key])  # the tip that has grown since
                return

    def _put(self, shelf: Shelf, thing: Thing, place: _Place) -> bool:
        """Have a thing written; whether it was queued."""
        meta: Mapping[str, str] = {}
        try:
            if isinstance(thing, Mark):
                live = self._cache.live.leaves.states
                tensors, meta = pack_states(thing.states or [s.snapshot() for s in live])
            else:
                stacks = thing.stacks
                if isinstance(thing, Page) and thing.residence == "live":
                    stacks = stack(self._cache.live.full_layers(), thing.start, thing.end)
                tensors, meta = pack_rows(stacks), {_ORDER: self._cache.live.order}
            return self._write(shelf, place, tensors, meta)
        except (Unpackable, ValueError) as error:
            log.debug("%s can't be stored: %s", thing, error)
            return True

    @staticmethod
    def _write(
        shelf: Shelf, place: _Place, tensors: Mapping[str, Tensor], meta: Mapping[str, str]
    ) -> bool:
        return shelf.put(place.kind, place.parent, place.tokens, place.start, tensors, meta)

    def keep(self, leaving: Sequence[tuple[Thing, PathNode]]) -> None:
        """Before things are given up in memory: see to it that those worth it are on the shelf."""
        shelf, rates = self.shelf, self._cache.rates
        if shelf is None:
            return
        waiting: list[tuple[Thing, _Place]] = []
        worth = not rates.prefill or rates.read < rates.prefill
        for thing, node in leaving:
            if _twin(thing) is not None or _short(node):
                continue
            place = self._place(shelf, thing, node)
            self._settle(shelf, thing, place)
            if _twin(thing) is None and worth:
                if not self._put(shelf, thing, place):
                    shelf.flush(PATIENCE)
                    if not self._put(shelf, thing, place):
                        break
                waiting.append((thing, place))
        if waiting and shelf.flush(PATIENCE):
            for thing, place in waiting:
                self._settle(shelf, thing, place)

    # --- reading -----------------------------------------------------------------------------

    @contextmanager
    def reading(self, pages: Sequence[Page]) -> Iterator[Callable[[Page], bool]]:
        """Read what lies on disk of these pages, in order, ahead of its use.

        Yields a function that brings the next of them into memory; False when its file isn't there
        any more.
        """
        entries = [p.entry for p in pages if p.residence == "disk" and p.entry is not None]
        if not entries or self._shelf is None:
            yield lambda page: self._arrive(page, None)
            return
        with self._shelf.reader(entries) as contents:
            yield lambda page: self._arrive(page, next(contents, (None, None))[1])

    def _arrive(self, page: Page, content: Content | None) -> bool:
        stacks = self._rows(page, content)
        if stacks is None:
            page.lose()
            return False
        page.arrive(stacks)
        return True

    def _rows(self, thing: Page | Strip, content: Content | None) -> Stacks | None:
        """A thing's part of the rows in its file."""
        entry = thing.entry
        if content is None or entry is None:
            return None
        if not self._cache.live.take_order(content.meta.get(_ORDER, "")):
            log.warning("A stored page is of no use: it belongs to other layers.")
            return None
        first = thing.start - entry.start
        try:
            return unpack_rows(content.tensors, first, first + thing.tokens)
        except Unpackable as error:
            log.warning("A stored page is of no use: %s", error)
            return None

    def fetch(self, things: Iterable[tuple[Strip | Mark, PathNode]]) -> bool:
        """Read strips and snapshots that lie on disk; False when one isn't there any more."""
        whole = True
        for thing, node in things:
            if thing.residence == "disk" and not self._fetch(thing):
                whole = False
                if isinstance(thing, Mark):
                    node.marks.pop(thing.at, None)
                else:
                    node.strips.remove(thing)
        return whole

    def _fetch(self, thing: Strip | Mark) -> bool:
        entry, cache = thing.entry, self._cache
        content = self._shelf.read(entry) if self._shelf is not None and entry else None
        if entry is None or content is None:
            return False
        if isinstance(thing, Strip):
            stacks = self._rows(thing, content)
            if stacks is not None:
                thing.hold(stacks)
            return stacks is not None
        try:
            thing.hold(unpack_states(content.tensors, content.meta, cache.live.fresh_states()))
        except Unpackable as error:
            log.warning("A stored snapshot is of no use: %s", error)
            return False
        cache.tally.nbytes += thing.nbytes
        return True

    def used(self, entries: Iterable[Entry | None]) -> None:
        """These files were just of use."""
        if self._shelf is not None:
            self._shelf.touch([entry for entry in entries if entry is not None])


class _Place:
    """Where a thing belongs on a shelf."""

    __slots__ = ("kind", "parent", "start", "tokens")

    def __init__(self, kind: keys.Kind, parent: bytes, tokens: np.ndarray, start: int) -> None:
        self.kind = kind
        self.parent = parent
        self.tokens = tokens
        self.start = start


def _short(node: PathNode) -> bool:
    """Whether a sequence isn't worth a file; one that others go on from is part of theirs."""
    return node.end < WORTH and not node.children


def _twin(thing: Thing) -> Entry | None:
    return thing.entry if isinstance(thing, Mark) else thing.twin

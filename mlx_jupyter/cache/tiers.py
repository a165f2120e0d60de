"""Moves stored things between the device, the host's memory and the shelf of their model.

Things are written while nobody waits, whatever the budget: then giving one up in memory costs
nothing, and a killed kernel loses little. What has no file yet when room is needed is copied into
the host's memory, where that isn't the device's, or written, if reading it back will be cheaper
than computing it. Memory is given up only when the copy is there. In exactness mode nothing moves:
a file doesn't know by which passes it was computed.

Used on the engine thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from mlx_jupyter.cache import keys
from mlx_jupyter.cache.adoption import adopt
from mlx_jupyter.cache.lending import is_lent
from mlx_jupyter.cache.packing import (
    Packed,
    Unpackable,
    cut,
    pack_rows,
    pack_states,
)
from mlx_jupyter.cache.packing import nbytes as packed_bytes
from mlx_jupyter.cache.page_reading import ORDER
from mlx_jupyter.cache.pages import Mark, Page, Strip, Thing, host_bytes, stack, things

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache
    from mlx_jupyter.cache.store_listing import Entry
    from mlx_jupyter.cache.store_shelf import Shelf
    from mlx_jupyter.cache.view import Residence

log = logging.getLogger(__name__)

WORTH = 64
"""Tokens below which a sequence is computed sooner than it is worth a file."""

PAUSE = 0.05
"""Seconds that an idle step waits for the disk; a request may wait as long."""

PATIENCE = 10.0
"""Seconds that giving up waits for the disk, before what isn't written is lost."""


class Tiers:
    """See the module.

    Args:
        cache: whose things move.
        shelf: its model's; None: nothing outlives memory.
        host_budget: bytes of the host's memory that things may take there.
    """

    def __init__(self, cache: PrefixCache, shelf: Shelf | None, host_budget: int = 0) -> None:
        self._cache = cache
        self._shelf = shelf
        self._host_budget = host_budget
        self._waiting: list[tuple[Thing, PathNode]] | None = None
        self._stuck = False

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
                if not strip.stacks and not strip.elsewhere:
                    node.strips.remove(strip)
            for mark in list(node.marks.values()):
                mark.entry = None
                nowhere = not mark.states and not mark.elsewhere and mark is not self._cache.tip
                if self._cache.needs.stateful and nowhere:
                    self._cache.drop_mark(node, mark)
        self._waiting = []  # what is in memory is saved again after the next request, not at once

    # --- finding -----------------------------------------------------------------------------

    def adopt(self, ids: np.ndarray) -> None:
        """Put into the trie what the shelf has of a prompt."""
        if self.shelf is not None:
            adopt(self._cache, self.shelf, ids)

    def expect(self) -> None:
        """A request ended: have read ahead what may go on from there, as when all cells run."""
        shelf, live = self.shelf, self._cache.live
        if shelf is not None and live.offset:
            shelf.expect(keys.chains(shelf.root, live.id_array())[-1])

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
                if not self._written(shelf, PAUSE):
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
            held = (p for p in node.pages if p.residence in ("live", "device", "host"))
            pages = held if self._cache.live.leaves.rows else ()
            for thing in (*pages, *node.strips, *marks):
                if _twin(thing) is None and not is_lent(self._cache, thing, node):
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

    def _packed(self, thing: Thing) -> Packed:
        """What a thing is to be written as."""
        if thing.host is not None:
            return thing.host
        live = self._cache.live
        if isinstance(thing, Mark):
            return pack_states(thing.states or [s.snapshot() for s in live.leaves.states])
        stacks = thing.stacks
        if isinstance(thing, Page) and thing.residence == "live":
            stacks = stack(live.full_layers(), thing.start, thing.end)
        return pack_rows(stacks), {ORDER: live.order}

    def packed(self, thing: Thing) -> Packed | None:
        """What a thing is written as, wherever it lies; it stays there. None: its file is gone.

        Raises:
            Unpackable: it can't be written at all.
        """
        entry = thing.entry
        if thing.residence != "disk" or entry is None or self._shelf is None:
            return self._packed(thing)
        content = self._shelf.read(entry)
        if content is None:
            return None
        whole = content.tensors, content.meta
        if isinstance(thing, Mark):
            return whole
        if not self._cache.live.take_order(content.meta.get(ORDER, "")):
            return None
        first = thing.start - entry.start
        return cut(whole, first, first + thing.tokens)

    def _put(self, shelf: Shelf, thing: Thing, place: _Place) -> bool:
        """Have a thing written; whether it was queued, or can't be at all."""
        try:
            tensors, meta = self._packed(thing)
            return shelf.put(place.kind, place.parent, place.tokens, place.start, tensors, meta)
        except (Unpackable, ValueError) as error:
            log.debug("%s can't be stored: %s", thing, error)
            return True

    def keep(self, leaving: Sequence[tuple[Thing, PathNode]]) -> None:
        """Before things are given up on the device: see to it that those worth it are elsewhere."""
        rates = self._cache.rates
        worth = not rates.prefill or rates.read < rates.prefill
        unkept = [(thing, node) for thing, node in leaving if not thing.elsewhere]
        if self._host_budget and worth and not self._cache.exact:
            unkept = [(thing, node) for thing, node in unkept if not self._to_host(thing)]
            self._fit_host()
        self._keep_on_shelf(unkept, worth=worth)

    def refuge(self, node: PathNode) -> Residence:
        """Where something of a node that is only on the device would probably be kept."""
        rates = self._cache.rates
        if rates.prefill and rates.read >= rates.prefill:
            return "gone"
        if self._host_budget and not self._cache.exact:
            return "host"
        return "disk" if self.shelf is not None and node.end >= WORTH else "gone"

    def _to_host(self, thing: Thing) -> bool:
        """Copy a thing into the host's memory; whether it is there."""
        try:
            packed = self._packed(thing)
        except Unpackable as error:
            log.debug("%s can't be copied: %s", thing, error)
            return False
        if packed_bytes(packed) > self._host_budget:
            return False
        self._set_host(thing, packed)
        return True

    def _set_host(self, thing: Thing, packed: Packed | None) -> None:
        if isinstance(thing, Mark):
            self._cache.tally.host += host_bytes(packed) - host_bytes(thing.host)
            thing.host = packed
        else:
            thing.to_host(packed)

    def _fit_host(self) -> None:
        """Let what was used longest ago leave the host's memory for the shelf."""
        over = self._cache.tally.host - self._host_budget
        if over <= 0:
            return
        held: list[tuple[Thing, PathNode]] = [
            (thing, node)
            for node in self._cache.trie.nodes()
            for thing in things(node)
            if thing.host is not None and not (thing.residence == "host" and self._is_needed(thing))
        ]
        held.sort(key=lambda each: each[0].last_used)
        leaving: list[tuple[Thing, PathNode]] = []
        for thing, node in held:
            if over <= 0:
                break
            over -= host_bytes(thing.host)
            leaving.append((thing, node))
        self._keep_on_shelf([each for each in leaving if _twin(each[0]) is None], worth=True)
        for thing, node in leaving:
            self._set_host(thing, None)
            if isinstance(thing, Page):
                if thing.residence == "host":
                    thing.leave()
            elif isinstance(thing, Strip):
                if not thing.stacks and thing.twin is None:
                    node.strips.remove(thing)
            elif not thing.states and thing.entry is None and thing is not self._cache.tip:
                self._cache.drop_mark(node, thing)

    def _is_needed(self, thing: Thing) -> bool:
        """Whether a request is about to put it in place."""
        return id(thing) in self._cache.needed

    def _keep_on_shelf(self, leaving: Sequence[tuple[Thing, PathNode]], *, worth: bool) -> None:
        shelf = self.shelf
        if shelf is None:
            return
        waiting: list[tuple[Thing, _Place]] = []
        for thing, node in leaving:
            if _short(node) or is_lent(self._cache, thing, node):
                continue
            place = self._place(shelf, thing, node)
            self._settle(shelf, thing, place)
            if _twin(thing) is None and worth:
                if not self._put(shelf, thing, place):
                    self._written(shelf, PATIENCE)
                    if not self._put(shelf, thing, place):
                        break
                waiting.append((thing, place))
        if waiting and self._written(shelf, PATIENCE):
            for thing, place in waiting:
                self._settle(shelf, thing, place)

    def _written(self, shelf: Shelf, patience: float) -> bool:
        """Wait for the disk so many seconds, but hardly while it stands still."""
        seconds = PAUSE if self._stuck else patience
        done = shelf.flush(seconds)
        self._stuck = not done and (self._stuck or seconds > PAUSE)
        return done


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

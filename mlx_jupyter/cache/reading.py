"""Brings pages, strips and snapshots that lie elsewhere back. Used on the engine thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mlx_jupyter.cache.packing import Unpackable, unpack_rows, unpack_states
from mlx_jupyter.cache.page_reading import ORDER, Pages
from mlx_jupyter.cache.pages import Mark
from mlx_jupyter.cache.view import AWAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mlx_jupyter.cache.pages import Page, Stacks, Strip
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache
    from mlx_jupyter.cache.store_file import Content
    from mlx_jupyter.cache.store_listing import Entry
    from mlx_jupyter.cache.store_shelf import Shelf

log = logging.getLogger(__name__)


class Reader:
    """See the module.

    Args:
        cache: whose things come back.
        shelf: its model's; None: nothing lies on disk.
    """

    def __init__(self, cache: PrefixCache, shelf: Shelf | None) -> None:
        self._cache = cache
        self._shelf = shelf

    def pages(self, pages: Sequence[Page], total: int, told_to_stop: Callable[[], bool]) -> Pages:
        """Read these pages; see ``Pages``."""
        return Pages(self._cache, self._shelf, pages, total, told_to_stop)

    def fetch(self, things: Iterable[tuple[Strip | Mark, PathNode]]) -> bool:
        """Read strips and snapshots that lie elsewhere; False when one isn't there any more."""
        whole = True
        for thing, node in things:
            if thing.residence not in AWAY or self._fetch(thing):
                continue
            whole = False
            if isinstance(thing, Mark):
                self._cache.drop_mark(node, thing)
            else:
                thing.drop()
                node.strips.remove(thing)
        return whole

    def _fetch(self, thing: Strip | Mark) -> bool:
        content: Content | None = None
        if thing.host is None:
            entry = thing.entry
            content = self._shelf.read(entry) if self._shelf is not None and entry else None
            if content is None:
                return False
        try:
            if isinstance(thing, Mark):
                self._fetch_mark(thing, content)
            else:
                thing.hold(self._strip(thing, content))
        except Unpackable as error:
            log.warning("A stored %s is of no use: %s", type(thing).__name__.lower(), error)
            return False
        return True

    def _strip(self, strip: Strip, content: Content | None) -> Stacks:
        if content is None or strip.entry is None:
            assert strip.host is not None
            return unpack_rows(strip.host[0], 0, strip.tokens)
        if not self._cache.live.take_order(content.meta.get(ORDER, "")):
            raise Unpackable("it belongs to other layers")
        first = strip.start - strip.entry.start
        return unpack_rows(content.tensors, first, first + strip.tokens)

    def _fetch_mark(self, mark: Mark, content: Content | None) -> None:
        tensors, meta = (content.tensors, content.meta) if content else mark.host or ({}, {})
        mark.hold(unpack_states(tensors, meta, self._cache.live.fresh_states()))
        self._cache.tally.nbytes += mark.nbytes

    def used(self, entries: Iterable[Entry | None]) -> None:
        """These files were just of use."""
        if self._shelf is not None:
            self._shelf.touch([entry for entry in entries if entry is not None])

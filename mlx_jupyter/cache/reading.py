"""Brings rows, strips and snapshots that lie elsewhere back, by the way that is fastest here.

On a CPU rows go from a page's arrays, or the buffer that a file was read into, straight into the
live cache (``direct.py``). Where the device has memory of its own, MLX reads the file itself, into
buffers that are at home there, once its checksum was looked at: those of NumPy's arrays would stay
in managed memory.

Used on the engine thread.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_jupyter.cache.packing import (
    HostRows,
    Unpackable,
    discrete,
    pack_rows,
    row_stacks,
    unpack_rows,
    unpack_states,
)
from mlx_jupyter.cache.pages import LooseRows, Mark
from mlx_jupyter.cache.view import AWAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mlx_jupyter.cache.pages import Page, Stacks, Strip
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache
    from mlx_jupyter.cache.store_format import Content
    from mlx_jupyter.cache.store_listing import Entry
    from mlx_jupyter.cache.store_shelf import Shelf

    Rows = Page | HostRows | LooseRows
    """What a page's rows can be appended from."""

log = logging.getLogger(__name__)

ORDER = "order"
"""The entry of a file's metadata that says how the layers stand in its stacks."""


class Reader:
    """See the module.

    Args:
        cache: whose things come back.
        shelf: its model's; None: nothing lies on disk.
    """

    def __init__(self, cache: PrefixCache, shelf: Shelf | None) -> None:
        self._cache = cache
        self._shelf = shelf
        self._discrete = discrete()

    @contextmanager
    def pages(self, pages: Sequence[Page]) -> Iterator[Callable[[Page], Rows | None]]:
        """Read what lies on disk of these pages, in order, ahead of its use.

        Yields a function that gives the rows of the next of them; None when its file isn't there
        any more, and the page is lost.
        """
        entries = [p.entry for p in pages if p.residence == "disk" and p.entry is not None]
        if not entries or self._shelf is None:
            yield lambda page: self._page(page, iter(()))
            return
        with self._shelf.reader(entries) as contents:
            yield lambda page: self._page(page, contents)

    def _page(self, page: Page, contents: Iterator[tuple[Entry, Content | None]]) -> Rows | None:
        if page.residence not in AWAY:
            return page if self._cache.live.gpu else self._in_place(page)
        rows: Rows | None = None
        try:
            if page.host is not None:
                rows = HostRows(page.start, page.end, page.host[0], page.start)
            else:
                rows = self._from_file(page, next(contents, (None, None))[1])
        except (Unpackable, OSError, RuntimeError, ValueError) as error:
            log.warning("A stored page is of no use: %s", error)
        if rows is None:
            page.lose()
        return rows

    @staticmethod
    def _in_place(page: Page) -> Rows:
        """A page on a CPU, where its arrays are host memory: NumPy copies them faster than MLX."""
        try:
            return HostRows(page.start, page.end, pack_rows(page.stacks), page.start)
        except Unpackable:
            return page

    def _from_file(self, page: Page, content: Content | None) -> Rows | None:
        entry = page.entry
        if content is None or entry is None:
            return None
        self._take_order(content)
        if not self._discrete:
            return HostRows(page.start, page.end, content.tensors, entry.start)
        loaded = mx.load(str(entry.path))
        assert isinstance(loaded, dict)
        mx.eval(loaded)  # here, where a file that can't be read costs a page and not the request
        rows = LooseRows(entry.start, entry.end, row_stacks(loaded))
        return rows.part(page.start, page.end)

    def _take_order(self, content: Content) -> None:
        if not self._cache.live.take_order(content.meta.get(ORDER, "")):
            raise Unpackable("it belongs to other layers")

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
        self._take_order(content)
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

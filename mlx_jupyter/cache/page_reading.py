"""Brings pages that lie elsewhere back, by the way that is fastest here.

On a CPU rows go straight into the live cache: from a page's arrays by NumPy (``direct.py``), from a
file as it is read (``targets.py``). Where the device has memory of its own, MLX reads the file
itself, into buffers that are at home there, once its checksum was looked at: those of NumPy's
arrays would stay in managed memory.

Used on the engine thread.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx

from mlx_jupyter.cache.packing import HostRows, Unpackable, discrete, pack_rows, row_stacks
from mlx_jupyter.cache.pages import LooseRows, Placed
from mlx_jupyter.cache.targets import Targets
from mlx_jupyter.cache.view import AWAY
from mlx_jupyter.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_jupyter.cache.pages import Page, RowSource
    from mlx_jupyter.cache.prefix_cache import PrefixCache
    from mlx_jupyter.cache.store_file import Content, Into
    from mlx_jupyter.cache.store_listing import Entry
    from mlx_jupyter.cache.store_reading import Reading
    from mlx_jupyter.cache.store_shelf import Shelf

log = logging.getLogger(__name__)

ORDER = "order"
"""The entry of a file's metadata that says how the layers stand in its stacks."""


class Pages:
    """Within its block, a function that gives the rows of the next of some pages.

    None when a page's file isn't there any more, and the page is lost.

    Args:
        cache: whose pages.
        shelf: its model's.
        pages: consecutive, from where the live cache stands.
        total: rows that its buffers are to have room for.
        told_to_stop: looked at while a disk keeps everybody waiting.

    Attributes:
        hung: after the block: the live cache's buffers may still be written to, and must go.
    """

    def __init__(
        self,
        cache: PrefixCache,
        shelf: Shelf | None,
        pages: Sequence[Page],
        total: int,
        told_to_stop: Callable[[], bool],
    ) -> None:
        self._live = cache.live
        self._shelf = shelf
        self._total = total
        self._told_to_stop = told_to_stop
        self._waiting = [page for page in pages if page.residence == "disk"]
        self._block = ExitStack()
        self._contents: Reading | None = None
        self._targets: Targets | None = None
        self.hung = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.close()
        assert self._targets is None or self._targets.valid
        if self._targets is not None and not self._live.offset:
            for layer in self._live.leaves.rows:
                layer.let_go()  # made for a file that may have been wrong
        self._targets = None
        if self._contents is not None:
            self.hung = self._contents.hung

    def __call__(self, page: Page) -> RowSource | Placed | None:
        """The rows of the next page.

        Raises:
            Interrupted: ``told_to_stop`` said so.
        """
        if page.residence not in AWAY:
            return page if self._live.gpu else _in_place(page)
        if self._told_to_stop():
            raise Interrupted
        rows: RowSource | Placed | None = None
        try:
            if page.host is not None:
                rows = HostRows(page.start, page.end, page.host[0], page.start)
            else:
                rows = self._from_disk(page)
        except (Unpackable, OSError, RuntimeError, ValueError) as error:
            log.warning("A stored page is of no use: %s", error)
        if rows is None:
            page.lose()
        return rows

    def _from_disk(self, page: Page) -> RowSource | Placed | None:
        content, entry = self._next(), page.entry
        if content is None or entry is None:
            return None
        if not self._live.take_order(content.meta.get(ORDER, "")):
            raise Unpackable("it belongs to other layers")
        if self._targets is not None and not content.tensors:
            return Placed(page.start, page.end)
        if not discrete():
            return HostRows(page.start, page.end, content.tensors, entry.start)
        loaded = mx.load(str(entry.path))
        assert isinstance(loaded, dict)
        mx.eval(loaded)  # here, where a file that can't be read costs a page and not the request
        rows = LooseRows(entry.start, entry.end, row_stacks(loaded))
        return rows.part(page.start, page.end)

    def _next(self) -> Content | None:
        """What the next file holds; with its rows, or these are where they belong already."""
        page = self._waiting.pop(0)
        if self._shelf is None or page.entry is None:
            return None
        if self._contents is None:
            self._open(self._shelf, [page, *self._waiting])
        assert self._contents is not None
        content = next(self._contents, (None, None))[1]
        if self._contents.cancelled:
            raise Interrupted
        return content

    def _prepare(self, shelf: Shelf, page: Page) -> bool:
        """See to it that the live cache has buffers that are large enough."""
        live = self._live
        if live.offset:
            live.reserve(self._total)
            return True
        header = shelf.header(page.entry) if page.entry is not None else None
        if header is None or not live.take_order(header.meta.get(ORDER, "")):
            return False
        for layer in live.leaves.rows:
            layer.let_go()
        return Targets.prepare(live.full_layers(), header.entries, self._total)

    def _open(self, shelf: Shelf, pages: Sequence[Page]) -> None:
        """Begin to read what lies on disk."""
        live, targets = self._live, None
        if not live.gpu and self._prepare(shelf, pages[0]):
            self._targets = targets = Targets.of(live.full_layers(), self._total)
        fitting = {
            page.entry.key
            for page in pages
            if page.entry is not None
            and (page.start, page.end) == (page.entry.start, page.entry.end)
            and live.offset <= page.start
            and page.end <= self._total
        }

        def into(entry: Entry) -> Into | None:
            if targets is None or entry.key not in fitting:
                return None
            return targets.into(entry.start, entry.end)

        entries = [page.entry for page in pages if page.entry is not None]
        self._contents = self._block.enter_context(
            shelf.reader(entries, into=into, keep=not discrete(), told_to_stop=self._told_to_stop)
        )


def _in_place(page: Page) -> RowSource:
    """A page on a CPU, where its arrays are host memory: NumPy copies them faster than MLX."""
    try:
        return HostRows(page.start, page.end, pack_rows(page.stacks), page.start)
    except Unpackable:
        return page

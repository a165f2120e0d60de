"""What a cache holds along one sequence, packed for a file.

Used on the engine thread.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mlx_jupyter.cache import lending
from mlx_jupyter.cache.bundle import Piece
from mlx_jupyter.cache.packing import Unpackable, cut
from mlx_jupyter.cache.pages import Page
from mlx_jupyter.models.tensors import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np

    from mlx_jupyter.cache.pages import Strip
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache
    from mlx_jupyter.cache.store_format import Data, Tensor


class Vanished(Exception):
    """A page that was to be packed lies in a file that isn't there any more."""


def packed(
    cache: PrefixCache, ids: np.ndarray, *, own: bool = False
) -> tuple[int, str, list[Piece]]:
    """What there is along a sequence: so many tokens' rows, a description, and the tensors.

    Args:
        cache: stays as it is; it knows the order of its layers.
        ids: int32, shape (tokens,).
        own: only what was computed here, see ``lending.py``.

    Raises:
        Unpackable: it can't be written.
        Vanished: a file of the store is gone, and the cache knows now: try again. A piece's
            ``load`` may raise it too.
    """
    known = cache.trie.match(ids)[1]
    path = cache.path_to(ids[:known])
    lent = lending.start(path) if own else None
    known = known if lent is None else min(known, lent)
    rows = [(p, min(p.end, known)) for p in _leading(path, known)] if cache.live.leaves.rows else []
    reach = max((end for _, end in rows), default=0) if cache.live.leaves.rows else known
    reach = min(reach, known)
    strips = [(s, min(s.end, reach)) for n in path for s in n.strips if s.start < reach]
    marks = [m for n in path for _, m in sorted(n.marks.items()) if m.at <= reach]
    pieces = [
        *_things(cache, "rows", rows),
        *_things(cache, "window", strips),
    ]
    described: list[list[Any]] = []
    for mark in marks:
        plan = None
        if cache.needs.stateful:
            try:
                content = cache.tiers.packed(mark)
            except Unpackable:
                content = None
            if content is None:
                continue
            tensors, plan = content[0], content[1]["plan"]
            pieces.append(_piece(f"state.{mark.at}.", tensors, tensors))
        described.append([mark.at, mark.kind, plan])
    if not rows and not strips and not described:
        return 0, "", []
    description = {
        "order": cache.live.order,
        "rows": [[page.start, end] for page, end in rows],
        "windows": [[strip.start, end] for strip, end in strips],
        "marks": described,
    }
    return reach, json.dumps(description, separators=(",", ":")), pieces


def _leading(path: Sequence[PathNode], known: int) -> Iterator[Page]:
    """The pages that have rows, from the beginning to the first gap."""
    for node in path:
        for page in node.pages:
            if page.residence == "gone" or page.start >= known:
                return
            yield page


def _things(
    cache: PrefixCache, kind: str, things: Sequence[tuple[Page | Strip, int]]
) -> Iterator[Piece]:
    """Pages or strips, each up to an end, packed when it is their turn."""
    if not things:
        return
    first = _content(cache, *things[0])
    for thing, end in things:
        shapes = {
            name: (each.dtype, (*each.shape[:-2], end - thing.start, each.shape[-1]))
            for name, each in first.items()
        }
        entries = tuple(
            Entry(f"{kind}.{thing.start}.{name}", dtype, shape)
            for name, (dtype, shape) in shapes.items()
        )

        def load(thing: Page | Strip = thing, end: int = end) -> list[Data]:
            return [each.data for each in _content(cache, thing, end).values()]

        yield Piece(entries, load)


def _content(cache: PrefixCache, thing: Page | Strip, end: int) -> Mapping[str, Tensor]:
    whole = cache.tiers.packed(thing)
    if whole is None:
        _lose(cache, thing)
        raise Vanished
    return whole[0] if end == thing.end else cut(whole, 0, end - thing.start)[0]


def _lose(cache: PrefixCache, thing: Page | Strip) -> None:
    if isinstance(thing, Page):
        thing.lose()
        return
    for node in cache.trie.nodes():
        node.strips = [strip for strip in node.strips if strip is not thing]


def _piece(prefix: str, shapes: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Piece:
    entries = tuple(Entry(prefix + name, t.dtype, tuple(t.shape)) for name, t in shapes.items())
    return Piece(entries, lambda: [tensor.data for tensor in tensors.values()])

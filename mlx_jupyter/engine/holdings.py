"""What each loaded model holds, and what would go next: made when something is published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_jupyter.cache import retention
from mlx_jupyter.cache.describe import items
from mlx_jupyter.cache.pages import Mark, Page

if TYPE_CHECKING:
    from mlx_jupyter.cache.prefix_cache import PrefixCache
    from mlx_jupyter.cache.view import TreeView
    from mlx_jupyter.models.pool import LoadedModel

LARGEST = 2_000
"""Things in a cache beyond which what goes next isn't looked for at each publishing: running the
policy over so many takes some ten milliseconds. A preview of a budget still tells it."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A loaded model and what is kept for it.

    Attributes:
        name: its short name.
        weights: bytes of its weights.
        live: bytes of the live cache's buffers, spare rows included.
        pages: bytes of stored rows on the device.
        snapshots: bytes of the states at marks.
        host: bytes of what lies in the host's memory, where that isn't the device's.
        on_disk: tokens whose rows only a file has.
        budget: what its cache may take.
        pinned: it is never sent away for another model.
        may_go: it may be: it isn't pinned, and it could come back.
        used: grows with each use of any model; the smallest goes first.
        used_at: when it was used last, by the engine's clock.
        next: what its cache would give up first, in words; empty when there is nothing, or too much
            to look at.
    """

    name: str
    weights: int = 0
    live: int = 0
    pages: int = 0
    snapshots: int = 0
    host: int = 0
    on_disk: int = 0
    budget: int = 0
    pinned: bool = False
    may_go: bool = True
    used: int = 0
    used_at: float = 0.0
    next: str = ""

    @property
    def cached(self) -> int:
        """Bytes of its cache on the device."""
        return self.live + self.pages + self.snapshots


def holding(loaded: LoadedModel, cache: PrefixCache, view: TreeView, used_at: float) -> Holding:
    """What a model holds now.

    Args:
        loaded: the model.
        cache: its cache.
        view: that cache's description.
        used_at: when it was used last.
    """
    nodes = list(view.nodes())
    snapshots = sum(m.nbytes for n in nodes for m in n.marks)
    away = sum(p.end - p.start for n in nodes for p in n.pages if p.residence == "disk")
    things = sum(len(n.pages) + len(n.strips) + len(n.marks) for n in nodes)
    return Holding(
        name=loaded.info.name,
        weights=loaded.info.weight_bytes,
        live=view.live_bytes,
        pages=view.stored_bytes - snapshots,
        snapshots=snapshots,
        host=view.host_bytes,
        on_disk=away,
        budget=view.budget,
        pinned=loaded.pinned,
        may_go=loaded.may_go,
        used=loaded.used,
        used_at=used_at,
        next=_next(cache) if things <= LARGEST else "",
    )


def _next(cache: PrefixCache) -> str:
    """What the cache's policy would give up first, in words."""
    described, things = items(cache, {})
    chosen = retention.choose(described, 1, cache.requests)
    if not chosen:
        return ""
    thing, node = things[chosen[0]]
    below = [node, *node.children.values()]
    owners = [cache.labels.get(owner, owner) for n in below for owner in n.owners]
    whose = f"of {', '.join(owners)}" if owners else "that nothing leads to any more"
    if isinstance(thing, Mark):
        return f"the state after {thing.at:,} tokens {whose}"
    kind = "rows" if isinstance(thing, Page) else "window rows"
    return f"{kind} {thing.start:,}–{thing.end:,} {whose}"

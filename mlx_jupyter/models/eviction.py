"""Makes room for a model: who goes, in which order, and what is said when nothing helps.

Idle models go first, the one that was used longest ago before the others, and each is fully gone,
by measurement, before the next step. Then the caches of those that stay give bytes up. What is
pinned stays, and so does a model that the user gave as an object, since it couldn't come back. A
load that can't succeed that way changes nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mlx_jupyter.errors import ModelDoesNotFit
from mlx_jupyter.models import memory
from mlx_jupyter.models.mlx_limits import trim_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_jupyter.models.pool import LoadedModel, ModelPool

log = logging.getLogger(__name__)

UNTOLD = 1 << 20
"""Bytes below which what nobody claims isn't worth a word."""


def in_order(models: Sequence[LoadedModel]) -> list[LoadedModel]:
    """The models that may be sent away, the one that goes first in front."""
    return sorted((m for m in models if m.may_go), key=lambda m: m.used)


def make_room(
    pool: ModelPool,
    name: str,
    needed: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Send idle models away, then shrink caches, until so many bytes are free.

    Args:
        pool: whose models.
        name: what the room is for.
        needed: bytes.
        progress: told of each model that went.

    Raises:
        ModelDoesNotFit: it can't be done.
    """
    leaving, free = in_order(pool.models()), free_bytes(pool)
    if needed > free:
        trim_buffers()
        free = free_bytes(pool)
    most = free + sum(pool.held(m) for m in pool.models())
    most += sum(m.info.weight_bytes for m in leaving)
    if needed > most:  # hopeless: nobody is sent away for it
        raise ModelDoesNotFit(name, needed, free, holders(pool))
    for going in leaving:
        if needed <= free_bytes(pool):
            return
        text = f"Unloaded {going.info.name} to make room for {name}"
        _send_away(pool, going)
        log.info("%s", text)
        if progress is not None:
            progress(text, 0, 0)
    short = needed - free_bytes(pool)
    if short > 0:
        pool.shrink(short)
    if needed > (free := free_bytes(pool)):
        raise ModelDoesNotFit(name, needed, free, holders(pool))


def _send_away(pool: ModelPool, going: LoadedModel) -> None:
    """Unload a model that may be asked for again, and look whether its arrays are gone."""
    import mlx.core as mx

    before, weights, name = mx.get_active_memory(), going.info.weight_bytes, going.info.name
    pool.send_away(going)
    freed = before - mx.get_active_memory()
    if freed < weights * 0.9:
        log.warning(
            "%s is unloaded, but only %d of its %d bytes are free: something still holds its "
            "arrays",
            name,
            max(freed, 0),
            weights,
        )


def free_bytes(pool: ModelPool) -> int:
    """Bytes that a model may take now."""
    return memory.free_within(pool.memory_limit)


def holders(pool: ModelPool) -> list[tuple[str, int]]:
    """Who holds how many bytes: each model, its cache, and what nobody here claims."""
    held = []
    for model in pool.models():
        name = f"{model.info.name}{' (pinned)' if model.pinned else ''}"
        held.append((name, model.info.weight_bytes))
        if (cached := pool.held(model)) > 0:
            held.append((f"the cache of {model.info.name}", cached))
    rest = memory.measured().active - sum(size for _, size in held)
    return [*held, ("others", rest)] if rest > UNTOLD else held

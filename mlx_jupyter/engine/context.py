"""The context length in force: of all that bounds it, the smallest; safe from any thread.

The model, its tokenizer and the user bound it always, memory as it is now: a prompt whose rows
have no room fails before anything is computed, not in the middle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_jupyter.errors import BadRequest
from mlx_jupyter.models import limits, memory
from mlx_jupyter.models.limits import Limit

if TYPE_CHECKING:
    from mlx_jupyter.engine.workshop import Workshop
    from mlx_jupyter.models.pool import LoadedModel

REQUEST = "this request's own context option"


def checked_context(tokens: int | None) -> int | None:
    """A bound on the context.

    Raises:
        BadRequest: it isn't a whole number above 0.
    """
    if tokens is None:
        return None
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise BadRequest(f"context takes a whole number, not {tokens!r}.")
    if tokens < 1:
        raise BadRequest(f"context must be at least 1, not {tokens}.")
    return tokens


def all_limits(shop: Workshop, loaded: LoadedModel, asked: int | None = None) -> list[Limit]:
    """What bounds a request to a model now, the smallest first.

    Args:
        shop: knows the user's bound and what its caches hold.
        loaded: the model.
        asked: the request's own bound.
    """
    info = loaded.info
    found = [Limit(info.context, info.context_origin)]
    if shop.context is not None:
        found.append(Limit(shop.context, limits.OPTION))
    if asked is not None:
        found.append(Limit(asked, REQUEST))
    room = limits.by_memory(loaded.row_bytes, _free(shop))
    if room is not None:
        found.append(room)
    return sorted(found, key=lambda limit: limit.tokens)


def in_force(shop: Workshop, loaded: LoadedModel, asked: int | None = None) -> Limit:
    """The smallest of them; arguments as above."""
    return all_limits(shop, loaded, asked)[0]


def _free(shop: Workshop) -> int:
    """Bytes that the rows of one request may take: free ones, and what caches can give up."""
    use = shop.memory_use(memory.measured())
    return memory.free_within(shop.memory_limit) + use.live + use.stored

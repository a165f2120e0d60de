"""Removing a conversation for good: what is cached of it, wherever, and its private file.

Runs on the engine thread, as an ``Errand``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from mlx_jupyter.cache import forgetting
from mlx_jupyter.cache.bundle import Bundle, Foreign
from mlx_jupyter.cache.forgetting import Removed
from mlx_jupyter.cache.store_file import Damaged
from mlx_jupyter.engine.keeping import path_ids
from mlx_jupyter.engine.private import place
from mlx_jupyter.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_jupyter.engine.errand import Errand

    Path_ = tuple[str, Sequence[int]]

log = logging.getLogger(__name__)


def forget(errand: Errand, name: str, gone: Iterable[Path_], kept: Iterable[Path_]) -> Removed:
    """Remove what is cached of a conversation, in memory and on disk, and its private file.

    Args:
        errand: whose work it is.
        name: the branch.
        gone: (model, ids) of its turns.
        kept: the same of all other branches.
    """
    shop, owner = errand.shop, f"@{name}"
    going: dict[str, list[np.ndarray]] = {}
    staying: dict[str, list[np.ndarray]] = {}
    for each, into in ((gone, going), (kept, staying)):
        for model, ids in each:
            into.setdefault(model, []).append(np.asarray(ids, np.int32))
    for model, path in shop.trails.of(owner):
        going.setdefault(model, []).append(path)
    identities = shop.known()
    removed = _remove_file(name, going, identities)
    for model in {*going, *(info.name for info in shop.published.models)}:
        loaded = shop.find(model)
        cache = shop.cache_of(loaded) if loaded is not None else None
        identity = identities.get(model)
        shelf = shop.storage.shelf_of(identity, model) if identity is not None else None
        removed += forgetting.forget(
            cache, shelf, owner, going.get(model, []), staying.get(model, [])
        )
    shop.trails.forget(owner)
    shop.memory.release(owner)
    shop.publish()
    return removed


def _remove_file(
    name: str, going: dict[str, list[np.ndarray]], identities: dict[str, str]
) -> Removed:
    """Remove the private file, once what it says of the conversation's tokens is noted."""
    path = place(name, make=False)
    try:
        with Bundle(path) as file:
            model, identity = file.meta.get("model", ""), file.meta.get("identity", "")
            if model and identity:
                going.setdefault(model, []).append(path_ids(file))
                identities.setdefault(model, identity)
    except FileNotFoundError:
        return Removed()
    except (Foreign, Damaged, OSError) as error:
        log.debug("%s says nothing: %s", path, error)
    try:
        nbytes = path.lstat().st_size
        path.unlink()
    except OSError as error:
        raise BadRequest(f"{path} can't be removed: {error.strerror or error}.") from None
    return Removed(0, 0, nbytes, 1)

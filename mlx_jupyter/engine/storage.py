"""The page store of an engine: opened with the first model that may be kept on disk."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_jupyter.cache.store import Store
from mlx_jupyter.errors import BadRequest
from mlx_jupyter.models import paths

if TYPE_CHECKING:
    from os import PathLike

    from mlx_jupyter.cache.store_listing import Usage
    from mlx_jupyter.cache.store_shelf import Shelf
    from mlx_jupyter.models.pool import LoadedModel

STORE = "MLX_JUPYTER_STORE"
"""The variable that turns the page store off for a whole process, whatever was asked for."""

LARGEST = 16 << 30
SHARE = 0.1
"""By default the store takes a tenth of what is free on its disk, and no more than 16 GiB."""


@dataclass(frozen=True, slots=True)
class StoreUse:
    """What is kept on disk.

    Attributes:
        place: the directory; None when nothing is kept.
        nbytes: bytes of all files, other kernels' included.
        budget: what they may take.
        files: how many.
        models: bytes by model.
        fault: what went wrong last; empty when nothing did.
    """

    place: Path | None = None
    nbytes: int = 0
    budget: int = 0
    files: int = 0
    models: dict[str, int] = field(default_factory=dict)
    fault: str = ""


def store_place(store: bool | str | PathLike[str] | None) -> Path | None:
    """The page store's directory, which need not be there yet; None when it is off.

    Args:
        store: as ``Engine``'s.

    Raises:
        BadRequest: it is no place.
    """
    if isinstance(store, str) and not store.strip():
        raise BadRequest("store takes a directory, True or False, not an empty text.")
    if store is False or os.environ.get(STORE, "").strip().casefold() in ("off", "0", "false"):
        return None
    if store is None or store is True:
        return paths.pages()
    return Path(store).expanduser().absolute()


class Storage:
    """See the module. Any thread.

    Args:
        place: the directory; None: nothing is kept on disk.
        nbytes: what it may take; None for the default.
    """

    def __init__(self, place: Path | None, nbytes: int | None) -> None:
        self.place = place
        self.nbytes = nbytes
        self._store: Store | None = None
        self._closed = False
        self._lock = threading.Lock()

    def shelf(self, loaded: LoadedModel) -> Shelf | None:
        """Where a model's pages are kept; None for one without an identity."""
        if loaded.identity is None:
            return None
        return self.shelf_of(loaded.identity, loaded.info.name)

    def shelf_of(self, identity: str, name: str) -> Shelf | None:
        """The same for a model that need not be loaded."""
        store = self._opened()
        return None if store is None else store.shelf(identity, name)

    def _opened(self) -> Store | None:
        with self._lock:
            if self._store is None and self.place is not None and not self._closed:
                budget = _default(self.place) if self.nbytes is None else self.nbytes
                self._store = Store(self.place, budget=budget)
            return self._store

    def use(self) -> StoreUse:
        """What is kept now."""
        store = self._opened()
        if store is None:
            return StoreUse()
        models = store.models()
        return StoreUse(
            place=store.directory,
            nbytes=sum(each.nbytes for each in models.values()),
            budget=store.budget,
            files=sum(each.files for each in models.values()),
            models={name: each.nbytes for name, each in models.items()},
            fault=store.faults.last,
        )

    def flush(self, timeout: float) -> bool:
        """Wait until what is queued is written; False when ``timeout`` seconds passed first."""
        store = self._opened()
        return True if store is None else store.flush(timeout)

    def clear(self) -> Usage | None:
        """Remove everything of every model; what was removed, None when nothing is kept."""
        store = self._opened()
        return None if store is None else store.clear()

    def close(self, timeout: float) -> None:
        """Write what is queued within so many seconds, and end."""
        with self._lock:
            store, self._store, self._closed = self._store, None, True
        if store is not None:
            store.close(timeout)


def _default(place: Path) -> int:
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return min(LARGEST, int(shutil.disk_usage(place).free * SHARE))
    except OSError:
        return LARGEST

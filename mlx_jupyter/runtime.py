"""The kernel's engine: one per process, made on first use.

It lives in this module and not in the extension, so that it outlives ``%unload_ext`` and
``%reload_ext``. It ends with the process, or when it is closed; then the next use makes another.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_jupyter.engine.engine import Engine

_lock = threading.RLock()
_engine: Engine | None = None
_settings: dict[str, Any] = {}
_watcher: Callable[[Engine], object] | None = None


def engine() -> Engine:
    """The kernel's engine, made on first use with what ``configure`` was given."""
    global _engine
    with _lock:
        if _engine is None or _engine.status().closed:
            _engine = _make(_settings)
            _announce()
        return _engine


def current() -> Engine | None:
    """The kernel's engine if there is one already; makes none."""
    return _engine


def set_engine(engine: Engine | None) -> None:
    """Use ``engine`` from now on (tests, own models); the earlier one isn't closed."""
    global _engine
    with _lock:
        _engine = engine
        _announce()


def watch(callback: Callable[[Engine], object] | None) -> None:
    """Call ``callback`` with the engine, now if there is one, and whenever another one is set."""
    global _watcher
    with _lock:
        _watcher = callback
        _announce()


def _announce() -> None:
    if _engine is not None and _watcher is not None:
        _watcher(_engine)


def configure(**settings: Any) -> bool:
    """Keep keyword arguments for making the engine.

    Returns:
        False when the engine is there already, so that they come too late for it.
    """
    with _lock:
        _settings.clear()
        _settings.update({name: value for name, value in settings.items() if value is not None})
        return _engine is None


def _make(settings: dict[str, Any]) -> Engine:
    from mlx_jupyter import blas

    blas.ensure()  # before mlx is imported
    from mlx_jupyter.engine.engine import Engine

    return Engine(**settings)
